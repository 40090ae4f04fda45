"""Scopes mark JAX's special functions, but only while autocast traces."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from jaxmp._internals.jax.sources import names_of
from jaxmp.engine.classifier import Classifier
from jaxmp.engine.marks import SPECIAL
from jaxmp.engine.trace import tracing
from jaxmp.program.walk import jaxprs_in


def scopes(fun, *args):
    """Return the scopes of each equation of a function that the engine traces."""
    with tracing(Classifier(np.dtype("float16"))):
        closed = jax.make_jaxpr(fun)(*args)

    def below(jaxpr, around):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            yield (names := (*around, *names_of(eqn)))
            for inner in jaxprs_in(eqn):
                yield from below(inner, names)

    return list(below(closed, ()))


def test_special_functions_are_traced_in_a_scope():
    counts = {"log_ndtr": 1, "betaln": 2, "gammainc": 2, "ndtr": 1, "ndtri": 1, "i0": 1}
    for name, count in counts.items():

        def fun(*args, name=name):
            return getattr(jax.scipy.special, name)(*args)  # looked up during the trace, when jaxmp has replaced it

        scopes_of_equations = scopes(fun, *[jnp.float32(0.5)] * count)
        assert scopes_of_equations and all(SPECIAL in names for names in scopes_of_equations), name
        inside = scopes(jax.grad(fun), *[jnp.float32(0.5)] * count)
        assert sum(SPECIAL in names for names in inside) >= 0.8 * len(inside), name


def test_a_density_is_traced_in_a_scope():
    assert all(SPECIAL in names for names in scopes(lambda x: jax.scipy.stats.norm.logpdf(x), jnp.float32(1)))


def test_autocast_dtype_is_the_half_dtype_except_in_float32_regions():
    dtypes = []

    def fun(x):
        dtypes.append(jaxmp.autocast_dtype())
        for level in ("half", "float32"):
            with jaxmp.precision(level):
                dtypes.append(jaxmp.autocast_dtype())
        return x

    jax.eval_shape(jaxmp.autocast(fun, "mixed_bfloat16"), jnp.ones(2))
    assert dtypes == [jnp.bfloat16, jnp.bfloat16, None]


def test_only_jaxs_special_functions_in_the_engines_trace_have_the_scope():
    assert not any(SPECIAL in names for names in scopes(lambda x: jnp.tanh(x) * 2 + x, jnp.float32(1)))
    jaxpr = jax.make_jaxpr(lambda x: jax.scipy.special.ndtr(x))(jnp.float32(1))
    assert not any(SPECIAL in names_of(eqn) for eqn in jaxpr.eqns)
