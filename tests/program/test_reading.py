"""A program that is read can be computed from its values alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxmp.inspect.program.iterations import operands_of
from jaxmp.program.binding import bind_equation
from jaxmp.program.reading import read_program
from jaxmp.program.values import BRANCHES, CONSTANT, ELEMENT, STACKED

X = jnp.linspace(-1, 1, 6).reshape(3, 2)
TABLE = np.arange(6, dtype=np.float32).reshape(3, 2)


class Computed:
    """The values of a program, each computed from the iterations of its operands that it reads."""

    def __init__(self, program, args):
        self.known = {(value, ()): arg for value, arg in zip(program.arguments, args, strict=True)}

    def at(self, value, turns=()):
        turns = turns[: len(value.scans)]
        if (value, turns) not in self.known:
            self.known[value, turns] = self.compute(value, turns)
        return self.known[value, turns]

    def compute(self, value, turns):
        if value.name == CONSTANT:
            return jnp.asarray(value.constant)
        sources = [(number, operand, other) for number, operand, other in operands_of(value, turns)]
        if value.name == BRANCHES:
            (index,) = (self.at(*source) for number, *source in sources if number == len(sources) - 1)
            return next(self.at(*source) for number, *source in sources if number == int(index))
        operands = [self.at(operand, other) for _, operand, other in sources]
        if value.name == STACKED:
            return jnp.stack(operands)
        if value.equation is not None and len(sources) == len(value.equation.eqn.invars):
            return bind_equation(value.equation.eqn, operands, value.equation.eqn.params)[value.position]
        (operand,) = operands  # a carry, a loop constant, or the operand that a barrier passes on
        return operand[turns[-1]] if value.name == ELEMENT else operand


def _restacked(x):
    """Return each row stacked by an inner scan, which is not the scan that picks the row."""
    return lax.scan(lambda h, row: (h, lax.scan(lambda g, _: (g, row), h, None, length=3)[1]), x[0], x)


def _layers(x, reverse=False):
    return lax.scan(lambda h, row: (jnp.tanh(h + row), h * row), x[0], x, reverse=reverse)


PROGRAMS = {
    "operations": lambda x: (x + TABLE, jnp.sin(x) * 2.0, 3.0),
    "calls": jax.jit(lambda x: (jax.nn.relu(x), jax.checkpoint(jnp.sin)(x))),
    "a scan": _layers,
    "a scan from the end": lambda x: _layers(x, reverse=True),
    "rows that another scan stacks": _restacked,
    "scans in scans": lambda x: lax.scan(lambda h, row: (h + _layers(x * row)[0], _layers(x + h)), x[1], x),
    "carries that change places": lambda x: lax.fori_loop(0, 3, lambda n, h: (h[1], h[0] + n, h[2]), (x, 2 * x, x + 1)),
    "a branch": lambda x: lax.switch(jnp.int32(1), [jnp.sin, lambda x: x * TABLE, jnp.cos], x),
    "a branch in a scan": lambda x: lax.scan(lambda h, n: (lax.cond(n > 1, jnp.sin, jnp.cos, h), h), x, jnp.arange(4)),
    "a barrier": lambda x: lax.optimization_barrier((x, 2 * x)),
    "a gradient": jax.grad(lambda x: jax.checkpoint(_layers)(x)[0].sum()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_values_of_a_program_compute_its_results(name):
    fun = PROGRAMS[name]
    program = read_program(jax.make_jaxpr(fun)(X))
    computed = Computed(program, [X])
    for value, expected in zip(program.results, jax.tree.leaves(fun(X)), strict=True):
        np.testing.assert_allclose(computed.at(value), expected, rtol=1e-5, atol=1e-6)


SAME_OPERANDS = {
    "a carry": lambda x: lax.scan(lambda c, _: ((jnp.sin(c[0]), jnp.sin(c[1])), None), (x, 2 * x), None, 3)[0],
    "a scanned array": lambda x: lax.scan(lambda c, row: (jnp.sin(c), jnp.sin(row)), x, 2 * x),
    "more iterations": lambda x: lax.scan(lambda c, _: ((jnp.sin(c[0]), jnp.sin(c[1])), None), (x, 2 * x), None, 4)[0],
    "from the end": lambda x: lax.scan(lambda c, row: (jnp.sin(c), jnp.sin(row)), x, 2 * x, reverse=True),
}


def test_values_that_are_the_same_are_equal():
    functions = [*PROGRAMS.values(), *PROGRAMS.values(), *SAME_OPERANDS.values()]
    program = read_program(jax.make_jaxpr(lambda x: [fun(x) for fun in functions])(X))
    computed = Computed(program, [X])
    for value in program.values:
        if not value.scans:
            np.testing.assert_array_equal(computed.at(value), computed.at(value.same))


@pytest.mark.parametrize("name", ["operations", "calls", "a branch", "a barrier"])
def test_a_program_that_is_computed_twice_has_the_same_values(name):
    program = read_program(jax.make_jaxpr(lambda x: (PROGRAMS[name](x), PROGRAMS[name](x)))(X))
    half = len(program.results) // 2
    for first, second in zip(program.results[:half], program.results[half:], strict=True):
        assert first.same is second.same


def test_a_part_of_an_array_is_not_the_same_as_the_array():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))

    def fun(x):
        specs = [PartitionSpec("i"), PartitionSpec(None, "i")]
        inside = [jax.shard_map(lambda x: jnp.sin(x), mesh=mesh, in_specs=(p,), out_specs=p)(x) for p in specs]
        return jnp.sin(x), *inside

    program = read_program(jax.make_jaxpr(fun)(jnp.ones((4, 4))))
    sines = [value.same for value in program.values if value.name == "sin"]
    assert len({*sines, *(value.same for value in program.results)}) == 5


def test_elements_of_a_scan_and_of_a_scan_inside_are_not_the_same():
    def pairs(x):
        def row_of(total, row):
            def other_of(total, other):
                return total + jnp.sin(row) * jnp.sin(other) + jnp.sin(other), None

            return lax.scan(other_of, total, x)[0], None

        return lax.scan(row_of, x[0], x)[0]

    program = read_program(jax.make_jaxpr(pairs)(X))
    row, other, other_again = (value.same for value in program.values if value.name == "sin")
    assert row is not other is other_again
