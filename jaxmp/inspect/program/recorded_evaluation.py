"""Evaluate a program, and record results of its equations.

Equations in loops and branches are included. A ``Taps`` object (see ``taps.py``) makes the records.
To record the cotangent of a result, the program gets an extra argument, called a sink. The gradient of the sink is the
record.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp.inspect.program.taps import Taps
from jaxmp.program.bodies import rebuild
from jaxmp.program.equations import Bodies, is_literal
from jaxmp.program.reading import is_whole_with_rules
from jaxmp.program.rewriting import Rewriter
from jaxmp.program.values import Key

Records = dict[Key, Any]


def evaluate_and_record(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    taps: Taps,
    sinks: Mapping[Key, Any] | None = None,
) -> tuple[list[Any], Records]:
    """Return the results of an open jaxpr, and the records by equation key.

    A record from the body of a scan has a leading axis of iterations. In nested scans, the record has such an axis for
    each scan. Records from a branch that was not taken are zeros. You can differentiate the results, because
    ``checkpoint`` and custom derivative rules are kept. A function with such a rule counts as one operation, and so
    does a while loop.

    Args:
      jaxpr: an open jaxpr.
      consts: the constants of the jaxpr.
      args: the arguments of the jaxpr.
      taps: an object whose method ``at`` is called for each operation. A loop or a conditional also counts as an
        operation.
      sinks: pytrees of arrays for ``taps.at``, by equation key. The arrays have the same leading axes as the records of
        the equation.
    """
    rewriter = RecordingRewriter(taps, (), dict(sinks or {}))
    results = rewriter.evaluate(jaxpr, consts, args)
    for n, var in enumerate(jaxpr.outvars):
        if is_literal(var):  # the function returns a constant
            results[n] = jnp.asarray(results[n])
    return results, rewriter.records


class RecordingRewriter(Rewriter):
    """A rewriter of one body, which records results of its equations.

    Attributes:
      key: the key of the current equation.
      records: the records by equation key, also those of equations in bodies.
    """

    def __init__(self, taps: Any, around: Key, sinks: Records) -> None:
        """Record the results of a body. ``around`` is the key of the body."""
        self.taps, self.around, self.sinks = taps, around, sinks
        self.records: Records = {}
        self._numbers = itertools.count()
        self.key: Key = ()

    def inside(self, around: Key, sinks: Records) -> RecordingRewriter:
        """Return a rewriter of a body of the current equation."""
        return RecordingRewriter(self.taps, around, sinks)

    def is_whole(self, eqn: Any) -> bool:
        """Return whether an equation with bodies counts as one operation."""
        return is_whole_with_rules(eqn)

    def evaluate_equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Return the results of an equation, and record them if it counts as one operation."""
        self.key = (*self.around, next(self._numbers))
        if self.is_whole(eqn):
            return self.evaluate_operation(eqn, operands)
        return super().evaluate_equation(eqn, operands)

    def evaluate_operation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Return the results of an operation, and record them."""
        return self._tap(super().evaluate_operation(eqn, operands))

    def evaluate_bodies(self, eqn: Any, bodies: Bodies, operands: list[Any]) -> list[Any]:
        """Return the results of an equation with bodies, and add their records."""
        if bodies.is_call and not bodies.is_recomputed:
            return self.evaluate_call(eqn, bodies, operands)
        results, records = self.with_records(eqn, bodies, operands)
        self.records |= records
        return results if bodies.is_call else self._tap(results)

    def evaluate_call(self, eqn: Any, bodies: Bodies, operands: list[Any]) -> list[Any]:
        """Return the results of a call, whose body is evaluated in its place."""
        inside = self.inside((*self.key, 0), self.sinks)
        results = inside.evaluate_body(eqn, bodies, 0, *operands)
        self.records |= inside.records
        return results

    def _tap(self, results: list[Any]) -> list[Any]:
        """Record the results of the current equation."""
        results, record = self.taps.at(self.key, results, self.sinks.get(self.key))
        if record is not None:
            self.records[self.key] = record
        return results

    def with_records(self, eqn: Any, bodies: Bodies, operands: list[Any]) -> tuple[list[Any], Records]:
        """Evaluate an equation with bodies, and return its results and records.

        The equation is rebuilt so that its bodies take the sinks as operands, and return the records.
        """
        key = self.key
        inside = {place: value for place, value in self.sinks.items() if place[: len(key)] == key != place}
        sinks_inside, tree = jax.tree.flatten(inside)

        def body(number: int, *values: Any) -> tuple[list[Any], Records]:
            count = len(values) - len(sinks_inside)
            rewriter = self.inside((*key, number), jax.tree.unflatten(tree, values[count:]))
            return rewriter.evaluate_body(eqn, bodies, number, *values[:count]), rewriter.records

        shapes: Records = {}  # branches must have equal structures, so each returns the records of all branches
        if bodies.is_conditional:
            for number in range(len(bodies.jaxprs)):
                inputs = bodies.inputs(number, operands)
                _, of_branch = jax.eval_shape(functools.partial(body, number), *inputs, *sinks_inside)
                shapes |= of_branch
        structure: Any = None

        def function(number: int) -> Any:
            def call(*values: Any) -> list[Any]:
                nonlocal structure
                results, records = body(number, *values)
                leaves, structure = jax.tree.flatten(_zeros(shapes) | records)
                return [*results, *leaves]

            return call

        functions = [function(n) for n in range(len(bodies.jaxprs))]
        out = rebuild(eqn, bodies, functions)(*operands, *sinks_inside)
        stop = len(eqn.outvars)
        return list(out[:stop]), jax.tree.unflatten(structure, out[stop:])


def _zeros(records: Any) -> Any:
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), records)
