"""Integers that half does not have: positions and indices, counted or drawn at random."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp.inspect.evidence import EXACT, Audited, Found, rounded_to
from jaxmp.inspect.values import Value, constant

_Ends = tuple[float, float]
_INDICES = {"iota": 0, "argmax": 0, "argmin": 0, "top_k": 1}
"""Operations whose result of that number is of indices."""


class _Range(NamedTuple):
    """Between which numbers integers are, and whether they count something: a lone number does not."""

    ends: _Ends
    counts: bool


def inexact_integers(audited: Audited) -> Found:
    """Integers in half beyond those that it has all of: positions, say."""
    ranges: dict[Value, _Range | None] = {}
    for value in audited.values.all:
        if not value.is_half:
            continue
        place, largest = value.place or value.reader, 0.0
        if value.name == "iota" or (value.is_cast and not value.inputs[0].is_half):
            largest = _largest_cast(value, ranges)
        elif value.name == "constant" and value.const is not None:
            largest = _largest_rounded(value.const)
        if place and largest > EXACT[value.dtype.name]:
            yield (
                place,
                f"integers up to {largest:,.0f} in {value.dtype.name}, exact up to {EXACT[value.dtype.name]:,} only",
                "compute with them in float32 or as integers, and cast the result",
            )


def _largest_cast(value: Value, known: dict[Value, _Range | None]) -> float:
    """The largest of the integers that are cast to half; 0 if they are none, or are none of those that it lacks."""
    of = value if value.name == "iota" else value.inputs[0]
    found, numbers = _range_of(of, known), constant(of)
    if found is None or not found.counts:
        return 0.0
    if numbers is not None:
        rounded = rounded_to(value.dtype, numbers)
        are_counts = jnp.issubdtype(of.dtype, jnp.integer) or len(np.unique(rounded)) < len(np.unique(numbers))
        if not are_counts or np.array_equal(rounded, numbers):
            return 0.0
    return max(map(abs, found.ends))


def _largest_rounded(const: Any) -> float:
    """The largest of the evenly spaced integers that a half constant was made of, if rounding changed some; else 0."""
    exact = EXACT[const.dtype.name]
    for axis, length in enumerate(const.shape):
        line = np.moveaxis(const, axis, 0).reshape(length, -1)[:, :1].astype(np.float64).ravel()
        if length < 2 or not np.all(np.isfinite(line)):
            continue
        line = line if abs(line[0]) <= abs(line[-1]) else line[::-1]  # what is near 0 is exact
        integers = np.round(line[0]) + np.arange(length) * np.round((line[-1] - line[0]) / (length - 1))
        sizes = np.abs(integers)
        ulps = np.where(sizes > exact, 2 ** np.floor(np.log2(np.maximum(sizes, 1))) * 2 / exact, 0)
        if np.all(np.abs(line - integers) <= ulps) and not np.array_equal(line, integers):
            return float(np.max(sizes))
    return 0.0


def _range_of(value: Value, known: dict[Value, _Range | None]) -> _Range | None:
    """The range of integers that the program knows, draws or computes from such; None of all else."""
    if value not in known:
        known[value] = None  # a loop's carry
        known[value] = _find_range(value, known)
    return known[value]


def _find_range(value: Value, known: dict[Value, _Range | None]) -> _Range | None:
    const, name, inputs = constant(value), value.name, value.inputs
    if const is not None:
        return _range_of_constant(const) if const.size == 1 or not value.is_half else None
    if _INDICES.get(name) == value.position:
        params, of = value.at.eqn.params, inputs[0] if inputs else value
        axis = params["axes"][0] if "axes" in params else params.get("axis", params.get("dimension"))
        return _Range((0.0, of.shape[axis] - 1.0), True)
    if name == "random_bits":  # noise, until a remainder bounds it
        return _Range((0.0, 2.0 ** (8 * value.dtype.itemsize) - 1), False)
    is_logical = name in _LOGICAL and value.dtype == np.bool_
    if value.is_half or not (value.is_move or value.is_cast or name in _OF_RANGES or is_logical):
        return None
    if name == "select_n":
        chosen = _range_of(inputs[0], known)
        is_known = chosen is not None and chosen.ends[0] == chosen.ends[1]
        inputs = [inputs[1 + int(chosen.ends[0])]] if chosen and is_known else inputs[1:]
    elif name == "sort":
        inputs = [inputs[value.position]]
    elif name in ("gather", "dynamic_slice", "slice"):
        inputs = inputs[:1]
    found = [_range_of(each, known) for each in inputs]
    ranges = [each for each in found if each is not None]
    if len(ranges) < len(found):
        return None
    ends = {**_OF_RANGES, **_LOGICAL}.get(name, _around)(*(each.ends for each in ranges))
    return ends and _Range(ends, name == "rem" or any(each.counts for each in ranges))


def _range_of_constant(const: Any) -> _Range | None:
    is_number = jnp.issubdtype(const.dtype, jnp.number) and not jnp.issubdtype(const.dtype, jnp.complexfloating)
    if not const.size or not (is_number or const.dtype == np.bool_):
        return None
    numbers = const.astype(np.float64)
    if not (np.all(np.isfinite(numbers)) and np.array_equal(numbers, np.round(numbers))):
        return None
    return _Range((float(np.min(numbers)), float(np.max(numbers))), const.size > 1)


def _around(*ranges: _Ends) -> _Ends:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _monotone(function: Callable[..., float]) -> Callable[..., _Ends]:
    """Of what is monotone in each operand: the ends of its results are those of some ends."""

    def of(*ranges: _Ends) -> _Ends:
        return _around(*((end, end) for end in (float(function(*ends)) for ends in itertools.product(*ranges))))

    return of


def _remainder(one: _Ends, other: _Ends) -> _Ends | None:
    return (0.0, min(one[1], other[1] - 1)) if one[0] >= 0 and other[0] > 0 else None


def _equal(one: _Ends, other: _Ends) -> _Ends:
    return float(one == other and one[0] == one[1]), float(one[0] <= other[1] and other[0] <= one[1])


def _unequal(one: _Ends, other: _Ends) -> _Ends:
    low, high = _equal(one, other)
    return 1 - high, 1 - low


_OF_RANGES: dict[str, Callable[..., _Ends | None]] = {
    **{name: _monotone(getattr(operator, name)) for name in ("add", "sub", "mul", "neg", "lt", "le", "gt", "ge")},
    "min": _monotone(min), "max": _monotone(max), "clamp": _monotone(lambda low, x, high: min(max(low, x), high)),
    "abs": lambda ends: (0.0, max(map(abs, ends))), "rem": _remainder, "eq": _equal, "ne": _unequal,
}  # fmt: skip
_LOGICAL: dict[str, Callable[..., _Ends]] = {
    "and": _monotone(min), "or": _monotone(max), "not": _monotone(lambda x: 1 - x),
}  # fmt: skip
"""Of booleans, as 0 and 1; what chooses between numbers, as the range of a random integer may."""
