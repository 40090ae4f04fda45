"""Find casts that cost time and change no result.

"Half" means half precision: float16 or bfloat16. A move is an operation such as a reshape, whose result has the
elements of its operands.
"""

from __future__ import annotations

from jaxmp.engine.marks import DECIDED, WIDE_SUMS
from jaxmp.inspect._audit.evidence import Audited, Fault, Faults
from jaxmp.program.scopes import RECOMPUTED
from jaxmp.program.values import ELEMENT, Value, constant, origins


def round_trips(audited: Audited) -> Faults:
    """Find half values that are cast to a wider dtype and back to the half dtype.

    Only moves lie between the cast to the wider dtype and the cast back.
    """
    forward_casts = {
        (value.at.path, value.at.source, value.inputs[0].dtype, value.dtype)
        for value in audited.program.values
        if value.is_cast and value.at.phase != "backward"
    }

    def is_derivative(cast: Value) -> bool:
        equation = cast.at
        derived = equation.path, equation.source, cast.dtype, cast.inputs[0].dtype
        return equation.phase == "backward" and derived in forward_casts

    for value in audited.program.values:
        if not _narrows(value):
            continue
        widened = _casts_to_wider(value)
        if not widened or all(map(is_derivative, (value, *widened))) or _joins_modules(value, widened):
            # The derivatives of two casts may be adjacent although the program computes between the casts, for example
            # adds a bias.
            continue
        if all(WIDE_SUMS in cast.at.names for cast in widened):  # jaxmp adds these casts
            continue
        half, wide = value.dtype.name, value.inputs[0].dtype.name
        what = f"{half} → {wide} → {half} with nothing between that needs {wide}"
        remedy = "remove both casts; between two models, give the first model a half output dtype"
        yield Fault(value.at, what, remedy)


def _narrows(value: Value) -> bool:
    """Return whether a value is a cast to half from a wider floating dtype."""
    if not (value.is_half and value.is_cast):
        return False
    return value.inputs[0].is_float and not value.inputs[0].is_half


def _casts_to_wider(narrowed: Value) -> list[Value]:
    """Return the casts from half to a wider dtype that the cast ``narrowed`` undoes.

    The list is empty if ``narrowed`` also rounds a value that was not cast from the same half dtype.
    """

    def goes_on(value: Value) -> bool:
        return value.is_move or value.is_join

    computed = [origin for origin in origins(narrowed.inputs[0], goes_on) if constant(origin) is None]
    for origin in computed:
        if not (origin.is_cast and origin.inputs[0].dtype == narrowed.dtype):
            return []
    return computed


def _joins_modules(narrowed: Value, widened: list[Value]) -> bool:
    """Return whether two modules under policies cast the same carry of a loop.

    The carry has only one dtype, so neither module can omit its cast.
    """
    if DECIDED not in narrowed.at.names:
        return False

    def is_join(value: Value) -> bool:
        return value.is_join

    carried = set(origins(narrowed.inputs[0], is_join))
    return all(cast in carried and cast.at.path != narrowed.at.path for cast in widened)


def casts_in_loops(audited: Audited) -> Faults:
    """Find arrays that every iteration of a loop casts again.

    Casts that the compiler moves out of the loop are left out. So are loops that recompute casts for the backward
    pass, because storing the result of a cast would need the memory that the recomputation saves. Nothing is found if
    the program was not compiled, because these casts are then unknown.
    """
    if audited.repeated is None:
        return
    casts = [value for value in audited.program.values if value.is_cast and value.loops]
    recomputing_loops = {value.loops[-1] for value in casts if RECOMPUTED in value.at.names}
    for value in casts:
        if not (value.shape and value.is_float and value.inputs[0].is_float) or value.loops[-1] in recomputing_loops:
            continue
        before = value.inputs[0].dtype
        if value.dtype != before and _is_invariant(value) and audited.repeated(value):
            what = f"the same {before.name} array is cast to {value.dtype.name} in every iteration of a loop"
            yield Fault(value.at, what, "cast it once, before the loop")


def _is_invariant(value: Value) -> bool:
    """Return whether a cast in a loop casts a value from outside the loop.

    Moves inside the loop may lie between the value and the cast, unless they pick new elements in each iteration (such
    as rows of an embedding). Casts of constants do not count.
    """
    loop = value.loops[-1]

    def picks_anew(move: Value) -> bool:
        return any(not operand.is_float and loop in operand.loops for operand in move.inputs)

    def goes_on(origin: Value) -> bool:
        is_move = origin.is_move and origin.name != ELEMENT and not origin.is_join
        return is_move and loop in origin.loops and not picks_anew(origin)

    for origin in origins(value.inputs[0], goes_on):
        if loop in origin.loops or constant(origin) is not None:
            return False
    return True
