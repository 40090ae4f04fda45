"""Find the roundings in a traced program.

A site is a rounding: of the result of a cast or of an operation in the narrow dtype, or of the operands that such an
operation reads. Moves of data, and casts of values that the narrow dtype represents, round nothing.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmp._internals.jax.sources import origin_of
from jaxmp.base.dtypes import is_narrow
from jaxmp.inspect._switched.operations import CASTS, Operation, Operations, Part
from jaxmp.program.primitives import PRODUCTS, Class, Trait, classify, with_trait
from jaxmp.program.values import (
    CONSTANT,
    STACKED,
    Equation,
    Key,
    Program,
    Value,
    computed_at,
    is_move_or_cast,
    leading_to,
    origins,
)

_KEEPS_DIGITS = with_trait(Trait.KEEPS_MAGNITUDE) | {"sign"}
_DRAWS = ("random_", "rng_")

OPERANDS = -1
"""The position of a site at which the operands of an equation are rounded."""


class Pair:
    """A wide dtype in which a program computes, and a narrow one to which its values are rounded.

    A program in half precision rounds by itself. Then ``wide`` is None, and the sites are its values that are narrower
    than float32. Otherwise, the sites are the values in ``wide``.
    """

    def __init__(self, wide: np.dtype | None = None, narrow: np.dtype | None = None) -> None:
        self.wide, self.narrow = wide, narrow

    def rounded_to(self, dtype: np.dtype) -> np.dtype | None:
        """Return the dtype to which values of a dtype are rounded; None if they are not."""
        if self.wide is None:
            return dtype if is_narrow(dtype) else None
        return self.narrow if dtype == self.wide else None


HALF = Pair()
"""The pair of a program that computes in half precision."""
FLOAT64 = Pair(np.dtype(np.float64), np.dtype(np.float32))
"""The pair of a program in float64."""


@dataclass(frozen=True, eq=False)
class Site:
    """A rounding in a program.

    Attributes:
      key: the key of the equation at which the program rounds.
      position: the position of the result that is rounded; ``OPERANDS`` if the operands are.
      dtype: the dtype to which the value is rounded.
      phase: the phase in which the program rounds.
      part: identifies the rounding in other traces of the function.
      equation: the operation of the forward pass to which the rounding belongs. For a sum of cotangents, it is the
        operation that computes the value, because the sum is float32 if the value is. For an argument, it is the
        operation that reads it.
    """

    key: Key
    position: int
    dtype: np.dtype
    phase: str
    part: Part
    equation: Equation

    @property
    def is_operand_of_product(self) -> bool:
        """Return whether the rounding is that of a product's operand."""
        return self.part.is_operand and self.is_of_product

    @property
    def is_of_product(self) -> bool:
        """Return whether the rounding is that of a product's operand or result."""
        return self.equation.name in PRODUCTS and self.part.sum_shape is None


def has_float8(program: Program) -> bool:
    """Return whether a program has values in float8, or in a narrower floating dtype."""
    return any(is_narrow(value.dtype) and value.dtype.itemsize == 1 for value in program.values)


def sites_of(program: Program, operations: Operations, pair: Pair = HALF) -> list[Site]:
    """Return the roundings on which the results of a program depend, in program order."""
    leading = leading_to(program.results)
    readers = _readers(program.values)
    summed = _summed_values(program)
    sites = []
    for value in program.values:
        if value not in leading or value.equation is None or not value.is_computed:
            continue
        dtype = pair.rounded_to(value.dtype)
        if dtype is None or value.name.startswith(_DRAWS) or _is_exact(value, dtype):
            continue
        owner = _owner(value.at, operations, summed)
        if owner.has_only_casts and not _is_read(value, readers):
            owner = operations.get(value.inputs[0]) or owner
        part = operations.part_of_result(value.at)
        sites.append(Site(value.key, value.position, dtype, value.at.phase, part, owner.equation))
    for equation in program.equations.values():
        is_operation = equation.bodies is None and equation.name not in CASTS and not equation.results[0].is_move
        if not is_operation or leading.isdisjoint(equation.results):
            continue
        read = [
            value for value in equation.operands if not _is_computed_by(operations[equation.key], value, operations)
        ]
        dtypes = [dtype for operand in read if (dtype := pair.rounded_to(operand.dtype)) is not None]
        if dtypes:
            part = operations.part_of_operands(equation)
            owner = _owner(equation, operations, summed)
            sites.append(Site(equation.key, OPERANDS, dtypes[0], equation.phase, part, owner.equation))
    return sorted(sites, key=lambda site: (site.key, site.position))


def _is_computed_by(operation: Operation, value: Value, operations: Operations) -> bool:
    """Return whether an operation, or its backward pass, computes a value and does not only move it."""
    return all(operations.get(source) is operation for source in origins(value, lambda source: source.is_move))


_Reader = tuple[int, str, tuple[int, ...]]
"""The origin and the scope of an operation, and the shape of a value that it reads."""


def _summed_values(program: Program) -> dict[_Reader, Value]:
    """Return the values of the forward pass that several operations read, by each reader.

    The derivative of such a value is a sum of cotangents, which JAX gives the origin and the scope of a reader.
    """
    readers = collections.defaultdict[Value, list[Equation]](list)
    for equation in program.equations.values():
        if equation.phase == "forward":
            for operand in dict.fromkeys(equation.operands):
                readers[operand].append(equation)
    summed: dict[_Reader, Value] = {}
    for value, equations in readers.items():
        if value.is_float and len(equations) > 1:
            for equation in equations:
                summed.setdefault((origin_of(equation.eqn), equation.path, value.shape), value)
    return summed


def _owner(equation: Equation, operations: Operations, summed: Mapping[_Reader, Value]) -> Operation:
    """Return the operation to which the roundings of an equation belong; see :class:`Site`."""
    read = None
    if operations.is_sum(equation):
        read = summed.get((origin_of(equation.eqn), equation.path, equation.results[0].shape))
    while read is not None and is_move_or_cast(read) and len(read.inputs) == 1:
        (read,) = read.inputs
    producer = None if read is None else computed_at(read)
    if isinstance(producer, Equation) and producer.bodies is None:
        return operations[producer.key]
    return operations[equation.key]


def _is_exact(value: Value, dtype: np.dtype) -> bool:
    """Return whether a value has no more digits than its operands, or than its dtype has."""
    if value.name in CASTS:
        return is_representable(value.inputs[0], dtype)
    if value.name == "reduce_precision":  # of a value that is half already
        return is_narrow(value.inputs[0].dtype)
    return _has_digits_of_operands(value)


def _has_digits_of_operands(value: Value) -> bool:
    """Return whether a result has no more digits than its operands."""
    return value.is_move or value.name in _KEEPS_DIGITS or classify(value.name) is Class.CLEAR


def is_representable(value: Value, dtype: np.dtype) -> bool:
    """Return whether a dtype represents all elements of a value, by the way it is computed."""

    def is_moved(source: Value) -> bool:
        is_widened = source.name in CASTS and source.dtype.itemsize >= dtype.itemsize
        return source.dtype != dtype and (is_widened or source.is_join or _has_digits_of_operands(source))

    return all(
        source.dtype == dtype or _is_representable_constant(source, dtype) for source in origins(value, is_moved)
    )


def _is_representable_constant(value: Value, dtype: np.dtype) -> bool:
    if value.name != CONSTANT or value.constant is None or np.ndim(value.constant):
        return False
    number = np.float64(value.constant)
    return bool(number.astype(dtype).astype(np.float64) == number)


def _readers(values: Sequence[Value]) -> Mapping[Value, list[Value]]:
    readers = collections.defaultdict[Value, list[Value]](list)
    for value in values:
        for operand in value.inputs:
            readers[operand].append(value)
    return readers


def _is_read(value: Value, readers: Mapping[Value, list[Value]]) -> bool:
    """Return whether an operation reads a value, directly or after moves of data and casts."""
    stack, visited = [value], {value}
    while stack:
        for reader in readers.get(stack.pop(), ()):
            if reader in visited:
                continue
            visited.add(reader)
            if reader.is_join or reader.name == STACKED:
                continue
            if is_move_or_cast(reader):
                stack.append(reader)
            elif reader.equation is not None:
                return True
    return False
