"""Find exponentials, logarithms and variances that are computed in half.

"Half" means half precision: float16 or bfloat16. Exponentials include powers. A variance is the operand of a square
root in a normalisation layer.
"""

from __future__ import annotations

from jaxmp.engine.graph_paths import OFFSETS
from jaxmp.inspect._audit.evidence import Audited, Fault, Faults
from jaxmp.inspect._audit.finders.sums import terms
from jaxmp.program.primitives import Trait, with_trait
from jaxmp.program.values import Value, is_move_or_cast, origins

_EXPONENTIAL = with_trait(Trait.GROWS, Trait.LOGARITHM)
_ROOTS = with_trait(Trait.SQUARE_ROOT)
_OF_VARIANCE = OFFSETS | {"abs"}
"""Operations that may lie between a sum of squares and the square root of the variance."""


def half_exponentials(audited: Audited) -> Faults:
    """Find half exponentials and logarithms, and half variances of norm layers."""
    error_functions = set[tuple[str, str]]()
    for value in audited.program.values:
        if value.equation and value.name.startswith("erf"):  # erf, erfc
            error_functions.add((value.equation.path, value.equation.source))
    for value in audited.program.values:
        equation = value.equation
        if equation is None:
            continue
        if value.name in _EXPONENTIAL and value.is_half:
            if (equation.path, equation.source) in error_functions and _is_bell(value):
                continue  # the derivative of erf
            what = f"{value.name} in {value.dtype.name}, which loses the range or the digits that it needs"
            yield Fault(equation, what, "cast to float32 before it")
        elif value.name in _ROOTS and equation.phase != "backward":
            for part in _variance(value):
                if part.is_half:
                    what = f"the variance under a {value.name} is computed in {part.dtype.name}"
                    yield Fault(part.at, what, "compute the statistics of a norm in float32")
                    break


def _is_bell(value: Value) -> bool:
    """Return whether a value is exp(-x²), as in the derivative of erf."""
    if value.name != "exp":
        return False
    negated = value.inputs[0]
    return negated.name == "neg" and _is_square(negated.inputs[0])


def _is_square(value: Value) -> bool:
    if value.name == "integer_pow":
        return bool(value.at.eqn.params["y"] == 2)
    return value.name == "square" or (value.name == "mul" and value.inputs[0] is value.inputs[1])


def _variance(root: Value) -> list[Value]:
    """Return the operations of a variance, from the squares to the square root.

    The list is empty if the operand of ``root``, a ``sqrt`` or ``rsqrt``, is not a variance.
    """
    between = list[Value]()

    def goes_on(value: Value) -> bool:
        if not (is_move_or_cast(value) or value.name in _OF_VARIANCE):
            return False
        if value.equation:
            between.append(value)
        return True

    for total in origins(root.inputs[0], goes_on):
        squares = _sum_of_squares(total)
        if squares:
            return [*squares, *sorted(between, key=_key), root]
    return []


def _key(value: Value) -> tuple[int, ...]:
    return value.at.key


def _sum_of_squares(total: Value) -> list[Value]:
    """Return the squares and their sum.

    The list is empty if ``total`` is not a sum of squares.
    """
    if total.equation and terms(total):
        for square in origins(total.inputs[0], is_move_or_cast):
            if _is_square(square):
                return [square, total]
    return []
