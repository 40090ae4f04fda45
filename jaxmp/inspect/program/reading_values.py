"""Read the values of a program from its jaxpr."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp.inspect.program.equation_places import EquationPlace, Key, equation_places
from jaxmp.inspect.program.values import (
    JOIN,
    LOOP_CONSTANT,
    TURN,
    TURNS,
    Read,
    Scan,
    TurnMap,
    Turns,
    Value,
    Values,
)
from jaxmp.program.equations import Bodies, opened
from jaxmp.program.primitives import Trait, with_trait
from jaxmp.program.walk import interpreted

_ONE_BY_ONE = with_trait(Trait.IDENTITY)
"""Operations whose nth result depends only on the nth operand."""


def _has_no_bodies(eqn: Any) -> bool:
    return False


def values_of(jaxpr: Any, consts: Sequence[Any] = (), is_whole: Callable[[Any], bool] = _has_no_bodies) -> Values:
    """Return the values of a program.

    Args:
      jaxpr: an open or closed jaxpr.
      consts: the constants of an open jaxpr.
      is_whole: a function that returns whether an equation with bodies counts as one operation.
    """
    jaxpr, closed_consts = opened(jaxpr)
    reader = _Reader({place.key: place for place in equation_places(jaxpr)}, is_whole)
    arguments = [reader.add(Value(var.aval, "argument", position=n)) for n, var in enumerate(jaxpr.invars)]
    results = reader.body(jaxpr, consts or closed_consts, arguments, (), _Loops())
    return Values(reader.all, arguments, results, reader.places)


def same_turn(turns: Turns) -> list[Turns]:
    """Map an iteration to itself, for an operand in the same loops as its reader."""
    return [turns]


class _Loops(NamedTuple):
    """The loops around a body, outermost first."""

    scans: tuple[Scan, ...] = ()
    bodies: tuple[Key, ...] = ()


class _TurnMaps(NamedTuple):
    """The maps of iterations for values in a loop, and for results of the loop.

    Each map takes an iteration of a value, and returns the iterations of an operand that the value reads.

    Attributes:
      at_end: for the last carry. Outside the loop, it reads the last iteration.
      in_all: for a stacked output. Outside the loop, it reads all iterations.
      outside: for a constant or a scanned element. In the loop, it reads a value outside the loop.
      at_start: for a carry in the loop. In the first iteration, it reads the initial carry, outside the loop. In other
        iterations, it reads nothing.
      before: for a carry in the loop. It reads the iteration before. In the first iteration, it reads nothing.
    """

    at_end: TurnMap
    in_all: TurnMap
    outside: TurnMap
    at_start: TurnMap
    before: TurnMap


def _maps_across(scan: Scan | None) -> _TurnMaps:
    """Return the maps of iterations for a loop.

    ``scan`` is None for a while loop. A while loop counts as one iteration, because the number of its iterations is
    unknown.
    """
    if scan is None:
        return _TurnMaps(*[same_turn] * 5)
    first, last, back = (scan.length - 1, 0, 1) if scan.reverse else (0, scan.length - 1, -1)
    return _TurnMaps(
        at_end=lambda turns: [(*turns, last)] if scan.length else [],
        in_all=lambda turns: [(*turns, turn) for turn in range(scan.length)],
        outside=lambda turns: [turns[:-1]],
        at_start=lambda turns: [turns[:-1]] if turns[-1] == first else [],
        before=lambda turns: [] if turns[-1] == first else [(*turns[:-1], turns[-1] + back)],
    )


def _literal(atom: Any) -> Value:
    return Value(atom.aval, "constant", constant=np.asarray(atom.val))


class _Reader:
    """A reader that collects the values of a program, body by body."""

    def __init__(self, places: dict[Key, EquationPlace], is_whole: Callable[[Any], bool]) -> None:
        self.places = places
        self.is_whole = is_whole
        self.all: list[Value] = []

    def add(self, value: Value) -> Value:
        self.all.append(value)
        return value

    def body(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], key: Key, loops: _Loops) -> list[Value]:
        """Read the equations of a body and return its results."""
        constants = []
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            constants.append(self.add(Value(var.aval, "constant", constant=const)))
        numbers = itertools.count()

        def equation(eqn: Any, operands: list[Value]) -> list[Value]:
            return self.equation(self.places[(*key, next(numbers))], operands, loops)

        return interpreted(jaxpr, constants, inputs, equation, _literal)

    def equation(self, place: EquationPlace, operands: list[Value], loops: _Loops) -> list[Value]:
        bodies = place.bodies
        if bodies is None or self.is_whole(place.eqn):
            return self.operation(place, operands, loops)
        if bodies.kind == "call":
            return self.branch(place, 0, operands, loops)
        if bodies.kind == "cond":
            return self.conditional(place, bodies, operands, loops)
        return self.loop(place, bodies, operands, loops)

    def result(self, place: EquationPlace, name: str, position: int, reads: list[Read], loops: _Loops) -> Value:
        """Add a result of an equation with bodies."""
        aval = place.eqn.outvars[position].aval
        return self.add(Value(aval, name, place.key, None, position, loops.scans, loops.bodies, reads=reads))

    def operation(self, place: EquationPlace, operands: list[Value], loops: _Loops) -> list[Value]:
        name, results = place.eqn.primitive.name, []
        for operand in operands:
            operand.outer.reader = operand.outer.reader or place
        reads: list[Read] = [(n, operand, same_turn) for n, operand in enumerate(operands)]
        for n, var in enumerate(place.eqn.outvars):
            value = Value(var.aval, name, place.key, place, n, loops.scans, loops.bodies)
            value.reads = reads[n : n + 1] if name in _ONE_BY_ONE else reads
            results.append(self.add(value))
        return results

    def branch(self, place: EquationPlace, number: int, inputs: list[Value], loops: _Loops) -> list[Value]:
        assert place.bodies is not None
        return self.body(*opened(place.bodies.jaxprs[number]), inputs, (*place.key, number), loops)

    def conditional(self, place: EquationPlace, bodies: Bodies, operands: list[Value], loops: _Loops) -> list[Value]:
        branches = [self.branch(place, number, operands[1:], loops) for number in range(len(bodies.jaxprs))]
        results = []
        for n in range(len(place.eqn.outvars)):
            reads: list[Read] = [(len(branches), operands[0], same_turn)]
            for number, branch_results in enumerate(branches):
                reads.append((number, branch_results[n], same_turn))
            results.append(self.result(place, JOIN, n, reads, loops))
        return results

    def loop(self, place: EquationPlace, bodies: Bodies, operands: list[Value], around: _Loops) -> list[Value]:
        """Read a loop.

        A while loop counts as one iteration. The values of its condition are not operands of its results.
        """
        eqn, step = place.eqn, len(bodies.jaxprs) - 1
        scan = None
        if bodies.kind == "scan":
            scan = Scan(len(place.key), bool(eqn.params["reverse"]), eqn.params["length"])
        maps = _maps_across(scan)
        scans = around.scans if scan is None else (*around.scans, scan)
        inside = _Loops(scans, (*around.bodies, (*place.key, step)))

        def entering(name: str, aval: Any, operand: Value, turns_read: TurnMap) -> Value:
            reads = [(0, operand, turns_read)]
            return Value(aval, name, place.key, None, -1, inside.scans, inside.bodies, reads=reads)

        start, stop = bodies.start, bodies.start + bodies.carry
        constants = [entering(LOOP_CONSTANT, value.aval, value, maps.outside) for value in operands[:start]]
        carry = [self.add(entering(JOIN, value.aval, value, maps.at_start)) for value in operands[start:stop]]
        if bodies.kind == "while":
            in_condition = _Loops(inside.scans, (*around.bodies, (*place.key, 0)))
            self.branch(place, 0, [*constants[: bodies.consts], *carry], in_condition)
        jaxpr, _ = opened(bodies.jaxprs[step])
        inputs = []
        for var, value in zip(jaxpr.invars[stop - bodies.consts :], operands[stop:], strict=True):
            inputs.append(self.add(entering(TURN, var.aval, value, maps.outside)))
        results = self.branch(place, step, [*constants[bodies.consts :], *carry, *inputs], inside)
        for join, value in zip(carry, results, strict=False):
            join.reads.append((1, value, maps.before))
        return list(self.loop_results(place, bodies, operands[start:stop], results, maps, around))

    def loop_results(
        self,
        place: EquationPlace,
        bodies: Bodies,
        init: list[Value],
        results: list[Value],
        maps: _TurnMaps,
        around: _Loops,
    ) -> Iterator[Value]:
        """Add the last carry of a loop and the arrays that a scan stacks."""
        may_not_run = bodies.kind == "while" or not place.eqn.params["length"]
        for n, value in enumerate(results):
            if n >= bodies.carry:
                yield self.result(place, TURNS, n, [(1, value, maps.in_all)], around)
                continue
            reads: list[Read] = [(0, init[n], same_turn)] if may_not_run else []
            yield self.result(place, JOIN, n, [*reads, (1, value, maps.at_end)], around)
