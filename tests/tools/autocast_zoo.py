"""Functions between two matrix products, and their allowed errors.

Each function is computed between two products that only permute numbers, which is exact in every dtype. So its inputs
are known exactly, and the whole error comes from the function. Both bfloat16 and float16 represent all inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import optax.losses as losses
from autocast_tools import compiled
from jax import lax


class Tolerance(NamedTuple):
    """The largest allowed error of a result that a product reads.

    The unit is a unit in the last place (ulp) of the compute dtype.

    Attributes:
      ulps: the number of units.
      why: the causes of the error.
      of: the number whose last place is the unit: ``"each"`` number of the result, or its ``"largest"`` number.
    """

    ulps: float
    why: str
    of: str = "each"


EXACT = Tolerance(0, "moves or selects numbers, or computes small integers, so nothing is rounded")
ROUNDED = Tolerance(0.51, "computed in float32, and rounded once at the end: half a unit")
ONE_STEP = Tolerance(1, "one operation in half precision: half a unit by rounding, and half by its kernel")


def steps(count: float, why: str) -> Tolerance:
    """Allow ``count`` units for successive half operations without cancellation."""
    return Tolerance(count, why)


def of_largest(count: float, why: str) -> Tolerance:
    """Allow ``count`` units of the largest number.

    Use it for products, and for sums whose terms may cancel.
    """
    return Tolerance(count, why, "largest")


AROUND = of_largest(0.51, "computed in float32, rounded once; results near zero have the error of cancelled terms")
LOG_CDF = steps(0.76, "float32 itself is off by 0.749 bfloat16 units at 4.53, where it computes log(1 - 3e-6)")
LOGISTIC = of_largest(1.2, "exp(-x) overflows in float16, so the result below -11 is 0 and not 9e-6")


class Case(NamedTuple):
    """A function of ``inputs`` and ``plain`` arguments, and its allowed error.

    Only the ``inputs`` are results of a product.
    """

    name: str
    fun: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]
    tolerance: Tolerance
    plain: tuple[np.ndarray, ...] = ()


SHAPE = (4, 8)


def exact(x: Any) -> np.ndarray:
    """Round ``x`` to numbers that bfloat16 and float16 both represent."""
    rounded = np.asarray(x, np.float32).astype(jnp.bfloat16).astype(np.float32)
    return np.where(np.abs(rounded) < 2.0**-14, 0, rounded).astype(np.float32)


def normal(scale: float = 1, mean: float = 0, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    return exact(mean + scale * np.random.default_rng(seed).normal(size=shape))


def uniform(low: float, high: float, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    margin = (high - low) / 64  # keeps the rounded numbers between low and high
    return exact(np.random.default_rng(seed).uniform(low + margin, high - margin, size=shape))


def simplex(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    x = np.exp(np.random.default_rng(seed).normal(size=shape))
    return exact(x / x.sum(-1, keepdims=True))


def integers(stop: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(stop, size=shape).astype(np.int32)


def spread(n: int = 4, seed: int = 0) -> np.ndarray:
    """Return a well-conditioned matrix that is not symmetric."""
    return exact(np.random.default_rng(seed).normal(size=(n, n)) + 4 * np.eye(n))


def positive_definite(n: int = 4, seed: int = 0) -> np.ndarray:
    """Return a symmetric matrix whose eigenvalues are far from each other."""
    x = np.random.default_rng(seed).normal(size=(n, n)) / 4
    return exact(x + x.T + np.diag(2.0 + 2 * np.arange(n)))


A, B = normal(), normal(seed=1)
WIDE = normal(5)
POSITIVE, POSITIVE_B = uniform(0.1, 8), uniform(0.1, 8, seed=1)
UNIT, UNIT_B = uniform(0, 1), uniform(0, 1, seed=1)
SIGNED_UNIT = uniform(-1, 1)
ROW = normal(3, shape=(8,))
LABELS = integers(8, (4,))
ONE_HOT = np.eye(8, dtype=np.float32)[LABELS]
SIGNS = np.where(normal(seed=3) > 0, 1, -1).astype(np.float32)
ZEROS_AND_ONES = (normal(seed=3) > 0).astype(np.float32)
MASK = np.array([[True] * 5 + [False] * 3] * 3 + [[True] * 8])
SQUARE = spread()
SYMMETRIC = positive_definite()


def float32_functions() -> Iterator[Case]:
    """Yield pointwise functions that autocast computes in float32."""
    for name, fun, x in (
        ("exp", jnp.exp, normal(3)),
        ("expm1", jnp.expm1, normal(0.1)),
        ("log", jnp.log, POSITIVE),
        ("log1p", jnp.log1p, UNIT),
        ("sinh", jnp.sinh, normal(3)),
        ("cosh", jnp.cosh, normal(3)),
        ("tan", jnp.tan, SIGNED_UNIT),
        ("arcsin", jnp.arcsin, SIGNED_UNIT),
        ("arccos", jnp.arccos, SIGNED_UNIT),
        ("arctan", jnp.arctan, WIDE),
        ("arccosh", jnp.arccosh, uniform(1, 9)),
        ("arctanh", jnp.arctanh, SIGNED_UNIT),
        ("rsqrt", lax.rsqrt, POSITIVE),
        ("x ** 2.5", lambda x: x**2.5, POSITIVE),
        ("2 ** x", lambda x: 2.0**x, WIDE),
        ("erf_inv", lax.erf_inv, SIGNED_UNIT),
        ("lgamma", lax.lgamma, POSITIVE),
        ("digamma", lax.digamma, uniform(2, 9)),
        ("bessel_i0e", lax.bessel_i0e, WIDE),
    ):
        yield Case(name, fun, (x,), ROUNDED)
    yield Case("power", jnp.power, (POSITIVE, B), ROUNDED)
    sum_of_two = of_largest(0.51, "the float32 logarithm is rounded and added to the larger one, which is half")
    yield Case("logaddexp", jnp.logaddexp, (WIDE, normal(5, seed=1)), sum_of_two)


def half_functions() -> Iterator[Case]:
    """Yield operations that stay in half precision between two products."""
    for name, fun, x in (
        ("neg", jnp.negative, A),
        ("abs", jnp.abs, A),
        ("sign", jnp.sign, A),
        ("floor", jnp.floor, WIDE),
        ("round", jnp.round, WIDE),
        ("clip", lambda x: jnp.clip(x, -1, 1), A),
        ("clip at float32's largest", lambda x: jnp.clip(x, -3e38, 3e38), A),
        ("nan_to_num", lambda x: jnp.nan_to_num(x, nan=0.0, posinf=1.0, neginf=-1.0), A),
    ):
        yield Case(name, fun, (x,), EXACT)
    for name, fun, x in (
        ("square", jnp.square, A),
        ("x ** 3", lambda x: x**3, A),
        ("sqrt", jnp.sqrt, POSITIVE),
        ("reciprocal", jnp.reciprocal, POSITIVE),
        ("tanh", jnp.tanh, A),
        ("erf", lax.erf, A),
        ("x * scale", lambda x: x * 0.3, A),
    ):
        yield Case(name, fun, (x,), ONE_STEP)
    for name, fun, x, y in (
        ("add", jnp.add, A, B),
        ("subtract", jnp.subtract, A, B),
        ("multiply", jnp.multiply, A, B),
        ("divide", jnp.divide, A, POSITIVE),
    ):
        yield Case(name, fun, (x, y), ONE_STEP)
    yield Case("remainder", jnp.remainder, (POSITIVE, POSITIVE_B), EXACT)
    yield Case("maximum", jnp.maximum, (A, B), EXACT)
    yield Case("where", lambda x, y, m: jnp.where(m, x, y), (A, B), EXACT, (MASK,))
    yield Case("floor_divide", jnp.floor_divide, (WIDE, POSITIVE_B), EXACT)
    yield Case("arctan2", jnp.arctan2, (A, POSITIVE), ONE_STEP)


def activations() -> Iterator[Case]:
    """Yield the activation functions of jax.nn, and others as users write them."""
    for name, fun, x, tolerance in (
        ("relu", jax.nn.relu, A, EXACT),
        ("leaky_relu", jax.nn.leaky_relu, A, steps(2, "the slope 0.01 rounded, and the product")),
        ("sigmoid", jax.nn.sigmoid, WIDE, LOGISTIC),
        ("softplus", jax.nn.softplus, WIDE, ONE_STEP),
        ("silu", jax.nn.silu, WIDE, LOGISTIC),
        ("mish", jax.nn.mish, A, steps(2, "float32 up to the tanh or its product with x")),
        ("elu", jax.nn.elu, A, ROUNDED),
        ("selu", jax.nn.selu, A, steps(2, "the constant, and the product")),
        ("gelu", jax.nn.gelu, A, of_largest(1, "1 + tanh cancels in the tail, and the tanh has four rounding errors")),
        (
            "gelu exact",
            lambda x: jax.nn.gelu(x, approximate=False),
            A,
            of_largest(1, "erfc of the rounded argument: a relative error of x²·2⁻⁹ in the small tail"),
        ),
        (
            "swish with a slope",
            lambda x: x * jax.nn.sigmoid(1.702 * x),
            A,
            steps(4, "the slope, its product and the tail of the logistic function"),
        ),
        ("squared relu", lambda x: jnp.square(jax.nn.relu(x)), A, ONE_STEP),
    ):
        yield Case(name, fun, (x,), tolerance)


def softmaxes() -> Iterator[Case]:
    """Yield float32 regions that end in probabilities or their logarithms."""
    floor = float(np.finfo(np.float32).min)
    for name, fun in (
        ("softmax", jax.nn.softmax),
        ("softmax by hand", lambda x: (e := jnp.exp(x - x.max(-1, keepdims=True))) / e.sum(-1, keepdims=True)),
        ("softmax with a where", lambda x: jax.nn.softmax(x, where=jnp.asarray(MASK))),
        ("softmax with a mask selected", lambda x: jax.nn.softmax(jnp.where(MASK, x, floor))),
        ("softmax with a mask added", lambda x: jax.nn.softmax(x + jnp.where(MASK, 0.0, floor))),
        ("softmax of scaled and masked", lambda x: jax.nn.softmax(jnp.where(MASK, x / 3.0, -1e9))),
        ("log_softmax", jax.nn.log_softmax),
        ("log of a softmax by hand", lambda x: x - jnp.log(jnp.exp(x).sum(-1, keepdims=True))),
        ("logsumexp", lambda x: jax.nn.logsumexp(x, -1)),
        ("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1)),
        ("entropy of logits", lambda x: -(jax.nn.softmax(x) * jax.nn.log_softmax(x)).sum(-1)),
    ):
        yield Case(name, fun, (WIDE,), ROUNDED)


def sums() -> Iterator[Case]:
    """Yield sums and products over axes, and moments and norms computed from them."""
    far = normal(1, 100)
    for name, fun, x in (
        ("sum", lambda x: x.sum(-1), A),
        ("sum of all", jnp.sum, POSITIVE),
        ("mean", lambda x: x.mean(-1), A),
        ("mean of 4096", jnp.mean, uniform(0, 2, (4096,))),
        ("prod", lambda x: x.prod(-1), uniform(0.5, 2)),
        ("cumsum", lambda x: x.cumsum(-1), POSITIVE),
        ("cumprod", lambda x: x.cumprod(-1), uniform(0.5, 2)),
        ("var", lambda x: x.var(-1), far),
        ("std", lambda x: x.std(-1), far),
        ("standardize", jax.nn.standardize, far),
        (
            "layer norm by hand",
            lambda x: (
                (x - (m := x.mean(-1, keepdims=True))) * lax.rsqrt(((x - m) ** 2).mean(-1, keepdims=True) + 1e-12)
            ),
            far,
        ),
        ("rms norm by hand", lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6), A),
        ("norm of 300s", lambda x: jnp.sqrt(jnp.square(x).sum(-1)), normal(1, 300)),
        ("L2 normalised", lambda x: x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-12), A),
        ("L2 normalised by rsqrt", lambda x: x * lax.rsqrt(jnp.maximum((x**2).sum(-1, keepdims=True), 1e-12)), A),
        ("Lp norm", lambda x: jnp.linalg.norm(x, 3, axis=-1), WIDE),
        ("average pooling", lambda x: nn.avg_pool(x[..., None], (4,), (4,)), POSITIVE),
        ("segment_sum", lambda x: jax.ops.segment_sum(x, jnp.array([0, 1, 0, 1]), 2), POSITIVE),
        ("scatter-add", lambda x: jnp.zeros((2, 8)).at[jnp.array([0, 1, 0, 1])].add(x), POSITIVE),
        ("4096 ones scattered", lambda x: jnp.zeros(2).at[jnp.zeros(4096, int)].add(x), np.ones(4096, np.float32)),
        ("convolve", lambda x: jnp.abs(jnp.fft.rfft(x, axis=-1)), A),
    ):
        yield Case(name, fun, (x,), ROUNDED)
    yield Case(
        "E[x²] - E[x]²",
        lambda x: (x * x).mean(-1) - x.mean(-1) ** 2,
        (normal(3, 100),),
        Tolerance(0.6, "float32 throughout; cancellation multiplies its error by 1000, which is still small"),
    )
    yield Case("sum of products", dot, (A, B), of_largest(0.76, "each product rounded, summed in float32"))
    yield Case("cosine similarity", cosine, (A, B), of_largest(0.76, "products rounded"))
    yield Case("squared distance", lambda x, y: ((x - y) ** 2).sum(-1), (A, B), ROUNDED)


def dot(x: Any, y: Any) -> Any:
    return (x * y).sum(-1)


def cosine(x: Any, y: Any) -> Any:
    return dot(x, y) / (jnp.sqrt(dot(x, x)) * jnp.sqrt(dot(y, y)) + 1e-8)


def moves() -> Iterator[Case]:
    """Yield functions that move, sort and select elements."""
    for name, fun in (
        ("reshape", lambda x: x.reshape(2, 16)),
        ("sort", lambda x: jnp.sort(x, -1)),
        ("top_k", lambda x: lax.top_k(x, 3)),
        ("argmax", lambda x: jnp.argmax(x, -1)),
        ("take_along_axis", lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1)),
        ("max", lambda x: x.max(-1)),
        ("max pooling", lambda x: nn.max_pool(x[..., None], (4,), (4,))),
        ("concatenate", lambda x: jnp.concatenate([x, x[:, :3]], -1)),
        ("pad", lambda x: jnp.pad(x, 1)),
        ("dynamic_update_slice", lambda x: lax.dynamic_update_slice(x, x[:1, :2], (2, 3))),
        ("at[].set", lambda x: x.at[1].set(0.0)),
        ("one_hot of the largest", lambda x: jax.nn.one_hot(x.argmax(-1), 8)),
        ("comparison", lambda x: (x > 0).astype(jnp.float32)),
        ("searchsorted", lambda x: jnp.searchsorted(jnp.sort(x[0]), x[1])),
    ):
        yield Case(name, fun, (A,), EXACT)


def special_functions() -> Iterator[Case]:
    """Yield functions of jax.scipy.special."""
    sp = jsp.special
    for name, fun, *inputs in (
        ("special.logit", sp.logit, UNIT),
        ("special.entr", sp.entr, UNIT),
        ("special.xlogy", sp.xlogy, A, POSITIVE),
        ("special.gamma", sp.gamma, uniform(0.5, 5)),
        ("special.polygamma", lambda x: sp.polygamma(1, x), POSITIVE),
        ("special.gammaincc", sp.gammaincc, POSITIVE, POSITIVE_B),
        ("special.betainc", sp.betainc, POSITIVE, POSITIVE_B, UNIT),
    ):
        yield Case(name, fun, tuple(inputs), ROUNDED)
    for name, fun, *inputs in (
        ("special.rel_entr", sp.rel_entr, UNIT, UNIT_B),
        ("special.kl_div", sp.kl_div, UNIT, UNIT_B),
        ("special.i0", sp.i0, A),
        ("special.ndtr", sp.ndtr, A),
        ("special.ndtri", sp.ndtri, UNIT),
    ):
        yield Case(name, fun, tuple(inputs), AROUND)
    yield Case("special.erfc", sp.erfc, (A,), ONE_STEP)
    yield Case("special.log_ndtr", sp.log_ndtr, (WIDE,), LOG_CDF)


def log_densities() -> Iterator[Case]:
    """Yield functions of jax.scipy.stats."""
    st = jsp.stats
    yield Case("stats.expon.logpdf", st.expon.logpdf, (POSITIVE,), ROUNDED)
    for name, fun, *inputs in (
        ("stats.norm.logpdf", st.norm.logpdf, WIDE),
        ("stats.gamma.logpdf", st.gamma.logpdf, POSITIVE, POSITIVE_B),
        ("stats.t.logpdf", st.t.logpdf, WIDE, POSITIVE),
    ):
        yield Case(name, fun, tuple(inputs), AROUND)
    yield Case("stats.norm.logcdf", st.norm.logcdf, (WIDE,), LOG_CDF)
    counts = integers(5, SHAPE)
    yield Case("stats.poisson.logpmf", lambda mu, k: st.poisson.logpmf(k, mu), (POSITIVE,), AROUND, (counts,))
    yield Case("stats.bernoulli.logpmf", lambda p, k: st.bernoulli.logpmf(k, p), (UNIT,), AROUND, (counts % 2,))
    yield Case(
        "stats.dirichlet.logpdf",
        lambda a, x: st.dirichlet.logpdf(x[0], a),
        (uniform(1, 4, (8,)),),
        ROUNDED,
        (np.full((1, 8), 0.125, np.float32),),
    )
    yield Case(
        "stats.multivariate_normal.logpdf",
        lambda x, c: st.multivariate_normal.logpdf(x, jnp.zeros(4), c),
        (normal(shape=(3, 4)), SYMMETRIC),
        ROUNDED,
    )


def linear_algebra() -> Iterator[Case]:
    """Yield factorisations, solvers, transforms and products."""
    for name, fun, *inputs in (
        ("linalg.det", jnp.linalg.det, SQUARE),
        ("linalg.slogdet", lambda x: jnp.linalg.slogdet(x)[1], SQUARE),
        ("linalg.inv", jnp.linalg.inv, SQUARE),
        ("linalg.solve", jnp.linalg.solve, SQUARE, normal(shape=(4,))),
        ("linalg.cholesky", jnp.linalg.cholesky, SYMMETRIC),
        ("linalg.eigvalsh", jnp.linalg.eigvalsh, SYMMETRIC),
        ("linalg.qr", lambda x: jnp.linalg.qr(x)[1], SQUARE),
        (
            "scipy.linalg.cho_solve",
            lambda x, y: jsp.linalg.cho_solve(jsp.linalg.cho_factor(x), y),
            SYMMETRIC,
            normal(shape=(4,)),
        ),
        ("fft", lambda x: jnp.abs(jnp.fft.fft(x)), A),
    ):
        yield Case(name, fun, tuple(inputs), of_largest(0.51, ROUNDED.why))
    product = of_largest(0.51, "summed in float32, rounded to half once")
    for name, fun, *inputs in (
        (
            "convolution",
            lambda x, y: lax.conv_general_dilated(x, y, (1,), "SAME"),
            normal(shape=(1, 2, 8)),
            normal(shape=(3, 2, 3), seed=1),
        ),
        ("ragged_dot", lambda x, y: lax.ragged_dot(x, y, jnp.array([1, 3])), A, normal(shape=(2, 8, 4), seed=1)),
    ):
        yield Case(name, fun, tuple(inputs), product)
    yield Case("outer", jnp.outer, (ROW, normal(shape=(8,), seed=1)), ONE_STEP)
    yield Case(
        "dot_product_attention",
        lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True),
        (normal(shape=(1, 4, 2, 8)),),
        of_largest(0.76, "logits rounded, then two products"),
    )
    yield Case("expm", jsp.linalg.expm, (spread() / 4,), of_largest(1, "products, squared again and again"))
    yield Case("cov", jnp.cov, (A,), of_largest(1, "centred, rounded, multiplied"))


def optax_losses() -> Iterator[Case]:
    """Yield optax's losses, whose float32 results a product rounds once."""
    logits = WIDE
    ending = of_largest(
        1.1, "a loss per example, whose last difference, square or sum may be half where a product reads it"
    )
    for name, fun, x, *plain in (
        ("squared_error", losses.squared_error, A, B),
        ("huber_loss", losses.huber_loss, A, B),
        ("softmax_cross_entropy", losses.softmax_cross_entropy, logits, ONE_HOT),
        ("softmax_cross_entropy_with_integer_labels", losses.softmax_cross_entropy_with_integer_labels, logits, LABELS),
        ("sigmoid_binary_cross_entropy", losses.sigmoid_binary_cross_entropy, logits, ZEROS_AND_ONES),
        ("sigmoid_focal_loss", losses.sigmoid_focal_loss, logits, ZEROS_AND_ONES),
        ("kl_divergence", lambda x, p: losses.kl_divergence(jax.nn.log_softmax(x), p), logits, simplex()),
        ("hinge_loss", losses.hinge_loss, A, SIGNS),
        ("multiclass_hinge_loss", losses.multiclass_hinge_loss, A, LABELS),
        ("sparsemax_loss", losses.sparsemax_loss, A, ZEROS_AND_ONES),
        ("cosine_similarity", losses.cosine_similarity, A, B),
        ("ntxent", losses.ntxent, A, np.array([0, 0, 1, 1], np.int32)),
        (
            "ctc_loss",
            losses.ctc_loss,
            normal(5, shape=(1, 8, 4)),
            np.zeros((1, 8), np.float32),
            np.array([[1, 2, 3]], np.int32),
            np.zeros((1, 3), np.float32),
        ),
    ):
        yield Case(f"optax.{name}", fun, (x,), ending, tuple(plain))
    yield Case("optax.triplet_margin_loss", losses.triplet_margin_loss, (A, B, ZEROS_AND_ONES), ROUNDED)
    yield Case("optax.smooth_labels", lambda x: losses.smooth_labels(x, 0.1), (ONE_HOT,), ONE_STEP)


PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    part.__name__: part
    for part in (
        float32_functions,
        half_functions,
        activations,
        softmaxes,
        sums,
        moves,
        special_functions,
        log_densities,
        linear_algebra,
        optax_losses,
    )
}


@functools.cache
def table(part: str) -> dict[str, Case]:
    """Return the cases of a part by name, with JAX's standard dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        cases = list(PARTS[part]())
    by_name = {case.name: case for case in cases}
    assert len(by_name) == len(cases), "two cases have the same name"
    return by_name


def enter(x: Any) -> Any:
    """Return ``x`` as the result of an exact product, which reverses reversed rows."""
    return (in_rows(x)[:, ::-1] @ reversal(x)).reshape(x.shape)


def leave(y: Any) -> Any:
    """Return ``y`` after an exact product has read it.

    Integers and bools are returned as they are.
    """
    if not jnp.issubdtype(y.dtype, jnp.floating):
        return y
    return (in_rows(y) @ reversal(y))[:, ::-1].reshape(y.shape)


def in_rows(x: Any) -> Any:
    """Return ``x`` as a matrix, with rows of 64 if possible.

    Then ``reversal(x)`` is small.
    """
    return x.reshape(-1, 64) if x.size > 64 and x.size % 64 == 0 else x.reshape(1, -1)


def reversal(x: Any) -> Any:
    return jnp.asarray(np.eye(in_rows(x).shape[-1])[::-1], x.dtype)


def after_a_product(case: Case) -> Callable[..., Any]:
    """Return the case's function with inputs that come from a product."""
    count = len(case.inputs)
    return lambda *args: case.fun(*map(enter, args[:count]), *args[count:])


def between_products(case: Case) -> Callable[..., Any]:
    """Return the case's function between two products."""
    return lambda *args: jax.tree.map(leave, after_a_product(case)(*args))


def gradient(case: Case) -> Callable[..., Any]:
    """Return the gradient of ``between_products(case)`` for its inputs.

    The loss is a sum of the results with random weights.
    """

    def loss(inputs: tuple[Any, ...], *plain: Any) -> Any:
        leaves = jax.tree.leaves(between_products(case)(*inputs, *plain))
        return sum((leaf * jnp.asarray(normal(shape=leaf.shape, seed=5), leaf.dtype)).sum() for leaf in leaves)

    count = len(case.inputs)
    return lambda *args: jax.grad(loss)(args[:count], *args[count:])


def float64(function: Callable[[Case], Callable[..., Any]], cases: Iterable[Case]) -> dict[str, list[np.ndarray]]:
    """Return the float64 results of ``function(case)`` for each case, by name."""
    cases = list(cases)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = {case.name: tuple(jnp.asarray(float64_of(x)) for x in arguments(case)) for case in cases}
        results = compiled(lambda wide: {case.name: function(case)(*wide[case.name]) for case in cases})(wide)
        return {name: [np.asarray(leaf) for leaf in jax.tree.leaves(result)] for name, result in results.items()}


def float64_of(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if x.dtype == np.float32 else x


def arguments(case: Case) -> tuple[np.ndarray, ...]:
    return (*case.inputs, *case.plain)


def ulps(got: Any, want: np.ndarray, half: Any, of: str = "each") -> float:
    """Return the largest error of ``got``, in units in the last place.

    The units are those of ``want`` in the dtype ``half``.
    """
    info = jnp.finfo(half)
    size = np.abs(want) if of == "each" else np.abs(want).max(keepdims=True)
    exponent = np.floor(np.log2(np.maximum(size, float(info.smallest_normal))))
    return float(np.max(np.abs(np.asarray(got, np.float64) - want) / 2.0 ** (exponent - info.nmant)))
