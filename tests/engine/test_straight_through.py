"""Straight-through estimators are float32: half would round small codes away."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import compiled, dtypes_of, half, in_turn, normal, products
from jax.lax import stop_gradient

import jaxmp

LIMITS = {"mixed_bfloat16": 0.02, "mixed_float16": 0.003}
X, INDICES = normal(0, 256, 16), np.random.default_rng(1).integers(0, 32, 256)
# Codebooks are often initialised with such small codes: uniform between -1 / 32 and 1 / 32.
PARAMS = {"up": normal(2, 16, 8, scale=0.25), "codes": normal(3, 32, 8, scale=0.002), "down": normal(4, 8, 16)}


def looked_up(p, z):
    return p["codes"][INDICES]


def one_hot(p, z):
    return jax.nn.one_hot(INDICES, 32) @ p["codes"]


def mean_of_those_seen(p, z):
    return (p["codes"] / (1 + jnp.sum(p["codes"] ** 2)))[INDICES]


def plain(z, q):
    return z + stop_gradient(q - z)


ESTIMATORS = {
    "z + sg(q - z)": (looked_up, plain),
    "sg(q - z) + z": (one_hot, lambda z, q: stop_gradient(q - z) + z),
    "z + (sg(q) - sg(z))": (mean_of_those_seen, lambda z, q: z + (stop_gradient(q) - stop_gradient(z))),
    "reshaped": (
        looked_up,
        lambda z, q: z + stop_gradient(q.reshape(16, 16, 8) - z.reshape(16, 16, 8)).reshape(z.shape),
    ),
}


def reconstruction(codes, estimator):
    def loss(p, x):
        z = x @ p["up"]
        return jnp.mean((estimator(z, codes(p, z)) @ p["down"] - x) ** 2)

    return loss


@pytest.mark.parametrize(("estimator", "policy"), in_turn(ESTIMATORS))
def test_gradients_after_a_straight_through_estimator_are_accurate(estimator, policy):
    loss = reconstruction(*ESTIMATORS[estimator])
    gradients = (jax.grad(half(loss, policy)), half(jax.grad(loss), policy), jax.grad(loss))
    *results, true = compiled(lambda p, x: [gradient(p, x)["down"] for gradient in gradients])(PARAMS, X)
    for got in results:
        assert np.linalg.norm(got - true) < LIMITS[policy] * np.linalg.norm(true)


def test_the_distance_to_the_nearest_code_counts_as_a_cancellation():
    def nearest(p, z):
        codes = p["codes"]
        return codes[jnp.argmin(jnp.sum(z**2, -1, keepdims=True) - 2 * z @ codes.T + jnp.sum(codes**2, -1), -1)]

    plan = jaxmp.cast_plan(reconstruction(nearest, plain), "mixed_float16")(PARAMS, X)
    assert any(why.startswith("a term that others cancel") for _, why in plan.summary.full_products)


def test_products_and_streams_around_a_straight_through_estimator_are_half():
    def network(p, x):
        stream = plain(x @ p["up"], p["codes"][INDICES])
        for _ in range(2):
            stream = stream + jnp.tanh(stream @ p["down"]) @ p["up"]
        return stream @ p["down"]

    assert products(half(reconstruction(looked_up, plain)), PARAMS, X) == ["bfloat16", "bfloat16"]
    assert dtypes_of("add", half(network), PARAMS, X)[-2:] == ["bfloat16", "bfloat16"]
