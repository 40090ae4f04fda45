"""Groups: what is right only as a whole in float32, by its numbers and in the plan."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import HALVES, both, compiled, dtypes_of, half, in_turn, normal, operations, products

import jaxmp

W = jnp.eye(8)
LOWEST = jnp.finfo(jnp.float32).min


def between(fun):
    """``fun`` between two products that change nothing but the dtype."""
    return lambda x, w: fun(x @ w) @ w


@pytest.mark.parametrize("policy", HALVES)
def test_a_softmax_errs_by_one_ulp(policy):
    dtype = jnp.dtype(HALVES[policy])
    x = (normal(0, 4, 8) * 5).astype(dtype).astype(jnp.float32)
    exact = np.exp(np.asarray(x, np.float64) - np.max(np.asarray(x, np.float64), -1, keepdims=True))
    exact /= exact.sum(-1, keepdims=True)
    result = np.asarray(half(between(jax.nn.softmax), policy)(x, W), np.float64)
    info = jnp.finfo(dtype)
    assert np.max(np.abs(result - exact) / np.maximum(exact * info.eps, info.smallest_subnormal)) <= 1


def test_a_softmax_is_rounded_where_it_ends():
    assert dtypes_of("div", half(between(jax.nn.softmax)), normal(0, 4, 8), W) == ["float32"]
    program = jax.make_jaxpr(half(between(lambda x: jax.nn.softmax(x))))(normal(0, 4, 8), W)
    end = next(n for n, eqn in enumerate(program.eqns) if eqn.primitive.name == "div")
    assert program.eqns[end + 1].params.get("new_dtype") == jnp.bfloat16


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("loss", [jax.nn.log_softmax, jax.nn.logsumexp, lambda x: jnp.mean((x - 1.001) ** 2)])
def test_losses_have_the_accuracy_of_float32(policy, loss):
    x = (normal(1, 4, 8) * 5).astype(HALVES[policy]).astype(jnp.float32)
    exact = np.asarray(loss(x), np.float64)
    # The value beside a gradient: products follow, so that no operation is float32 for leading to none.
    both = half(jax.value_and_grad(lambda w, x: jnp.sum(loss(x @ w))), policy)
    assert set(products(both, W, x)) == {HALVES[policy]}
    assert np.isclose(both(W, x)[0], exact.sum(), rtol=1e-5, atol=1e-4)


def test_a_loss_of_a_product_and_its_target_does_not_round_the_target():
    def loss(w, x, target):
        return jnp.mean((x @ w - target) ** 2)

    x, target = normal(0, 4, 8), normal(1, 4, 8)
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    exact = jnp.mean((rounded - target) ** 2)
    assert np.isclose(half(loss)(W, x, target), exact, rtol=1e-6)
    value, _ = half(jax.value_and_grad(loss))(W, x, target)
    assert np.isclose(value, exact, rtol=1e-6)


@pytest.mark.parametrize("policy", HALVES)
def test_a_variance_as_a_difference_of_means_is_float32(policy):
    def standardise(x):
        variance = jnp.mean(x**2, -1, keepdims=True) - jnp.mean(x, -1, keepdims=True) ** 2
        return (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(variance + 1e-5)

    x = (100 + normal(2, 4, 8)).astype(HALVES[policy]).astype(jnp.float32)
    wide = np.asarray(x, np.float64)
    exact = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    error = np.abs(np.asarray(half(between(standardise), policy)(x, W)) - exact).max()
    assert error < 0.02  # bfloat16's E[x²] - E[x]² errs by 100 %; float32's own by 0.3 %


def test_squares_that_are_summed_do_not_overflow_float16():
    x = jnp.full((1, 8), 300.0)
    norm = half(between(lambda x: x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True))), "mixed_float16")
    assert np.allclose(norm(x, W), 8**-0.5, rtol=1e-3)


@pytest.mark.parametrize("epsilon", [1e-12, jnp.float32(1e-12), np.array([2.0, 1e-12] * 4, np.float32)])
def test_a_tiny_epsilon_does_not_vanish_in_float16(epsilon):
    def fun(x):
        return x / (jnp.abs(x) + epsilon)

    assert bool(jnp.all(jnp.isfinite(half(between(fun), "mixed_float16")(jnp.zeros((2, 8)), W))))


MASKS = {
    "added": lambda s, keep: s + jnp.where(keep, 0.0, LOWEST),
    "selected": lambda s, keep: jnp.where(keep, s, LOWEST),
    "a number": lambda s, keep: s + (1.0 - keep.astype(jnp.float32)) * -1e9,
    "a constant": lambda s, keep: s + np.where(np.arange(8) < 3, 0, LOWEST).astype(np.float32),
}


def test_a_mask_that_is_handed_in_stays_finite_in_float16():
    def attend(x, w, mask):
        return jax.nn.softmax(x @ w + mask) @ w

    mask = jnp.where(jnp.arange(8) < 3, 0.0, LOWEST)
    x = normal(3, 4, 8)
    assert np.allclose(half(attend, "mixed_float16")(x, W, mask), attend(x, W, mask), atol=2e-3)


@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_the_lowest_float32_stay_finite_in_float16(mask):
    keep = jnp.arange(8) < 3

    def attend(x, w):
        return jax.nn.softmax(MASKS[mask](x @ w, keep)) @ w

    x = jnp.concatenate([normal(3, 3, 8), jnp.zeros((1, 8))])
    cast = half(attend, "mixed_float16")
    gradient = jax.grad(lambda w: cast(x, w).sum())
    result, expected, slope = compiled(lambda w: (cast(x, w), attend(x, w), gradient(w)))(W)
    assert np.allclose(result, expected, atol=2e-3)
    assert bool(jnp.all(jnp.isfinite(slope)))


def test_a_mask_of_scores_that_others_read_is_not_rounded_to_infinity():
    def fun(x, w):
        scores = x @ w + jnp.where(jnp.arange(8) < 3, 0.0, LOWEST)
        return jax.nn.softmax(scores) @ w, scores

    assert bool(jnp.isfinite(half(fun, "mixed_float16")(jnp.ones((1, 8)), W)[1]).all())


def test_what_feeds_a_factorisation_is_float32_although_a_product_reads_it_too():
    def fun(x, w):
        kernel = jnp.exp(-((x @ w) ** 2))
        return jnp.linalg.cholesky(kernel @ w + 4.0 * w) @ w

    program = operations(half(fun), jnp.eye(8), W)
    assert ("cholesky", "float32") in program
    assert {dtype for name, dtype in program if name == "add"} == {"float32"}  # the jitter, the symmetric part


def test_cosine_similarity_is_float32():
    def similarity(x):
        y = jnp.roll(x, 1, 0)
        dot = jnp.sum(x * y, -1)
        return dot / (jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1) + 1e-12)

    x = (normal(6, 4, 8) * 100).astype(jnp.float16).astype(jnp.float32)
    result = half(lambda x, w: similarity(x @ w)[:, None] * jnp.ones(8) @ w, "mixed_float16")(x, W)
    assert np.allclose(result[:, 0], similarity(x), rtol=1e-3)


def test_scatters_that_add_do_so_in_float32():
    def fun(x, w):
        return jnp.zeros(8).at[jnp.zeros(8, int)].add((x @ w)[0]) @ w

    assert dtypes_of("scatter-add", half(fun), jnp.ones((1, 8)), W) == ["float32"]


def test_a_statistic_that_a_product_reads_is_rounded_once_and_last():
    def norms(x, w):
        return jnp.sqrt(jnp.sum((x @ w) ** 2, -1)) @ jnp.eye(4)

    def variances(x, w):
        h = x @ w
        return (jnp.mean(h * h, -1) - jnp.mean(h, -1) ** 2) @ jnp.eye(4)

    assert np.allclose(compiled(half(norms, "mixed_float16"))(jnp.full((4, 8), 300.0), W), 848.5)
    x = (100 + normal(7, 4, 8)).astype(jnp.bfloat16).astype(jnp.float32)
    assert np.allclose(*compiled(lambda x, w: (half(variances)(x, w), variances(x, w)))(x, W), rtol=0.01)


def test_a_logsumexp_that_is_subtracted_again_is_float32():
    def softmax(x, w):
        h = x @ w
        return jnp.exp(h - jax.nn.logsumexp(h, -1, keepdims=True)) @ w

    x = (normal(8, 4, 8) * 5).astype(jnp.bfloat16).astype(jnp.float32)
    assert np.allclose(half(softmax)(x, W), jax.nn.softmax(x), rtol=2**-8)


def test_special_functions_are_float32_as_a_whole():
    x = jnp.linspace(-8, 5, 32).reshape(4, 8)
    result = compiled(half(between(jax.scipy.special.log_ndtr), "mixed_float16"))(x, W)
    rounded = x.astype(jnp.float16).astype(jnp.float32)
    assert np.allclose(result, compiled(jax.scipy.special.log_ndtr)(rounded), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w, u: (x @ w - jnp.log(u)) @ w,  # Gumbel noise, a temperature: a logarithm, but no log-probability
        lambda x, w, u: (x @ w - jnp.log(jnp.sum(u))) @ w,
    ],
)
def test_a_product_of_other_logarithms_is_half(fun):
    assert products(half(fun), jnp.ones((4, 8)), W, jnp.ones(8)) == ["bfloat16"] * 2


@pytest.mark.parametrize("norm", [lambda v: jnp.vdot(v, v), lambda v: jnp.einsum("bi,bi->b", v, v).sum()])
def test_a_product_of_a_vector_with_itself_is_a_sum_of_squares(norm):
    v = jnp.full((1, 4096), 10.0)
    assert np.isclose(half(lambda v, w: (norm(v), w @ w), "mixed_float16")(v, W)[0], 409600.0)


def test_a_gram_matrix_of_an_element_of_a_scan_is_no_sum_of_squares():
    def scanned(x, kernels):
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ (kernel @ kernel.T)), None), x, kernels)[0]

    assert products(half(scanned), normal(0, 4, 8), normal(1, 3, 8, 8)) == ["bfloat16", "bfloat16"]


@pytest.mark.parametrize("head", [normal(3, 8, 1), normal(3, 8)], ids=["a column", "a vector"])
def test_a_head_of_width_one_is_half_at_every_batch_size_and_under_vmap(head):
    def fun(x, w):
        return jax.nn.relu(x @ w) @ head

    for x in (normal(0, 8), normal(0, 1, 8), normal(0, 2, 8)):
        assert products(half(fun), x, W) == ["bfloat16"] * 2
    each = functools.partial(jax.vmap, in_axes=(0, None))
    assert products(each(half(fun)), x, W) == products(half(each(fun)), x, W) == ["bfloat16"] * 2


def test_what_is_subtracted_before_a_float32_scale_is_subtracted_in_float32():
    def fun(x, mean, scale, w):
        return (x @ w - mean) * jax.lax.rsqrt(scale) @ w

    x = (10 + 0.3 * normal(10, 4, 8)).astype(jnp.bfloat16).astype(jnp.float32)
    args = (x, jnp.full(8, 10.03), jnp.full(8, 0.1), W)
    assert np.allclose(half(fun)(*args), fun(*args), rtol=2**-8)


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
    "diag(G)": of_the_diagonal(jnp.diag),
    "diagonal(G)": of_the_diagonal(jnp.diagonal),
    "einsum('ii->i', G)": of_the_diagonal(functools.partial(jnp.einsum, "ii->i")),
    "sum(G * eye)": of_the_diagonal(lambda g: jnp.sum(g * jnp.eye(len(g)), 1)),
    "G[i, i]": of_the_diagonal(lambda g: g[jnp.arange(len(g)), jnp.arange(len(g))]),
    "sum(h**2)": of_norms(lambda h: jnp.sum(h**2, -1)),
    "sum(abs(h)**2)": of_norms(lambda h: jnp.sum(jnp.abs(h) ** 2, -1)),
    "sum(h * h)": of_norms(lambda h: jnp.sum(h * h, -1)),
    "norm(h)**2": of_norms(lambda h: jnp.linalg.norm(h, axis=-1) ** 2),
    "square(norm(h))": of_norms(lambda h: jnp.square(jnp.linalg.norm(h, axis=-1))),
    "einsum('id,id->i', h, h)": of_norms(lambda h: jnp.einsum("id,id->i", h, h)),
    "vmap(vdot)(h, h)": of_norms(lambda h: jax.vmap(jnp.vdot)(h, h)),
    "half of it": lambda h: jnp.sum(h**2, -1)[:, None] / 2 + jnp.sum(h**2, -1) / 2 - h @ h.T,
    "(-2 h) @ h.T": lambda h: jnp.sum(h**2, -1)[:, None] + jnp.sum(h**2, -1) + (-2 * h) @ h.T,
    "never negative": lambda h: jnp.maximum(of_norms(lambda h: jnp.sum(h**2, -1))(h), 0),
    "in batches": of_batches,
    "to a codebook": to_a_codebook,
}


@pytest.mark.parametrize(("spelling", "policy"), in_turn(DISTANCES))
def test_distances_are_float32_in_every_spelling(spelling, policy):
    def fun(x):
        return DISTANCES[spelling](x @ W)

    x = (5 + normal(0, 32, 8)).astype(HALVES[policy]).astype(jnp.float32)  # one rounding of which is an error of 30 %
    np.testing.assert_allclose(*both(fun, policy, x), rtol=1e-5, atol=2e-4)
    assert jaxmp.cast_plan(fun, policy)(x).summary.groups["cancellation"] >= 1


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.sum((x @ W) * 0.5) + jnp.sum(W**2),  # a penalty
        lambda x: x @ x.T - (x @ W)[:, :1],
        lambda x: jax.nn.relu(x @ W) ** 2 @ W - x @ W,
    ],
)
def test_products_that_no_squares_cancel_stay_half(fun):
    assert set(products(half(fun), normal(0, 4, 8))) == {"bfloat16"}


def pixels():
    rows, columns = jnp.meshgrid(jnp.arange(512.0), jnp.arange(512.0), indexing="ij")
    return jnp.stack([rows.ravel(), columns.ravel(), jnp.ones(512 * 512)])


def warp(affine):
    at = affine @ pixels()
    image = jnp.arange(512.0)[:, None] + jnp.arange(512.0)
    return jax.scipy.ndimage.map_coordinates(image, [at[0], at[1]], order=1)


def sample(affine):
    ends = jnp.linspace(-1, 1, 512)
    at = jnp.stack([*jnp.meshgrid(ends, ends), jnp.ones((512, 512))], -1) @ affine.T / 512
    at = (at[..., 0] + 1) / 2 * 511
    low = jnp.floor(at)
    return jnp.arange(512.0)[jnp.clip(low.astype(int), 0, 511)] * (at - low)


AFFINE = jnp.array([[0.9, 0.1, 5.03], [-0.1, 0.95, 20.7]])
POINTS, ROTATION = 10 * normal(1, 1000, 3), jnp.linalg.qr(normal(2, 3, 3))[0]
FREQUENCIES = 10 * normal(4, 3, 16)
EDGES, THRESHOLDS = jnp.linspace(-30, 30, 600), jnp.linspace(-1, 1, 8)


COORDINATES = {
    "an affine warp": (warp, AFFINE),
    "a sampled grid": (sample, AFFINE),
    "floor": (lambda p, r: jnp.floor(p @ r.T / 0.05).astype(jnp.int32), POINTS, ROTATION),
    "round": (lambda p, r: jnp.round(20 * (p @ r.T)), POINTS, ROTATION),
    "astype(int)": (lambda p, r: ((p @ r.T + 10) / 0.1).astype(jnp.int32), POINTS, ROTATION),
    "// and %": (lambda p, r: ((p @ r.T) // 0.1, (p @ r.T) % 0.1), POINTS, ROTATION),
    "compared with positions": (lambda p, r: jnp.arange(32.0) < (p @ r.T)[..., None], POINTS, ROTATION),
    "the edges of bins": (lambda p, e: jnp.searchsorted(e, p @ ROTATION), POINTS, EDGES),
    "edges from outside": (lambda p, r: jnp.digitize(p @ r, EDGES), POINTS, ROTATION),
    "edges made here": (lambda p, r: jnp.histogram(p @ r, bins=300, range=(-30, 30))[0], POINTS, ROTATION),
    "an interpolated table": (lambda p, e: jnp.interp(p @ ROTATION, e, jnp.sin(e)), POINTS, EDGES),
    "compared with a table": (lambda p, e: (p @ ROTATION)[..., None] > e, POINTS, EDGES),
    "sin(2 pi x b)": (lambda x, b: jnp.sin(2 * jnp.pi * (x @ b)), normal(5, 100, 3), FREQUENCIES),
    "sin and cos": (lambda x, b: jnp.stack([jnp.sin(x @ b), jnp.cos(x @ b)]), normal(5, 100, 3), FREQUENCIES),
    "sin(s x b)": (lambda x, s: jnp.sin(s * (x @ FREQUENCIES)), normal(5, 100, 3), normal(6, 16)),
    "sin(exp(s) x b)": (lambda x, s: jnp.sin((x @ FREQUENCIES) * jnp.exp(s)), normal(5, 100, 3), normal(6, 16)),
    "points on rays": (lambda t, r: jnp.sin(8 * (POINTS[0] + (POINTS[1] @ r) * t)), normal(5, 100, 1), ROTATION),
}


@pytest.mark.parametrize(("spelling", "policy"), in_turn(COORDINATES))
def test_coordinates_and_phases_are_float32(spelling, policy):
    fun, *args = COORDINATES[spelling]
    jax.tree.map(np.testing.assert_array_equal, *both(fun, policy, *args))
    assert jaxmp.cast_plan(fun, policy)(*args).summary.groups["amplifier"] >= 1


def rounded(x):
    return x + jax.lax.stop_gradient(jnp.round(x) - x)


NO_COORDINATES = {
    "quantised activations": lambda x: jnp.clip(jnp.round((x @ W) / 0.1), -128, 127) @ W,
    "a straight-through gradient": lambda x: (x @ W + jax.lax.stop_gradient(jnp.round(x @ W) - x @ W)) @ W,
    "int8": lambda x: jnp.round((x @ W) / 0.1).astype(jnp.int8),
    "a rotary embedding": lambda x: ((x @ W) * jnp.cos(jnp.arange(8.0))) @ W,
    "the gradient of a clip": lambda x: jax.grad(lambda w: jnp.sum(jnp.clip(x @ w, 0, 6) @ w))(W),
    "learned steps": lambda x: jax.grad(lambda w, s: jnp.sum(rounded(jnp.clip(x @ w / s, -8, 7)) * s @ w))(W, 0.1),
    "a threshold": lambda x: jnp.where(x @ W > 0, x, 0.0) @ W,
    "a threshold for each feature": lambda x: jnp.where(x @ W > THRESHOLDS, x, 0.0) @ W,
    "a threshold for each example": lambda x: jnp.where(x @ W > THRESHOLDS[:4, None], x, 0.0) @ W,
    "radial basis functions": lambda x: jnp.tanh((x @ W)[..., None] - THRESHOLDS).sum(-1) @ W,
    "distances from an identity": lambda x: ((x @ W).T @ (x @ W) - jnp.eye(8)) ** 2,
    "distances from labels": lambda x: (x @ W - jax.nn.one_hot(jnp.arange(4), 8)) ** 2,
    "the largest": lambda x: jnp.argmax(x @ W, -1),
    "a sine of an activation": lambda x: jnp.sin(jax.nn.gelu(x @ W)) @ W,
}


@pytest.mark.parametrize("name", NO_COORDINATES)
def test_products_that_make_no_places_stay_half(name):
    assert set(products(half(NO_COORDINATES[name]), normal(0, 4, 8))) == {"bfloat16"}


ACTIVATIONS = {
    "leaky ReLU": jax.nn.leaky_relu,
    "ReLU": jax.nn.relu,
    "a bent line": lambda h: jnp.where(h > 0, h, 0.25 * h),
    "dropout": lambda h: jnp.where(jnp.arange(8) % 4 > 0, h / 0.75, 0.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("end", [jnp.sin, jnp.floor])
def test_of_layers_that_make_places_the_last_is_float32(name, end):
    def fun(x):
        for _ in range(3):
            x = ACTIVATIONS[name](x @ W)
        return end(x @ W)

    assert products(half(fun), normal(0, 4, 8)) == ["bfloat16"] * 3 + ["float32"]


CHAINS = {
    "scaled": (lambda h: h * 1.001, 1000),
    "logged": (lambda h: jnp.where(jnp.log(h) > 0, h, h * 1.01), 300),
    "streamed": (lambda h: h + 0.1 * jnp.log(1 + h), 300),
    "reduced": (lambda h: (h - h @ W) * 1.01, 300),
    "squared": (jnp.square, 64),  # of a complex number each part would be counted 2**64 times
}


@pytest.mark.once
@pytest.mark.parametrize("chain", CHAINS)
def test_the_time_to_find_groups_is_linear(chain):
    turn, count = CHAINS[chain]

    def fun(x):
        h = x @ W
        h = h.astype(jnp.complex64) if chain == "squared" else h
        for _ in range(count):
            h = turn(h)
        return jnp.floor(h.real)

    start = time.process_time()
    jaxmp.cast_plan(fun, "mixed_bfloat16")(normal(0, 4, 8))
    assert time.process_time() - start < 10  # a second; a chain that each operation follows to its start takes 20


def variances(x):
    return jnp.stack([jnp.mean(x * x, 0), (x * x).T @ FILTER - (x.T @ FILTER) ** 2])


FILTER = jnp.full(32, 1 / 32)


@pytest.mark.parametrize("policy", HALVES)
def test_means_of_products_by_a_filter_are_float32(policy):
    x = (5 + normal(0, 32, 8)).astype(HALVES[policy]).astype(jnp.float32)
    np.testing.assert_allclose(half(lambda x: variances(x @ W), policy)(x), variances(x), rtol=1e-5)


def _mean(x):
    return x.sum(0) / len(x)


COVARIANCES = {
    "outer": lambda x, y: x.T @ y / len(x) - jnp.outer(_mean(x), _mean(y)),
    "sum": lambda x, y: x.T @ y - len(x) * x.mean(0)[:, None] * y.mean(0),
    "einsum": lambda x, y: jnp.einsum("ni,nj->ij", x, y) / len(x) - jnp.einsum("i,j->ij", x.mean(0), y.mean(0)),
}


@pytest.mark.parametrize(("spelling", "policy"), in_turn(COVARIANCES))
def test_covariances_as_a_difference_of_means_are_float32(spelling, policy):
    covariance, x = COVARIANCES[spelling], normal(0, 128, 8) + 30.0
    y = x @ normal(1, 8, 4)
    expected = np.cov(np.asarray(x, np.float64), np.asarray(y, np.float64), rowvar=False, bias=True)[:8, 8:]
    scale = len(x) if spelling == "sum" else 1
    np.testing.assert_allclose(half(covariance, policy)(x, y) / scale, expected, rtol=0.02, atol=0.02)
    assert "cancellation" in jaxmp.cast_plan(covariance, policy)(x, y).summary.groups


@pytest.mark.parametrize(
    ("rest", "dtype"),
    [
        (lambda squares, dots: squares - dots / 0.5, "float32"),
        (lambda squares, dots: squares - 0.5 / dots, "bfloat16"),
        (lambda squares, dots: 0.5 / squares - dots, "bfloat16"),
    ],
)
def test_a_product_divided_by_a_constant_is_cancelled_but_no_quotient_of_a_constant(rest, dtype):
    def fun(x, w):
        return rest(jnp.sum(x**2, -1, keepdims=True), x @ w)

    assert products(half(fun), normal(0, 4, 8), W) == [dtype]


@pytest.mark.parametrize("policy", HALVES)
def test_a_product_that_is_only_factorised_is_float32(policy):
    a = 3 * normal(0, 64, 8)
    result = half(lambda a: jnp.linalg.cholesky(a @ a.T + 1e-2 * jnp.eye(64)), policy)(a)
    np.testing.assert_array_equal(jnp.isfinite(result), True)


@pytest.mark.parametrize("policy", HALVES)
def test_a_logarithm_near_a_bound_is_float32_although_a_product_reads_the_same(policy):
    def fun(x, w):
        action = jnp.tanh(3 * (x @ w))
        return jnp.sum(jnp.log(1 - action**2 + 1e-6), -1), action @ w

    x = normal(0, 4, 8).astype(HALVES[policy]).astype(jnp.float32)
    np.testing.assert_allclose(half(fun, policy)(x, W)[0], fun(x, W)[0], rtol=0.02)


def test_squares_under_a_root_do_not_overflow_and_epsilons_there_do_not_vanish():
    large = jnp.full((4, 8), 300.0)
    squareplus = between(jax.nn.squareplus)
    np.testing.assert_allclose(half(squareplus, "mixed_float16")(large, W), squareplus(large, W), rtol=1e-3)
    smooth = between(lambda h: jnp.sqrt(h**2 + 1e-12))
    gradient = jax.grad(lambda x: half(smooth, "mixed_float16")(x, W).sum())(jnp.zeros((4, 8)))
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("fill", [-1e30, 1e-12])
def test_what_a_gather_fills_with_is_not_rounded(fill):
    def fun(x, w):
        return 1 / jnp.take(x @ w, jnp.array([0, 99]), axis=0, mode="fill", fill_value=fill)

    np.testing.assert_allclose(half(fun, "mixed_float16")(jnp.ones((4, 8)), W), fun(jnp.ones((4, 8)), W), rtol=1e-3)


def _embedded(x):
    return jnp.where(x > 0, 5 + x * jnp.arange(8).astype(x.dtype), jnp.tanh(x))


def _in_a_loop(x):
    return jax.lax.fori_loop(0, 3, lambda n, h: jnp.where(n > 0, h, _embedded(h)), x)


def _noisy(x):
    return 1 + x + 0.1 * jax.random.normal(jax.random.key(7), x.shape, "float32").astype(x.dtype)


def _sum_of_far(total, w):
    return total + _far(lambda x: x + w)(total), None


def _far(f):
    return lambda x: jnp.sum(f(x) ** 2, -1)[:, None] + jnp.sum(f(x) ** 2, -1) - 2 * f(x) @ f(x).T


WRITTEN_TWICE = {
    "vdot(x - y, x - y)": lambda x: jnp.vdot(300 * x - 1, 300 * x - 1),
    "distances": _far(_embedded),
    "of calls": jax.jit(_far(jax.jit(_embedded))),
    "of remat": _far(jax.checkpoint(_embedded)),
    "of a loop": _far(_in_a_loop),
    "of a scan": _far(lambda x: jax.lax.scan(lambda h, w: (h + w, h * w), x, 2 * jnp.ones(3, x.dtype))[1][-1]),
    "of a cond": _far(lambda x: jax.lax.cond(x[0, 0] > 0, _embedded, jnp.sinh, x)),
    "of random numbers": _far(_noisy),
    "in a scan": lambda x: jax.lax.scan(_sum_of_far, 0 * x, x[0, :2])[0],
}


@pytest.mark.parametrize(("spelling", "policy"), in_turn(WRITTEN_TWICE))
def test_a_value_that_is_written_twice_is_the_same(spelling, policy):
    fun, x = WRITTEN_TWICE[spelling], (1 + 0.1 * normal(0, 8, 8)).astype(HALVES[policy]).astype(jnp.float32)
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, fun(x.astype(jnp.float64)))
    result = half(lambda x, w: (fun(x), w @ w), policy)(x, W)[0]
    np.testing.assert_allclose(result, exact, rtol=1e-3, atol=3e-4 * np.abs(exact).max())


DIFFERENT = {
    "another operand": lambda x: (jnp.tanh(x), jnp.tanh(2 * x)),
    "another parameter": lambda x: (jnp.roll(x, 1, 0) + 1, jnp.roll(x, 1, 1) + 1),
    "another constant": lambda x: (x + 1.0, x + 2.0),
    "another key": lambda x: tuple(x + jax.random.normal(jax.random.key(n), x.shape) for n in range(2)),
    "another body": lambda x: tuple(
        jax.lax.fori_loop(0, 3, turn, x) for turn in (lambda _, h: 1.5 * h, lambda _, h: 1.5 + h)
    ),
    "another branch": lambda x: tuple(jax.lax.cond(x[0, 0] > 0, jnp.sin, one, x) for one in (jnp.tanh, jnp.exp)),
    "an effect": lambda x: tuple(
        jax.experimental.io_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x) for _ in range(2)
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_equal_operations_on_what_differs_are_not_the_same(what):
    def fun(x):
        return jnp.vdot(*DIFFERENT[what](x))

    assert products(half(fun), normal(0, 8, 8)) == ["bfloat16"]


def test_a_product_of_float8_beside_others_is_left_as_it_is():
    codes = jnp.ones((16, 16), jnp.float8_e4m3fn)

    def fun(x, w):
        own = jax.lax.dot_general(codes, codes, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return own + x @ w

    found = jaxmp.autocast(fun, "mixed_bfloat16")(jnp.ones((16, 16)), jnp.ones((16, 16)))
    np.testing.assert_array_equal(np.asarray(found), 32)
