"""Products that cancel are float32: in distances, and in a constant minus a product."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import HALVES, both, half, in_turn, normal, products

import jaxmp

W, X = jnp.eye(8), normal(9, 16, 8)


# -- distances -------------------------------------------------------------------------------------------------------


def of_the_diagonal(diagonal):
    def squares(x):
        product = x @ x.T
        norms = diagonal(product)
        return norms[:, None] + norms - 2 * product

    return squares


def of_norms(norms):
    return lambda x: norms(x)[:, None] + norms(x) - 2 * x @ x.T


def of_batches(x):
    product = jnp.einsum("bid,bjd->bij", x.reshape(4, -1, 8), x.reshape(4, -1, 8))
    norms = jnp.diagonal(product, axis1=1, axis2=2)
    return norms[:, :, None] + norms[:, None] - 2 * product


def to_a_codebook(x):
    codes = 5 + normal(3, 16, 8)
    return jnp.sum(x**2, 1, keepdims=True) - 2 * x @ codes.T + jnp.sum(codes**2, 1)


def under_a_root(x):
    squares = jnp.sum(x**2, -1)
    return jnp.sqrt(squares[:, None] + squares[None] - 2 * x @ x.T + jnp.eye(len(x)))


DISTANCES = {
    "under a root": under_a_root,
    "diagonal(G)": of_the_diagonal(jnp.diagonal),
    "einsum('ii->i', G)": of_the_diagonal(functools.partial(jnp.einsum, "ii->i")),
    "sum(G * eye)": of_the_diagonal(lambda g: jnp.sum(g * jnp.eye(len(g)), 1)),
    "sum(abs(h)**2)": of_norms(lambda h: jnp.sum(jnp.abs(h) ** 2, -1)),
    "norm(h)**2": of_norms(lambda h: jnp.linalg.norm(h, axis=-1) ** 2),
    "half of it": lambda h: jnp.sum(h**2, -1)[:, None] / 2 + jnp.sum(h**2, -1) / 2 - h @ h.T,
    "(-2 h) @ h.T": lambda h: jnp.sum(h**2, -1)[:, None] + jnp.sum(h**2, -1) + (-2 * h) @ h.T,
    "in batches": of_batches,
    "to a codebook": to_a_codebook,
}


@pytest.mark.parametrize(("spelling", "policy"), in_turn(DISTANCES))
def test_distances_are_float32_in_every_spelling(spelling, policy):
    def fun(x):
        return DISTANCES[spelling](x @ W)

    x = (5 + normal(0, 32, 8)).astype(HALVES[policy]).astype(jnp.float32)  # rounding a term causes an error of 30 %
    np.testing.assert_allclose(*both(fun, policy, x), rtol=1e-5, atol=2e-4)
    assert any(
        why.startswith("a term that others cancel") for _, why in jaxmp.cast_plan(fun, policy)(x).summary.full_products
    )


def test_distances_that_are_computed_again_are_float32_each_time():
    def costs(x, y):  # Sinkhorn's algorithm in ott-jax computes the costs in each iteration
        return jnp.sum(x**2, -1)[:, None] + jnp.sum(y**2, -1) - 2 * x @ y.T

    def fun(x, w):
        x = x @ w

        def iteration(total, _):
            return total + jnp.exp(-costs(x, W)).sum(), None

        total, _ = jax.lax.scan(iteration, costs(x, W).sum(), length=2)
        return total + costs(x, W).mean()

    assert products(half(fun), normal(0, 4, 8), W) == ["bfloat16", "float32", "float32", "float32"]


def test_a_gram_matrix_in_a_scan_stays_half():
    def scanned(x, kernels):
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ (kernel @ kernel.T)), None), x, kernels)[0]

    assert products(half(scanned), normal(0, 4, 8), normal(1, 3, 8, 8)) == ["bfloat16", "bfloat16"]


def test_a_product_divided_by_a_constant_cancels_but_a_constant_divided_by_a_product_does_not():
    differences = {
        "squares - dots / 0.5": lambda squares, dots: squares - dots / 0.5,
        "squares - 0.5 / dots": lambda squares, dots: squares - 0.5 / dots,
        "0.5 / squares - dots": lambda squares, dots: 0.5 / squares - dots,
    }

    def fun(difference):
        return lambda x, w: difference(jnp.sum(x**2, -1, keepdims=True), x @ w)

    dtypes = {name: products(half(fun(difference)), normal(0, 4, 8), W) for name, difference in differences.items()}
    assert dtypes == dict(zip(differences, (["float32"], ["bfloat16"], ["bfloat16"]), strict=True))


# -- a constant minus a product --------------------------------------------------------------------------------------


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


# The results depend on the last digits of a product near 1.
DIFFERENCES = {
    "sqrt(1 - p**2)": lambda p: jnp.sqrt(1.001 - p**2),
    "rsqrt": lambda p: jax.lax.rsqrt(1.001 - p * p),
    "log": lambda p: jnp.log(1.001 - p),
    "p / (1 - p), as in scipy's logit": lambda p: p / (1.001 - p),
    "the inverse of a square": lambda p: (1.001 - p) ** -2,
    "log with an epsilon": lambda p: jnp.log(1.001 - p + 1e-7),
    "root of (1 - p) (1 + p)": lambda p: jnp.sqrt((1.001 - p) * (1 + p)),
    "magnitudes": lambda p: jnp.sqrt(jnp.abs(1.001 - jnp.abs(p))),
}


@pytest.mark.parametrize(("spelling", "policy"), in_turn(DIFFERENCES))
def test_a_constant_minus_a_product_is_float32_if_its_small_values_are_magnified(spelling, policy):
    def fun(x, y):
        return jnp.diagonal(DIFFERENCES[spelling](x @ y.T))

    def rounded(x):
        return x.astype(HALVES[policy]).astype(jnp.float32)

    x = rounded(1 + 0.05 * X)
    y = rounded(0.9995 * x / jnp.sum(x * x, -1, keepdims=True))  # so that the products of pairs are near 1
    np.testing.assert_allclose(*both(fun, policy, x, y), rtol=1e-3)


@pytest.mark.parametrize("power", [1, 2])
def test_a_product_that_the_author_casts_to_float32_cancels_like_any_other(power):
    def fun(x):
        cosines = (x.astype("bfloat16") @ x.T.astype("bfloat16")).astype("float32")
        return jnp.sqrt(1.001 - cosines**power)

    assert products(half(fun), X) == ["float32"]


# From tanh-Gaussian policies (rljax, CleanRL), and cross-entropies of sigmoids that a layer also reads.
SATURATING = {
    "log(1 - tanh**2)": lambda h: (a := jnp.tanh(h), jnp.log(1 - a**2 + 1e-6)),
    "log(1 - sigmoid)": lambda h: (a := jax.nn.sigmoid(2 * h), jnp.log(1 - a + 1e-6)),
    "log(1 - clip(sigmoid))": lambda h: (a := jax.nn.sigmoid(2 * h), jnp.log(1 - jnp.clip(a, 1e-6, 1 - 1e-6))),
    "a clipped tanh": lambda h: (a := jnp.clip(jnp.tanh(h), -1 + 1e-5, 1 - 1e-5), jnp.log(1 - a**2)),
    "log1p(-a**2)": lambda h: (a := 0.9999 * jnp.tanh(h), jnp.log1p(-(a**2))),
    "log(1 - erf)": lambda h: (a := jax.lax.erf(h / 2), jnp.log(1 - a + 1e-6)),
}


@pytest.mark.parametrize(("spelling", "policy"), in_turn(SATURATING))
def test_a_saturating_function_is_float32_if_its_distance_to_1_is_magnified(spelling, policy):
    def fun(x, w):
        activation, magnified = SATURATING[spelling](x @ w)
        return jnp.stack([jnp.mean(magnified), jnp.mean(jnp.square(activation @ w))])  # a product reads it, too

    x, w = 2 * normal(0, 32, 8), normal(1, 8, 8) / 2
    np.testing.assert_allclose(*both(fun, policy, x, w), rtol=0.005)
    assert products(half(fun, policy), x, w) == [HALVES[policy]] * 2


@pytest.mark.once
def test_the_plan_of_a_long_chain_takes_little_time():
    def transmittance(x):
        transmitted = jnp.ones(16)
        for i in range(80):
            transmitted = transmitted * (1 - jax.nn.sigmoid(x @ W[0] + i))
        return jnp.mean(1 - transmitted)

    def norm_to_a_power(x):
        norm = jnp.linalg.norm(x @ W, axis=-1)
        for _ in range(40):
            norm = norm * norm
        return 1 - norm

    def diffusion(x):
        heat = x @ normal(3, 8, 64)
        for _ in range(20):
            left, middle, right = heat[:, :-2], heat[:, 1:-1], heat[:, 2:]
            heat = 0.99 * (middle + 0.1 * (left - 2 * middle + right))
        return heat

    assert jaxmp.cast_plan(transmittance, "mixed_bfloat16")(X).rows
    assert jaxmp.cast_plan(norm_to_a_power, "mixed_bfloat16")(X).rows
    assert jaxmp.cast_plan(diffusion, "mixed_bfloat16")(X).rows


def test_a_zero_or_nonfinite_scale_raises_no_error():
    for scale in (0.0, np.nan, np.inf):
        assert jax.eval_shape(half(lambda x, s=scale: 1 - (unit(x) @ unit(x).T) / s), X).shape == (16, 16)


def test_a_difference_from_a_product_with_integers_is_left_alone():
    def fun(x):
        return x @ W - jax.lax.dot(jnp.arange(64).reshape(8, 8), W, preferred_element_type=jnp.float32)

    assert products(half(fun), X[:8]) == ["bfloat16", "float32+int32"]


# -- no cancellation -------------------------------------------------------------------------------------------------


STAY_HALF = {
    "a penalty": lambda x: jnp.sum((x @ W) * 0.5) + jnp.sum(W**2),
    "a network less an output": lambda x: jax.nn.relu(x @ W) ** 2 @ W - x @ W,
    "logits": lambda x: 20 * unit(x) @ unit(W).T,
    "logits with an argument": lambda x: unit(x) @ unit(W).T - x[:, :1],
    "a cosine less another": lambda x: unit(x) @ unit(W).T - unit(x) @ unit(2 + W).T,
    "1 less another product": lambda x: 1 - x @ W,
    "the angle of 1 less another product": lambda x: jnp.arctan2(1 - x @ W, 1 + x[:, :1] ** 2),
    "a squared error": lambda x: jnp.sqrt(jnp.mean((x @ W - jax.nn.one_hot(jnp.arange(4), 8)) ** 2)),
    "a root of a product and a constant": lambda x: jnp.sqrt((x @ W) ** 2 + 1e-6),
    "1 less a squared norm": lambda x: 2 / (1 - jnp.sum((x @ W) ** 2, -1)),
    "a gate": lambda x: (1 - jax.nn.sigmoid(x @ W)) / (1.5 - jnp.tanh(x @ W)),
    "a hinge loss to a power": lambda x: jnp.maximum(1 - x @ W, 0) ** 1.5,
    "a normalised product and a closed-over array": lambda x: unit(x @ W) - X[:4],
    "cosine scores with a mask": lambda x: 10 * unit(x) @ unit(x).T + jnp.where(jnp.tri(4) > 0, 0.0, -100.0),
    "a product times a squared norm": lambda x: (x @ W) * jnp.sum(x**2, -1, keepdims=True),
    "distances from an identity": lambda x: ((x @ W).T @ (x @ W) - jnp.eye(8)) ** 2,
}


def test_products_that_do_not_cancel_stay_half():
    dtypes = {name: set(products(half(fun), normal(0, 4, 8))) for name, fun in STAY_HALF.items()}
    assert dtypes == {name: {"bfloat16"} for name in STAY_HALF}


def test_a_product_of_an_inner_scan_is_not_that_of_the_scan_around_it():
    def pairs(w, xs):
        def outer(total, x):
            def inner(total, y):
                return total + jax.nn.relu(y @ w).mean(), None

            return jax.lax.scan(inner, total + jnp.sqrt(1.1 - (x @ w) ** 2).mean(), xs)[0], None

        return jax.lax.scan(outer, 0.0, xs)[0]

    def twice(w, xs):
        def turn(total, x):
            return total + jnp.sqrt(1.1 - (x @ w) ** 2).mean() + jax.nn.relu(x @ w).mean(), None

        return jax.lax.scan(turn, 0.0, xs)[0]

    args = normal(0, 16, 16), normal(1, 3, 8, 16)
    assert products(half(pairs), *args) == ["float32", "bfloat16"]
    assert products(half(twice), *args) == ["float32", "float32"]  # in one scan, the same product
