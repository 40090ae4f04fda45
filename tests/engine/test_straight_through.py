"""Straight-through estimators of codes are float32: in half a small code would be as coarse as what it stands for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import HALVES, compiled, dtypes_of, half, in_turn, normal, products
from jax.lax import stop_gradient

import jaxmp

LIMITS = {"mixed_bfloat16": 0.02, "mixed_float16": 0.003}
X, INDICES = normal(0, 256, 16), np.random.default_rng(1).integers(0, 32, 256)
# Codes begin as small as this: uniform between -1 / 32 and 1 / 32, or less.
PARAMS = {"up": normal(2, 16, 8, scale=0.25), "codes": normal(3, 32, 8, scale=0.002), "down": normal(4, 8, 16)}


def looked_up(p, z):
    return p["codes"][INDICES]


CODES = {
    "looked up": looked_up,
    "a product with one-hot": lambda p, z: jax.nn.one_hot(INDICES, 32) @ p["codes"],
    "a mean of those seen": lambda p, z: (p["codes"] / (1 + jnp.sum(p["codes"] ** 2)))[INDICES],
}
ESTIMATORS = {
    "z + sg(q - z)": lambda z, q: z + stop_gradient(q - z),
    "sg(q - z) + z": lambda z, q: stop_gradient(q - z) + z,
    "z + (sg(q) - sg(z))": lambda z, q: z + (stop_gradient(q) - stop_gradient(z)),
    "reshaped": lambda z, q: z + stop_gradient(q.reshape(16, 16, 8) - z.reshape(16, 16, 8)).reshape(z.shape),
}


def reconstruction(codes, estimator):
    def loss(p, x):
        z = x @ p["up"]
        quantised = estimator(z, codes(p, z))
        return jnp.mean((quantised @ p["down"] - x) ** 2)

    return loss


def errors(loss, policy):
    """How far the gradients of the params are off, relative to their norms."""
    gradient = jax.grad(half(loss, policy))
    got, true = compiled(gradient)(PARAMS, X), compiled(jax.grad(loss))(PARAMS, X)
    return {name: np.linalg.norm(got[name] - true[name]) / max(np.linalg.norm(true[name]), 1e-30) for name in true}


@pytest.mark.parametrize(("estimator", "policy"), in_turn(ESTIMATORS))
@pytest.mark.parametrize("codes", CODES)
def test_gradients_behind_a_straight_through_estimator_are_those_of_small_codes(codes, estimator, policy):
    loss = reconstruction(CODES[codes], ESTIMATORS[estimator])
    assert errors(loss, policy)["down"] < LIMITS[policy]


@pytest.mark.parametrize("policy", HALVES)
def test_so_are_they_in_the_program_of_the_gradient(policy):
    loss = reconstruction(looked_up, ESTIMATORS["z + sg(q - z)"])
    got = compiled(half(jax.grad(loss), policy))(PARAMS, X)["down"]
    true = compiled(jax.grad(loss))(PARAMS, X)["down"]
    assert np.linalg.norm(got - true) < LIMITS[policy] * np.linalg.norm(true)


def test_it_is_found_where_the_nearest_code_is_chosen():
    def nearest(p, z):
        codes = p["codes"]
        return codes[jnp.argmin(jnp.sum(z**2, -1, keepdims=True) - 2 * z @ codes.T + jnp.sum(codes**2, -1), -1)]

    plan = jaxmp.cast_plan(reconstruction(nearest, ESTIMATORS["z + sg(q - z)"]), "mixed_float16")(PARAMS, X)
    assert "cancellation" in plan.summary.groups


def test_the_products_around_it_stay_half():
    loss = reconstruction(looked_up, ESTIMATORS["z + sg(q - z)"])
    assert products(half(loss), PARAMS, X) == ["bfloat16", "bfloat16"]


def test_a_residual_stream_stays_half_behind_an_estimator():
    def network(p, x):
        z = x @ p["up"]
        stream = z + stop_gradient(p["codes"][INDICES] - z)
        for _ in range(2):
            stream = stream + jnp.tanh(stream @ p["down"]) @ p["up"]
        return stream @ p["down"]

    assert dtypes_of("add", half(network), PARAMS, X)[-2:] == ["bfloat16", "bfloat16"]
