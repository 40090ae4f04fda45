"""Products that tensor cores would not compute faster are float32 sums."""

from __future__ import annotations

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import HALVES, both, compiled, half, in_turn, normal, products

import jaxmp

X, W = normal(0, 32, 16), normal(1, 16, 512, scale=0.3)
# NumPy computes these arrays, so that nothing is compiled when the file is imported.
GRID = concrete.array(np.arange(512, dtype=np.float32))
COSINE, SINE = np.cos(np.float32(0.3)), np.sin(np.float32(0.3))
ROTATION = concrete.array(np.array([[COSINE, -SINE, 0], [SINE, COSINE, 0], [0, 0, 1]], np.float32))
ROWS, COLUMNS = np.meshgrid(np.arange(16), np.arange(32), indexing="ij")
PIXELS = concrete.array(np.stack([ROWS.ravel(), COLUMNS.ravel()], -1), jnp.float32)
HIGH_BIN = concrete.array(np.eye(512, dtype=np.float32)[300])
IMAGES, SQUARE = concrete.array(np.full((32, 16), 200, np.uint8)), normal(3, 16, 16)
WEIGHTS = (SQUARE * 10).astype(jnp.int8)


def probabilities(x, w):
    return jax.nn.softmax(x @ w)


def energies(x, w):
    """Return the energy of a molecule: a sum over its atoms' elements, plus a learned part."""
    elements = jax.nn.one_hot(jnp.arange(32) % 4, 4)
    return elements @ jnp.array([-2001.3, -513.7, -37.9, -0.5]) + jax.nn.relu(x @ w).mean(-1)


def projected(x, w):
    points = (x @ w)[:, :384].reshape(32, 128, 3) + jnp.array([0.0, 0.0, 60.0])
    rotated = points @ ROTATION
    return rotated[..., :2] / rotated[..., 2:]


# Each program with the same program written without products after the first one.
PROGRAMS = {
    "soft-argmax": (
        lambda x, w: probabilities(x, w) @ GRID,
        lambda x, w: (probabilities(x, w) * GRID).sum(-1),
    ),
    "soft-argmax of each example": (
        lambda x, w: jax.vmap(lambda p: jnp.vdot(p, GRID))(probabilities(x, w)),
        lambda x, w: (probabilities(x, w) * GRID).sum(-1),
    ),
    "expected pixel": (
        lambda x, w: probabilities(x, w) @ PIXELS,
        lambda x, w: (probabilities(x, w)[..., None] * PIXELS).sum(-2),
    ),
    "value head": (
        lambda x, w: jax.nn.relu(x @ w) @ (HIGH_BIN + 20)[:, None],
        lambda x, w: (jax.nn.relu(x @ w) * (HIGH_BIN + 20)).sum(-1, keepdims=True),
    ),
    "scalar product of rows": (
        lambda x, w: jnp.einsum("bn,bn->b", x @ w, x @ w),
        lambda x, w: jnp.square(x @ w).sum(-1),
    ),
}


@pytest.mark.parametrize(("name", "policy"), in_turn(PROGRAMS))
def test_a_product_with_few_columns_is_as_exact_as_a_sum(name, policy):
    by_product, by_sum = PROGRAMS[name]
    assert products(half(by_product, policy), X, W)[-1] == "float32"
    ways = by_product, half(by_product, policy), half(by_sum, policy)
    exact, *results = compiled(lambda x, w: [fun(x, w) for fun in ways])(X, W)
    errors = [np.abs(result - exact).max() for result in results]
    assert errors[0] <= 1.5 * errors[1] + 1e-6 * np.abs(exact).max()


def test_a_sum_of_large_energies_by_a_one_hot_product_is_float32():
    np.testing.assert_allclose(*both(energies, "mixed_bfloat16", X, W), atol=0.05)


def test_points_are_rotated_and_projected_in_float32():
    assert products(half(projected), X, W) == ["bfloat16", "float32"]


def test_counts_by_a_product_are_exact():
    def positions(x, w):
        is_of_expert = jax.nn.one_hot(jnp.minimum((x @ w).argmax(-1), 0), 8)
        counts = jnp.tril(jnp.ones((640, 640))) @ is_of_expert
        return (counts * is_of_expert).sum(-1)

    np.testing.assert_array_equal(compiled(half(positions))(jnp.tile(X, (20, 1)), W), np.arange(1, 641))


LAYERS = {
    "one example": (lambda x, w: jax.nn.relu(x[:1] @ w[:, :16]) @ w[:, :16], 2),
    "one example without a batch axis": (lambda x, w: w[:, :16].T @ jax.nn.relu(x[0] @ w[:, :16]), 2),
    "each of many examples": (
        lambda x, w: jax.vmap(lambda row: w[:, :16].T @ jax.nn.relu(row @ w[:, :16]))(x),
        2,
    ),
    "a state of one example": (
        lambda x, w: jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(w[:, :16] @ h), x[0]) @ w,
        2,
    ),
    "a head with four classes": (lambda x, w: jax.nn.relu(x @ w[:, :16]) @ w[:, :4], 2),
    "random features": (lambda x, w: jax.random.normal(jax.random.key(0), (16, 16)) @ SQUARE @ w, 2),
    "images with weights of 8 bits": (
        lambda x, w: (IMAGES.astype(jnp.float32) / 255.0) @ (WEIGHTS.astype(jnp.float32) * 0.01) @ w,
        2,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_products_with_a_weight_stay_half(name):
    fun, number = LAYERS[name]
    assert products(half(fun), X, W) == ["bfloat16"] * number


def test_a_weight_is_one_after_vmap_makes_selections_of_a_conditional():
    def layer(h, w):
        return jax.lax.cond(h.sum() > 0, lambda h: jnp.tanh(h @ w), lambda h: h / 2, h), None

    def switched(h, weights):
        branches = [lambda h: h @ weights[0], lambda h: h @ weights[1].T, jnp.tanh]
        return jax.lax.switch((h[0] > 0).astype(int), branches, h)

    def picked(h, weights):
        return h @ jax.lax.cond(h.sum() > 0, lambda: weights[0], lambda: weights[1])

    weights = jnp.stack([SQUARE] * 3)
    of_stack = lambda h, weights: jax.lax.scan(layer, h, weights)[0]  # noqa: E731
    for fun, number in ((of_stack, 1), (switched, 2), (picked, 1)):
        assert products(half(jax.vmap(fun, (0, None))), X, weights) == ["bfloat16"] * number
        assert products(jax.vmap(half(fun), (0, None)), X, weights) == ["bfloat16"] * number
    masked = lambda h, w: h @ jnp.where(jnp.tri(16, dtype=bool), 1.0, 0.0) + h @ w  # noqa: E731
    assert products(half(masked), X[0], SQUARE) == ["float32", "bfloat16"]  # a selection of scalars is no weight


LENGTH = 384
TRIANGLE = concrete.array(np.tri(LENGTH, dtype=np.float32))
STEPS, GROWTH = normal(4, LENGTH, 16), normal(5, 16, 16)
IS_PAST = jnp.asarray(np.tri(LENGTH, dtype=bool))
RUNNING_SUMS = {
    "a closed-over mask": lambda a: TRIANGLE @ a,
    "bools": lambda a: IS_PAST.astype(jnp.float32) @ a,
    "a mask of the program": lambda a: jnp.tril(jnp.ones((LENGTH, LENGTH))) @ a,
    "an einsum": lambda a: jnp.einsum("sn,ts->tn", a, jnp.tri(LENGTH)),
}


def decays(a, running_sum):
    """Return the decays of a state-space model between the first rows and all later ones."""
    sums = running_sum(-jax.nn.softplus(a @ GROWTH))
    return jnp.exp(sums[8:, None] - sums[None, :8]).sum(1)


@pytest.mark.parametrize(("name", "policy"), in_turn(RUNNING_SUMS))
def test_running_sums_by_a_constant_mask_have_a_float32_result(name, policy):
    def fun(a):
        return decays(a, RUNNING_SUMS[name])

    def by_sum(a):
        return decays(a, lambda steps: jnp.cumsum(steps, 0))

    kinds = {row.why: ({*row.operands}, row.result) for row in jaxmp.cast_plan(fun, policy)(STEPS).rows}
    assert kinds["a sum by a constant mask"] == ({HALVES[policy]}, "float32")
    sums = np.cumsum(-np.logaddexp(0, np.float64(STEPS) @ np.float64(GROWTH)), 0)
    expected = np.exp(sums[8:, None] - sums[None, :8]).sum(1)
    errors = [np.abs(compiled(half(way, policy))(STEPS) - expected).max() for way in (fun, by_sum)]
    assert errors[0] < 2 * errors[1]
    gradients = [jax.grad(lambda a, way=way: way(a).sum()) for way in (by_sum, half(fun, policy))]
    expected, gradient = (compiled(way)(STEPS) for way in gradients)
    assert np.linalg.norm(gradient - expected) < 0.02 * np.linalg.norm(expected)


def test_counts_by_a_closed_over_mask_are_exact():
    one_hot = concrete.array(np.eye(8, dtype=np.float32)[np.random.default_rng(0).integers(0, 8, LENGTH)])
    for choices in (one_hot, one_hot * 0 + 1):
        counts = compiled(half(lambda x, w, choices: (TRIANGLE @ choices, x @ w)))(X, W, choices)[0]
        np.testing.assert_array_equal(counts, np.cumsum(choices, 0))


LOOKUPS = {
    "a permutation": lambda x, w: np.eye(16, dtype=np.float32)[::-1] @ (x @ w[:, :16])[:16],
    "a constant one-hot array": lambda x, w: jax.nn.one_hot(jnp.arange(24) % 16, 16) @ w,
    "rows of a table": lambda x, w: jax.nn.one_hot((x[:, 0] > 0).astype(int), 16) @ w,
    "a mask that is an argument": lambda x, w: (x > 0).astype(jnp.float32) @ w,
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_products_that_add_nothing_or_have_no_constant_mask_stay_half(name):
    rows = jaxmp.cast_plan(LOOKUPS[name], "mixed_bfloat16")(X, W).rows
    found = [(row.operands[0], row.result) for row in rows if row.primitive == "dot_general"]
    assert found[-1] == ("bfloat16", "bfloat16")


def test_a_sum_by_a_mask_is_float32_before_an_amplifier():
    assert products(half(lambda x, w: jnp.sin(TRIANGLE[:32, :32] @ (x @ w))), X, W) == ["float32"] * 2


IMAGE, OTHER = np.random.default_rng(6).uniform(0.5, 0.6, (2, 1, 24, 24, 1)).astype(np.float32)
BELL = np.exp(-(((np.arange(7, dtype=np.float32) - 3) / 1.5) ** 2) / 2)
WINDOW = (np.outer(BELL, BELL) / BELL.sum() ** 2).astype(np.float32)[..., None, None]


def convolved(image, window, groups=1):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        image, window, (1, 1), "VALID", dimension_numbers=layout, feature_group_count=groups
    )


MEANS = {
    "one channel": lambda image: convolved(image, WINDOW),
    "three channels": lambda image: convolved(jnp.tile(image, 3), WINDOW * np.eye(3, dtype=np.float32)),
    "a box": lambda image: jax.vmap(lambda row: jnp.convolve(row, np.ones(5, np.float32)))(image[0, ..., 0]) / 5,
}


@pytest.mark.parametrize(("name", "policy"), in_turn(MEANS))
def test_means_in_a_window_are_float32(name, policy):
    mean = MEANS[name]

    def similarity(a, b):
        variances = [mean(image**2) - mean(image) ** 2 for image in (a, b)]
        return (2 * (mean(a * b) - mean(a) * mean(b)) / (sum(variances) + 1e-6)).mean()

    assert set(products(half(similarity, policy), IMAGE, OTHER)) == {"float32"}
    assert set(products(half(jax.grad(similarity), policy), IMAGE, OTHER)) == {"float32"}
    result, expected = both(similarity, policy, IMAGE, OTHER)
    np.testing.assert_allclose(result, expected, rtol=1e-3)


def test_a_window_that_is_an_argument_is_float32_for_a_few_channels():
    for channels, dtype in ((1, "float32"), (3, "float32"), (8, "bfloat16")):
        args = np.tile(IMAGE, channels), np.tile(WINDOW, channels)
        assert products(half(lambda x, w, n=channels: convolved(x, w, n)), *args) == [dtype]


CONVOLUTIONS = {
    "a depthwise layer": lambda x, w: convolved(jnp.tile(x, 16), w.reshape(4, 4, 1, 512)[..., :16], 16),
    "few channels": lambda x, w: convolved(jnp.tile(x, 3), w[:3, :36].reshape(3, 3, 3, 4)),
    "a constant window for a layer": lambda x, w: convolved(jnp.tile(x, 3), np.tile(WINDOW, (1, 1, 3, 16))),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_layers_stay_half(name):
    assert products(half(CONVOLUTIONS[name]), IMAGE, W) == ["bfloat16"]


HEADS = {
    "a vector": (lambda w: w[:, 0], "float32"),
    "one column": (lambda w: w[:, :1], "float32"),
    "eight columns": (lambda w: w[:, :8], "bfloat16"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_layer_has_the_same_dtypes_for_one_example_as_for_many(name):
    head, dtype = HEADS[name]

    def fun(x, w):
        return jax.nn.relu(x @ w[:, :16]) @ head(w)

    for x in (X[:1], X[:4], X):
        assert products(half(fun), x, W)[-1] == dtype
        assert products(half(jax.vmap(fun, (0, None))), x, W)[-1] == dtype


def test_a_matrix_with_a_vector_is_half_if_either_side_may_be_the_weight():
    for policy_inside in (lambda f: jax.vmap(half(f), (0, None)), lambda f: half(jax.vmap(f, (0, None)))):
        assert products(policy_inside(lambda x, w: w.T @ x), X, W) == ["bfloat16"]
    assert products(half(lambda x, w: x @ w[:, 0]), X, W) == ["bfloat16"]


def test_regions_overrides_and_half_products_of_the_author_win():
    def fun(x, w):
        return jax.nn.softmax(x @ w) @ GRID

    def region(x, w):
        with jaxmp.precision("half"):
            return fun(x, w)

    assert products(half(fun, overrides={"primitive:dot_general": "half"}), X, W) == ["bfloat16"] * 2
    assert products(half(region), X, W) == ["bfloat16"] * 2

    def author(x, w):
        return (x @ w).astype(jnp.bfloat16) @ GRID.astype(jnp.bfloat16)

    assert products(half(author), X, W) == ["bfloat16"] * 2
