"""Operands of amplifiers are float32: coordinates, phases, factorised matrices."""

from __future__ import annotations

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import both, compiled, half, in_turn, normal, operations, products

import jaxmp

W = concrete.eye(8)


def pixels():
    rows, columns = jnp.meshgrid(jnp.arange(512.0), jnp.arange(512.0), indexing="ij")
    return jnp.stack([rows.ravel(), columns.ravel(), jnp.ones(512 * 512)])


def warp(affine):
    at = affine @ pixels()
    image = jnp.arange(512.0)[:, None] + jnp.arange(512.0)
    return jax.scipy.ndimage.map_coordinates(image, [at[0], at[1]], order=1)


# NumPy computes these arrays, so that nothing is compiled when the file is imported.
AFFINE = concrete.array(np.tile(np.array([[0.9, 0.1, 5.03], [-0.1, 0.95, 20.7]], np.float32), (4, 1)))  # four warps
POINTS, ROTATION = normal(1, 1000, 8, scale=10), concrete.array(np.linalg.qr(np.asarray(normal(2, 8, 8)))[0])
FREQUENCIES = normal(4, 8, 16, scale=10)
POSITIONS = concrete.array(np.arange(1000, dtype=np.float32)[:, None])
THRESHOLDS = concrete.array(np.linspace(-1, 1, 8, dtype=np.float32))


def beside_shifted(points):
    return jnp.concatenate([points, points + 0.5 * jnp.pi], -1)


COORDINATES = {
    "an affine warp": (warp, AFFINE),
    "astype(int)": (lambda p, r: ((p @ r.T + 10) / 0.1).astype(jnp.int32), POINTS, ROTATION),
    "%": (lambda p, r: (p @ r.T) % 0.1, POINTS, ROTATION),
    "sin(exp(s) x b)": (lambda x, s: jnp.sin((x @ FREQUENCIES) * jnp.exp(s)), normal(5, 100, 8), normal(6, 16)),
    "the cell of a masked sum": (
        lambda p, r: jnp.sum(10 * (p @ r), -1, where=jnp.arange(8) > 0).astype(jnp.int32),
        POINTS,
        ROTATION,
    ),
    "the cell of a running sum": (lambda p, r: (10 * jnp.cumsum(p @ r, -1)).astype(jnp.int32), POINTS, ROTATION),
    "the angle of a rotation": (
        lambda p, r: jnp.arccos(jnp.clip((jnp.trace(p @ r) - 1) / 2, -1, 1)),
        ROTATION.T,
        ROTATION,
    ),
    # as in Hugging Face's rotary embeddings
    "angles, twice": (lambda t, f: jnp.cos(jnp.concatenate([t @ f] * 2, -1)), POSITIONS, 1 / FREQUENCIES[:1]),
    # as in the positional encodings of JaxNeRF and Nerfies
    "points beside shifted points": (lambda p, r: jnp.sin(beside_shifted(p @ r)), POINTS, ROTATION),
}


@pytest.mark.parametrize(("spelling", "policy"), in_turn(COORDINATES))
def test_coordinates_and_phases_are_float32(spelling, policy):
    fun, *args = COORDINATES[spelling]
    jax.tree.map(np.testing.assert_array_equal, *both(fun, policy, *args))
    products = jaxmp.cast_plan(fun, policy)(*args).summary.full_products
    assert any(why.startswith("amplified by ") for _, why in products)


REMAINDERS = {
    "%": lambda c: c % 1.0,
    "rem": lambda c: jax.lax.rem(c, jnp.float32(1.0)),
}


@pytest.mark.parametrize(("spelling", "policy"), in_turn(REMAINDERS))
def test_remainders_before_a_product_are_float32(spelling, policy):
    def fun(points, rotation):
        return REMAINDERS[spelling](20 * (points @ rotation)) @ jnp.ones((8, 8))

    np.testing.assert_allclose(*both(fun, policy, POINTS, ROTATION), atol=0.05)


def test_values_computed_from_float32_products_are_float32():
    def kernel(x, y):  # the sum of the two squares is no residual stream
        squares = jnp.einsum("nd,nd->n", x, x)[:, None] + jnp.einsum("nd,nd->n", y, y)
        return jnp.exp(-(squares - 2 * x @ y.T) / 8) @ jnp.ones((64, 8))

    x = (9 + normal(0, 64, 8)).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(*both(lambda x: kernel(x @ W, x[::-1] @ W), "mixed_bfloat16", x), rtol=0.01)


def beside_sines(features):
    return jnp.concatenate([jnp.sin(features), features @ jnp.eye(16)], -1)


def beside_a_sine(stream):
    return jnp.sin(stream) + stream @ W


def rounded(x):
    return x + jax.lax.stop_gradient(jnp.round(x) - x)


NO_COORDINATES = {
    "quantised activations": lambda x: jnp.clip(jnp.round((x @ W) / 0.1), -128, 127) @ W,
    "a straight-through gradient": lambda x: (x @ W + jax.lax.stop_gradient(jnp.round(x @ W) - x @ W)) @ W,
    "int8": lambda x: jnp.round((x @ W) / 0.1).astype(jnp.int8),
    "a rotary embedding": lambda x: ((x @ W) * jnp.cos(jnp.arange(8.0))) @ W,
    "the gradient of a clip": lambda x: jax.grad(lambda w: jnp.sum(jnp.clip(x @ w, 0, 6) @ w))(W + x[0]),
    "learned steps": lambda x: jax.grad(lambda w, s: jnp.sum(rounded(jnp.clip(x @ w / s, -8, 7)) * s @ w))(
        W + x[0], 0.1
    ),
    "a threshold": lambda x: jnp.where(x @ W > 0, x, 0.0) @ W,
    "a threshold for each example": lambda x: jnp.where(x @ W > THRESHOLDS[:, None], x, 0.0) @ W,
    "radial basis functions": lambda x: jnp.tanh((x @ W)[..., None] - THRESHOLDS).sum(-1) @ W,
    "distances from labels": lambda x: (x @ W - jax.nn.one_hot(jnp.arange(8), 8)) ** 2,
    "sines of features that a layer reads, too": lambda x: beside_sines(beside_shifted(x @ W)) @ jnp.ones((32, 8)),
    "a sine of a residual stream": lambda x: beside_a_sine(x @ W + jnp.tanh(x @ W) @ W),
    # a logarithm whose operand comes from no product
    "Gumbel noise": lambda x: (x @ W - jnp.log(jnp.arange(1.0, 9))) @ W,
}


def test_products_that_feed_no_coordinates_stay_half():
    dtypes = {name: set(products(half(fun), normal(0, 8, 8))) for name, fun in NO_COORDINATES.items()}
    assert dtypes == {name: {"bfloat16"} for name in NO_COORDINATES}


ACTIVATIONS = {
    "leaky ReLU": jax.nn.leaky_relu,
    "ReLU": jax.nn.relu,
    "a bent line": lambda h: jnp.where(h > 0, h, 0.25 * h),
    "dropout": lambda h: jnp.where(jnp.arange(8) % 4 > 0, h / 0.75, 0.0),
}


def test_only_the_last_of_the_layers_before_a_phase_is_float32():
    def layers(activation, end):
        def fun(x):
            for _ in range(3):
                x = activation(x @ W)
            return end(x @ W)

        return products(half(fun), normal(0, 4, 8))

    dtypes = {name: layers(activation, jnp.sin) for name, activation in ACTIVATIONS.items()}
    assert dtypes == {name: ["bfloat16"] * 3 + ["float32"] for name in ACTIVATIONS}
    assert layers(jax.nn.relu, lambda h: h.astype(jnp.int32)) == dtypes["ReLU"]


def test_a_phase_with_a_bias_is_float32_even_if_a_product_reads_it_too():
    def fun(x, bias):
        phase = x @ W + bias
        return jnp.sin(phase), phase @ W

    assert products(half(fun), normal(0, 4, 8), jnp.ones(8)) == ["float32", "bfloat16"]


def test_a_factorised_matrix_is_float32_even_if_a_product_reads_it_too():
    def fun(x, w):
        kernel = jnp.exp(-((x @ w) ** 2))
        return jnp.linalg.cholesky(kernel @ w + 4.0 * w) @ w

    program = operations(half(fun), jnp.eye(8), W)
    assert ("cholesky", "float32") in program
    assert {dtype for name, dtype in program if name == "add"} == {"float32"}  # `4.0 * w` and the symmetrisation


def test_a_product_that_is_only_factorised_is_float32():
    a = 3 * normal(0, 64, 8)
    result = half(lambda a: jnp.linalg.cholesky(a @ a.T + 1e-2 * jnp.eye(64)))(a)
    np.testing.assert_array_equal(jnp.isfinite(result), True)


def test_under_a_root_squares_do_not_overflow_and_epsilons_do_not_vanish():
    def squareplus(x, w):
        return jax.nn.squareplus(x @ w) @ w

    def smooth(x, w):
        return jnp.sqrt((x @ w) ** 2 + 1e-12) @ w

    large = jnp.full((4, 8), 300.0)
    np.testing.assert_allclose(*both(squareplus, "mixed_float16", large, W), rtol=1e-3)
    gradient = compiled(jax.grad(lambda x: half(smooth, "mixed_float16")(x, W).sum()))(jnp.zeros((4, 8)))
    np.testing.assert_array_equal(gradient, 0)
