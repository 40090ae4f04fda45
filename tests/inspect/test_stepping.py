"""Programs that run one equation at a time."""

from __future__ import annotations

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp.inspect import first_nonfinite
from jaxmp.inspect._first_nonfinite import stepping
from jaxmp.inspect.program.tracing import program_of


def stepped(fun, *args):
    """Return the results, the moments of all operations, the branches taken, and the lengths of while loops."""
    moments = []
    jaxpr, consts, structure = program_of(fun, *args)
    results, branches, lengths = stepping.step_through(
        jaxpr, consts, jax.tree.leaves(args), lambda moment, *_: moments.append(moment)
    )
    return jax.tree.unflatten(structure, results), moments, branches, lengths


def loops(x, key):
    """Return results of nested scans, a while loop, branches, keys and an empty scan."""

    def outer(carry, inputs):
        row, key = inputs
        carry = jax.lax.fori_loop(0, row.astype(jnp.int32).sum() % 2 + 1, lambda n, c: c * 1.5 + n, carry)
        carry, inner = jax.lax.scan(lambda c, value: (c + value, c * value), carry, row, reverse=True)
        carry = jax.lax.cond(carry > 3, lambda c: jnp.log(c), lambda c: c - 1, carry)
        return carry + jax.random.uniform(key), (inner, jax.random.fold_in(key, 1))

    carry, (inner, keys) = jax.lax.scan(outer, 0.5, (x, jax.random.split(key, len(x))))
    none = jax.lax.scan(lambda c, value: (c * value, value), carry, x[:0, 0])
    return carry, inner, jax.random.uniform(keys[-1]), none, jax.lax.top_k(x, 2)


def test_results_are_those_of_the_whole_program():
    x, key = concrete.array(np.arange(12.0).reshape(4, 3)), jax.random.key(0)
    results, moments, branches, lengths = stepped(loops, x, key)
    expected = jax.jit(loops)(x, key)
    for result, expected_result in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, expected_result, rtol=1e-6)
    assert {(0, 2), (3, 0)} < {moment.turns for moment in moments}
    assert list(lengths.values()) == [2]
    assert sorted(turns for _, turns in branches) == [(0,), (1,), (2,), (3,)]


def test_compiling_takes_as_long_as_the_distinct_operations():
    def distinct_operations(lines):
        def loss(x):
            for _ in range(lines):
                x = x * jnp.tanh(x)
            return x.sum()

        stepping.compiled_operation.cache_clear()
        assert first_nonfinite(loss)(jnp.full((7, 5), 1.5)) is None
        return stepping.compiled_operation.cache_info().currsize

    assert distinct_operations(2) == distinct_operations(9) < 16


def test_a_compiled_operation_is_one_equation_and_a_flag():
    x = concrete.ones((7, 5))
    multiply = program_of(jnp.multiply, x, x)[0].eqns[-1]
    program = stepping.compiled_operation(stepping.Operation(multiply)).trace(x, x).jaxpr.jaxpr
    assert [eqn.primitive.name for eqn in program.eqns] == ["mul", "sub", "reduce_sum"]


def test_a_flag_tells_infinities_and_nan_from_large_numbers():
    for dtype in ("float16", "float32", "float8_e4m3fn", "float8_e5m2", "complex64"):
        values = np.full(300, jnp.finfo(dtype).max, dtype)  # their sum would overflow
        assert stepping.is_finite(concrete.array(values)) and stepping.is_finite(concrete.array(-values))
        assert stepping.is_finite(concrete.array(values[:0]))
        for bad in (np.nan, np.inf, -np.inf):
            values[7] = bad
            assert not stepping.is_finite(concrete.array(values)), (dtype, bad)
    assert stepping.is_finite(concrete.arange(3)) and stepping.is_finite(jax.random.key(0))


def test_an_operation_on_a_mesh_with_explicit_axes_is_blamed():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(concrete.full((4, 2), 100.0), NamedSharding(mesh, P("data")))

    def loss(x):
        return jnp.exp(x * jnp.arange(2.0)).mean()

    blame = first_nonfinite(loss)(x)
    assert (blame.primitive, blame.kind, blame.operands[0].high) == ("exp", "overflow", 100)


@pytest.mark.parametrize(("turns", "reverse"), [(10, False), (100, True)])
def test_the_operation_that_fails_in_a_turn_of_a_scan_is_found_with_its_operands(turns, reverse):
    """Row 7 fails with log(0). A jitted call before it makes the keys nested."""

    def loss(x):
        def turn(carry, row):
            carry = carry + jax.jit(lambda row: jnp.tanh(row) * 2)(row)
            return carry, jnp.log(row)

        carry, rows = jax.lax.scan(turn, jnp.zeros(3), x, reverse=reverse)
        return carry.sum() + rows.sum()

    rows = np.ones((turns, 3))
    rows[7, 1] = 0
    blame = first_nonfinite(loss, grad=False)(concrete.array(rows))
    assert (blame.primitive, blame.kind) == ("log", "division by zero")
    assert blame.turn == 7
    assert (blame.operands[0].low, blame.operands[0].high) == (0, 1)
    assert first_nonfinite(loss)(concrete.ones((turns, 3))) is None
