"""Special functions, densities and linear algebra for the tests of autocast."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from autocast_cases import (
    AROUND,
    LOG_CDF,
    ONE_STEP,
    POSITIVE,
    POSITIVE_B,
    ROUNDED,
    ROW,
    SHAPE,
    SIGNED_UNIT,
    SQUARE,
    SYMMETRIC,
    UNIT,
    UNIT_B,
    WIDE,
    A,
    B,
    Case,
    integers,
    normal,
    of_largest,
    spread,
    uniform,
)
from jax import lax


def looked_up(name: str, fun: Any) -> Any:
    """Return a call of a ``jax.scipy`` function by its name in the module.

    The name is looked up at each call, because autocast replaces the function in the module while it traces.
    """
    path = name.split(" ")[0].split(".")
    return fun if fun.__name__ == "<lambda>" else lambda *args: functools.reduce(getattr, path, jsp)(*args)


def special_functions() -> Iterator[Case]:
    """Yield functions of jax.scipy.special."""
    sp = jsp.special
    for name, fun, *inputs in (
        ("special.logit", sp.logit, UNIT),
        ("special.entr", sp.entr, UNIT),
        ("special.xlogy", sp.xlogy, A, POSITIVE),
        ("special.xlog1py", sp.xlog1py, A, POSITIVE),
        ("special.gamma", sp.gamma, uniform(0.5, 5)),
        ("special.polygamma", lambda x: sp.polygamma(1, x), POSITIVE),
        ("special.zeta", lambda x: sp.zeta(x + 1.5, 1.0), POSITIVE),
        ("special.gammaincc", sp.gammaincc, POSITIVE, POSITIVE_B),
        ("special.betaln", sp.betaln, POSITIVE, POSITIVE_B),
        ("special.betainc", sp.betainc, POSITIVE, POSITIVE_B, UNIT),
    ):
        yield Case(name, looked_up(name, fun), tuple(inputs), ROUNDED)
    for name, fun, *inputs in (
        ("special.rel_entr", sp.rel_entr, UNIT, UNIT_B),
        ("special.kl_div", sp.kl_div, UNIT, UNIT_B),
        ("special.i0", sp.i0, A),
        ("special.i1", sp.i1, A),
        ("special.ndtr", sp.ndtr, A),
        ("special.ndtri", sp.ndtri, UNIT),
        ("special.multigammaln", lambda x: sp.multigammaln(x, 2), uniform(3, 9)),
    ):
        yield Case(name, looked_up(name, fun), tuple(inputs), AROUND)
    yield Case("special.erfc", looked_up("special.erfc", sp.erfc), (A,), ONE_STEP)
    yield Case("special.log_ndtr", looked_up("special.log_ndtr", sp.log_ndtr), (WIDE,), LOG_CDF)


def log_densities() -> Iterator[Case]:
    """Yield functions of jax.scipy.stats."""
    st = jsp.stats
    for name, fun, *inputs in (
        ("stats.norm.pdf", st.norm.pdf, A),
        ("stats.expon.logpdf", st.expon.logpdf, POSITIVE),
        ("stats.beta.logpdf", st.beta.logpdf, UNIT, POSITIVE, POSITIVE_B),
    ):
        yield Case(name, looked_up(name, fun), tuple(inputs), ROUNDED)
    for name, fun, *inputs in (
        ("stats.norm.logpdf", st.norm.logpdf, WIDE),
        ("stats.norm.logpdf of a mean and a deviation", st.norm.logpdf, A, B, POSITIVE),
        ("stats.cauchy.logpdf", st.cauchy.logpdf, WIDE),
        ("stats.laplace.logpdf", st.laplace.logpdf, WIDE),
        ("stats.logistic.logpdf", st.logistic.logpdf, WIDE),
        ("stats.gamma.logpdf", st.gamma.logpdf, POSITIVE, POSITIVE_B),
        ("stats.t.logpdf", st.t.logpdf, WIDE, POSITIVE),
        ("stats.chi2.logpdf", st.chi2.logpdf, POSITIVE, POSITIVE_B),
        ("stats.pareto.logpdf", lambda x, b: st.pareto.logpdf(x + 1, b), POSITIVE, POSITIVE_B),
        ("stats.truncnorm.logpdf", lambda x: st.truncnorm.logpdf(x, -2.0, 3.0), SIGNED_UNIT),
    ):
        yield Case(name, looked_up(name, fun), tuple(inputs), AROUND)
    yield Case("stats.norm.logcdf", looked_up("stats.norm.logcdf", st.norm.logcdf), (WIDE,), LOG_CDF)
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
        ("linalg.svdvals", jnp.linalg.svdvals, SQUARE),
        ("linalg.eigvalsh", jnp.linalg.eigvalsh, SYMMETRIC),
        ("linalg.qr", lambda x: jnp.linalg.qr(x)[1], SQUARE),
        ("linalg.cond", jnp.linalg.cond, SQUARE),
        (
            "scipy.linalg.cho_solve",
            lambda x, y: jsp.linalg.cho_solve(jsp.linalg.cho_factor(x), y),
            SYMMETRIC,
            normal(shape=(4,)),
        ),
        (
            "scipy.linalg.solve_triangular",
            lambda x, y: jsp.linalg.solve_triangular(x, y, lower=True),
            SQUARE,
            normal(shape=(4,)),
        ),
        ("fft", lambda x: jnp.abs(jnp.fft.fft(x)), A),
    ):
        yield Case(name, fun, tuple(inputs), of_largest(0.51, ROUNDED.why))
    product = of_largest(0.51, "summed in float32, rounded to half once")
    for name, fun, *inputs in (
        ("dot", jnp.dot, A, normal(shape=(8, 4), seed=1)),
        ("einsum", lambda x, y: jnp.einsum("ij,kj->ik", x, y), A, B),
        ("vdot", jnp.vdot, A, B),
        ("tensordot", lambda x, y: jnp.tensordot(x, y, 2), A, B),
        ("batched matmul", jnp.matmul, normal(shape=(2, 3, 4)), normal(shape=(2, 4, 3))),
        (
            "convolution",
            lambda x, y: lax.conv_general_dilated(x, y, (1,), "SAME"),
            normal(shape=(1, 2, 8)),
            normal(shape=(3, 2, 3), seed=1),
        ),
        ("jnp.convolve", jnp.convolve, ROW, normal(shape=(3,))),
        ("ragged_dot", lambda x, y: lax.ragged_dot(x, y, jnp.array([1, 3])), A, normal(shape=(2, 8, 4), seed=1)),
    ):
        yield Case(name, fun, tuple(inputs), product)
    yield Case("outer", jnp.outer, (ROW, normal(shape=(8,), seed=1)), ONE_STEP)
    yield Case("expm", jsp.linalg.expm, (spread() / 4,), of_largest(1, "products, squared again and again"))
    yield Case(
        "matrix_power",
        lambda x: jnp.linalg.matrix_power(x, 3),
        (SQUARE,),
        of_largest(1.5, "a product of a rounded product"),
    )
    yield Case("cov", jnp.cov, (A,), of_largest(1, "centred, rounded, multiplied"))
    yield Case("corrcoef", jnp.corrcoef, (A,), of_largest(2, "a covariance, divided twice"))
