"""Constants that half does not have: what becomes 0, 1 or infinite in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp.inspect.evidence import Audited, Found, rounded_to
from jaxmp.inspect.values import Value, constant, is_zero, origins
from jaxmp.inspect.written import numbers_of

_POLES = {"div": 1, "log": 0, "log2": 0, "sqrt": 0, "rsqrt": 0}
"""Operations that an epsilon keeps from 0, and the operand of them that is; a root for its derivative."""


def vanishing_constants(audited: Audited) -> Found:
    """Constants that half rounds to 0, an epsilon, say, or from below to 1, a decay."""
    remedy = "use a larger constant, or compute this in float32"
    yield from _lost_constants(
        audited,
        lambda numbers, rounded: bool(np.any(numbers != 0) and np.all(rounded == 0)),
        lambda const: const.size == 1 and not np.any(const),
        "0",
        remedy,
    )
    yield from _lost_constants(
        audited,
        lambda numbers, rounded: bool(np.all((numbers > 0.5) & (numbers < 1) & (rounded == 1))),
        lambda const: const.size == 1 and bool(np.all(const == 1)),
        "1",
        "use a smaller constant, or compute this in float32",
    )
    for value in audited.values.all:
        if value.name not in _POLES:
            continue
        for each in origins(value.inputs[_POLES[value.name]], lambda each: each.is_move or each.is_cast):
            # Nobody adds a 0 there. In bfloat16 no epsilon is 0, but an optimizer's eps_root may be.
            if each.name == "add" and each.dtype == np.float16 and any(map(is_zero, each.inputs)):
                yield each.at, f"0 is added before {value.name}: an epsilon that is 0 in float16", remedy


def overflowing_constants(audited: Audited) -> Found:
    """Constants that are infinite in half: what masks, say."""
    yield from _lost_constants(
        audited,
        lambda numbers, rounded: bool(np.any(np.isfinite(numbers) & np.isinf(rounded))),
        lambda const: bool(np.any(np.isinf(const))),
        "infinite",
        "use jnp.finfo(x.dtype).min or .max, or compute this in float32",
    )


def _lost_constants(
    audited: Audited, is_lost: Callable[[Any, Any], bool], suspicious: Callable[[Any], bool], what: str, remedy: str
) -> Found:
    for value in audited.values.all:
        if value.is_half and value.is_cast and not value.inputs[0].is_half:
            for numbers in _constants_in(value.inputs[0]):
                numbers = numbers.astype(np.float64)
                if is_lost(numbers, rounded_to(value.dtype, numbers)):
                    worst = numbers.flat[np.argmax(np.abs(numbers))]
                    yield value.at, f"the constant {_shown(worst)} is {what} in {value.dtype.name}", remedy
        if value.place is None or not any(each.is_float for each in value.inputs):
            continue
        for operand in value.inputs:
            if operand.name != "constant" or not operand.is_half or operand.const is None:
                continue
            if not suspicious(operand.const.astype(np.float32)):
                continue
            for number in numbers_of(value.place.eqn, is_array=operand.const.size > 1):
                array = np.float64(number)
                if np.isfinite(array) and is_lost(array, rounded_to(operand.dtype, array)):
                    yield value.place, f"the constant {_shown(number)} is {what} in {operand.dtype.name}", remedy
                    break


def _shown(number: float) -> str:
    text = f"{number:g}"
    return text if text != "1" else f"1 - {1 - number:g}"


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
