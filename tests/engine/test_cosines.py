"""Cosines that are read near 1 are float32; logits of unit vectors are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import HALVES, both, half, in_turn, normal, products

import jaxmp

W, X = jnp.eye(8), normal(9, 16, 8)


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


UNITS = {
    "x / norm": unit,
    "x * (1 / norm)": lambda x: x * (1 / jnp.linalg.norm(x, axis=-1, keepdims=True)),
    "rsqrt * x": lambda x: jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-12) * x,
}
# The last digits of a cosine near 1 are all that these leave of it.
COSINES = {
    "1 - c": lambda u, v: 1 - u @ v.T,
    "2 - 2 c": lambda u, v: 2 - 2 * (u @ v.T),
    "2 - (2 u) v": lambda u, v: 2 - 2 * u @ v.T,
    "-c + 1": lambda u, v: -(u @ v.T) + 1,
    "(c - 1) / 0.01": lambda u, v: (u @ v.T - 1) / 0.01,
    "of pairs": lambda u, v: 2 - 2 * jnp.einsum("nd,nd->n", u, v),
    "of one pair": lambda u, v: 1 - jax.vmap(jnp.vdot)(u, v),
    "acos(c)": lambda u, v: jnp.arccos(jnp.clip(u @ v.T, -0.99999, 0.99999)),
    "atanh(c)": lambda u, v: jnp.arctanh(0.9999 * (u @ v.T)),
    "log1p(-c)": lambda u, v: jnp.log1p(-0.9999 * (u @ v.T)),
}


@pytest.mark.parametrize(("spelling", "policy"), in_turn(COSINES))
@pytest.mark.parametrize("unit", UNITS)
def test_cosines_near_1_are_float32(spelling, unit, policy):
    def fun(x):
        return COSINES[spelling](UNITS[unit](x @ W), UNITS[unit](x[::-1] @ W))

    x = (1 + 0.1 * X).astype(HALVES[policy]).astype(jnp.float32)
    np.testing.assert_allclose(*both(fun, policy, x), rtol=0.02, atol=1e-5)
    assert jaxmp.cast_plan(fun, policy)(x).summary.groups.keys() & {"cancellation", "amplifier"}


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("paired", [False, True])
def test_distances_of_unit_vectors_that_are_near_are_float32(paired, policy):
    def distance(x):
        return 1 - (jax.vmap(jnp.dot)(unit(x), unit(x[::-1])) if paired else unit(x) @ unit(x).T)

    x = 1 + 0.01 * normal(6, 16, 8)  # vectors so near that half's rounding is all that is left
    np.testing.assert_allclose(*both(distance, policy, x), rtol=1e-5, atol=1e-7)
    assert jaxmp.cast_plan(distance, policy)(x).summary.groups.keys() & {"cancellation", "amplifier"}


@pytest.mark.parametrize("scale", [0.0, np.nan, np.inf])
def test_a_scale_that_is_no_number_is_no_error(scale):
    assert half(lambda x: 1 - (unit(x) @ unit(x).T) / scale)(X).shape == (16, 16)


STAY_HALF = {
    "logits": lambda x: 20 * unit(x) @ unit(W).T,
    "logits with an argument": lambda x: unit(x) @ unit(W).T - x[:, :1],
    "a cosine less another": lambda x: unit(x) @ unit(W).T - unit(x) @ unit(2 + W).T,
    "1 less another product": lambda x: 1 - x @ W,
}


@pytest.mark.parametrize("name", STAY_HALF)
def test_products_of_unit_vectors_that_are_read_elsewhere_stay_half(name):
    assert set(products(half(STAY_HALF[name]), normal(0, 4, 8))) == {"bfloat16"}
