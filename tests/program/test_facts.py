"""Facts about values, through calls, loops and branches."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmp.program.equations import primitive_of
from jaxmp.program.facts import Analysis
from jaxmp.program.invariants import SAME_FOR_EXAMPLES

A, B, C = jnp.float32(1), jnp.float32(2), jnp.arange(3.0)

PROGRAMS = {
    "operations": lambda a, b, c: (jnp.sin(a), a + b, c * a, 1.0),
    "calls": jax.jit(lambda a, b, c: jax.checkpoint(lambda b, c: (b, c + 1))(b, c)),
    "a scan": lambda a, b, c: lax.scan(lambda h, x: ((h[1], h[1] + x), (h[0], x)), (a, b), c),
    "a scan of constants": lambda a, b, c: lax.scan(lambda h, _: (h * a, b), 1.0, None, length=2),
    "a carry that another carry changes": lambda a, b, c: lax.fori_loop(0, 3, lambda _, h: (h[1], h[2], a), (b, b, b)),
    "a loop until a value": lambda a, b, c: lax.while_loop(lambda h: h[0] < a, lambda h: (h[0] + 1, h[1]), (b, c)),
    "nested loops": lambda a, b, c: lax.scan(
        lambda h, x: (lax.fori_loop(0, 2, lambda _, g: g + h, x * 0.0) + b, h), a, c
    ),
    "a branch": lambda a, b, c: lax.cond(a > 0, lambda b, c: (b, c.sum()), lambda b, c: (b, b), b, c),
    "a branch in a loop": lambda a, b, c: lax.fori_loop(
        0, 3, lambda n, h: lax.cond(n > 1, lambda h: h + b, lambda h: h, h), a
    ),
    "a barrier": lambda a, b, c: lax.optimization_barrier((a, b, c)),
    "a derivative rule": lambda a, b, c: (jax.nn.relu(a), jax.nn.relu(b)),
}


def differ_between_examples(fun, axes, number):
    """Return whether `jax.vmap` maps result ``number`` of a function."""
    args = [jnp.stack([x, x]) if axis == 0 else x for x, axis in zip((A, B, C), axes, strict=True)]
    try:
        jax.eval_shape(jax.vmap(lambda *args: jax.tree.leaves(fun(*args))[number], axes, None), *args)
    except ValueError as error:
        assert "out_axes" in str(error)
        return True
    return False


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_value_is_the_same_for_all_examples_if_vmap_does_not_map_it(name):
    fun = PROGRAMS[name]
    program = jax.make_jaxpr(fun)(A, B, C)
    for axes in itertools.product((None, 0), repeat=3):
        if axes == (None, None, None):
            continue
        results = SAME_FOR_EXAMPLES.solve(program, [axis is None for axis in axes]).results
        expected = [not differ_between_examples(fun, axes, n) for n in range(len(results))]
        assert results == expected, axes


class CountsScans(Analysis[int]):
    """The number of scans that pick an element of a value, plus 10 for each scan that stacks it."""

    constant = 0

    def transfer(self, eqn, operands):
        return [max(operands, default=0)] * len(eqn.outvars)

    def join(self, first, second):
        return max(first, second)

    def pick(self, fact):
        return min(fact + 1, 5)

    def stack(self, fact):
        return fact + 10

    def transfer_whole(self, eqn, operands):
        return [-1] * len(eqn.outvars) if primitive_of(eqn) == "custom_jvp_call" else None


def test_elements_stacks_and_equations_that_are_not_entered_have_facts_of_their_own():
    def fun(x):
        inner = lax.map(lambda row: lax.map(jnp.sin, row), x)
        return inner, jax.nn.relu(inner), lax.scan(lambda h, row: (h + row, h), x[0], x)

    facts = CountsScans().solve(jax.make_jaxpr(fun)(jnp.ones((2, 2))), [0])
    assert facts.results == [2 + 10 + 10, -1, 1, 11]
