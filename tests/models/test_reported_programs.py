"""Programs after public reports: a policy of the model gives gradients close to those in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from linen_zoo import data, quick_jit

import jaxmp

Params = dict[str, jax.Array]
Body = Callable[[Params, jax.Array], jax.Array]


def noisy_or(params: Params, x: jax.Array) -> jax.Array:
    """Return the log-likelihood of noisy-ors of 256 pairs (Pearl, 1988), with most pairs nearly certain."""
    inhibited = jnp.log1p(-jnp.clip(jax.nn.sigmoid(8 * x @ params["w"] + 3), 0, 1 - 1e-6))
    return jnp.log(-jnp.expm1(inhibited.sum(-1) / 64))


def timestep(params: Params, x: jax.Array) -> jax.Array:
    """Return features of a timestep that a dense layer computes."""
    times = 100 * (x @ params["w"])[:, :1]
    angles = times * jnp.exp(-jnp.linspace(0, 4, 8))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) @ params["w"][:16]


def raw_features(params: Params, x: jax.Array) -> jax.Array:
    """Return a layer of normalised pressures."""
    pressures = 101_325 + 50 * x
    centred = (pressures - pressures.mean(-1, keepdims=True)) / pressures.std(-1, keepdims=True)
    return jnp.tanh(centred @ params["w"])


def small_vectors(params: Params, x: jax.Array) -> jax.Array:
    """Return the cosines of small vectors."""
    vectors = 1e-4 * (x @ params["w"])
    vectors = vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return jnp.tanh(vectors @ vectors.T)


def statistics(params: Params, x: jax.Array) -> jax.Array:
    """Return statistics of the outputs of a layer."""
    h = x @ params["w"] + 30
    covariance = jnp.cov(h[:, :4].T) + jnp.eye(4)
    spectrum = jnp.abs(jnp.fft.rfft(h, axis=-1))[:, :4]
    return h.mean(-1)[:4] + h.var(-1)[:4] + jnp.diag(jnp.linalg.cholesky(covariance)) + spectrum[:4, 1]


QUICK_PROGRAMS = (noisy_or, statistics)
OTHER_PROGRAMS = (timestep, raw_features, small_vectors)
other_programs = [pytest.param(body, marks=pytest.mark.slow("another program")) for body in OTHER_PROGRAMS]
X = data(16, 32) / 4


class LinenModel(nn.Module):
    body: Body

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.body({"w": self.param("w", nn.initializers.lecun_normal(), (32, 256))}, x)


class NnxModel(nnx.Module):
    def __init__(self, body: Body, w: jax.Array) -> None:
        self.body, self.w = body, nnx.Param(w)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.body({"w": self.w[...]}, x)


def gradient_of(apply: Callable[[Any], jax.Array], w: jax.Array) -> np.ndarray:
    """Return the gradient of a loss that is scaled by 1024, as float16 needs it."""
    gradient = quick_jit(jax.grad(lambda w: 1024 * jnp.sum(jnp.sin(apply(w).astype("float32")))))
    return np.asarray(gradient(w), np.float64)


@pytest.mark.once
@pytest.mark.parametrize("body", [*QUICK_PROGRAMS, *other_programs])
def test_a_program_inside_of_a_module_has_the_gradient_of_float32(body):
    bare = LinenModel(body)
    w = bare.init(jax.random.key(0), X)["params"]["w"]
    want = gradient_of(lambda w: bare.apply({"params": {"w": w}}, X), w)
    linen = jaxmp.linen.apply_policy(bare, "mixed_bfloat16")
    graphdef, state = nnx.split(jaxmp.nnx.apply_policy(NnxModel(body, w), "mixed_float16"))

    def apply_nnx(w: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, nnx.State({"w": state["w"].replace(w)}))(X)

    for apply, bound in ((lambda w: linen.apply({"params": {"w": w}}, X), 0.03), (apply_nnx, 0.01)):
        error = np.linalg.norm(gradient_of(apply, w) - want) / np.linalg.norm(want)
        assert error < bound, (bound, error)
