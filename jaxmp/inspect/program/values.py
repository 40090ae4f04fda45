"""The values of a program over all its bodies: their operations and operands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.primitives import COMBINES, PICKS
from jaxmp.inspect.program.equation_places import EquationPlace, Key

Turns = tuple[int, ...]
"""For each scan around a place, outermost first, the index into its inputs; a while loop counts as one turn."""
TurnMap = Callable[[Turns], list[Turns]]
"""From the turns of a value to those of an operand that it reads."""
Read = tuple[int, "Value", TurnMap]
"""The number of an operand, the operand, and the turns of it that are read."""
TURN, TURNS, JOIN, LOOP_CONSTANT = "turn", "turns", "join", "loop constant"
MOVES = PICKS | COMBINES | {TURN, TURNS, "stop_gradient", "reduce_max", "reduce_min"}
MOVES |= {"reduce_window_max", "reduce_window_min", "sort", "top_k", "reshard"}
"""Operations whose results are elements of their operands; for ``top_k`` the first result."""


class Scan(NamedTuple):
    """A scan around a value: the position of its turn in the value's order, its direction, and its length."""

    depth: int
    reverse: bool
    length: int


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value and the operation that makes it.

    Attributes:
      aval: its shape and dtype.
      name: the primitive, or ``"argument"``, ``"constant"``; ``TURN``, the part of an array that one turn of a scan
        reads; ``TURNS``, the array that all turns make; ``JOIN``, one of several values (a carry of a loop, the result
        of a conditional).
      key: the equation that computes it; for a carry or an input of a loop that of the loop; else ``()``.
      place: that equation, if it is one operation; None for arguments, constants, and results of loops and
        conditionals.
      position: its number among the results, or among the arguments; -1 for a carry or an input of a loop.
      scans: the scans around it, outermost first.
      loops: the bodies of loops that it is computed in, outermost first.
      constant: the number or array of a constant, if the program has it.
      const: the same as an array of NumPy, if it is small.
      reads: the operands, each with its number among the operands or branches (the operand that chose the branch comes
        after those), and the turns of it that a turn of this value reads.
      reader: the first operation that reads it.
    """

    aval: Any
    name: str
    key: Key = ()
    place: EquationPlace | None = None
    position: int = 0
    scans: tuple[Scan, ...] = ()
    loops: tuple[Key, ...] = ()
    constant: Any = None
    const: Any = None
    reads: list[Read] = dataclasses.field(default_factory=list)
    reader: EquationPlace | None = None

    @property
    def inputs(self) -> list[Value]:
        """The operands; a constant of a loop is replaced by the value outside of the loop."""
        return [value.outer for _, value, _ in self.reads]

    @property
    def outer(self) -> Value:
        """The value outside of the loops that this is a constant of; other values themselves."""
        value = self
        while value.name == LOOP_CONSTANT:
            ((_, value, _),) = value.reads
        return value

    @property
    def at(self) -> EquationPlace:
        """The equation that computes it; an AssertionError where ``place`` is None."""
        assert self.place is not None
        return self.place

    @property
    def dtype(self) -> np.dtype:
        """Its dtype; ``"V"``, which is no number, for a random key or a token."""
        dtype = getattr(self.aval, "dtype", "V")
        return np.dtype("V" if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def is_float(self) -> bool:
        """Is the dtype floating?"""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def is_half(self) -> bool:
        """Is the dtype float16 or bfloat16?"""
        return self.dtype.name in ("float16", "bfloat16")

    @property
    def is_move(self) -> bool:
        """Are the elements those of an operand? A cast to the same dtype is a move."""
        if self.name == "top_k":
            return self.position == 0
        return self.name in MOVES or (self.is_cast and self.inputs[0].dtype == self.dtype)

    @property
    def is_cast(self) -> bool:
        """Is the value the result of a cast?"""
        return self.name == "convert_element_type"

    @property
    def is_computed(self) -> bool:
        """Does an equation compute the value? Then it may have a record."""
        return bool(self.key) and self.position >= 0

    def sources(self, turns: Turns) -> Iterator[tuple[int, Value, Turns]]:
        """Yield the operands that one turn reads: the number, the operand, and its turns."""
        for number, value, turns_read in self.reads:
            for other in turns_read(turns):
                yield number, value, other

    def order(self, turns: Turns = ()) -> tuple[float, ...]:
        """Return a key that sorts values as they are computed, arguments first."""
        numbers: list[float] = [*self.key, math.inf] if self.key else []
        for scan, turn in reversed(list(zip(self.scans, turns, strict=False))):
            numbers.insert(scan.depth, scan.length - 1 - turn if scan.reverse else turn)
        return tuple(numbers)


@dataclasses.dataclass(frozen=True)
class Values:
    """All values of a program in its order, its arguments and results, and its equations by their keys."""

    all: list[Value]
    arguments: list[Value]
    results: list[Value]
    places: dict[Key, EquationPlace]


def leading_to(values: Sequence[Value]) -> set[Value]:
    """Return these values and all that they are computed from."""
    sources, stack = set(values), list(values)
    while stack:
        for _, value, _ in stack.pop().reads:
            if value not in sources:
                sources.add(value)
                stack.append(value)
    return sources


def is_moved_value(value: Value) -> bool:
    """Return whether the elements of a value are elements of its operands."""
    return value.is_move


def is_move_or_cast(value: Value) -> bool:
    """Return whether a value is moved or cast, but not computed with."""
    return value.is_move or value.is_cast


def origins(value: Value, goes_on: Callable[[Value], bool] = is_moved_value) -> Iterator[Value]:
    """Yield the first values that ``goes_on`` rejects, on all ways back from a floating value.

    Only floating operands are followed: integers and booleans that choose elements are left out.
    """
    stack, visited = [value], {value}
    while stack:
        source = stack.pop()
        if not goes_on(source):
            yield source
            continue
        for operand in source.inputs:
            if operand.is_float and operand not in visited:
                visited.add(operand)
                stack.append(operand)


def made_of(values: Values, mark: Callable[[Value], int]) -> dict[Value, int]:
    """Return for each value the marks (bits) of itself and of all that it is computed from."""
    marks = {value: mark(value) for value in values.all}
    has_changed = True
    while has_changed:  # a carry is computed from itself
        has_changed = False
        for value in values.all:
            bits = marks[value]
            for operand in value.inputs:
                bits |= marks.get(operand, 0)
            if bits != marks[value]:
                marks[value] = bits
                has_changed = True
    return marks


def constant(value: Value) -> Any:
    """Return the elements of a constant, before it was moved or cast; None for other values."""
    while value.const is None and is_move_or_cast(value) and len(value.reads) == 1:
        (value,) = value.inputs
    return value.const


def is_zero(value: Value) -> bool:
    """Return whether a value is a constant of zeros."""
    numbers = constant(value)
    return numbers is not None and not np.any(numbers)


def computed_at(value: Value) -> EquationPlace | tuple[str, str]:
    """Return the equation that computes a value; for an argument the line that reads it.

    The result of a loop or a branch is computed within it.
    """
    visited = {value}
    while value.name in (JOIN, TURN, TURNS) and value.inputs[-1] not in visited:
        value = value.inputs[-1]
        visited.add(value)
    return value.place or ("", value.reader.source if value.reader else "")
