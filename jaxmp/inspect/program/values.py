"""The values of a program, each with its operation and its operands.

The values in the bodies of loops, conditionals and calls are included. A ``Value`` in a loop body represents
all iterations. So each operand comes with a map that tells which iterations of the operand are read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.inspect.program.equation_places import EquationPlace, Key
from jaxmp.program.equations import elements_of
from jaxmp.program.primitives import COMBINES, PICKS, Trait, with_trait

Turns = tuple[int, ...]
"""The iteration of each scan around a value, as an index into the scan's inputs, outermost first.

A while loop has no index. It counts as one iteration, because the number of its iterations is unknown.
"""
TurnMap = Callable[[Turns], list[Turns]]
"""A function that takes an iteration of a value, and returns the iterations of an operand that the value reads."""
Read = tuple[int, "Value", TurnMap]
"""An operand of a value: a number (see ``Value.reads``), the operand, and the map of iterations."""
# The names of values that no primitive computes. The attribute `name` of `Value` explains them.
TURN, TURNS, JOIN, LOOP_CONSTANT = "turn", "turns", "join", "loop constant"
_SORTS = with_trait(Trait.SORTS)
MOVES = PICKS | COMBINES | with_trait(Trait.EXTREME, Trait.POOLS) | _SORTS | {TURN, TURNS}
"""Moves: operations whose results contain only elements of the operands; for ``top_k``, only the first result."""


class Scan(NamedTuple):
    """A scan around a value.

    Attributes:
      depth: the position of the iteration in the sort key that :meth:`Value.order` returns.
      reverse: whether the scan runs from the last element to the first.
      length: the number of iterations.
    """

    depth: int
    reverse: bool
    length: int


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value and the operation that computes it.

    Attributes:
      aval: its shape and dtype.
      name: the primitive, ``"argument"``, ``"constant"``, or one of these names: ``TURN`` is the element of a scanned
        array that one iteration reads. ``TURNS`` is the array that all iterations stack. ``JOIN`` is one of several
        values: a carry in a loop, the last carry, or the result of a conditional. ``LOOP_CONSTANT`` is a value from
        outside a loop that the body reads.
      key: the key of the equation that computes the value; for a carry or an input in a loop body, the key of the loop;
        for arguments and constants, ``()``.
      place: the equation, if it is a single operation. None for arguments and constants, and for the carries, inputs
        and results of loops and conditionals.
      position: the position among the results or the arguments; -1 for a carry or an input in a loop body.
      scans: the scans around the value, outermost first.
      loops: the keys of the loop bodies around the value, outermost first.
      constant: the number or array of a constant; None if it is unknown.
      reads: the operands. The number of an operand is its position. For the result of a conditional, the number is that
        of the branch, and the index of the conditional comes after all branches. For a carry, 0 is the initial carry,
        and 1 is the carry from an iteration.
      reader: the first operation that reads the value.
    """

    aval: Any
    name: str
    key: Key = ()
    place: EquationPlace | None = None
    position: int = 0
    scans: tuple[Scan, ...] = ()
    loops: tuple[Key, ...] = ()
    constant: Any = None
    reads: list[Read] = dataclasses.field(default_factory=list)
    reader: EquationPlace | None = None

    @property
    def inputs(self) -> list[Value]:
        """Return the operands.

        A loop constant is replaced by the value outside of the loop.
        """
        return [value.outer for _, value, _ in self.reads]

    @property
    def outer(self) -> Value:
        """Return the value outside of all loops for a loop constant, else ``self``."""
        value = self
        while value.name == LOOP_CONSTANT:
            ((_, value, _),) = value.reads
        return value

    @property
    def at(self) -> EquationPlace:
        """Return the equation that computes the value.

        Raises:
          AssertionError: ``place`` is None.
        """
        assert self.place is not None
        return self.place

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of the value; ``"V"`` for a random key or a token."""
        dtype = getattr(self.aval, "dtype", "V")
        return np.dtype("V" if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the value."""
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def is_float(self) -> bool:
        """Return whether the dtype is floating."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def is_half(self) -> bool:
        """Return whether the dtype is float16 or bfloat16."""
        return self.dtype.name in ("float16", "bfloat16")

    @property
    def is_move(self) -> bool:
        """Return whether the value contains only elements of its operands.

        A cast to the same dtype is a move.
        """
        if self.name in _SORTS and self.name != "sort":  # the second result has indices
            return self.position == 0
        return self.name in MOVES or (self.is_cast and self.inputs[0].dtype == self.dtype)

    @property
    def is_cast(self) -> bool:
        """Return whether the value is the result of a cast."""
        return self.name == "convert_element_type"

    @property
    def is_computed(self) -> bool:
        """Return whether the value is a result of an equation.

        Arguments, constants, and the carries and inputs in a loop body are not results.
        """
        return bool(self.key) and self.position >= 0

    def sources(self, turns: Turns) -> Iterator[tuple[int, Value, Turns]]:
        """Yield the operands that an iteration of the value reads.

        Each item is the number of the operand, the operand, and the operand's iteration.
        """
        for number, value, turns_read in self.reads:
            for other in turns_read(turns):
                yield number, value, other

    def order(self, turns: Turns = ()) -> tuple[float, ...]:
        """Return a key that sorts values by time of computation, arguments first."""
        numbers: list[float] = [*self.key, math.inf] if self.key else []
        for scan, turn in reversed(list(zip(self.scans, turns, strict=False))):
            numbers.insert(scan.depth, scan.length - 1 - turn if scan.reverse else turn)
        return tuple(numbers)


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of a program, and its equations.

    Attributes:
      all: all values, in program order.
      arguments: the arguments.
      results: the results.
      places: the equations by their keys.
    """

    all: list[Value]
    arguments: list[Value]
    results: list[Value]
    places: dict[Key, EquationPlace]


def leading_to(values: Sequence[Value]) -> set[Value]:
    """Return ``values`` and all values on which they depend."""
    sources, stack = set(values), list(values)
    while stack:
        for _, value, _ in stack.pop().reads:
            if value not in sources:
                sources.add(value)
                stack.append(value)
    return sources


def is_move_or_cast(value: Value) -> bool:
    """Return whether a value is the result of a move or a cast."""
    return value.is_move or value.is_cast


def origins(value: Value, goes_on: Callable[[Value], bool]) -> Iterator[Value]:
    """Search back from a value, and yield the values at which the search stops.

    From each value that ``goes_on`` accepts, the search goes to the floating operands. Other operands, such as indices
    and conditions, are left out.
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
    """Return for each value its marks and those of all values on which it depends.

    Marks are bits of an integer. The function ``mark`` returns the marks of a value without those of its operands.
    """
    marks = {value: mark(value) for value in values.all}
    has_changed = True
    while has_changed:  # repeated, because a carry depends on itself
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
    """Return the elements of a constant as a NumPy array.

    The elements are those before its moves and casts. Return None for a value that is large or not constant.
    """
    while is_move_or_cast(value) and len(value.reads) == 1:
        (value,) = value.inputs
    return None if value.constant is None else elements_of(value.constant)


def is_zero(value: Value) -> bool:
    """Return whether a value is a constant of zeros."""
    numbers = constant(value)
    return numbers is not None and not np.any(numbers)


def computed_at(value: Value) -> EquationPlace | tuple[str, str]:
    """Return the equation that computes a value.

    For an argument, return an empty path and the source line that reads the argument. For the result of a loop or a
    conditional, return the equation in the body that computes it.
    """
    visited = {value}
    while value.name in (JOIN, TURN, TURNS) and value.inputs[-1] not in visited:
        value = value.inputs[-1]
        visited.add(value)
    return value.place or ("", value.reader.source if value.reader else "")
