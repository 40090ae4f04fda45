"""Find half-precision sums with more terms than their dtype can count.

A bfloat16 sum of ones, for example, stops at 256. A sum is one operation (such as ``reduce_sum``), or the carry of a
loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxmp.inspect._audit.evidence import EXACT, Audited, Fault, Faults
from jaxmp.program.primitives import COMBINATIONS, SUMS, Trait, with_trait
from jaxmp.program.values import (
    CARRY,
    ELEMENT,
    LAST_CARRY,
    STACKED,
    Program,
    Value,
    is_move_or_cast,
    is_zero,
    leading_to,
)

_WRITES = with_trait(Trait.SCATTERS) | {"dynamic_update_slice"}
_SCATTERS = frozenset(name for name in _WRITES if COMBINATIONS.get(name) == "add")
_REMEDY = "sum in float32: cast before, or pass dtype=jnp.float32"
_CARRIED = "carry the sum in float32; if it is the gradient of a loop-invariant array, cast that array inside the loop"


def half_sums(audited: Audited) -> Faults:
    """Find half sums that one operation computes, or that a loop carries."""
    operands = set(audited.program.results)
    for value in audited.program.values:
        operands.update(value.inputs)
    for value in audited.program.values:
        if not value.is_half or not value.equation or value not in operands:
            continue  # nothing reads some sums, such as the count of ties in the derivative of a maximum
        count, dtype = terms(value), value.dtype.name
        if count > EXACT[dtype]:
            yield Fault(value.equation, f"{value.name} {_of_terms(count, dtype)}", _REMEDY)
    for value, count, dtype in carried_sums(audited.program):
        if count > EXACT[dtype]:
            yield Fault(value.at, f"a loop's carry is a sum {_of_terms(count, dtype)}", _CARRIED)


def _of_terms(count: int, dtype: str) -> str:
    return f"of {count:,} terms in {dtype}, which counts exactly only to {EXACT[dtype]:,}"


def terms(value: Value) -> int:
    """Return how many terms each element of a sum has; 0 if the value is not a sum."""
    params, name = value.at.eqn.params, value.name
    if name == "reduce_sum":
        return math.prod(value.inputs[0].shape[axis] for axis in params["axes"])
    if name == "cumsum":
        return int(value.inputs[0].shape[params["axis"]])
    if name == "reduce_window_sum":
        return math.prod(params["window_dimensions"])
    if name in _SCATTERS and not params["unique_indices"]:
        batching = getattr(params["dimension_numbers"], "scatter_indices_batching_dims", ())
        indices = value.inputs[1].shape[:-1]
        return math.prod(size for axis, size in enumerate(indices) if axis not in batching)
    return 0


class _Sum(NamedTuple):
    """A value that is the sum of a loop's carry and some terms.

    Attributes:
      sign: -1 if the carry is subtracted, else 1.
      terms: the number of terms.
      last: the last addition; None if there are no terms.
    """

    sign: int = 1
    terms: int = 0
    last: Value | None = None


_Sums = Mapping[Value, _Sum]
"""A value as the sum of a carry and terms, for each carry from which it is computed."""


def carried_sums(program: Program) -> Iterator[tuple[Value, int, str]]:
    """Yield the sums that loops carry in half.

    Each item has the last addition, the number of terms and the dtype. For nested loops, the numbers of iterations are
    multiplied. A while loop counts as one iteration, because the number of its iterations is unknown. Carries that are
    multiplied by a factor (a decay) are left out. Compensated sums (Kahan's sum) are also left out: there, the program
    subtracts the carry from the sum to find the rounding error.
    """
    sums_of: dict[Value, _Sums] = {}
    carries: dict[tuple[int, ...], list[Value]] = {}
    compensated = set[Value]()
    live = leading_to(program.results)
    for value in program.values:
        sums = _sums_of(value, sums_of, compensated) if value.is_float else {}
        if value.name == CARRY:
            carries.setdefault(value.key, []).append(value)
            sums = {**sums, value: _Sum()}
        elif value.name in (LAST_CARRY, STACKED) and value.key in carries:  # the result of a loop
            bodies = program.equations[value.key].bodies
            turns = bodies and bodies.length
            of_loop = carries[value.key]
            carry = of_loop[value.position] if value.position < len(of_loop) else None
            in_turn = sums.get(carry) if carry else None
            is_uncompensated = carry in live and carry not in compensated
            if carry and carry.is_half and is_uncompensated and in_turn and in_turn.last:
                yield in_turn.last, in_turn.terms * (turns or 1), carry.dtype.name
            sums = _after_all_turns(sums, of_loop, in_turn, turns or 1)
        sums_of[value] = sums


def _after_all_turns(sums: _Sums, carries: list[Value], in_turn: _Sum | None, turns: int) -> _Sums:
    """Return the sums of outer loops' carries after all iterations of a loop.

    The carries of the loop itself, ``carries``, are left out.
    """
    more = in_turn.terms * (turns - 1) if in_turn else 0
    return {carry: total._replace(terms=total.terms + more) for carry, total in sums.items() if carry not in carries}


def _sums_of(value: Value, sums_of: Mapping[Value, _Sums], compensated: set[Value]) -> _Sums:
    """Return a value as the sum of a carry and terms, for each carry.

    If the value subtracts a carry from a sum that contains the carry, the carry is added to ``compensated``.
    """
    parts = [sums_of.get(operand, {}) for operand in value.inputs]
    if is_move_or_cast(value) or value.is_join or value.name in (ELEMENT, STACKED):
        return _with_most_terms(parts)
    if value.name in _SCATTERS:
        return _plus(parts[0], value, 1 if parts[0] and not _is_elsewhere(value) else 0)
    if value.name not in SUMS:
        return {}
    (first, second), (left, right) = value.inputs, parts
    if value.name == "sub":
        right = {carry: total._replace(sign=-total.sign) for carry, total in right.items()}
    in_both = left.keys() & right.keys()
    compensated |= {carry for carry in in_both if left[carry].sign != right[carry].sign}
    sums = dict(_plus(left, value, _added_terms(second))) if left else {}
    if right:
        sums.update(_plus(right, value, _added_terms(first)))
    return {carry: total for carry, total in sums.items() if carry not in in_both}


def _with_most_terms(parts: list[_Sums]) -> _Sums:
    """Return the sum with the most terms for each carry.

    ``parts`` has the sums of each operand of a move, or of each branch of a conditional.
    """
    sums: dict[Value, _Sum] = {}
    for part in parts:
        for carry, total in part.items():
            if carry not in sums or total.terms > sums[carry].terms:
                sums[carry] = total
    return sums


def _plus(sums: _Sums, addition: Value, count: int) -> _Sums:
    return {carry: total._replace(terms=total.terms + count, last=addition) for carry, total in sums.items()}


def _added_terms(value: Value) -> int:
    """Return 1 if a value adds to the same elements in each iteration, else 0.

    The result is 0 for zeros, and for an array of zeros if the iterations write to different elements of it.
    """
    while (value.is_move and len(value.inputs) == 1) or value.is_cast:
        (value,) = value.inputs
    if is_zero(value):
        return 0
    return 0 if value.name in _WRITES and is_zero(value.inputs[0]) and _is_elsewhere(value) else 1


def _is_elsewhere(write: Value) -> bool:
    """Return whether the iterations of a loop write to different elements.

    The answer is a guess: True if the indices depend on values in a loop, but not on arguments or random bits.
    """
    indices = write.inputs[2:] if write.name == "dynamic_update_slice" else write.inputs[1:2]
    sources = leading_to(indices)
    if any(source.name in ("argument", "random_bits") for source in sources):
        return False
    return any(source.loops for source in sources)
