"""Likelihoods of mixtures are float32; logarithms of other mixtures are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import HALVES, both, half, in_turn, normal, products
from jax.scipy.special import logit, ndtri, xlog1py

import jaxmp

W, X, Y = jnp.eye(8), normal(9, 16, 8), jnp.arange(16.0) % 2

# Of an expected probability near 1, whose difference from 1 is what counts.
LIKELIHOODS = {
    "log(1 - q)": lambda q: jnp.log(1 - q),
    "log1p(-q)": lambda q: jnp.log1p(-q),
    "logit(q)": logit,
    "log(q / (1 - q))": lambda q: jnp.log(q / (1 - q)),
    "xlog1py(1 - y, -q)": lambda q: xlog1py(1 - Y, -q),
    "log(where(y, q, 1 - q))": lambda q: jnp.log(jnp.where(Y > 0, q, 1 - q)),
    "log(y q + (1 - y) (1 - q))": lambda q: jnp.log(Y * q + (1 - Y) * (1 - q)),
    "log(q**y (1 - q)**(1 - y))": lambda q: jnp.log(q**Y * (1 - q) ** (1 - Y)),
    "atanh(q)": jnp.arctanh,
    "ndtri(q)": ndtri,
}


@pytest.mark.parametrize(("spelling", "policy"), in_turn(LIKELIHOODS))
def test_likelihoods_of_a_mixture_are_float32(spelling, policy):
    def fun(x):
        return LIKELIHOODS[spelling](jax.nn.sigmoid(x @ W + 7) @ jax.nn.softmax(jnp.arange(8.0)))

    x = X.astype(HALVES[policy]).astype(jnp.float32)
    np.testing.assert_allclose(*both(fun, policy, x), rtol=1e-3)
    assert jaxmp.cast_plan(fun, policy)(x).summary.groups["log-probabilities"] == 1


def outer_stream(x):
    """A residual stream of attention, whose logarithm is no likelihood."""
    for _ in range(3):
        x = x + jax.nn.softmax(x @ x.T) @ x
    return x


STAY_HALF = {
    "the logarithm of a power": lambda x: jnp.log1p((jax.nn.softmax(x @ W) @ x[:, :4].repeat(2, 0)) ** 2),
    "the logarithm of an activation": lambda x: jnp.log1p(jax.nn.relu(jax.nn.softmax(x @ W) @ W)),
    "the logarithm of a stream": lambda x: jnp.log1p(jnp.abs(outer_stream(x))),
    "the logarithm of other mixtures": lambda x: jnp.log(jax.nn.sigmoid(x @ W) @ W + jax.nn.sigmoid(x) @ W),
}


@pytest.mark.parametrize("name", STAY_HALF)
def test_products_in_other_logarithms_stay_half(name):
    assert set(products(half(STAY_HALF[name]), normal(0, 4, 8))) == {"bfloat16"}
