"""The models' GELU, compared with float64."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import compiled

import jaxmp
from experiments.models.activations import gelu


def saved(fun, *args):
    """Return the shape and dtype of the arrays that are saved for the gradient."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args))
    return sorted((leaf.shape, leaf.dtype.name) for leaf in leaves if leaf.ndim)


def with_gradient(fun, x, cotangent):
    def both(x, cotangent):
        y, vjp = jax.vjp(fun, x)
        return y, vjp(cotangent)[0]

    return compiled(both)(x, cotangent)


X = np.concatenate([np.linspace(-12, 12, 2001), [-1e4, 1e4]])


def naive_gelu(x, approximate):
    """Compute GELU in float64, without the cancellation of ``jax.nn.gelu`` below -5."""
    if approximate:
        return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return x * jax.scipy.special.erfc(-x / math.sqrt(2)) / 2


@pytest.mark.parametrize(("approximate", "dtype"), [(True, jnp.float32), (False, jnp.bfloat16)])
def test_gelu_and_its_gradient_are_those_of_float64_rounded(approximate, dtype):
    x, cotangent = jnp.asarray(X, dtype), jnp.asarray(np.linspace(0.5, 2, len(X)), dtype)
    got = with_gradient(lambda x: gelu(x, approximate), x, cotangent)
    with jax.enable_x64(True):
        x, cotangent = x.astype(jnp.float64), cotangent.astype(jnp.float64)
        want = with_gradient(lambda x: naive_gelu(x, approximate), x, cotangent)
    # Half a unit in the last place, plus float32's error: of the gradient near its zero, and of 1 + erf in the tail.
    relative = 2e-5 if dtype == jnp.float32 else 0.51 * float(jnp.finfo(dtype).eps)
    absolute = 3e-7 if dtype == jnp.float32 else 1e-6
    for ours, exact in zip(got, want, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(np.asarray(ours, np.float64), np.asarray(exact), relative, absolute)


def test_gelu_keeps_its_half_input_alone_and_under_autocast_computes_in_float32():
    for approximate in [True, False]:
        x = jnp.ones((3, 4), jnp.bfloat16)
        assert saved(functools.partial(gelu, approximate=approximate), x) == [((3, 4), "bfloat16")]

    x, w = jax.random.normal(jax.random.key(0), (3, 8)), jax.random.normal(jax.random.key(1), (8, 8))

    def model(w, x, gelu=gelu):
        return gelu(x @ w, True) @ w

    half = jaxmp.autocast(model, "mixed_bfloat16")
    assert ((3, 8), "float32") not in saved(lambda w: half(w, x), w)

    def in_half(x):
        return model(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32)

    got, by_hand = (with_gradient(fun, x, x) for fun in (lambda x: half(w, x), in_half))
    for ours, wanted in zip(got, by_hand, strict=True):
        np.testing.assert_array_equal(ours, wanted)
