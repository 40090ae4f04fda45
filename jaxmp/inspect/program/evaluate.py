"""Evaluates a program as it stands, and hands out what its equations compute, from within loops and branches too."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxmp._internals.jax import equations
from jaxmp._internals.jax.bodies import Rule, bound, rebuilt
from jaxmp._internals.jax.equations import RESHARDS, Bodies, bodies_of, is_literal
from jaxmp._internals.jax.rebind import in_place_of
from jaxmp._internals.jax.walk import interpreted
from jaxmp.inspect.program.equations import Key

Records = dict[Key, Any]
_RULE = Rule(lambda traced, args, dtypes: equations.evaluate(*traced, args), contextlib.nullcontext)


class Recorder(Protocol):
    """What is done at each operation, the loops, branches and functions with derivative rules as a whole included."""

    def at(self, key: Key, eqn: Any, operands: Sequence[Any], results: list[Any], given: Any) -> tuple[list[Any], Any]:
        """What goes on in place of ``results``, and a record: arrays in a pytree, or None.

        Args:
          key: that of the equation's :class:`jaxmp.inspect.program.equations.Place`.
          eqn: the equation.
          operands, results: its values, traced.
          given: what :func:`evaluate` was given for the key; in a loop that of this turn.
        """

    def merged(self, key: Key, old: Any, new: Any, turn: jax.Array) -> Any:
        """The record after a turn of a while loop: ``old`` of those before, zeros at the first; ``turn`` is int32."""


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    recorder: Recorder,
    given: Mapping[Key, Any] | None = None,
    keeps_rules: bool = False,
) -> tuple[list[Any], Records]:
    """The results of an open jaxpr, and the records by the keys of their equations.

    Records of a scan's body have an axis before their own, one entry a turn, and one more for each scan around it;
    those of a while loop are merged; those of a branch that was not taken are zeros.

    Args:
      jaxpr: an open jaxpr.
      consts: its constants.
      args: its arguments.
      recorder: what is done at each operation.
      given: arrays in pytrees that reach ``recorder.at`` by key, with the axes that records of that place have; none
        for a place in a while loop.
      keeps_rules: whether the results will be differentiated: functions with derivative rules are one operation then,
        and ``checkpoint`` stays. Otherwise what they compute is looked into.
    """
    results, records = _Evaluation(recorder, keeps_rules).body(jaxpr, consts, args, (), dict(given or {}))
    written = map(is_literal, jaxpr.outvars)  # a number that the function returns, whatever it is given
    arrays = [jnp.asarray(each) if number else each for each, number in zip(results, written, strict=True)]
    return arrays, records


def is_whole(eqn: Any, keeps_rules: bool = False) -> bool:
    """Whether :func:`evaluate` takes an equation with bodies for one operation."""
    return eqn.primitive.name == "shard_map" or (keeps_rules and eqn.primitive.name.startswith("custom_"))


class _Evaluation:
    def __init__(self, recorder: Recorder, keeps_rules: bool) -> None:
        self.recorder = recorder
        self.keeps_rules = keeps_rules

    def body(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], key: Key, given: Records
    ) -> tuple[list[Any], Records]:
        records: Records = {}
        numbers = itertools.count()

        def equation(eqn: Any, operands: list[Any]) -> list[Any]:
            with in_place_of(eqn):
                return self.equation(eqn, operands, (*key, next(numbers)), given, records)

        return interpreted(jaxpr, consts, args, equation), records

    def equation(self, eqn: Any, operands: list[Any], key: Key, given: Records, records: Records) -> list[Any]:
        bodies = bodies_of(eqn)
        if bodies is None or is_whole(eqn, self.keeps_rules):
            results = bound(eqn, operands, eqn.params)
            # The same numbers, of the type that can be looked at where the result lies.
            operands = results if eqn.primitive.name in RESHARDS else operands
        elif bodies.kind == "call" and not (self.keeps_rules and eqn.primitive.name == "remat2"):
            opened = equations.opened(bodies.jaxprs[0])
            results, inner = self.body(*opened, operands, (*key, 0), given)
            records |= inner
            return results
        else:
            results, inner = self.with_bodies(eqn, bodies, operands, key, given)
            records |= inner
            if bodies.kind == "call":
                return results
        results, record = self.recorder.at(key, eqn, operands, results, given.get(key))
        if record is not None:
            records[key] = record
        return results

    def with_bodies(
        self, eqn: Any, bodies: Bodies, operands: list[Any], key: Key, given: Records
    ) -> tuple[list[Any], Records]:
        """An equation built again around bodies that take what is given for their places, and return their records."""
        own, tree = jax.tree.flatten(
            {place: value for place, value in given.items() if place[: len(key)] == key != place}
        )

        def body(index: int, *values: Any) -> tuple[list[Any], Records]:
            jaxpr, consts = equations.opened(bodies.jaxprs[index])
            plain, more = values[: len(jaxpr.invars)], values[len(jaxpr.invars) :]
            return self.body(jaxpr, consts, plain, (*key, index), jax.tree.unflatten(tree, more))

        if bodies.kind == "while":
            return self.loop(eqn, bodies, operands, key)
        if bodies.kind == "cond":
            shapes = [
                jax.eval_shape(lambda *a, i=i: body(i, *a)[1], *operands[1:], *own) for i in range(len(bodies.jaxprs))
            ]
            empty: Records = {place: record for each in shapes for place, record in each.items()}
        else:
            empty = {}
        structure: Any = None

        def function(index: int) -> Any:
            def call(*values: Any) -> list[Any]:
                nonlocal structure
                results, records = body(index, *values)
                leaves, structure = jax.tree.flatten(_zeros(empty) | records)
                return [*results, *leaves]

            return call

        out = rebuilt(eqn, bodies, [function(n) for n in range(len(bodies.jaxprs))], _RULE)(*operands, *own)
        stop = len(eqn.outvars)
        return list(out[:stop]), jax.tree.unflatten(structure, out[stop:])

    def loop(self, eqn: Any, bodies: Bodies, operands: list[Any], key: Key) -> tuple[list[Any], Records]:
        """A while loop that carries its turn and its records, too."""
        condition, step = (equations.opened(jaxpr) for jaxpr in bodies.jaxprs)
        consts = operands[bodies.consts : bodies.start]

        def turn(*carry: Any) -> tuple[list[Any], Records]:
            return self.body(*step, [*consts, *carry], (*key, 1), {})

        init = operands[bodies.start :]
        start, tree = jax.tree.flatten(_zeros(jax.eval_shape(lambda *carry: turn(*carry)[1], *init)))
        size = len(init)

        def stays(*values: Any) -> list[Any]:
            return equations.evaluate(*condition, values[: bodies.consts + size])

        def go(*values: Any) -> list[Any]:
            carry, (number, *old) = values[len(consts) : len(consts) + size], values[len(consts) + size :]
            results, new = turn(*carry)
            before = jax.tree.unflatten(tree, old)
            merged = {
                place: self.recorder.merged(place, before[place], record, number) for place, record in new.items()
            }
            return [*results, number + 1, *jax.tree.leaves(merged)]

        out = rebuilt(eqn, bodies, [stays, go], _RULE)(*operands, jnp.int32(0), *start)
        return list(out[:size]), jax.tree.unflatten(tree, out[size + 1 :])


def _zeros(records: Any) -> Any:
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), records)
