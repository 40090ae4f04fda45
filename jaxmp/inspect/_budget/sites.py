"""Find the roundings to half precision (float16 or bfloat16) in a traced program.

A site is a value that the program rounds: the result of a cast, or of an operation in half precision. Moves of data,
and casts of values that half precision represents, round nothing.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmp._internals.jax.sources import origin_of
from jaxmp.base.dtypes import is_narrow
from jaxmp.program.primitives import CAST, PRODUCTS, Class, Trait, classify, with_trait
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
CASTS = frozenset({CAST, "cast_repeated"})
SUM_OF_COTANGENTS = "add_any"
_DRAWS = ("random_", "rng_")
Place = tuple[Key, int]
"""The key of an equation, and the position of one of its results."""


@dataclass(frozen=True, eq=False)
class Site:
    """A rounding in a program.

    Attributes:
      place: the equation and the result that is rounded.
      dtype: the dtype to which the value is rounded.
      operation: the primitive; for a cast, the operation that reads its result.
      is_operand: whether the value is cast for the operation that reads it.
      is_float32: whether the program does not round the value, but keeps it in float32.
      phase: the phase in which the program rounds.
      equation: the equation to whose line and scope the rounding belongs, usually the one that computes the value. For
        the cast of a loop's carry, it is the equation before the cast, because the cast has the line of the whole loop.
        For a sum of cotangents, it is the equation that computes the value whose cotangents are summed, or for an
        argument the operation that reads it.
    """

    place: Place
    dtype: np.dtype
    operation: str
    is_operand: bool
    is_float32: bool
    phase: str
    equation: Equation

    @property
    def rounded_operation(self) -> str:
        """Return the operation as the user reads it, such as ``"exp"`` or ``"operand of dot_general"``."""
        return f"operand of {self.operation}" if self.is_operand else self.operation

    @property
    def operation_in_float32(self) -> str:
        """Return the operation that must be float32 so that the rounding does not happen.

        The operands of an operation are float32 with it. A sum of cotangents is float32 if the value is.
        """
        return self.equation.name if self.operation == SUM_OF_COTANGENTS else self.operation


def has_float8(program: Program) -> bool:
    """Return whether a program has values in float8, or in a narrower floating dtype."""
    return any(is_narrow(value.dtype) and value.dtype.itemsize == 1 for value in program.values)


def sites_of(program: Program, float32_as: np.dtype | None = None) -> list[Site]:
    """Return the roundings on which the results of a program depend, in program order.

    Args:
      program: the program.
      float32_as: the half dtype to which float32 results count as rounded; None to leave them out.
    """
    leading = leading_to(program.results)
    readers = _readers(program.values)
    carried = _results_of_bodies(program)
    summed = _summed_values(program)
    sites = []
    for value in program.values:
        if value not in leading or value.equation is None or not value.is_computed:
            continue
        dtype = _rounded_to(value, float32_as)
        if dtype is None:
            continue
        computed, operation = value, value.name
        if value.name in CASTS:
            operation = _reading_operation(value, readers, passes_joins=value not in carried)
            if operation == CAST and value.inputs[0].equation is not None:
                computed = value.inputs[0]
                operation = computed.name
        is_operand = computed is value and operation != value.name
        place, is_float32 = (value.key, value.position), not is_narrow(value.dtype)
        equation = _owner_of_sum(value, summed) if operation == SUM_OF_COTANGENTS else computed.at
        phase = value.at.phase
        sites.append(Site(place, dtype, operation, is_operand, is_float32, phase, equation))
    return sorted(sites, key=lambda site: site.place)


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


def _owner_of_sum(value: Value, summed: Mapping[_Reader, Value]) -> Equation:
    """Return the equation to which a sum of cotangents belongs.

    It is the equation that computes the value whose cotangents are summed. An argument has none, so the sum belongs to
    the operation that reads the argument.
    """
    read = summed.get((origin_of(value.at.eqn), value.at.path, value.shape))
    while read is not None and is_move_or_cast(read) and len(read.inputs) == 1:
        (read,) = read.inputs
    owner = None if read is None else computed_at(read)
    return owner if isinstance(owner, Equation) else value.at


def _results_of_bodies(program: Program) -> set[Value]:
    """Return the results of the bodies of loops and conditionals."""
    results = set[Value]()
    for equation in program.equations.values():
        if equation.bodies is not None and not equation.bodies.is_call:
            results.update(result for body in equation.inside for result in body.results)
    return results


def _rounded_to(value: Value, float32_as: np.dtype | None) -> np.dtype | None:
    """Return the dtype to which a value is rounded; None if it is exact, or not rounded."""
    if value.name.startswith(_DRAWS) or _is_exact(value):
        return None
    if is_narrow(value.dtype):
        return value.dtype
    is_rounded = value.dtype == np.float32 and value.name not in CASTS
    return float32_as if is_rounded else None


def _is_exact(value: Value) -> bool:
    """Return whether a value has no more digits than its operands, or than its dtype has."""
    if value.name in CASTS:
        return is_narrow(value.dtype) and is_representable(value.inputs[0], value.dtype)
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
    number = np.float32(value.constant)
    return bool(number.astype(dtype).astype(np.float32) == number)


def _readers(values: Sequence[Value]) -> Mapping[Value, list[Value]]:
    readers = collections.defaultdict[Value, list[Value]](list)
    for value in values:
        for operand in value.inputs:
            readers[operand].append(value)
    return readers


def _reading_operation(value: Value, readers: Mapping[Value, list[Value]], *, passes_joins: bool) -> str:
    """Return the operation that reads a cast value, a product first; the name of a cast if nothing reads it."""
    names = list(dict.fromkeys(reader.name for reader in _values_behind(value, readers, passes_joins=passes_joins)))
    products = [name for name in names if name in PRODUCTS]
    return (products or names or [CAST])[0]


def _values_behind(
    value: Value, readers: Mapping[Value, list[Value]], *, passes_joins: bool = False
) -> Iterator[Value]:
    """Yield the results of the operations that read a value, directly or after moves of data and casts.

    ``passes_joins`` says whether the carries of loops and the results of conditionals count as moves.
    """
    stack, visited = [value], {value}
    while stack:
        for reader in readers.get(stack.pop(), ()):
            if reader in visited:
                continue
            visited.add(reader)
            if reader.is_join or reader.name == STACKED:
                stack += [reader] if passes_joins else []
            elif is_move_or_cast(reader):
                stack.append(reader)
            elif reader.equation is not None:
                yield reader
