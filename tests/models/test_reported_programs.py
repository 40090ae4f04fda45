"""Programs after public reports: a policy of the model gives gradients close to those in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_apis import NNX, Linen, mixed, pure
from linen_zoo import data, quick_jit

pytestmark = pytest.mark.once

X = data(16, 8) / 2


def noisy_or(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return the log-likelihood of noisy-ors of pairs (Pearl, 1988), with most pairs nearly certain."""
    inhibited = jnp.log1p(-jnp.clip(jax.nn.sigmoid(8 * x @ w + 3), 0, 1 - 1e-6))
    return jnp.log(-jnp.expm1(inhibited.sum(-1) / 64))


def statistics(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return statistics of the outputs of a layer."""
    h = x @ w + 30
    covariance = jnp.cov(h[:, :4].T) + jnp.eye(4)
    spectrum = jnp.abs(jnp.fft.rfft(h, axis=-1))[:, :4]
    return h.mean(-1)[:4] + h.var(-1)[:4] + jnp.diag(jnp.linalg.cholesky(covariance)) + spectrum[:4, 1]


@pytest.mark.parametrize("program", [noisy_or, statistics])
@pytest.mark.parametrize(("api", "policy", "bound"), [(Linen, "mixed_bfloat16", 0.03), (NNX, "mixed_float16", 0.01)])
def test_a_program_inside_of_a_module_has_the_gradient_of_float32(api, policy, bound, program):
    bare = api.WithParam(program)

    def gradient(model):
        apply, params = pure(model, X)
        # float16 needs a scaled loss
        scaled = quick_jit(jax.grad(lambda params: 1024 * jnp.sum(jnp.sin(apply(params, X).astype("float32")))))
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(scaled(params))]).astype(np.float64)

    want = gradient(bare)
    assert 0 < np.linalg.norm(gradient(mixed(bare, policy)) - want) < bound * np.linalg.norm(want)
