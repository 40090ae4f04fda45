"""Find constants and integers that a half dtype (float16, bfloat16) cannot hold."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxmp.inspect._audit.evidence import EXACT, Audited, Fault, Faults, rounded_to
from jaxmp.program.primitives import BOUNDS, EXTREMES, POWERS, SINGULAR, SUMS, Trait, with_trait
from jaxmp.program.values import CONSTANT, Value, constant, is_move_or_cast, is_zero, origins

# Most powers have no pole, because their exponents are at least 1.
_POLES = {name: position for name, position in SINGULAR.items() if name not in POWERS}
"""Operations with a pole at 0 (``sqrt`` in its derivative), and the index of the operand that must not be 0."""
_BOUNDS = BOUNDS | EXTREMES
"""Operations that compare operands, so that their result may contain no element of a constant operand."""

_FACTORS = with_trait(Trait.MULTIPLIES)
"""Multiplications and divisions."""


def vanishing_constants(audited: Audited) -> Faults:
    """Find constants that a cast to half makes 0 or 1.

    Examples are an epsilon, and a decay that is nearly 1.
    """
    remedy = "use a larger constant, or compute this in float32"
    for value, numbers, rounded in _cast_constants(audited):
        if np.any(numbers != 0) and np.all(rounded == 0):
            yield Fault(value.at, _loss_of_constant(value, numbers, "0"), remedy)
        if np.all((numbers > 0.5) & (numbers < 1) & (rounded == 1)):
            smaller = "use a smaller constant, or compute this in float32"
            yield Fault(value.at, _loss_of_constant(value, numbers, "1"), smaller)
    for value in audited.program.values:
        if value.name not in _POLES:
            continue
        for source in origins(value.inputs[_POLES[value.name]], is_move_or_cast):
            # JAX rounds literals during tracing. A float16 literal 0 in a sum was an epsilon, because nobody adds 0 on
            # purpose. (An optimizer's eps_root may be 0, but that literal is not float16.)
            if source.name == "add" and source.dtype == np.float16 and any(map(is_zero, source.inputs)):
                what = f"0 is added before {value.name}: an epsilon that is 0 in float16"
                yield Fault(source.at, what, remedy)
    for value in audited.program.values:
        # Python's `sum` adds to a 0 on the left, so only the right operand counts.
        if value.name in SUMS and value.dtype == np.float16 and _is_rounded_literal(value.inputs[-1], np.float16(0)):
            yield Fault(value.at, "0 is added or subtracted: a constant that is 0 in float16", remedy)


def overflowing_constants(audited: Audited) -> Faults:
    """Find constants that a cast to half makes infinite, such as -1e9 in float16.

    An infinity that is a factor or a scalar term was a finite constant, because JAX rounds literals during tracing. An
    infinity that is selected, as in ``jnp.where``, may be intended, and so may an array of constants that is added.
    """
    remedy = "use jnp.finfo(x.dtype).min or .max, or compute this in float32"
    for value, numbers, rounded in _cast_constants(audited):
        if np.any(np.isfinite(numbers) & np.isinf(rounded)):
            yield Fault(value.at, _loss_of_constant(value, numbers, "infinite"), remedy)
    for value in audited.program.values:
        if value.is_half and value.name in _FACTORS | SUMS and any(map(_is_infinite_literal, value.inputs)):
            yield Fault(value.at, f"{value.name} with a constant that is infinite in {value.dtype.name}", remedy)


def inexact_integers(audited: Audited) -> Faults:
    """Find integers that are too large for a half dtype to represent exactly.

    The integers come from an iota, or from a constant array of integers.
    """
    for value in audited.program.values:
        if not value.is_half:
            continue
        largest, exact = _largest_integer(value), EXACT[value.dtype.name]
        if largest > exact:
            yield Fault(
                value.at,
                f"integers up to {largest:,} in {value.dtype.name}, exact up to {exact:,} only",
                "compute with them in float32 or as integers, and cast the result",
            )


def _largest_integer(value: Value) -> int:
    """Return the largest integer of an iota or a constant array of integers.

    ``value`` is a half iota, or a cast of the integers to half. Return 0 for other values, and for constant arrays that
    the half dtype represents exactly.
    """
    source = value
    if value.is_cast and not value.inputs[0].is_half:
        while len(source.inputs) == 1 and is_move_or_cast(source):
            (source,) = source.inputs
    if source.name == "iota":
        return int(source.shape[source.at.eqn.params["dimension"]]) - 1
    integers = constant(source) if source.name == "constant" else None
    if integers is None or not jnp.issubdtype(integers.dtype, jnp.integer) or integers.size < 2:
        return 0
    is_exact = np.array_equal(rounded_to(value.dtype, integers), integers)
    return 0 if is_exact else int(np.max(np.abs(integers.astype(np.int64))))


def _cast_constants(audited: Audited) -> Iterator[tuple[Value, NDArray[np.float64], NDArray[np.float64]]]:
    """Yield casts of constants to half, with the numbers before and after the cast."""
    for value in audited.program.values:
        if not (value.is_half and value.is_cast) or value.inputs[0].is_half:
            continue
        source = value.inputs[0]
        sources = [source] if constant(source) is not None else origins(source, _returns_each)
        for origin in sources:
            numbers = constant(origin)
            if numbers is not None and numbers.size and jnp.issubdtype(numbers.dtype, jnp.number):
                yield value, numbers.astype(np.float64), rounded_to(value.dtype, numbers.astype(np.float64))


def _is_rounded_literal(value: Value, number: np.generic) -> bool:
    """Return whether a value is a scalar constant that equals ``number`` and that no cast made."""
    while value.is_move and len(value.inputs) == 1:
        (value,) = value.inputs
    if value.name != CONSTANT or value.shape or value.dtype != number.dtype:
        return False
    numbers = constant(value)
    return numbers is not None and bool(numbers == number)


def _is_infinite_literal(value: Value) -> bool:
    if not value.is_half:
        return False
    return any(_is_rounded_literal(value, value.dtype.type(number)) for number in (np.inf, -np.inf))


def _returns_each(value: Value) -> bool:
    """Return whether a value is a move that does not compare its operands.

    The result of a comparison, such as a maximum, may contain no element of a constant operand.
    """
    return value.is_move and value.name not in _BOUNDS


def _loss_of_constant(value: Value, numbers: NDArray[np.float64], what: str) -> str:
    number = numbers.flat[np.argmax(np.abs(numbers))]
    text = f"{number:g}"
    text = f"1 - {1 - number:g}" if text == "1" else text
    return f"the constant {text} is {what} in {value.dtype.name}"
