"""Groups in more spellings: likelihoods of mixtures, cosines near 1, quadratic forms; and what only looks like them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import HALVES, compiled, half, in_turn, normal, products
from jax.scipy.special import logit, ndtri, xlog1py

import jaxmp

W, X, Y = jnp.eye(8), normal(9, 16, 8), jnp.arange(16.0) % 2


def both(fun, policy, *args):
    """What ``fun`` gives under a policy and without one."""
    return compiled(lambda *args: (half(fun, policy)(*args), fun(*args)))(*args)


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


UNITS = {
    "x / norm": lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "x * (1 / norm)": lambda x: x * (1 / jnp.linalg.norm(x, axis=-1, keepdims=True)),
    "rsqrt * x": lambda x: jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-12) * x,
}
# The last digits of a cosine near 1 are all that these leave of it.
COSINES = {
    "1 - c": lambda u, v: 1 - u @ v.T,
    "2 - 2 c": lambda u, v: 2 - 2 * (u @ v.T),
    "2 - (2 u) v": lambda u, v: 2 - 2 * u @ v.T,
    "-2 c + 2": lambda u, v: -2 * (u @ v.T) + 2,
    "(c - 1) / 0.01": lambda u, v: (u @ v.T - 1) / 0.01,
    "1 - (c + 1) / 2": lambda u, v: 1 - (u @ v.T + 1) / 2,
    "1 - c**2": lambda u, v: 1 - (u @ v.T) ** 2,
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
    assert jaxmp.cast_plan(fun, policy)(x).summary.groups["cosine similarity"] == 1


MIXTURES = {
    "x² @ a - 2 x @ (a m) + sum(a m²)": lambda x, m, a: x**2 @ a.T - 2 * x @ (a * m).T + jnp.sum(a * m**2, 1),
    "in another order": lambda x, m, a: jnp.sum(m**2 * a, 1) - 2 * jnp.dot(x, (m * a).T) + jnp.dot(jnp.square(x), a.T),
    "halved": lambda x, m, a: -0.5 * (jnp.sum(m * m * a, 1) + (x * x) @ a.T) + x @ (m * a).T,
}


@pytest.mark.parametrize(("spelling", "policy"), in_turn(MIXTURES))
def test_distances_scaled_along_each_axis_are_float32(spelling, policy):
    def fun(x, means, precisions):
        return MIXTURES[spelling](x @ W, means, precisions)

    x = (5 + X).astype(HALVES[policy]).astype(jnp.float32)
    args = x, 5 + normal(3, 4, 8), jnp.exp(normal(4, 4, 8))
    np.testing.assert_allclose(*both(fun, policy, *args), rtol=1e-4, atol=1e-3)
    assert jaxmp.cast_plan(fun, policy)(*args).summary.groups["distances"] == 1


def pixels():
    line = jnp.arange(8.0)
    return 296 + jnp.stack(jnp.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 1, 2)


FORMS = {  # of the offset d of each pixel from each centre, and a matrix for each centre
    "einsum(d, k, d)": lambda d, k: jnp.einsum("pni,nij,pnj->pn", d, k, d),
    "d @ k @ d": lambda d, k: (d[..., None, :] @ k @ d[..., None])[..., 0, 0],
    "sum(k d * d)": lambda d, k: jnp.sum(jnp.einsum("nij,pnj->pni", k, d) * d, -1),
    "sum((k d)**2)": lambda d, k: jnp.sum(jnp.einsum("nij,pnj->pni", k, d) ** 2, -1),
    "of one pixel": lambda d, k: jax.vmap(jax.vmap(lambda d, k: d @ k @ d), (0, None))(d, k),
    "by hand": lambda d, k: k[:, 0, 0] * d[..., 0] ** 2 + 2 * k[:, 0, 1] * d[..., 0] * d[..., 1] + d[..., 1] ** 2,
}


@pytest.mark.parametrize(("form", "policy"), in_turn(FORMS))
def test_centres_whose_offsets_from_pixels_a_quadratic_form_reads_are_places(form, policy):
    def fun(x, r, k):  # a rounded centre of 300.4 is 300
        return jnp.exp(-0.5 * FORMS[form](pixels() - x @ r, k))

    args = 300 + 2 * normal(5, 16, 2), jnp.eye(2), jnp.eye(2) + 0.1 * normal(6, 16, 2, 2)
    np.testing.assert_allclose(*both(fun, policy, *args), rtol=0.05, atol=0.01)
    assert jaxmp.cast_plan(fun, policy)(*args).summary.groups["coordinates"] == 1


def unit(x):
    return UNITS["x / norm"](x)


STAY_HALF = {
    "logits with a bias": lambda x: 10 * (unit(x) @ unit(W).T) - 3,
    "logits with an argument": lambda x: unit(x) @ unit(W).T - x[:, :1],
    "a cosine less another": lambda x: unit(x) @ unit(W).T - unit(x) @ unit(2 + W).T,
    "1 less another product": lambda x: 1 - x @ W,
    "a quadratic layer": lambda x: x**2 @ normal(1, 8, 8) - 2 * x @ normal(2, 8, 8),
    "the logarithm of other mixtures": lambda x: jnp.log(jax.nn.sigmoid(x @ W) @ W + jax.nn.sigmoid(x) @ W),
    "a form of what is no place": lambda x: jnp.sum(((x @ W - x) @ W) * (x @ W - x), -1),
}


@pytest.mark.parametrize("name", STAY_HALF)
def test_what_only_looks_like_them_stays_half(name):
    assert set(products(half(STAY_HALF[name]), normal(0, 4, 8))) == {"bfloat16"}
