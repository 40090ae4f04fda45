"""The values of a program over all its bodies: what each is made of, and in which turns of the loops around it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.equations import Bodies, elements_of, opened
from jaxmp._internals.jax.primitives import COMBINES, PICKS
from jaxmp._internals.jax.sources import Names
from jaxmp._internals.jax.walk import interpreted
from jaxmp.inspect.program.equations import Key, Place, is_entered, paths_left, places
from jaxmp.inspect.program.evaluate import is_whole

Turns = tuple[int, ...]
"""Of each scan around a place, outermost first, the index into what it runs over; those of while loops are one."""
Step = Callable[[Turns], list[Turns]]
Read = tuple[int, "Value", Step]
TURN, TURNS, JOIN, _HELD = "turn", "turns", "join", "held"
MOVES = PICKS | COMBINES | {TURN, TURNS, "stop_gradient", "reduce_max", "reduce_min"}
MOVES |= {"reduce_window_max", "reduce_window_min", "sort", "top_k", "reshard"}
"""Operations whose results are elements of their operands; of ``top_k`` the first result."""
_ONE_BY_ONE = frozenset({"optimization_barrier"})


class Scan(NamedTuple):
    """A scan around a value: where its number stands in the value's key, whether it runs in reverse, its length."""

    depth: int
    reverse: bool
    length: int


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value and what makes it.

    Attributes:
      aval: its shape and dtype.
      name: the primitive; ``"argument"``, ``"constant"``; ``TURN``, what one turn of a scan gets of an array, and
        ``TURNS``, the array that all turns make; ``JOIN``, where several become one (what a loop carries, the result of
        a conditional).
      key: the equation that computes it; that of the loop, of what the loop carries or runs over; else ``()``.
      place: that equation, if it is one operation; None for arguments, constants, and what loops and conditionals make.
      position: which of its results, or of the arguments; -1 of what a loop carries or runs over.
      scans: those around it, outermost first.
      loops: the bodies of loops that it is computed in, outermost first.
      constant: what a constant is, if the program says so.
      const: the same as an array of NumPy, if it is small.
      reads: what it is computed from, each with its number among the operands, or of the branch (behind those what
        chose it), and the turns of it that a turn of this value reads.
      reader: the first operation that reads it.
    """

    aval: Any
    name: str
    key: Key = ()
    place: Place | None = None
    position: int = 0
    scans: tuple[Scan, ...] = ()
    loops: tuple[Key, ...] = ()
    constant: Any = None
    const: Any = None
    reads: list[Read] = dataclasses.field(default_factory=list)
    reader: Place | None = None

    @property
    def inputs(self) -> list[Value]:
        """What it is made of, be it outside of its loop."""
        return [value.held for _, value, _ in self.reads]

    @property
    def held(self) -> Value:
        """What a loop holds for all its turns; of all else itself."""
        value = self
        while value.name == _HELD:
            ((_, value, _),) = value.reads
        return value

    @property
    def at(self) -> Place:
        """The equation that computes it; an AssertionError where ``place`` is None."""
        assert self.place is not None
        return self.place

    @property
    def dtype(self) -> np.dtype:
        """Its dtype; of a random key, or of what has none (a token), that of no number."""
        dtype = getattr(self.aval, "dtype", "V")
        return np.dtype("V" if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def is_float(self) -> bool:
        """Whether it is of a floating dtype."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def is_half(self) -> bool:
        """Whether it is float16 or bfloat16."""
        return self.dtype.name in ("float16", "bfloat16")

    @property
    def is_move(self) -> bool:
        """Whether its elements are elements of what it is made of, a cast to the same dtype included."""
        if self.name == "top_k":
            return self.position == 0
        return self.name in MOVES or (self.is_cast and self.inputs[0].dtype == self.dtype)

    @property
    def is_cast(self) -> bool:
        """Whether it is a cast."""
        return self.name == "convert_element_type"

    @property
    def is_computed(self) -> bool:
        """Whether an equation computes it: that has a record, if it was given one."""
        return bool(self.key) and self.position >= 0

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


@dataclasses.dataclass(frozen=True)
class Values:
    """All values of a program in its order, arguments and results apart, and its equations by their keys."""

    all: list[Value]
    arguments: list[Value]
    results: list[Value]
    places: dict[Key, Place]


def values_of(jaxpr: Any, consts: Sequence[Any] = (), whole: Callable[[Any], bool] = lambda eqn: False) -> Values:
    """The values of a program, open or closed; ``whole`` says of an equation with bodies that it is one operation."""
    jaxpr, own = opened(jaxpr)
    builder = _Builder({place.key: place for place in places(jaxpr)}, whole)
    arguments = [builder.add(Value(var.aval, "argument", position=n)) for n, var in enumerate(jaxpr.invars)]
    results = builder.body(jaxpr, consts or own, arguments, (), (), ())
    return Values(builder.all, arguments, results, builder.places)


def leading_to(values: Sequence[Value]) -> set[Value]:
    """These and all that they are computed from."""
    found, left = set(values), list(values)
    while left:
        for _, value, _ in left.pop().reads:
            if value not in found:
                found.add(value)
                left.append(value)
    return found


def origins(value: Value, goes_on: Callable[[Value], bool] = lambda each: each.is_move) -> Iterator[Value]:
    """What a floating value is made of, each once, behind all that ``goes_on``; what only chooses is left out."""
    stack, seen = [value], {value}
    while stack:
        each = stack.pop()
        if not goes_on(each):
            yield each
            continue
        for one in each.inputs:
            if one.is_float and one not in seen:
                seen.add(one)
                stack.append(one)


def made_of(values: Values, marks: Callable[[Value], int]) -> dict[Value, int]:
    """Of each value the marks (bits) of itself and of all that it is computed from, what chooses included."""
    found = {value: marks(value) for value in values.all}
    is_new = True
    while is_new:  # what a loop carries goes round
        is_new = False
        for value in values.all:
            bits = functools.reduce(operator.or_, (found.get(each, 0) for each in value.inputs), found[value])
            is_new, found[value] = is_new or bits != found[value], bits
    return found


def constant(value: Value) -> Any:
    """The elements of a value that is a constant, moved about and cast maybe, as it was written; else None."""
    while value.const is None and (value.is_move or value.is_cast) and len(value.reads) == 1:
        (value,) = value.inputs
    return value.const


def is_zero(value: Value) -> bool:
    """Whether a value is a constant of zeros."""
    const = constant(value)
    return const is not None and not np.any(const)


class AtBorder(NamedTuple):
    """A floating value at the border of a module or a named scope.

    Attributes:
      key: that of the equation that computes it.
      position: which of its results.
      path: the scope. Of nested scopes that return the same value each has an ``AtBorder``.
      turns: as those of a :class:`jaxmp.inspect.program.equations.Place`.
    """

    key: Key
    position: int
    path: str
    turns: tuple[int | None, ...]


def returned(jaxpr: Any, roots: Sequence[bool] | None = None) -> list[AtBorder]:
    """What each scope returns, in program order: values that are computed in it and used outside of it.

    ``jit`` and ``checkpoint`` are no border: a value is that of the equation which computes it. What a loop or a branch
    returns is computed by the loop, and within the body by an equation of its own. The condition of a while loop and
    what :func:`jaxmp.inspect.program.evaluate.evaluate` takes as one operation are not looked into.

    Args:
      jaxpr: open.
      roots: which results of the program count. A value that leads to none of them is not what a scope returns, but
        statistics for the next step, say. None: all count.
    """
    return [
        AtBorder(place.key, position, path, place.turns)
        for place, position, readers in _read_floats(jaxpr, roots)
        for path in paths_left(place.names, readers)
    ]


def passed_in(jaxpr: Any, roots: Sequence[bool] | None = None) -> list[AtBorder]:
    """Return the values that a scope reads and outer code computes, with that code's path.

    A value that a scope returns is not among them. Arguments as :func:`returned` takes them.
    """
    return [
        AtBorder(place.key, position, place.path, place.turns)
        for place, position, readers in _read_floats(jaxpr, roots)
        if not paths_left(place.names, readers) and any(is_entered(place.names, names) for names in readers)
    ]


def _read_floats(jaxpr: Any, roots: Sequence[bool] | None) -> Iterator[tuple[Place, int, list[Names]]]:
    """Yield the floating values that lead to a root, with the scopes that read them."""
    values = values_of(jaxpr, [None] * len(jaxpr.constvars), functools.partial(is_whole, keeps_rules=True))
    ends = [value for n, value in enumerate(values.results) if roots is None or roots[n]]
    by_key, readers = values.places, collections.defaultdict[Value, list[Any]](list)
    for value in ends:
        readers[value].append(())
    found = leading_to(ends)
    for value in found:
        for _, source, _ in value.reads:
            readers[source].append(by_key[value.key].names)
    for value in sorted(found, key=lambda each: (each.key, each.position)):
        if value.is_computed and value.is_float:
            yield by_key[value.key], value.position, readers[value]


def _constant(aval: Any, value: Any) -> Value:
    return Value(aval, "constant", constant=value, const=elements_of(value))


def same_turn(turns: Turns) -> list[Turns]:
    """The step of what reads what stands beside it, in no other loop."""
    return [turns]


class _Steps(NamedTuple):
    """From the turns of a value to those of what it reads across the border of a loop."""

    at_end: Step  # from around the loop to the last turn
    in_all: Step  # from around the loop to every turn
    outside: Step  # from a turn to what is around the loop
    at_start: Step  # the same, from the first turn only
    before: Step  # from each turn but the first one to that before it


def _steps_across(scan: Scan | None) -> _Steps:
    """The steps across a scan; None for a while loop, which is one turn."""
    if scan is None:
        return _Steps(*[same_turn] * 5)
    first, last, back = (scan.length - 1, 0, 1) if scan.reverse else (0, scan.length - 1, -1)
    return _Steps(
        at_end=lambda turns: [(*turns, last)] if scan.length else [],
        in_all=lambda turns: [(*turns, turn) for turn in range(scan.length)],
        outside=lambda turns: [turns[:-1]],
        at_start=lambda turns: [turns[:-1]] if turns[-1] == first else [],
        before=lambda turns: [] if turns[-1] == first else [(*turns[:-1], turns[-1] + back)],
    )


class _Builder:
    def __init__(self, known: dict[Key, Place], whole: Callable[[Any], bool]) -> None:
        self.places, self.whole = known, whole
        self.all: list[Value] = []

    def add(self, value: Value) -> Value:
        self.all.append(value)
        return value

    def body(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        inputs: Sequence[Value],
        key: Key,
        scans: tuple[Scan, ...],
        loops: tuple[Key, ...],
    ) -> list[Value]:
        """The results of a body, of its inputs."""
        known = [self.add(_constant(var.aval, const)) for var, const in zip(jaxpr.constvars, consts, strict=True)]
        numbers = itertools.count()

        def equation(eqn: Any, operands: list[Value]) -> list[Value]:
            return self.equation(self.places[(*key, next(numbers))], operands, scans, loops)

        return interpreted(jaxpr, known, inputs, equation, lambda atom: _constant(atom.aval, np.asarray(atom.val)))

    def equation(
        self, place: Place, operands: list[Value], scans: tuple[Scan, ...], loops: tuple[Key, ...]
    ) -> list[Value]:
        eqn, bodies, name = place.eqn, place.bodies, place.eqn.primitive.name
        if bodies is None or self.whole(eqn):
            for operand in operands:
                operand.held.reader = operand.held.reader or place
            reads: list[Read] = [(n, operand, same_turn) for n, operand in enumerate(operands)]
            return [
                self.add(
                    Value(var.aval, name, place.key, place, n, scans, loops,
                          reads=reads[n : n + 1] if name in _ONE_BY_ONE else reads)
                )
                for n, var in enumerate(eqn.outvars)
            ]  # fmt: skip
        if bodies.kind not in ("call", "cond"):
            return self.loop(place, bodies, operands, scans, loops)
        given = operands if bodies.kind == "call" else operands[1:]
        inner = [
            self.body(*opened(jaxpr), given, (*place.key, n), scans, loops) for n, jaxpr in enumerate(bodies.jaxprs)
        ]
        if bodies.kind == "call":
            return inner[0]
        chosen = (len(inner), operands[0], same_turn)
        return [
            self.add(
                Value(var.aval, JOIN, place.key, None, n, scans, loops,
                      reads=[chosen, *((index, results[n], same_turn) for index, results in enumerate(inner))])
            )
            for n, var in enumerate(eqn.outvars)
        ]  # fmt: skip

    def loop(
        self,
        place: Place,
        bodies: Bodies,
        operands: list[Value],
        scans: tuple[Scan, ...],
        loops: tuple[Key, ...],
    ) -> list[Value]:
        """Joins what a loop returns, carries and runs over; a while loop is one turn, and no value leads to its end."""
        eqn, last = place.eqn, len(bodies.jaxprs) - 1
        outside, scan = scans, None
        if bodies.kind == "scan":
            scan = Scan(len(place.key), bool(eqn.params["reverse"]), eqn.params["length"])
            scans = (*scans, scan)
        steps = _steps_across(scan)
        within = (*loops, (*place.key, last))

        def inside(name: str, aval: Any, operand: Value, step: Step) -> Value:
            return Value(aval, name, place.key, None, -1, scans, within, reads=[(0, operand, step)])

        start, stop = bodies.start, bodies.start + bodies.carry
        jaxpr, consts = opened(bodies.jaxprs[last])
        held = [inside(_HELD, each.aval, each, steps.outside) for each in operands[:start]]
        carry = [self.add(inside(JOIN, each.aval, each, steps.at_start)) for each in operands[start:stop]]
        if last:
            condition = (*held[: bodies.consts], *carry)
            self.body(*opened(bodies.jaxprs[0]), condition, (*place.key, 0), scans, (*loops, (*place.key, 0)))
        sliced = zip(jaxpr.invars[stop - bodies.consts :], operands[stop:], strict=True)
        turns = [self.add(inside(TURN, var.aval, each, steps.outside)) for var, each in sliced]
        made = self.body(jaxpr, consts, [*held[bodies.consts :], *carry, *turns], (*place.key, last), scans, within)
        for join, value in zip(carry, made, strict=False):
            join.reads.append((1, value, steps.before))
        results = []
        for n, (var, value) in enumerate(zip(eqn.outvars, made, strict=True)):
            is_carry = n < bodies.carry
            skipped = is_carry and (bodies.kind == "while" or not eqn.params["length"])
            reads: list[Read] = [(0, operands[start + n], same_turn)] if skipped else []
            reads.append((1, value, steps.at_end if is_carry else steps.in_all))
            name = JOIN if is_carry else TURNS
            results.append(self.add(Value(var.aval, name, place.key, None, n, outside, loops, reads=reads)))
        return results
