"""Which value of a program is computed from which: through calls and branches, and from turn to turn of its loops."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp._jaxpr import reading
from jaxmp.inspect.program import Key, paths_left, places

Turns = tuple[int, ...]
"""Of each scan around a place, outermost first, the index into what it runs over; those of while loops are one."""
Step = Callable[[Turns], list[Turns]]


class Scan(NamedTuple):
    """A scan around a value: where its number stands in the value's key, whether it runs in reverse, its length."""

    depth: int
    reverse: bool
    length: int


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value of a program.

    Attributes:
      key: the equation that computes it; that of the loop, of what the loop carries or runs over; else ``()``.
      eqn: that equation; None for arguments and constants.
      position: which of its results, or of the arguments.
      scans: those around it, outermost first.
      constant: what it is, if the program says so.
      reads: what it is computed from, each with its number among the operands, or of the branch
        (behind those what chose it), and the turns of it
        that a turn of this value reads.
    """

    key: Key
    eqn: Any = None
    position: int = 0
    scans: tuple[Scan, ...] = ()
    constant: Any = None
    reads: list[tuple[int, Value, Step]] = dataclasses.field(default_factory=list)

    @property
    def is_computed(self) -> bool:
        """Whether an equation computes it: that has a record, if it was given one."""
        return self.eqn is not None and self.position >= 0

    def sources(self, turns: Turns) -> Iterator[tuple[int, Value, Turns]]:
        """What it is computed from in one turn, with the number among the operands."""
        for number, value, step in self.reads:
            for other in step(turns):
                yield number, value, other

    def order(self, turns: Turns = ()) -> tuple[float, ...]:
        """Sorts the values of a program as they are computed, what comes in first, a loop's result after the loop."""
        numbers: list[float] = [*self.key, math.inf] if self.key else []
        for scan, turn in reversed(list(zip(self.scans, turns, strict=False))):
            numbers.insert(scan.depth, scan.length - 1 - turn if scan.reverse else turn)
        return tuple(numbers)


def values_of(jaxpr: Any, consts: Sequence[Any], keeps_rules: bool = False) -> list[Value]:
    """The results of an open jaxpr, from which all else is reached that leads to them.

    With ``keeps_rules`` a function with a derivative rule is one operation, as for :func:`jaxmp.inspect.evaluate`.
    """
    arguments = [Value((), position=n) for n in range(len(jaxpr.invars))]
    return _Body(keeps_rules)(jaxpr, consts, arguments, (), ())


def leading_to(values: Sequence[Value]) -> set[Value]:
    """These and all that they are computed from."""
    found, left = set(values), list(values)
    while left:
        for _, value, _ in left.pop().reads:
            if value not in found:
                found.add(value)
                left.append(value)
    return found


class Returned(NamedTuple):
    """A floating value that a module or a named scope returns.

    Attributes:
      key: that of the equation that computes it.
      position: which of its results.
      path: the scope. Of nested scopes that return the same value each has a ``Returned``.
      turns: as those of a :class:`jaxmp.inspect.program.Place`.
    """

    key: Key
    position: int
    path: str
    turns: tuple[int | None, ...]


def returned(jaxpr: Any, roots: Sequence[bool] | None = None) -> list[Returned]:
    """What each scope returns, in program order: values that are computed in it and used outside of it.

    ``jit`` and ``checkpoint`` are no border: a value is that of the equation which computes it. What a loop or a branch
    returns is computed by the loop, and within the body by an equation of its own. The condition of a while loop and
    what :func:`jaxmp.inspect.evaluate.evaluate` takes as one operation are not looked into.

    Args:
      jaxpr: open.
      roots: which results of the program count. A value that leads to none of them is not what a scope returns, but
        statistics for the next step, say. None: all count.
    """
    ends = values_of(jaxpr, [None] * len(jaxpr.constvars), keeps_rules=True)
    ends = [value for value, counts in zip(ends, roots or [True] * len(ends), strict=True) if counts]
    by_key, readers = {place.key: place for place in places(jaxpr)}, collections.defaultdict[Value, list[Any]](list)
    for value in ends:
        readers[value].append(())
    found = leading_to(ends)
    for value in found:
        for _, source, _ in value.reads:
            readers[source].append(by_key[value.key].names)
    return [
        Returned(value.key, value.position, path, by_key[value.key].turns)
        for value in sorted(found, key=lambda each: (each.key, each.position))
        if value.is_computed and jnp.issubdtype(value.eqn.outvars[value.position].aval.dtype, jnp.floating)
        for path in paths_left(by_key[value.key].names, readers[value])
    ]


def _same(turns: Turns) -> list[Turns]:
    return [turns]


class _Body(NamedTuple):
    keeps_rules: bool

    def __call__(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], key: Key, scans: tuple[Scan, ...]
    ) -> list[Value]:
        """The results of a body, of its inputs."""
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {var: Value((), constant=const) for var, const in zip(jaxpr.constvars, consts, strict=True)}

        def read(atom: Any) -> Value:
            return Value((), constant=np.asarray(atom.val)) if reading.is_literal(atom) else env[atom]

        for number, eqn in enumerate(jaxpr.eqns):
            operands, place, bodies = [read(atom) for atom in eqn.invars], (*key, number), reading.bodies_of(eqn)
            name = eqn.primitive.name
            if name == "shard_map" or (self.keeps_rules and name.startswith("custom_")):
                bodies = None
            results = [Value(place, eqn, n, scans) for n in range(len(eqn.outvars))]
            if bodies is None:
                for result in results:
                    result.reads = [(n, operand, _same) for n, operand in enumerate(operands)]
            elif bodies.kind == "call":
                results = self(*reading.opened(bodies.jaxprs[0]), operands, (*place, 0), scans)
            elif bodies.kind == "cond":
                for result in results:
                    result.reads = [(len(bodies.jaxprs), operands[0], _same)]
                for index, branch in enumerate(bodies.jaxprs):
                    inner = self(*reading.opened(branch), operands[1:], (*place, index), scans)
                    for result, value in zip(results, inner, strict=True):
                        result.reads.append((index, value, _same))
            else:
                self.loop(eqn, bodies, operands, results, scans)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def loop(
        self,
        eqn: Any,
        bodies: reading.Bodies,
        operands: Sequence[Value],
        results: Sequence[Value],
        scans: tuple[Scan, ...],
    ) -> None:
        """Joins what a loop returns, carries and runs over; a while loop is one turn, and its condition left out."""
        place = results[0].key if results else ()
        enter = leave = begin = before = every = _same
        if bodies.kind == "scan":
            scan = Scan(len(place), bool(eqn.params["reverse"]), eqn.params["length"])
            scans = (*scans, scan)
            first, last, back = (scan.length - 1, 0, 1) if scan.reverse else (0, scan.length - 1, -1)

            def enter(turns: Turns) -> list[Turns]:
                return [(*turns, last)] if scan.length else []

            def every(turns: Turns) -> list[Turns]:
                return [(*turns, turn) for turn in range(scan.length)]

            def leave(turns: Turns) -> list[Turns]:
                return [turns[:-1]]

            def begin(turns: Turns) -> list[Turns]:
                return [turns[:-1]] if turns[-1] == first else []

            def before(turns: Turns) -> list[Turns]:
                return [] if turns[-1] == first else [(*turns[:-1], turns[-1] + back)]

        operands, start = operands[bodies.consts :], bodies.start - bodies.consts
        given = [Value(place, eqn, -1, scans) for _ in operands]
        body = reading.opened(bodies.jaxprs[-1])
        values = self(*body, given, (*place, len(bodies.jaxprs) - 1), scans)
        for n, (value, operand) in enumerate(zip(given, operands, strict=True)):
            carried = start <= n < start + bodies.carry
            value.reads = [(0, operand, begin if carried else leave)]
            if carried:
                value.reads.append((1, values[n - start], before))
        for n, (result, value) in enumerate(zip(results, values, strict=True)):
            result.reads = [(1, value, enter if n < bodies.carry else every)]
            if n < bodies.carry and (bodies.kind == "while" or not eqn.params["length"]):
                result.reads.append((0, operands[start + n], _same))
