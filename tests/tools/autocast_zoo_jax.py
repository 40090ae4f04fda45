"""Functions of jax.numpy, jax.lax and jax.nn for the tests of autocast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from autocast_cases import (
    EXACT,
    LOGISTIC,
    MASK,
    ONE_STEP,
    POSITIVE,
    POSITIVE_B,
    ROUNDED,
    ROW,
    SIGNED_UNIT,
    UNIT,
    WIDE,
    A,
    B,
    Case,
    Tolerance,
    normal,
    of_largest,
    steps,
    uniform,
)
from jax import lax


def float32_functions() -> Iterator[Case]:
    """Yield pointwise functions that autocast computes in float32."""
    for name, fun, x in (
        ("exp", jnp.exp, normal(3)),
        ("exp2", jnp.exp2, normal(3)),
        ("expm1", jnp.expm1, normal(0.1)),
        ("log", jnp.log, POSITIVE),
        ("log near one", jnp.log, normal(0.05, 1)),
        ("log1p", jnp.log1p, UNIT),
        ("log2", jnp.log2, POSITIVE),
        ("log10", jnp.log10, POSITIVE),
        ("sinh", jnp.sinh, normal(3)),
        ("cosh", jnp.cosh, normal(3)),
        ("sin of 1000", jnp.sin, normal(30, 1000)),
        ("cos of 1000", jnp.cos, normal(30, 1000)),
        ("tan", jnp.tan, SIGNED_UNIT),
        ("arcsin", jnp.arcsin, SIGNED_UNIT),
        ("arccos", jnp.arccos, SIGNED_UNIT),
        ("arctan", jnp.arctan, WIDE),
        ("arcsinh", jnp.arcsinh, WIDE),
        ("arccosh", jnp.arccosh, uniform(1, 9)),
        ("arctanh", jnp.arctanh, SIGNED_UNIT),
        ("rsqrt", lax.rsqrt, POSITIVE),
        ("rsqrt of a small variance", lambda x: lax.rsqrt(x + 1e-6), uniform(0, 0.001)),
        ("x ** 2.5", lambda x: x**2.5, POSITIVE),
        ("2 ** x", lambda x: 2.0**x, WIDE),
        ("erf_inv", lax.erf_inv, SIGNED_UNIT),
        ("lgamma", lax.lgamma, POSITIVE),
        ("digamma", lax.digamma, uniform(2, 9)),
        ("bessel_i0e", lax.bessel_i0e, WIDE),
        ("bessel_i1e", lax.bessel_i1e, WIDE),
        ("angles of positions", lambda x: jnp.sin(x[:, :1] * 100.0) + jnp.cos(x[:, 1:2] * 100.0), normal(3)),
    ):
        yield Case(name, fun, (x,), ROUNDED)
    yield Case("power", jnp.power, (POSITIVE, B), ROUNDED)
    sum_of_two = of_largest(0.51, "the float32 logarithm is rounded and added to the larger one, which is half")
    yield Case("logaddexp", jnp.logaddexp, (WIDE, normal(5, seed=1)), sum_of_two)
    yield Case("logaddexp2", jnp.logaddexp2, (WIDE, normal(5, seed=1)), sum_of_two)


def half_functions() -> Iterator[Case]:
    """Yield operations that stay in half precision between two products."""
    for name, fun, x in (
        ("neg", jnp.negative, A),
        ("abs", jnp.abs, A),
        ("sign", jnp.sign, A),
        ("floor", jnp.floor, WIDE),
        ("ceil", jnp.ceil, WIDE),
        ("round", jnp.round, WIDE),
        ("trunc", jnp.trunc, WIDE),
        ("clip", lambda x: jnp.clip(x, -1, 1), A),
        ("maximum with zero written as 1e-12", lambda x: jnp.maximum(x, 1e-12), POSITIVE),
        ("clip at float32's largest", lambda x: jnp.clip(x, -3e38, 3e38), A),
        ("nan_to_num", lambda x: jnp.nan_to_num(x, nan=0.0, posinf=1.0, neginf=-1.0), A),
        ("heaviside", lambda x: jnp.heaviside(x, 0.5), A),
    ):
        yield Case(name, fun, (x,), EXACT)
    for name, fun, x in (
        ("square", jnp.square, A),
        ("x ** 3", lambda x: x**3, A),
        ("sqrt", jnp.sqrt, POSITIVE),
        ("cbrt", jnp.cbrt, POSITIVE),
        ("reciprocal", jnp.reciprocal, POSITIVE),
        ("tanh", jnp.tanh, A),
        ("erf", lax.erf, A),
        ("x / 3", lambda x: x / 3.0, A),
        ("x * scale", lambda x: x * 0.3, A),
        ("x + 1", lambda x: x + 1.0, A),
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
    yield Case("fmod", jnp.fmod, (WIDE, POSITIVE_B), EXACT)
    yield Case("maximum", jnp.maximum, (A, B), EXACT)
    yield Case("minimum", jnp.minimum, (A, B), EXACT)
    yield Case("where", lambda x, y, m: jnp.where(m, x, y), (A, B), EXACT, (MASK,))
    yield Case("floor_divide", jnp.floor_divide, (WIDE, POSITIVE_B), EXACT)
    yield Case("arctan2", jnp.arctan2, (A, POSITIVE), ONE_STEP)
    yield Case("add a bias", jnp.add, (A,), ONE_STEP, (ROW,))
    yield Case(
        "hypot",
        jnp.hypot,
        (A, B),
        steps(1.5, "a ratio, its square, a root and a product are each rounded"),
    )
    yield Case("lerp", lambda x, y: x + 0.25 * (y - x), (A, B), of_largest(1, "a difference, a sum"))
    yield Case("sinc", jnp.sinc, (A,), of_largest(1.5, "pi·x rounded in half, near the zeros of sin"))


def activations() -> Iterator[Case]:
    """Yield the activation functions of jax.nn, and others as users write them."""
    chain = "elementwise in half precision, each operation rounded"
    for name, fun, x, tolerance in (
        ("relu", jax.nn.relu, A, EXACT),
        ("relu6", jax.nn.relu6, WIDE, EXACT),
        ("hard_tanh", jax.nn.hard_tanh, A, EXACT),
        ("identity", jax.nn.identity, A, EXACT),
        ("leaky_relu", jax.nn.leaky_relu, A, steps(2, "the slope 0.01 rounded, and the product")),
        ("sigmoid", jax.nn.sigmoid, WIDE, LOGISTIC),
        ("softplus", jax.nn.softplus, WIDE, ONE_STEP),
        ("log_sigmoid", jax.nn.log_sigmoid, WIDE, ONE_STEP),
        ("soft_sign", jax.nn.soft_sign, A, steps(2, chain)),
        ("silu", jax.nn.silu, WIDE, LOGISTIC),
        ("mish", jax.nn.mish, A, steps(2, "float32 up to the tanh or its product with x")),
        ("elu", jax.nn.elu, A, ROUNDED),
        ("celu", jax.nn.celu, A, ROUNDED),
        ("selu", jax.nn.selu, A, steps(2, "the constant, and the product")),
        ("gelu", jax.nn.gelu, A, of_largest(1, "1 + tanh cancels in the tail, and the tanh has four rounding errors")),
        (
            "gelu exact",
            lambda x: jax.nn.gelu(x, approximate=False),
            A,
            of_largest(1, "erfc of the rounded argument: a relative error of x²·2⁻⁹ in the small tail"),
        ),
        ("glu", jax.nn.glu, A, steps(2, chain)),
        ("hard_sigmoid", jax.nn.hard_sigmoid, WIDE, steps(1, chain)),
        ("hard_silu", jax.nn.hard_silu, WIDE, steps(2, chain)),
        ("squareplus", jax.nn.squareplus, A, of_largest(2, "x and the root cancel below zero")),
        ("sparse_plus", jax.nn.sparse_plus, A, steps(3, chain)),
        ("sparse_sigmoid", jax.nn.sparse_sigmoid, A, of_largest(0.51, chain)),
        (
            "swish with a slope",
            lambda x: x * jax.nn.sigmoid(1.702 * x),
            A,
            steps(4, "the slope, its product and the tail of the logistic function"),
        ),
        ("squared relu", lambda x: jnp.square(jax.nn.relu(x)), A, ONE_STEP),
        ("geglu", lambda x: x[:, :4] * jax.nn.silu(x[:, 4:]), A, steps(3, chain)),
    ):
        yield Case(name, fun, (x,), tolerance)


def softmaxes() -> Iterator[Case]:
    """Yield float32 regions that end in probabilities or their logarithms."""
    floor = float(np.finfo(np.float32).min)
    for name, fun in (
        ("softmax", jax.nn.softmax),
        ("softmax over columns", lambda x: jax.nn.softmax(x, axis=0)),
        ("softmax by hand", lambda x: (e := jnp.exp(x - x.max(-1, keepdims=True))) / e.sum(-1, keepdims=True)),
        ("softmax by logsumexp", lambda x: jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True))),
        ("softmax of scaled logits", lambda x: jax.nn.softmax(x / 8**0.5)),
        ("softmax with a where", lambda x: jax.nn.softmax(x, where=jnp.asarray(MASK))),
        ("softmax with a mask selected", lambda x: jax.nn.softmax(jnp.where(MASK, x, floor))),
        ("softmax with a mask added", lambda x: jax.nn.softmax(x + jnp.where(MASK, 0.0, floor))),
        ("softmax of scaled and masked", lambda x: jax.nn.softmax(jnp.where(MASK, x / 3.0, -1e9))),
        ("log_softmax", jax.nn.log_softmax),
        ("log of a softmax by hand", lambda x: x - jnp.log(jnp.exp(x).sum(-1, keepdims=True))),
        ("logsumexp", lambda x: jax.nn.logsumexp(x, -1)),
        ("logmeanexp", lambda x: jax.nn.logmeanexp(x, -1)),
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
        ("average", lambda x: jnp.average(x, -1, jnp.arange(1.0, 9.0)), A),
        ("prod", lambda x: x.prod(-1), uniform(0.5, 2)),
        ("cumsum", lambda x: x.cumsum(-1), POSITIVE),
        ("cumprod", lambda x: x.cumprod(-1), uniform(0.5, 2)),
        ("nansum", lambda x: jnp.nansum(x, -1), A),
        ("var", lambda x: x.var(-1), far),
        ("std", lambda x: x.std(-1), far),
        ("var, unbiased", lambda x: x.var(-1, ddof=1), far),
        ("nanvar", lambda x: jnp.nanvar(x, -1), far),
        ("standardize", jax.nn.standardize, far),
        ("standardize of jnp", lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True), far),
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
        ("L2 normalised by maximum", lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12), A),
        ("L2 normalised by rsqrt", lambda x: x * lax.rsqrt(jnp.maximum((x**2).sum(-1, keepdims=True), 1e-12)), A),
        ("L1 norm", lambda x: jnp.abs(x).sum(-1), WIDE),
        ("Lp norm", lambda x: jnp.linalg.norm(x, 3, axis=-1), WIDE),
        ("Frobenius norm", jnp.linalg.norm, WIDE),
        ("mean square", lambda x: jnp.square(x).mean(), normal(1, 200)),
        ("trapezoid", lambda x: jnp.trapezoid(x, axis=-1), POSITIVE),
        ("average pooling", lambda x: nn.avg_pool(x[..., None], (4,), (4,)), POSITIVE),
        ("sum pooling", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 4), (1, 4), "VALID"), POSITIVE),
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
    yield Case("distance", lambda x, y: jnp.linalg.norm(x - y, axis=-1), (A, B), ROUNDED)
    yield Case("mean absolute error", lambda x, y: jnp.abs(x - y).mean(), (A, B), ROUNDED)


def dot(x: Any, y: Any) -> Any:
    return (x * y).sum(-1)


def cosine(x: Any, y: Any) -> Any:
    return dot(x, y) / (jnp.sqrt(dot(x, x)) * jnp.sqrt(dot(y, y)) + 1e-8)


def moves() -> Iterator[Case]:
    """Yield functions that move, sort and select elements."""
    for name, fun in (
        ("reshape", lambda x: x.reshape(2, 16)),
        ("transpose", lambda x: x.T),
        ("sort", lambda x: jnp.sort(x, -1)),
        ("top_k", lambda x: lax.top_k(x, 3)),
        ("argmax", lambda x: jnp.argmax(x, -1)),
        ("argsort", lambda x: jnp.argsort(x, -1)),
        ("take_along_axis", lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1)),
        ("take", lambda x: x[jnp.array([3, 0])]),
        ("max", lambda x: x.max(-1)),
        ("min", lambda x: x.min(-1)),
        ("cummax", lambda x: lax.cummax(x, 1)),
        ("max pooling", lambda x: nn.max_pool(x[..., None], (4,), (4,))),
        ("roll", lambda x: jnp.roll(x, 3, -1)),
        ("flip", jnp.flip),
        ("concatenate", lambda x: jnp.concatenate([x, x[:, :3]], -1)),
        ("stack", lambda x: jnp.stack([x, x])),
        ("pad", lambda x: jnp.pad(x, 1)),
        ("tile", lambda x: jnp.tile(x, 2)),
        ("repeat", lambda x: jnp.repeat(x, 2, 0)),
        ("broadcast_to", lambda x: jnp.broadcast_to(x, (2, 4, 8))),
        ("tril", jnp.tril),
        ("diagonal", jnp.diagonal),
        ("dynamic_update_slice", lambda x: lax.dynamic_update_slice(x, x[:1, :2], (2, 3))),
        ("at[].set", lambda x: x.at[1].set(0.0)),
        ("split", lambda x: jnp.split(x, 2, -1)),
        ("one_hot of the largest", lambda x: jax.nn.one_hot(x.argmax(-1), 8)),
        ("median", lambda x: jnp.median(x[:3], 0)),
        ("comparison", lambda x: (x > 0).astype(jnp.float32)),
        ("isfinite", jnp.isfinite),
        ("stop_gradient", lax.stop_gradient),
        ("searchsorted", lambda x: jnp.searchsorted(jnp.sort(x[0]), x[1])),
    ):
        yield Case(name, fun, (A,), EXACT)
