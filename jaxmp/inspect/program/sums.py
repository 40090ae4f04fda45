"""Sums in half of more terms than it counts: of one operation, and of what a loop adds to in every turn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxmp._internals.jax.equations import opened
from jaxmp.inspect.program.equations import turns_of
from jaxmp.inspect.program.evidence import EXACT, Audited, Found
from jaxmp.inspect.program.values import JOIN, TURN, TURNS, Value, Values, is_zero, leading_to

_SCATTERS = frozenset({"scatter-add", "scatter-sub"})
_WRITES = frozenset({"dynamic_update_slice", "scatter"}) | _SCATTERS
_REMEDY = "sum in float32: cast before, or pass dtype=jnp.float32"
_CARRIED = "carry the sum in float32; if it is the gradient of what every turn reads, cast that inside the loop"


def half_sums(audited: Audited) -> Found:
    """Sums of one operation, or of one that a loop repeats."""
    read = {each for value in audited.values.all for each in value.inputs} | set(audited.values.results)
    for value in audited.values.all:
        if not value.is_half or not value.place or not (value.reader or value in read):
            continue  # derivatives of maxima count their ties, read or not
        if (count := terms(value)) > EXACT[value.dtype.name]:
            yield value.place, f"{value.name} {_of(count, value.dtype.name)}", _REMEDY
    for value, count, dtype in carried_sums(audited.values):
        if count > EXACT[dtype]:
            yield value.at, f"a loop's carry is a sum {_of(count, dtype)}", _CARRIED


def _of(count: int, dtype: str) -> str:
    return f"of {count:,} terms in {dtype}, which counts to {EXACT[dtype]:,}"


def terms(value: Value) -> int:
    """How many terms each element of a sum has; 0 of what is none."""
    params, name = value.at.eqn.params, value.name
    if name in ("reduce", "reduce_window"):
        body = opened(params["jaxpr"])[0]
        if {eqn.primitive.name for eqn in body.eqns} != {"add"}:
            return 0
    if name in ("reduce_sum", "reduce"):
        return math.prod(value.inputs[0].shape[axis] for axis in params.get("axes", params.get("dimensions")))
    if name == "cumsum":
        return int(value.inputs[0].shape[params["axis"]])
    if name in ("reduce_window_sum", "reduce_window"):
        return math.prod(params["window_dimensions"])
    if name in _SCATTERS and not params["unique_indices"]:
        batching = getattr(params["dimension_numbers"], "scatter_indices_batching_dims", ())
        indices = value.inputs[1].shape[:-1]
        return math.prod(size for axis, size in enumerate(indices) if axis not in batching)
    return 0


class _Sum(NamedTuple):
    """How a value is what a loop carries, plus terms.

    Attributes:
      sign: -1 if what is carried is subtracted.
      terms: how many are added.
      dtype: the half dtype that is on the way; None if all is wider.
      last: the last addition.
    """

    sign: int = 1
    terms: int = 0
    dtype: str | None = None
    last: Value | None = None


_Sums = Mapping[Value, _Sum]
"""Of each value that a loop carries how another is it, plus terms."""


def carried_sums(values: Values) -> Iterator[tuple[Value, int, str]]:
    """Sums that scans carry and round to half in every turn: an addition, how many terms, and the dtype.

    Turns of a scan in a scan multiply. A factor on the way makes it no sum (a decay), and what is subtracted from its
    own sum is compensated (Kahan's). Of while loops only the run tells how often they turn.
    """
    found: dict[Value, _Sums] = {}
    carries: dict[tuple[int, ...], list[Value]] = {}
    compensated = set[Value]()
    is_live = leading_to(values.results)
    for value in values.all:
        sums = {} if not value.is_float else _sums_of(value, found, compensated)
        if value.name == JOIN and value.position < 0:
            carries.setdefault(value.key, []).append(value)
            sums = {**sums, value: _Sum()}
        elif value.name in (JOIN, TURNS) and value.key in carries:  # what a loop returns
            (turns,) = turns_of(values.places[value.key].eqn)
            own = carries[value.key]
            carry = own[value.position] if value.position < len(own) else None
            once = sums.get(carry) if carry else None
            if carry and once and once.last and once.dtype and carry in is_live and carry not in compensated:
                yield once.last, once.terms * (turns or 1), once.dtype
            more = once.terms * ((turns or 1) - 1) if once else 0
            sums = {each: one._replace(terms=one.terms + more) for each, one in sums.items() if each not in own}
        half = value.dtype.name if value.is_half else None
        found[value] = {each: one._replace(dtype=one.dtype or half) for each, one in sums.items()}


def _sums_of(value: Value, found: Mapping[Value, _Sums], compensated: set[Value]) -> _Sums:
    parts = [found.get(each, {}) for each in value.inputs]
    if value.is_move or value.is_cast or value.name in (JOIN, TURN, TURNS):
        return _either(parts)
    if value.name in _SCATTERS:
        return _plus(parts[0], value, int(bool(parts[0]) and not _is_elsewhere(value)))
    if value.name not in ("add", "sub", "add_any"):
        return {}
    (one, other), (left, right) = value.inputs, parts
    if value.name == "sub":
        right = {carry: each._replace(sign=-each.sign) for carry, each in right.items()}
    twice = left.keys() & right.keys()
    compensated |= {carry for carry in twice if left[carry].sign != right[carry].sign}
    sums = {
        carry: each
        for part, term in ((left, other), (right, one))
        for carry, each in (_plus(part, value, _adds(term)) if part else {}).items()
    }
    return {carry: each for carry, each in sums.items() if carry not in twice}


def _either(parts: list[_Sums]) -> _Sums:
    """Of what is one of several values: the way with most terms."""
    sums: dict[Value, _Sum] = {}
    for carry, each in (item for part in parts for item in part.items()):
        if carry not in sums or each.terms > sums[carry].terms:
            sums[carry] = each
    return sums


def _plus(sums: _Sums, value: Value, count: int) -> _Sums:
    return {carry: each._replace(terms=each.terms + count, last=value) for carry, each in sums.items()}


def _adds(value: Value) -> int:
    """1 if adding a value changes each element in each turn; 0 of zeros, and of zeros but for what moves with turns."""
    while (value.is_move and len(value.inputs) == 1) or value.is_cast:
        (value,) = value.inputs
    if is_zero(value):
        return 0
    return 0 if value.name in _WRITES and is_zero(value.inputs[0]) and _is_elsewhere(value) else 1


def _is_elsewhere(value: Value) -> bool:
    """Whether what is written goes elsewhere in each turn: to where the program counts, and no data says."""
    indices = value.inputs[2:] if value.name == "dynamic_update_slice" else value.inputs[1:2]
    read = leading_to(indices)
    return any(each.loops for each in read) and all(each.name not in ("argument", "random_bits") for each in read)
