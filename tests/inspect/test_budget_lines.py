"""An error budget names the lines that need float32 and that autocast does not recognise.

Each row is a program. Half precision causes an error, and a float32 mark around a line, or another spelling, removes
it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import compiled, dtypes_of, half, normal, products
from places import ROOT

import jaxmp
from jaxmp.inspect import error_budget

no_mark = contextlib.nullcontext
float32_mark = functools.partial(jaxmp.precision, "float32")


class Row(NamedTuple):
    """A program, and the same program with a mark or in another spelling.

    Without the mark, the relative error is above ``effect``. With the mark, it is below a tenth of ``effect``.
    """

    original: Callable[..., Any]
    unmarked: Callable[..., Any]
    marked: Callable[..., Any]
    args: tuple[np.ndarray, ...]
    effect: float


def marks(program, *args, effect, policy="mixed_bfloat16"):
    """Return the row of a program that takes the mark as its first argument."""
    original, marked = functools.partial(program, no_mark), functools.partial(program, float32_mark)
    return Row(original, half(original, policy), half(marked, policy), args, effect)


def draw(seed, *shape, scale=1.0):
    return np.asarray(normal(seed, *shape, scale=scale))  # in NumPy, sums of these arrays compile nothing


X, W = draw(0, 8, 16), draw(1, 16, 16, scale=0.25)
EYE = np.eye(29, dtype="float32")


# -- small steps and layers ------------------------------------------------------------------------------------------


def small_steps(mark, table, w):
    h = table[jnp.arange(8)]  # a stream that begins with an argument itself is float32
    for _ in range(5):
        step = jnp.tanh(h @ w)
        with mark():
            h = h + 0.003 * step
    return h


def kalman_filter(mark, h, matrices, offsets):
    def iteration(h, matrix_and_offset):
        matrix, offset = matrix_and_offset
        with mark():
            h = matrix @ h + offset
        return h, None

    return jax.lax.scan(iteration, h, (matrices, offsets))[0]


def gated_recurrence(mark, x, gates, values, out):
    gate, value = x @ gates + 6, jnp.tanh(x @ values)
    with mark():
        decay = jax.nn.sigmoid(gate)
        h = jax.lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (decay, value))[1]
    return h @ out


def decayed_layers(mark, h, ws):
    def layer(h, w):
        with mark():
            h = 0.99 * h
        return h + jnp.tanh(h @ w), None

    return jax.lax.scan(layer, h, ws)[0]


MATRICES = EYE[:16, :16] + draw(5, 100, 16, 16, scale=0.01)
SEQUENCE = draw(3, 1024, 16)


# -- positions -------------------------------------------------------------------------------------------------------


def floor_of_coordinates(mark, h, w):
    with mark():
        coordinates = h @ w
    return jnp.floor(coordinates)


def fraction(mark, h, w):
    with mark():
        c = h @ w
    return c - jnp.floor(c)


def structure_factor(mark, positions, wave_vectors):
    with mark():
        phase = positions @ wave_vectors
    return jnp.exp(jax.lax.complex(jnp.zeros_like(phase), phase)).sum(0)


POINTS = np.random.default_rng(3).random((64, 2), "float32")
SCREEN = np.array([[200, 13, 90, 11, 70, 5, 120, 31], [40, 300, 7, 25, 60, 80, 9, 210]], "float32")


# -- small differences -----------------------------------------------------------------------------------------------


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def one_minus_cosine(mark, x, y, w):
    with mark():
        a, b = x @ w, y @ w
    u, v = unit(a), unit(b)
    with mark():
        cosine = u @ v.T
    return 1 - jnp.diagonal(cosine)


def normalised_cut(mark, scores, weights, degrees):
    p = jax.nn.softmax(scores)
    with mark():
        inside = jnp.trace(p.T @ weights @ p)
        total = jnp.trace(p.T @ degrees @ p)
    return 1 - inside / total


def variance_by_products(mark, x, w):
    with mark():
        mean_of_squares = (x * x) @ w
        mean = x @ w
    return mean_of_squares - mean**2


def gaussian_process(mark, x, t):
    def k(a, b):
        return jnp.exp(-0.5 * (a[:, None] - b) ** 2)

    cholesky = jnp.linalg.cholesky(k(x, x) + 0.01 * jnp.eye(len(x)))
    v = jax.scipy.linalg.solve_triangular(cholesky, k(x, t), lower=True)
    with mark():
        explained = v.T @ v
    return jnp.sqrt(jnp.diagonal(k(t, t) - explained))


def style_loss(mark, f, g):
    f, g = jax.nn.relu(f), jax.nn.relu(g)
    with mark():
        gram, target = f.T @ f, g.T @ g
    return jnp.mean((gram - target) ** 2)


def root_near_zero(mark, h, w, b):
    with mark():
        v = h @ w + b
    return jnp.sqrt(jax.nn.relu(v))


def weighted_distances(mark, x, a, y):
    with mark():
        distances = x**2 @ a - 2 * x @ (a * y)
    return distances + jnp.sum(a * y**2, 0)


def similarity(x, y):
    distances = jnp.sum(x**2, -1)[:, None] + jnp.sum(y**2, -1) - 2 * x @ y.T
    return jnp.sum(jnp.exp(-distances))


def orthogonal_weight(mark, w):
    x = w / jnp.linalg.norm(w)
    for _ in range(5):
        with mark():
            gram = x @ x.T
            x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
    return x


NEAR = 5 + 0.5 * X[:, :8]
CLUSTERS = np.arange(16) % 2
EDGES = 0.01 + (CLUSTERS[:, None] == CLUSTERS) * (1 + 0.3 * np.abs(W + W.T))
CLUSTER_SCORES = 10 * EYE[:2, :2][CLUSTERS] + draw(3, 16, 2)


# -- sums and logarithms ---------------------------------------------------------------------------------------------


def covariance(mark, x, w):
    h = x @ w
    with mark():
        gram = h.T @ h
    return gram / len(h)


def naive_bayes(mark, scores, counts):
    with mark():
        log_likelihoods = jax.nn.log_softmax(scores) @ counts
    return jax.nn.softmax(log_likelihoods)


def log_of_a_product_of_exponentials(mark, a, b):
    with mark():
        result = jnp.log(jnp.exp(a) @ jnp.exp(b))
    return result


WORDS = np.random.default_rng(5).integers(0, 10, (16, 8)).astype("float32")
SCORES = draw(1, 16) + draw(2, 4, 16, scale=0.1)
LOG_SCALES = np.array([7, -11], "float32")
LOG_FACTORS = LOG_SCALES[:, None] + X[:2], LOG_SCALES + W[:, :2]


# -- the rows --------------------------------------------------------------------------------------------------------

ROWS = {
    "small steps without a loop, `h + 0.01 * f(h)`, from rows of a table: integrators": marks(
        small_steps, X, W, effect=0.002
    ),
    "a state that each iteration multiplies by another matrix, `A[t] @ h`: Kalman filters": marks(
        kalman_filter, draw(7, 16, 16), MATRICES, draw(6, 100, 16, 16, scale=0.02), effect=0.01
    ),
    "a recurrence by `associative_scan` with gates near 1: GateLoop, QRNN": marks(
        gated_recurrence, SEQUENCE, W, draw(2, 16, 16, scale=0.25), draw(4, 16, 16, scale=0.25), effect=0.05
    ),
    "a multiplication by a number near 1, such as 0.99, in a stack of layers or right before a product": marks(
        decayed_layers, 1 + 0.1 * X, draw(2, 100, 16, 16, scale=0.01), effect=0.05
    ),
    "bins and cells without casts to integers: `searchsorted`, `histogram`, `floor`, comparisons with positions": marks(
        floor_of_coordinates, POINTS, SCREEN, effect=0.0015
    ),
    "a fraction, `c - floor(c)` or `jnp.modf(c)`": marks(fraction, POINTS, SCREEN, effect=0.1),
    "a complex exponential, `exp(1j * x @ w)`": marks(structure_factor, 5 * X, 4 * W, effect=0.02),
    "`1 - cosine`, if the cosine is a product and near 1": marks(
        one_minus_cosine, X, X + draw(2, 8, 16, scale=0.03), draw(1, 16, 16), effect=1
    ),
    "a normalised cut, `1 - trace(p.T @ w @ p) / trace(p.T @ d @ p)`": marks(
        normalised_cut, CLUSTER_SCORES, EDGES, np.diag(EDGES.sum(0)), effect=0.05
    ),
    "moments by products, `(x * x) @ w - (x @ w)**2`, as in SSIM": marks(
        variance_by_products, 3 + X, np.full((16, 8), 1 / 16, "float32"), effect=0.005
    ),
    "a computed number minus a product: the variance of a Gaussian process, `k(t, t) - v.T @ v`": marks(
        gaussian_process, np.linspace(-5, 5, 12, dtype="float32"), np.linspace(-4, 4, 16, dtype="float32"), effect=0.05
    ),
    "a difference of two Gram matrices that are nearly equal: style losses": marks(
        style_loss, SEQUENCE, SEQUENCE + draw(9, 1024, 16, scale=0.03), effect=0.01
    ),
    "a mean of products, `h.T @ h / n`, in float16: Gram matrices, covariances": marks(
        covariance, 10 * SEQUENCE, W, effect=1, policy="mixed_float16"
    ),
    "Muon's Newton–Schulz iteration inside a model": marks(orthogonal_weight, W, effect=0.02),
    "a root or a logarithm of a small value that a product computes, `sqrt(relu(h @ w + b))`": marks(
        root_near_zero, X[:1] + draw(9, 8, 16, scale=0.01), W, -(X[0] @ W), effect=0.05
    ),
    "products of log-probabilities": marks(naive_bayes, SCORES, WORDS, effect=0.02),
    "the logarithm of a product of exponentials in float16": marks(
        log_of_a_product_of_exponentials, *LOG_FACTORS, effect=0.1, policy="mixed_float16"
    ),
    "weighted distances": marks(weighted_distances, 3 + W[0] + 0.1 * X, np.abs(X.T), 3 + W[0][:, None], effect=0.5),
    "distances under `autocast(grad(f))`": Row(
        jax.grad(similarity),
        unmarked=half(jax.grad(similarity)),
        marked=jax.grad(half(similarity)),
        args=(NEAR, NEAR + draw(9, 8, 8, scale=0.3)),
        effect=0.015,
    ),
}
HALF_CARRIES = list(ROWS)[1:2]
SINES = "sines as activations: SIREN, Snake"
DISTANCES = list(ROWS)[-1]
FLOAT32_STREAM = "a weight that a layer of a scanned stack uses twice, `h + relu(h @ w) @ w.T`"


def in_float64(fun, args):
    with jax.enable_x64(True):
        args = [np.asarray(arg, "float64") if arg.dtype == "float32" else arg for arg in args]
        return np.asarray(jax.jit(fun)(*args))


def error(result, expected):
    """Return the relative error, in which an infinity or a NaN counts as an infinite error."""
    if not np.isfinite(result).all():
        return np.inf
    return np.linalg.norm(result - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("your_code", ROWS)
def test_half_precision_has_the_effect_of_the_row_and_the_mark_removes_it(your_code):
    row = ROWS[your_code]
    unmarked, marked = compiled(lambda *args: (row.unmarked(*args), row.marked(*args)))(*row.args)
    exact = in_float64(row.original, row.args)
    assert error(unmarked, exact) > row.effect
    assert error(marked, exact) < row.effect / 10


def marked_lines(program):
    """Return the numbers of the lines that a program marks."""
    lines, start = inspect.getsourcelines(program)
    marks = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.With)]
    return {start - 1 + statement.lineno for mark in marks for statement in mark.body}


def rows_with_marked_lines():
    """Return the names of the rows that mark lines."""
    return [name for name in ROWS if isinstance(ROWS[name].original, functools.partial)]


@pytest.mark.parametrize("your_code", rows_with_marked_lines())
def test_the_error_budget_names_the_line_to_mark(your_code):
    row = ROWS[your_code]
    budget = error_budget(row.unmarked)(*row.args)
    file, _, line = budget.by_line[0].name.rpartition(":")
    assert file == "test_budget_lines.py" and int(line) in marked_lines(row.original.func)


def test_the_page_lists_the_programs_that_need_no_mark():
    page = (ROOT / "docs" / "autocast.md").read_text(encoding="utf-8")
    section = page.partition("\n## Mark these yourself\n")[2].partition("\n## ")[0]
    heading, *rows = re.findall(r"^\| (.*?) \| (.*?) \|", section, re.MULTILINE)
    assert heading == ("your code", "effect of half precision")
    assert [your_code for your_code, _ in rows] == [DISTANCES, SINES, FLOAT32_STREAM]


# -- what else the rows say ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("your_code", HALF_CARRIES)
def test_the_carry_is_half_without_the_mark_and_float32_with_it(your_code):
    row = ROWS[your_code]
    assert dtypes_of("scan", row.unmarked, *row.args) == ["bfloat16"]
    assert dtypes_of("scan", row.marked, *row.args) == ["float32"]


def test_products_before_sines_are_float32_unless_an_override_makes_sines_half():
    def siren(x, a, b, c):
        return jnp.sin(30 * (jnp.sin(30 * (x @ a)) @ b)) @ c

    def snake(x, a, b, c):
        h = x @ a
        h = (h + jnp.sin(h) ** 2) @ b
        return (h + jnp.sin(h) ** 2) @ c

    for fun in (siren, snake):
        assert products(half(fun), X, W, W, W) == ["float32", "float32", "bfloat16"]
        assert products(half(fun, overrides={"primitive:sin": "half"}), X, W, W, W) == ["bfloat16"] * 3


def number_before_a_product(mark, x, w):
    h = jax.nn.relu(x @ w)
    with mark():
        h = 0.99 * h
    return h @ w


def bins(read):
    def binned(mark, h, w):
        with mark():
            coordinates = h @ w
        return read(coordinates)

    return binned


EDGES = np.arange(8, dtype="float32")
# Programs of the same kinds, and the primitive in the marked line.
VARIANTS = {
    "0.99 right before a product": (number_before_a_product, "mul"),
    "searchsorted": (bins(lambda c: jnp.searchsorted(EDGES, c)), "dot_general"),
    "histogram": (bins(lambda c: jnp.histogram(c, EDGES)[0]), "dot_general"),
    "comparisons with positions": (bins(lambda c: c[..., None] > EDGES), "dot_general"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_marked_line_is_half_without_the_mark(variant):
    program, primitive = VARIANTS[variant]

    def marked_dtypes(mark):
        return dtypes_of(primitive, half(functools.partial(program, mark)), X, W)

    assert set(marked_dtypes(no_mark)) == {"bfloat16"}
    assert "float32" in marked_dtypes(float32_mark)


def test_the_programs_that_need_no_mark_are_float32():
    def adversarial_input(x, w):
        return (x + 0.003 * jnp.sign(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x))) @ w

    def adapted_weight(x, w):  # MAML, with an update as in optax
        return x @ (w + -0.01 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w))

    def gradient_descent_by_hand(w, xs):
        return jax.lax.scan(lambda w, x: (w - 0.001 * (x @ w), None), w, xs)[0]

    def steps_with_weights_by_index(x, ws):
        return jax.lax.fori_loop(0, 100, lambda n, h: h + 0.003 * jnp.tanh(h @ ws[n % 5]), x)

    def small_differences(h, w):
        for _ in range(3):
            h = h - 0.003 * jnp.tanh(h @ w)
        return h @ w

    assert dtypes_of("add", half(adversarial_input), X, W) == ["float32"]
    assert dtypes_of("add", half(adapted_weight), X, W) == ["float32"]
    assert dtypes_of("scan", half(gradient_descent_by_hand), W, draw(3, 100, 16, 16)) == ["float32"]
    assert "bfloat16" not in dtypes_of("scan", half(steps_with_weights_by_index), X, draw(4, 5, 16, 16))
    assert dtypes_of("sub", half(small_differences), X, W) == ["float32"] * 3
    assert dtypes_of("dot_general", half(lambda h, w: (h @ w) % 1), X, W) == ["float32"]
    assert dtypes_of("dot_general", half(lambda h, w: jnp.sqrt(1 - h @ w)), X, W) == ["float32"]
