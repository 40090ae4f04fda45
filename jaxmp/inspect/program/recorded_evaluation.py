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

from jaxmp._internals.jax.rebind import in_place_of
from jaxmp.inspect.program.taps import Taps
from jaxmp.program import equations
from jaxmp.program.bodies import UNCHANGED_RULES, bind_equation, rebuilt
from jaxmp.program.equations import Bodies, bodies_of, is_literal
from jaxmp.program.reading import is_whole_with_rules
from jaxmp.program.values import Key
from jaxmp.program.walk import interpreted

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
    results, records = _RecordedEvaluation(taps).body(jaxpr, consts, args, (), dict(sinks or {}))
    for n, var in enumerate(jaxpr.outvars):
        if is_literal(var):  # the function returns a constant
            results[n] = jnp.asarray(results[n])
    return results, records


class _RecordedEvaluation:
    """An evaluation of a program with taps."""

    def __init__(self, taps: Taps) -> None:
        self.taps = taps

    def body(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], key: Key, sinks: Records
    ) -> tuple[list[Any], Records]:
        records: Records = {}
        numbers = itertools.count()

        def equation(eqn: Any, operands: list[Any]) -> list[Any]:
            with in_place_of(eqn):
                return self.equation(eqn, operands, (*key, next(numbers)), sinks, records)

        return interpreted(jaxpr, consts, args, equation), records

    def equation(self, eqn: Any, operands: list[Any], key: Key, sinks: Records, records: Records) -> list[Any]:
        bodies = bodies_of(eqn)
        if bodies is None or is_whole_with_rules(eqn):
            results = bind_equation(eqn, operands, eqn.params)
        elif bodies.kind == "call" and eqn.primitive.name != "remat2":
            opened = equations.opened(bodies.jaxprs[0])
            results, inner = self.body(*opened, operands, (*key, 0), sinks)
            records |= inner
            return results
        else:
            results, inner = self.with_bodies(eqn, bodies, operands, key, sinks)
            records |= inner
            if bodies.kind == "call":
                return results
        results, record = self.taps.at(key, results, sinks.get(key))
        if record is not None:
            records[key] = record
        return results

    def with_bodies(
        self, eqn: Any, bodies: Bodies, operands: list[Any], key: Key, sinks: Records
    ) -> tuple[list[Any], Records]:
        """Evaluate an equation with bodies, and return its results and records.

        The equation is rebuilt so that its bodies take the sinks as operands, and return the records.
        """
        inside = {place: value for place, value in sinks.items() if place[: len(key)] == key != place}
        sinks_inside, tree = jax.tree.flatten(inside)

        def body(index: int, *values: Any) -> tuple[list[Any], Records]:
            jaxpr, consts = equations.opened(bodies.jaxprs[index])
            plain, more = values[: len(jaxpr.invars)], values[len(jaxpr.invars) :]
            return self.body(jaxpr, consts, plain, (*key, index), jax.tree.unflatten(tree, more))

        shapes: Records = {}  # branches must have equal structures, so each returns the records of all branches
        if bodies.kind == "cond":
            for index in range(len(bodies.jaxprs)):
                _, of_branch = jax.eval_shape(functools.partial(body, index), *operands[1:], *sinks_inside)
                shapes |= of_branch
        structure: Any = None

        def function(index: int) -> Any:
            def call(*values: Any) -> list[Any]:
                nonlocal structure
                results, records = body(index, *values)
                leaves, structure = jax.tree.flatten(_zeros(shapes) | records)
                return [*results, *leaves]

            return call

        functions = [function(n) for n in range(len(bodies.jaxprs))]
        out = rebuilt(eqn, bodies, functions, UNCHANGED_RULES)(*operands, *sinks_inside)
        stop = len(eqn.outvars)
        return list(out[:stop]), jax.tree.unflatten(structure, out[stop:])


def _zeros(records: Any) -> Any:
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), records)
