"""Each primitive of the installed JAX has exactly one class in the table."""

from __future__ import annotations

from collections import Counter
from fnmatch import filter as filter_names

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P
from primitive_tools import installed_primitives

from jaxmp.program.equations import primitive_of
from jaxmp.program.primitives import (
    MONOTONE,
    Class,
    Trait,
    _rows,
    classify,
    of_class,
    with_trait,
)
from jaxmp.program.walk import equations, jaxprs_in

ALL = frozenset().union(*map(of_class, Class))
PATTERNS = {name for name in ALL if "*" in name}
X = jax.ShapeDtypeStruct((4, 4), "float32")
WITH_BODY = (Class.RECURSE, Class.OPAQUE, Class.LINALG)

# The first version of JAX that has a primitive, and the first version that no longer has it. All versions from 0.10 to
# 0.12 have the primitives that are not listed here.
_ARRIVALS = {
    "0.10.1": "stack stage unstack",
    "0.10.2": "mulhi philox*x32",
    "0.11.1": "relayout unreduced_pmax unreduced_pmin",
    "0.11.2": "log2 one_minus_square program_order",
    "0.12.0": "pbroadcast_dynamic polynomial reduced_vary_cast vary_unreduced_cast thunky.*",
}
_DEPARTURES = {
    "0.11.1": "call closed_call core_map fusible box_* new_box new_log log_extend log_read",
    "0.11.2": "shard_alike",
    "0.12.0": "reduced_vary_cast_p vary_unreduced_cast_p",
}
SINCE = {name: version for version, names in _ARRIVALS.items() for name in names.split()}
UNTIL = {name: version for version, names in _DEPARTURES.items() for name in names.split()}


# -- the table -------------------------------------------------------------------------------------------------------


def test_every_primitive_of_the_installed_jax_has_a_class():
    unknown = {name: module for name, module in installed_primitives().items() if classify(name) is None}
    assert not unknown, (
        f"JAX {jax.__version__} has primitives without a class in jaxmp/program/primitives.py: {unknown}"
    )


def test_the_table_names_no_primitive_twice_and_has_all_primitives_with_versions():
    counts = Counter(name for name, _, _ in _rows())
    assert [name for name, count in counts.items() if count > 1] == []
    assert (SINCE.keys() | UNTIL.keys()) <= ALL


def test_the_table_names_only_primitives_of_this_jax_or_gives_their_versions():
    def is_expected(name):
        since, until = (_version(bounds.get(name)) for bounds in (SINCE, UNTIL))
        return (since or (0,)) <= jax.__version_info__ and (until is None or jax.__version_info__ < until)

    installed = {
        *installed_primitives(),
        "cast_repeated",
        "separate_cast",
        *(pattern for pattern in PATTERNS if filter_names(installed_primitives(), pattern)),
    }
    assert {name for name in ALL if is_expected(name)} - installed == set(), "not in this JAX"
    assert {name for name in ALL if not is_expected(name)} & installed == set(), "SINCE or UNTIL"


def test_only_opaque_primitives_have_patterns():
    assert of_class(Class.OPAQUE) >= PATTERNS
    assert all(len(pattern.replace("*", "")) > 3 for pattern in PATTERNS)
    assert classify("scan") is classify("custom_jvp_call") is Class.RECURSE  # a name wins over a pattern
    assert classify("random_of_tomorrow") is Class.OPAQUE and classify("a_random_one") is None
    assert classify("someone_elses_primitive") is None


def test_moves_do_not_sum_cotangents_in_their_gradients():
    assert with_trait(Trait.PERMUTES).isdisjoint(with_trait(Trait.REPEATS, Trait.LOOKS_UP, Trait.BROADCASTS))
    assert MONOTONE.isdisjoint(with_trait(Trait.REPEATS, Trait.LOOKS_UP, Trait.BROADCASTS))


def _version(text):
    return text and tuple(map(int, text.split(".")))


# -- how the primitives are found ------------------------------------------------------------------------------------


def test_a_new_primitive_in_any_module_of_jax_is_found(monkeypatch):
    monkeypatch.setattr(jax.experimental.ode, "new_p", Primitive("brand_new"), raising=False)
    assert installed_primitives.__wrapped__()["brand_new"] == "jax.experimental.ode"


# -- primitives with bodies --------------------------------------------------------------------------------------


@jax.custom_jvp
def jvp_by_hand(x):
    return jnp.sin(x)


jvp_by_hand.defjvp(lambda primals, tangents: (jvp_by_hand(*primals), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def vjp_by_hand(x):
    return jnp.sin(x)


vjp_by_hand.defvjp(lambda x: (vjp_by_hand(x), x), lambda x, ct: (jnp.cos(x) * ct,))


@jax.custom_batching.custom_vmap
def vmap_by_hand(x):
    return jnp.sin(x)


vmap_by_hand.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))


def scan(x):
    return jax.lax.scan(lambda carry, row: (jnp.tanh(carry @ x + row), carry.sum()), x[0], x)


def over_devices(x):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x):
        return jax.lax.psum(jax.lax.all_gather(x, "i") @ jax.lax.ppermute(x, "i", [(0, 1), (1, 0)]).T, "i")

    return jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=False)(x)


def callbacks(x):
    jax.debug.print("{}", x)
    return jax.pure_callback(lambda x: x, X, x)


def total(fun):
    return lambda *args: sum(leaf.sum() for leaf in jax.tree.leaves(fun(*args)))


# Programs whose primitives have bodies.
PROGRAMS = {
    "solve": lambda x: jnp.linalg.solve(x, x),
    "gradient of a scan": jax.grad(total(scan)),
    "while": lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x),
    "switch": lambda x: jax.lax.switch(2, [jnp.sin, jnp.cos, jnp.tan], x),
    "checkpoint": jax.grad(total(jax.checkpoint(lambda x: jnp.tanh(x @ x)))),
    "custom_jvp": jvp_by_hand,
    "custom_vjp": vjp_by_hand,
    "custom_vmap": vmap_by_hand,
    "jit": jax.jit(jnp.sin),
    "shard_map": over_devices,
    "callbacks": callbacks,
    "reduce": lambda x: jax.lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)),
    "ode": lambda x: odeint(lambda y, t: -y, x, jnp.arange(3.0)),
}


def test_primitives_with_a_body_are_recurse_opaque_or_linalg():
    eqns = [eqn for fun in PROGRAMS.values() for eqn in equations(jax.make_jaxpr(fun)(X))]
    bodies = {primitive_of(eqn) for eqn in eqns if any(jaxprs_in(eqn))}
    assert {"scan", "while", "cond", "jit", "shard_map", "custom_jvp_call"} <= bodies
    assert {name: classify(name) for name in bodies if classify(name) not in WITH_BODY} == {}


# -- numerics behind the table ---------------------------------------------------------------------------------------


def amplifications(names):
    """Return for each function the error of its result for a relative error of its argument.

    The error is relative to the result, or to 1 if the result is smaller.
    """

    def amplification(fun, x):
        slope = jax.vmap(jax.grad(fun))(x)
        return jnp.max(jnp.abs(x * slope) / jnp.maximum(jnp.abs(fun(x)), 1))

    x = np.logspace(-6.0, 1.9, 2000, dtype=np.float32)
    errors = jax.jit(lambda x: {name: amplification(getattr(jax.lax, name), x) for name in names})(x)
    return {name: float(error) for name, error in errors.items()}


@pytest.mark.once
def test_infer_primitives_hardly_amplify_rounding():
    unary = [name for name in of_class(Class.INFER) - {"integer_pow"} if hasattr(jax.lax, name)]
    assert {"tanh", "logistic", "erfc"} <= set(unary)
    assert {name: error for name, error in amplifications(unary).items() if not error <= 4} == {}


def test_primitives_that_amplify_rounding_are_float32():
    for name, error in amplifications(["exp", "exp2", "expm1", "sinh", "cosh", "tan", "sin", "cos"]).items():
        assert error > 8, name
        assert classify(name) is Class.POINTWISE, name
