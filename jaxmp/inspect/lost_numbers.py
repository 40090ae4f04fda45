"""Numbers that half does not have: constants that become 0 or infinite, integers that are rounded."""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._jaxpr import reading
from jaxmp.inspect.evidence import EXACT, Audited, Found
from jaxmp.inspect.values import Value, constant, origins

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Pow: operator.pow, ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}  # fmt: skip
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_Range = tuple[float, float]


def vanishing_constants(audited: Audited) -> Found:
    """Constants that half rounds to 0: an epsilon, say."""
    yield from _lost_constants(
        audited,
        lambda numbers, rounded: bool(np.any(numbers != 0)) and bool(np.all(rounded == 0)),
        lambda value: value == 0,
        "0",
        "use a larger constant, or compute this in float32",
    )


def overflowing_constants(audited: Audited) -> Found:
    """Constants that are infinite in half: what masks, say."""
    yield from _lost_constants(
        audited,
        lambda numbers, rounded: bool(np.any(np.isfinite(numbers) & np.isinf(rounded))),
        np.isinf,
        "infinite",
        "use jnp.finfo(x.dtype).min or .max, or compute this in float32",
    )


def _lost_constants(
    audited: Audited, is_lost: Callable[[Any, Any], bool], suspicious: Callable[[Any], Any], what: str, remedy: str
) -> Found:
    for value in audited.values.all:
        if value.is_half and value.is_cast and not value.inputs[0].is_half:
            for numbers in _constants_in(value.inputs[0]):
                numbers = numbers.astype(np.float64)
                if is_lost(numbers, _rounded(numbers, value.dtype)):
                    worst = numbers.flat[np.argmax(np.abs(numbers))]
                    yield value.at, f"the constant {worst:g} is {what} in {value.dtype.name}", remedy
        if value.place is None or not any(each.is_float for each in value.inputs):
            continue
        for operand in value.inputs:
            if operand.name != "constant" or not operand.is_half or operand.const is None or operand.const.size != 1:
                continue
            if not suspicious(float(operand.const.reshape(()))):
                continue
            for number in _numbers_in(reading.user_code_of(value.place.eqn)):
                array = np.float64(number)
                if np.isfinite(array) and is_lost(array, _rounded(array, operand.dtype)):
                    yield value.place, f"the constant {number:g} is {what} in {operand.dtype.name}", remedy
                    break


def _constants_in(value: Value) -> Iterator[Any]:
    """The constants that a value consists of, or is on one side: those of a ``where``, or of a mask times a number."""

    def goes_on(each: Value) -> bool:
        return (each.is_move and each.name not in _BOUNDS) or (each.name == "mul" and any(map(_is_mask, each.inputs)))

    for each in [value] if constant(value) is not None else origins(value, goes_on):
        numbers = constant(each)
        if numbers is not None and numbers.size and jnp.issubdtype(numbers.dtype, jnp.number):
            yield numbers


_BOUNDS = frozenset({"max", "min", "clamp", "reduce_max", "reduce_min"})
"""Moves that need not return a constant among their operands: they compare it with others."""


def _is_mask(value: Value) -> bool:
    """Whether a value is of 0 and 1: booleans, moved and cast, or what is subtracted from 1, say."""
    if value.dtype == np.bool_:
        return True
    known = [constant(each) for each in value.inputs]
    are_small = all(each is None or bool(np.all(np.abs(each) <= 1)) for each in known)
    masks = [each for each, const in zip(value.inputs, known, strict=True) if const is None]
    is_kept = value.is_cast or value.is_move or value.name in ("add", "sub")
    return is_kept and are_small and bool(masks) and all(map(_is_mask, masks))


def _rounded(numbers: Any, dtype: np.dtype) -> Any:
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(numbers).astype(np.float32).astype(dtype).astype(np.float64)


def _numbers_in(code: str) -> Iterator[float]:
    """The numbers that are written in an expression, powers and quotients of numbers computed."""
    try:
        tree = ast.parse(code, mode="eval")
    except SyntaxError:  # a part of a statement
        yield from (float(number) for number in _NUMBER.findall(code))
        return
    for node in ast.walk(tree):
        if (number := _number(node)) is not None:
            yield number


def _number(node: ast.AST) -> float | None:
    parts: tuple[ast.AST, ...]
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.UnaryOp(op=op, operand=operand):
            parts = (operand,)
        case ast.BinOp(left=left, op=op, right=right):
            parts = (left, right)
        case _:
            return None
    try:
        return float(_OPERATORS[type(op)](*map(_number, parts)))
    except (ArithmeticError, KeyError, TypeError):  # another operator, or of what is no number, or a complex result
        return None


def inexact_integers(audited: Audited) -> Found:
    """Integers in half beyond those that it has all of: positions, say."""
    ranges: dict[Value, _Range | None] = {}
    for value in audited.values.all:
        if not value.is_half or not (value.is_cast or value.name == "iota"):
            continue
        of = value if value.name == "iota" else value.inputs[0]
        if of.is_half and of is not value:
            continue
        numbers, dtype = constant(of), value.dtype
        ends = _range_of_integers(of, ranges)
        largest = max(map(abs, ends or (0.0,)))
        if largest <= EXACT[dtype.name]:
            continue
        if numbers is not None:
            rounded = _rounded(numbers, dtype)
            are_counts = jnp.issubdtype(of.dtype, jnp.integer) or len(np.unique(rounded)) < len(np.unique(numbers))
            if not are_counts or np.array_equal(rounded, numbers):
                continue
        yield (
            value.at,
            f"integers up to {largest:,.0f} in {dtype.name}, which is exact up to {EXACT[dtype.name]:,}",
            "compute with them in float32 or as integers, and cast the result",
        )


def _range_of_integers(value: Value, known: dict[Value, _Range | None]) -> _Range | None:
    """The smallest and largest of what is an array of known integers, or computed from such; None of all else."""
    if value not in known:
        known[value] = None  # a loop's carry
        known[value] = _find_range(value, known)
    return known[value]


def _find_range(value: Value, known: dict[Value, _Range | None]) -> _Range | None:
    if value.name == "iota":
        return 0.0, float(value.shape[value.at.eqn.params["dimension"]] - 1)
    if value.const is not None:
        is_number = jnp.issubdtype(value.dtype, jnp.number) and value.const.size > 1
        if not is_number or jnp.issubdtype(value.dtype, jnp.complexfloating):
            return None
        numbers = value.const.astype(np.float64)
        is_integer = bool(np.all(np.isfinite(numbers)) and np.all(numbers == np.round(numbers)))
        return (float(np.min(numbers)), float(np.max(numbers))) if is_integer else None
    is_arithmetic = value.name in ("add", "sub", "mul", "neg", "abs")
    if not (value.is_move or value.is_cast or is_arithmetic) or value.is_half or value.dtype == np.bool_:
        return None
    inputs = value.inputs[1:] if value.name == "select_n" else value.inputs
    if value.name in ("gather", "dynamic_slice", "slice"):
        inputs = inputs[:1]
    found = [_scalar_or_range(each, known) for each in inputs]
    scalars = [(const := constant(each)) is not None and const.size == 1 for each in inputs]
    ranges = [each for each in found if each is not None]
    if len(ranges) < len(found) or all(scalars):
        return None
    if value.name == "abs":
        return 0.0, max(map(abs, ranges[0]))
    if value.name in _OF_RANGES:
        ends = [_OF_RANGES[value.name](*ends) for ends in itertools.product(*ranges)]
        return min(ends), max(ends)
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _scalar_or_range(value: Value, known: dict[Value, _Range | None]) -> _Range | None:
    const = constant(value)
    if const is not None and const.size == 1:
        number = float(const.reshape(()))
        return (number, number) if number.is_integer() else None
    return _range_of_integers(value, known)


_OF_RANGES: dict[str, Callable[..., float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "min": min, "max": max,
    "clamp": lambda low, each, high: min(max(low, each), high),
}  # fmt: skip
"""Operations that are monotone in each operand, so that the ends of their results are those of some ends."""
