"""Sums of squares that cancel, and quadratic forms of differences from positions, are float32; others are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import HALVES, both, half, in_turn, normal, products

import jaxmp

W, X = jnp.eye(8), normal(9, 16, 8)


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
    assert jaxmp.cast_plan(fun, policy)(*args).summary.groups["cancellation"] == 1


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
    assert jaxmp.cast_plan(fun, policy)(*args).summary.groups["amplifier"] == 1


STAY_HALF = {
    "a quadratic layer": lambda x: x**2 @ normal(1, 8, 8) - 2 * x @ normal(2, 8, 8),
    "a form of what is no place": lambda x: jnp.sum(((x @ W - x) @ W) * (x @ W - x), -1),
}


@pytest.mark.parametrize("name", STAY_HALF)
def test_products_in_other_forms_stay_half(name):
    assert set(products(half(STAY_HALF[name]), normal(0, 4, 8))) == {"bfloat16"}
