"""The evaluation of a program that records the results of its equations.

Equations in loops and branches are recorded too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxmp._internals.jax import equations
from jaxmp._internals.jax.bodies import RuleEvaluation, bind_equation, rebuilt
from jaxmp._internals.jax.equations import RESHARDS, Bodies, bodies_of, is_literal
from jaxmp._internals.jax.rebind import in_place_of
from jaxmp._internals.jax.walk import interpreted
from jaxmp.inspect.program.equation_places import Key

Records = dict[Key, Any]
_RULE = RuleEvaluation(lambda traced, args, dtypes: equations.evaluate(*traced, args), contextlib.nullcontext)


class Recorder(Protocol):
    """The part of a tool that is called for each operation.

    A loop, a branch or a function with custom derivative rules also counts as an operation.
    """

    def at(self, key: Key, eqn: Any, operands: Sequence[Any], results: list[Any], extra: Any) -> tuple[list[Any], Any]:
        """Return the results to continue with, and a record: arrays in a pytree, or None.

        Args:
          key: the key of the equation's :class:`jaxmp.inspect.program.equation_places.EquationPlace`.
          eqn: the equation.
          operands: its operands, traced.
          results: its results, traced.
          extra: the arrays of :func:`evaluate_and_record` for the key; in a loop, those of this iteration.
        """

    def merged(self, key: Key, old: Any, new: Any, turn: jax.Array) -> Any:
        """Return the record of a while loop after an iteration.

        ``old`` is zeros in the first iteration.
        """


def evaluate_and_record(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    recorder: Recorder,
    extra: Mapping[Key, Any] | None = None,
    keeps_rules: bool = False,
) -> tuple[list[Any], Records]:
    """Return the results of an open jaxpr, and the records by equation key.

    Records in the body of a scan have a leading axis of iterations, and one more for each scan around. Records of a
    while loop are merged. Records of a branch that was not taken are zeros.

    Args:
      jaxpr: an open jaxpr.
      consts: its constants.
      args: its arguments.
      recorder: its method ``at`` is called for each operation.
      extra: pytrees of arrays for ``recorder.at``, by key, with the leading axes of the records of that place; places
        in while loops have none.
      keeps_rules: whether the results will be differentiated. Then functions with custom derivative rules are one
        operation, and ``checkpoint`` stays; otherwise their equations are evaluated one by one.
    """
    results, records = _RecordedEvaluation(recorder, keeps_rules).body(jaxpr, consts, args, (), dict(extra or {}))
    for n, var in enumerate(jaxpr.outvars):
        if is_literal(var):  # the function returns a constant
            results[n] = jnp.asarray(results[n])
    return results, records


def is_whole(eqn: Any, keeps_rules: bool = False) -> bool:
    """Return whether an equation with bodies is recorded as one operation."""
    return eqn.primitive.name == "shard_map" or (keeps_rules and eqn.primitive.name.startswith("custom_"))


class _RecordedEvaluation:
    """An evaluation of a program with a recorder."""

    def __init__(self, recorder: Recorder, keeps_rules: bool) -> None:
        self.recorder = recorder
        self.keeps_rules = keeps_rules

    def body(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], key: Key, extra: Records
    ) -> tuple[list[Any], Records]:
        records: Records = {}
        numbers = itertools.count()

        def equation(eqn: Any, operands: list[Any]) -> list[Any]:
            with in_place_of(eqn):
                return self.equation(eqn, operands, (*key, next(numbers)), extra, records)

        return interpreted(jaxpr, consts, args, equation), records

    def equation(self, eqn: Any, operands: list[Any], key: Key, extra: Records, records: Records) -> list[Any]:
        bodies = bodies_of(eqn)
        if bodies is None or is_whole(eqn, self.keeps_rules):
            results = bind_equation(eqn, operands, eqn.params)
            # A reshard does not change the numbers, and its result has the sharding type that the recorder needs.
            operands = results if eqn.primitive.name in RESHARDS else operands
        elif bodies.kind == "call" and not (self.keeps_rules and eqn.primitive.name == "remat2"):
            opened = equations.opened(bodies.jaxprs[0])
            results, inner = self.body(*opened, operands, (*key, 0), extra)
            records |= inner
            return results
        else:
            results, inner = self.with_bodies(eqn, bodies, operands, key, extra)
            records |= inner
            if bodies.kind == "call":
                return results
        results, record = self.recorder.at(key, eqn, operands, results, extra.get(key))
        if record is not None:
            records[key] = record
        return results

    def with_bodies(
        self, eqn: Any, bodies: Bodies, operands: list[Any], key: Key, extra: Records
    ) -> tuple[list[Any], Records]:
        """Evaluate an equation whose bodies return records.

        The equation is rebuilt. Its bodies also take the extra arrays.
        """
        inside = {place: value for place, value in extra.items() if place[: len(key)] == key != place}
        extra_leaves, tree = jax.tree.flatten(inside)

        def body(index: int, *values: Any) -> tuple[list[Any], Records]:
            jaxpr, consts = equations.opened(bodies.jaxprs[index])
            plain, more = values[: len(jaxpr.invars)], values[len(jaxpr.invars) :]
            return self.body(jaxpr, consts, plain, (*key, index), jax.tree.unflatten(tree, more))

        if bodies.kind == "while":
            return self.loop(eqn, bodies, operands, key)
        shapes: Records = {}  # every branch returns the records of all branches
        if bodies.kind == "cond":
            for index in range(len(bodies.jaxprs)):
                _, of_branch = jax.eval_shape(functools.partial(body, index), *operands[1:], *extra_leaves)
                shapes |= of_branch
        structure: Any = None

        def function(index: int) -> Any:
            def call(*values: Any) -> list[Any]:
                nonlocal structure
                results, records = body(index, *values)
                leaves, structure = jax.tree.flatten(_zeros(shapes) | records)
                return [*results, *leaves]

            return call

        out = rebuilt(eqn, bodies, [function(n) for n in range(len(bodies.jaxprs))], _RULE)(*operands, *extra_leaves)
        stop = len(eqn.outvars)
        return list(out[:stop]), jax.tree.unflatten(structure, out[stop:])

    def loop(self, eqn: Any, bodies: Bodies, operands: list[Any], key: Key) -> tuple[list[Any], Records]:
        """Evaluate a while loop that also carries its records.

        The loop is rebuilt. It carries the number of the iteration too.
        """
        condition, step = (equations.opened(jaxpr) for jaxpr in bodies.jaxprs)
        consts = operands[bodies.consts : bodies.start]

        def turn(*carry: Any) -> tuple[list[Any], Records]:
            return self.body(*step, [*consts, *carry], (*key, 1), {})

        init = operands[bodies.start :]
        start, tree = jax.tree.flatten(_zeros(jax.eval_shape(lambda *carry: turn(*carry)[1], *init)))
        size = len(init)

        def goes_on(*values: Any) -> list[Any]:
            return equations.evaluate(*condition, values[: bodies.consts + size])

        def one_turn(*values: Any) -> list[Any]:
            carry, (number, *old) = values[len(consts) : len(consts) + size], values[len(consts) + size :]
            results, new = turn(*carry)
            before = jax.tree.unflatten(tree, old)
            merged = {
                place: self.recorder.merged(place, before[place], record, number) for place, record in new.items()
            }
            return [*results, number + 1, *jax.tree.leaves(merged)]

        out = rebuilt(eqn, bodies, [goes_on, one_turn], _RULE)(*operands, jnp.int32(0), *start)
        return list(out[:size]), jax.tree.unflatten(tree, out[size + 1 :])


def _zeros(records: Any) -> Any:
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), records)
