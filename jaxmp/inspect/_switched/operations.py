"""The operations of a program, with the equations that JAX makes from each of them.

An operation is an operation of the function, such as one addition. JAX makes equations of the backward pass from it,
and autocast makes casts for it. All of them have the traceback and the scopes of the operation.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from jaxmp._internals.jax.sources import origin_of
from jaxmp.base.dtypes import is_narrow
from jaxmp.program.primitives import CAST, PRODUCTS
from jaxmp.program.values import Equation, Key, Program, Value

CASTS = frozenset({CAST, "cast_repeated"})
_SUM_OF_COTANGENTS = "add_any"


class Part(NamedTuple):
    """The roundings of an operation that happen or not under each policy.

    Two traces of a function under different policies have the same parts.

    Attributes:
      operation: a name of the operation: its path, line, primitive and shape, and its number among equal operations.
      is_backward: whether the roundings are outside of the forward pass.
      is_operand: whether they are of values that the operation reads, not of its results.
      is_inner: whether they are of results that only other equations of the operation read.
      sum_shape: the shape of a sum of cotangents of a value that the operation reads; None for other roundings.
    """

    operation: Hashable
    is_backward: bool
    is_operand: bool
    is_inner: bool
    sum_shape: tuple[int, ...] | None


class Operation(NamedTuple):
    """An operation of a program.

    Attributes:
      name: see :class:`Part`.
      equation: the equation of the forward pass. Without one, the first equation that JAX made.
    """

    name: Hashable
    equation: Equation

    @property
    def has_only_casts(self) -> bool:
        """Return whether all equations of the operation are casts."""
        return self.equation.name in CASTS


class Operations:
    """The operations of a program, by the keys of their equations. Equations with bodies have none."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._by_key: dict[Key, Operation] = {}
        groups = collections.defaultdict[Hashable, list[Equation]](list)
        for equation in program.equations.values():
            if equation.bodies is None:
                groups[origin_of(equation.eqn), equation.path].append(equation)
        numbers = collections.Counter[Hashable]()
        for equations in groups.values():
            for equations_of_one in _single_operations(equations):
                first = min(equations_of_one, key=_rank)
                kind = first.path, first.source, first.name, first.results[0].shape
                operation = Operation((*kind, numbers[kind]), first)
                numbers[kind] += 1
                self._by_key |= dict.fromkeys((equation.key for equation in equations_of_one), operation)
        self._casts_of_operands, self._read_inside, self._read_outside = set[Key](), set[Key](), set[Key]()
        for key in self._by_key:
            for operand in program.equations[key].operands:
                is_inside = self.get(operand) is self._by_key[key]
                (self._read_inside if is_inside else self._read_outside).add(operand.key)
                if self.is_cast_for(operand, key):
                    self._casts_of_operands.add(operand.key)

    def __getitem__(self, key: Key) -> Operation:
        return self._by_key[key]

    def get(self, value: Value) -> Operation | None:
        """Return the operation that computes a value; None for an argument, or a value of a loop."""
        return self._by_key.get(value.key) if value.equation is not None else None

    def is_cast_for(self, operand: Value, key: Key) -> bool:
        """Return whether an operand of an equation was cast for its operation."""
        is_cast = operand.name in CASTS and self.program.equations[key].name not in CASTS
        return is_cast and self._by_key[operand.key] is self._by_key[key]

    def part_of_result(self, equation: Equation) -> Part:
        """Return the part to which a rounded result of an equation belongs."""
        is_inner = equation.key in self._read_inside and equation.key not in self._read_outside
        return self._part(equation, is_operand=equation.key in self._casts_of_operands, is_inner=is_inner)

    def part_of_operands(self, equation: Equation) -> Part:
        """Return the part to which the rounded operands of an equation belong."""
        return self._part(equation, is_operand=True, is_inner=False)

    def is_sum(self, equation: Equation) -> bool:
        """Return whether an equation adds the cotangents of a value that several operations read.

        The derivative of one operation, such as tanh, may also add cotangents.
        """
        operation = self[equation.key]
        is_inside = all(self.get(operand) is operation for operand in equation.operands)
        return equation.name == _SUM_OF_COTANGENTS and not is_inside

    def _part(self, equation: Equation, *, is_operand: bool, is_inner: bool) -> Part:
        shape = equation.results[0].shape if self.is_sum(equation) else None
        is_backward = equation.phase != "forward"
        return Part(self[equation.key].name, is_backward, is_operand, is_inner and not is_operand, shape)

    def half_parts(self) -> set[Part]:
        """Return the parts that are half."""
        parts = set[Part]()
        for key, operation in self._by_key.items():
            equation = self.program.equations[key]
            is_cast = equation.name in CASTS
            # In the forward pass, a cast of a result is for an operation that reads it.
            is_of_others = is_cast and equation.phase == "forward" and not operation.has_only_casts
            if not is_of_others and any(is_narrow(value.dtype) for value in equation.results):
                parts.add(self.part_of_result(equation))
            if not is_cast and any(is_narrow(operand.dtype) for operand in equation.operands):
                parts.add(self.part_of_operands(equation))
        return parts

    def names(self) -> set[Hashable]:
        """Return the names of all operations."""
        return {operation.name for operation in self._by_key.values()}


def _single_operations(equations: Sequence[Equation]) -> Iterable[list[Equation]]:
    """Split equations with one traceback into those of single operations.

    Usually they are one operation. The equations of a function with a derivative rule of its own, such as a loss or an
    attention, all have the traceback of its call. If one of them is a product, each is an operation of its own, with
    the casts that it reads.
    """
    forward = {equation.name for equation in equations if equation.phase == "forward" and not _moves_or_casts(equation)}
    if len(forward) < 2 or forward.isdisjoint(PRODUCTS):
        return [list(equations)]
    by_reader: dict[Key, list[Equation]] = {}
    reader_of: dict[Key, Key] = {}
    for equation in reversed(equations):
        reader = equation.key
        if equation.name in CASTS:
            reader = reader_of.get(equation.key, reader)
        by_reader.setdefault(reader, []).append(equation)
        for operand in equation.operands:
            reader_of[operand.key] = reader
    return reversed(by_reader.values())


def _moves_or_casts(equation: Equation) -> bool:
    return equation.name in CASTS or equation.results[0].is_move


def _rank(equation: Equation) -> tuple[bool, bool, bool]:
    """Return a key that sorts equations: those of the forward pass come first, and moves and casts last."""
    return equation.name in CASTS, equation.results[0].is_move, equation.phase != "forward"
