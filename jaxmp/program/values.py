"""The values and equations of a program, each with its operands.

The values in the bodies of loops, conditionals and calls are included. A ``Value`` in a loop body represents
all iterations.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from jaxmp._internals.jax.sources import Names, user_source_of
from jaxmp.base.graphs import reachable
from jaxmp.program.equations import Array, Bodies, elements_of, primitive_of
from jaxmp.program.primitives import CAST, MOVES, Trait, with_trait
from jaxmp.program.scopes import path_in

Key = tuple[int, ...]
"""The position of an equation in a program. For example, ``(2, 0, 3)`` is equation 3 in body 0 of equation 2."""
Read = tuple[int, "Value"]
"""An operand of a value: a number (see ``Value.reads``), and the operand."""

# The names of values that no primitive computes. The attribute `name` of `Value` explains them.
ARGUMENT, CONSTANT, LOOP_CONSTANT = "argument", "constant", "loop constant"
ELEMENT, STACKED = "element", "stacked"
PART, WHOLE = "part", "whole"
CARRY, LAST_CARRY, BRANCHES = "carry", "last carry", "branches"
JOINS = frozenset({CARRY, LAST_CARRY, BRANCHES})
"""Names of values that are one of several values."""
_SORTS = with_trait(Trait.SORTS)
_ONE_BY_ONE = with_trait(Trait.IDENTITY)
"""Operations whose nth result depends only on the nth operand."""
_MOVES_OF_BODIES = frozenset({ELEMENT, STACKED, PART, WHOLE})
"""Names of values that are moved at the border of a body."""


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class Equation:
    """An equation and its place in the program.

    Attributes:
      key: the position of the equation; keys sort in program order.
      eqn: the equation of the jaxpr.
      names: the scopes around the equation, including jaxmp's own scopes (``"jaxmp.…"``).
      phase: ``"forward"``, ``"backward"`` (transposed by ``jax.grad``, or recomputed for the transpose) or ``"update"``
        (computed from gradients).
      lengths: the number of iterations of each loop around the equation, outermost first; None for a while loop, whose
        number of iterations is unknown before the run.
      bodies: the bodies of the equation; None for a single operation.
      around: the equation around this equation, or None.
      operands: the operands.
      results: the results.
      inside: the bodies, with their values. Empty for an equation that counts as one operation.
    """

    key: Key
    eqn: JaxprEqn
    names: Names
    phase: str
    lengths: tuple[int | None, ...]
    bodies: Bodies | None
    around: Equation | None
    operands: Sequence[Value]
    results: Sequence[Value] = ()
    inside: Sequence[Body] = ()
    _source: str | None = None

    def __repr__(self) -> str:
        return f"Equation({self.name} {self.key})"  # without the operands, which have equations too

    @property
    def name(self) -> str:
        """Return the name of the primitive."""
        return primitive_of(self.eqn)

    @property
    def path(self) -> str:
        """Return the names of modules and scopes around the equation, joined by ``/``."""
        return path_in(self.names)

    @property
    def count(self) -> int | None:
        """Return how often the equation runs if each branch is taken; None inside a while loop."""
        known = [length for length in self.lengths if length is not None]
        return math.prod(known) if len(known) == len(self.lengths) else None

    @property
    def is_loop(self) -> bool:
        """Return whether the equation is a loop whose body is read."""
        return bool(self.inside) and self.bodies is not None and self.bodies.is_loop

    @property
    def has_backward_rule(self) -> bool:
        """Return whether the equation has a rule for cotangents (``jax.custom_vjp``)."""
        return self.bodies is not None and self.bodies.has_backward_rule

    @property
    def carries(self) -> Sequence[Value]:
        """Return the carries that a loop's body reads; empty for other equations.

        A carry that no iteration changes is a loop constant.
        """
        if self.bodies is None or not self.is_loop:
            return ()
        first = self.bodies.start - self.bodies.consts
        return self.inside[-1].inputs[first : first + self.bodies.carry]

    @property
    def source(self) -> str:
        """Return the user's file and line, such as ``"package/module.py:12"``.

        If JAX does not know this line, the source is the line of the equation around this equation. The source is empty
        if that line is unknown too.
        """
        if self._source is None:
            self._source = user_source_of(self.eqn) or (self.around.source if self.around else "")
        return self._source


class Body(NamedTuple):
    """A jaxpr and its values.

    Attributes:
      jaxpr: an open jaxpr.
      consts: the constants of the jaxpr.
      constants: their values.
      inputs: the values of the arguments.
      equations: the equations.
      results: the values of the results.
    """

    jaxpr: Jaxpr
    consts: Sequence[Array]
    constants: Sequence[Value]
    inputs: Sequence[Value]
    equations: Sequence[Equation]
    results: Sequence[Value]


class Scan(NamedTuple):
    """A scan around a value.

    Attributes:
      depth: the length of the scan's key.
      reverse: whether the scan runs from the last element to the first.
      length: the number of iterations.
    """

    depth: int
    reverse: bool
    length: int


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class Value:
    """A value and the operation that computes it.

    Attributes:
      aval: its shape and dtype.
      name: the primitive, or one of these names:

        - ``ARGUMENT`` and ``CONSTANT`` of the program
        - ``LOOP_CONSTANT``: a value from outside a loop that the body reads
        - ``ELEMENT``: the element of a scanned array that one iteration reads
        - ``STACKED``: the array that all iterations stack
        - ``PART``: the part of an array that one device reads in a ``jax.shard_map``; ``WHOLE``: the array of all parts
        - ``CARRY`` in a loop, the ``LAST_CARRY``, and the result of a conditional, ``BRANCHES``, are one of several
          values
      key: the key of the equation that computes the value; for a carry or an input in a loop body, the key of the loop;
        for arguments and constants, ``()``.
      equation: the equation, if it is a single operation. None for all values with one of the names above.
      position: the position among the results or the arguments; -1 for a carry or an input in a loop body.
      scans: the scans around the value, outermost first.
      loops: the keys of the loop bodies around the value, outermost first.
      constant: the number or array of a constant; None if it is unknown.
      reader: the first operation that reads the value.
      same: the first value that is equal, because equal operations compute both from equal operands.
    """

    aval: jax.core.AbstractValue
    name: str
    key: Key = ()
    equation: Equation | None = None
    position: int = 0
    scans: tuple[Scan, ...] = ()
    loops: tuple[Key, ...] = ()
    constant: Array | None = None
    _reads: list[Read] | None = None
    reader: Equation | None = None
    same: Value = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.same = self

    @property
    def reads(self) -> list[Read]:
        """Return the operands.

        The number of an operand is its position. For the result of a conditional, the number is that of the branch, and
        the index of the conditional comes after all branches. For a carry, 0 is the initial carry, and 1 is the carry
        from an iteration.
        """
        if self._reads is None:
            operands = self.equation.operands if self.equation else ()
            self._reads = list(enumerate(operands))
            if self.name in _ONE_BY_ONE:
                self._reads = self._reads[self.position : self.position + 1]
        return self._reads

    def __repr__(self) -> str:
        return f"Value({self.name} {self.key}[{self.position}])"  # without the operands, which have operands too

    @property
    def inputs(self) -> list[Value]:
        """Return the operands.

        A loop constant is replaced by the value outside of the loop.
        """
        return [value.outer for _, value in self.reads]

    @property
    def outer(self) -> Value:
        """Return the value outside of all loops for a loop constant, else ``self``."""
        value = self
        while value.name == LOOP_CONSTANT:
            ((_, value),) = value.reads
        return value

    @property
    def at(self) -> Equation:
        """Return the equation that computes the value.

        Raises:
          AssertionError: ``equation`` is None.
        """
        assert self.equation is not None
        return self.equation

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
        return (
            self.name in MOVES or self.name in _MOVES_OF_BODIES or (self.is_cast and self.inputs[0].dtype == self.dtype)
        )

    @property
    def is_cast(self) -> bool:
        """Return whether the value is the result of a cast."""
        return self.name == CAST

    @property
    def is_join(self) -> bool:
        """Return whether the value is a carry, or the result of a conditional."""
        return self.name in JOINS

    @property
    def is_computed(self) -> bool:
        """Return whether the value is a result of an equation.

        Arguments, constants, and the carries and inputs in a loop body are not results.
        """
        return bool(self.key) and self.position >= 0


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Program:
    """The values of a program, and its equations.

    Attributes:
      body: the program as a body.
      values: all values in program order, without literals and loop constants. A carry comes before the values of the
        loop's body.
      equations: the equations by their keys, in program order. An equation with bodies comes before the equations in
        its bodies.
    """

    body: Body
    values: list[Value]
    equations: dict[Key, Equation]

    @property
    def arguments(self) -> Sequence[Value]:
        """Return the arguments."""
        return self.body.inputs

    @property
    def results(self) -> Sequence[Value]:
        """Return the results."""
        return self.body.results


def leading_to(values: Sequence[Value]) -> set[Value]:
    """Return ``values`` and all values on which they depend."""
    return set(reachable(values, lambda value: [operand for _, operand in value.reads]))


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


def depending_on(sources: Iterable[Value], values: Iterable[Value]) -> set[Value]:
    """Return ``sources`` and all of ``values`` that depend on them."""
    readers = collections.defaultdict[Value, list[Value]](list)
    for value in values:
        for operand in value.inputs:
            readers[operand].append(value)
    return set(reachable(sources, lambda value: readers.get(value, ())))


def constant(value: Value) -> np.ndarray | None:
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


def computed_at(value: Value) -> Equation | tuple[str, str]:
    """Return the equation that computes a value.

    For an argument, return an empty path and the source line that reads the argument. For the result of a loop or a
    conditional, return the equation in the body that computes it.
    """
    visited = {value}
    while (value.is_join or value.name in (ELEMENT, STACKED, PART, WHOLE)) and value.inputs[-1] not in visited:
        value = value.inputs[-1]
        visited.add(value)
    return value.equation or ("", value.reader.source if value.reader else "")
