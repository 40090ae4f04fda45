"""Which value of a program is computed from which: through calls and branches, and from turn to turn of its loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp._jaxpr import reading
from jaxmp.inspect.program import Key

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
      reads: what it is computed from, each with its number among the operands, or of the branch, and the turns of it
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

    def time(self, turns: Turns) -> tuple[int, ...]:
        """Sorts the values of a program in the order in which they are computed."""
        order = list(self.key)
        for scan, turn in reversed(list(zip(self.scans, turns, strict=False))):
            order.insert(scan.depth, scan.length - 1 - turn if scan.reverse else turn)
        return tuple(order)


def values_of(jaxpr: Any, consts: Sequence[Any]) -> list[Value]:
    """The results of an open jaxpr, from which all else is reached; without what leads to none of them."""
    arguments = [Value((), position=n) for n in range(len(jaxpr.invars))]
    return _body(jaxpr, consts, arguments, (), ())


def leading_to(values: Sequence[Value]) -> set[Value]:
    """These and all that they are computed from."""
    found, left = set(values), list(values)
    while left:
        for _, value, _ in left.pop().reads:
            if value not in found:
                found.add(value)
                left.append(value)
    return found


def _same(turns: Turns) -> list[Turns]:
    return [turns]


def _outside(turns: Turns) -> list[Turns]:
    return [turns[:-1]]


def _body(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], key: Key, scans: Any) -> list[Value]:
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    env |= {var: Value((), constant=const) for var, const in zip(jaxpr.constvars, consts, strict=True)}

    def read(atom: Any) -> Value:
        return Value((), constant=np.asarray(atom.val)) if reading.is_literal(atom) else env[atom]

    for number, eqn in enumerate(jaxpr.eqns):
        operands, place, bodies = [read(atom) for atom in eqn.invars], (*key, number), reading.bodies_of(eqn)
        if bodies is not None and bodies.kind == "call" and eqn.primitive.name != "shard_map":
            results = _body(*reading.opened(bodies.jaxprs[0]), operands, (*place, 0), scans)
        else:
            results = [Value(place, eqn, n, scans) for n in range(len(eqn.outvars))]
            if bodies is None or bodies.kind == "call":
                for result in results:
                    result.reads = [(n, operand, _same) for n, operand in enumerate(operands)]
            elif bodies.kind == "cond":
                for index, branch in enumerate(bodies.jaxprs):
                    inner = _body(*reading.opened(branch), operands[1:], (*place, index), scans)
                    for result, value in zip(results, inner, strict=True):
                        result.reads.append((index, value, _same))
            else:
                _loop(eqn, bodies, operands, results, place, scans)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _loop(eqn: Any, bodies: reading.Bodies, operands: Any, results: Sequence[Value], place: Key, scans: Any) -> None:
    """Joins what a loop returns, carries and runs over; of a while loop the turns are one, and its condition is left."""
    is_scan = bodies.kind == "scan"
    jaxpr, own = reading.opened(bodies.jaxprs[-1])
    start, carry = bodies.start, bodies.carry if is_scan else len(results)
    length, reverse = (eqn.params["length"], bool(eqn.params["reverse"])) if is_scan else (1, False)
    first, last, back = (length - 1, 0, 1) if reverse else (0, length - 1, -1)
    if is_scan:
        inside = (*scans, Scan(len(place), reverse, length))
        leave, final = _outside, lambda turns: [(*turns, last)] if length else []
        begin = lambda turns: [turns[:-1]] if turns[-1] == first else []  # noqa: E731
        before = lambda turns: [(*turns[:-1], turns[-1] + back)] if turns[-1] != first else []  # noqa: E731
    else:
        inside, leave, final, begin, before = scans, _same, _same, _same, _same
    given = [Value(place, eqn, -1, inside) for _ in operands[bodies.consts :]]
    values = _body(jaxpr, own, given, (*place, len(bodies.jaxprs) - 1), inside)
    for n, (value, operand) in enumerate(zip(given, operands[bodies.consts :], strict=True)):
        number = n - (start - bodies.consts)
        if 0 <= number < carry:
            value.reads = [(0, operand, begin), (1, values[number], before)]
        else:
            value.reads = [(0, operand, leave)]
    for n, result in enumerate(results):
        if n < carry:
            result.reads = [(1, values[n], final)]
            if not is_scan or not length:
                result.reads.append((0, operands[start + n], _same))
        else:
            result.reads = [(1, values[n], lambda turns: [(*turns, turn) for turn in range(length)])]
