"""Find params and other state in the wrong dtype, and float64 values."""

from __future__ import annotations

import numpy as np

from jaxmp.engine.marks import DECIDED, region_of
from jaxmp.inspect._audit.evidence import Audited, Fault, Faults
from jaxmp.inspect._audit.finders.products import half_of
from jaxmp.program.values import Program, Value, computed_at, origins


def half_params(audited: Audited) -> Faults:
    """Find params whose dtype is not the param dtype of their policy.

    The path of a param does not tell the class of its module. So a param may also have the param dtype of an override
    for a class, such as the norms of ``bfloat16_sr``.
    """
    dtypes_of_classes = {policy.param_dtype for policy in audited.policies_of_classes}
    for value, path in _state(audited, "params"):
        policies = audited.policies_of(path[:-1])
        if policies and value.dtype != policies[0].param_dtype and value.dtype not in dtypes_of_classes:
            yield _dtype_fault(value, path, policies[0].param_dtype, "the policy keeps params in")


def half_optimizer_state(audited: Audited) -> Faults:
    """Find optimizer state that is not float32.

    Arrays that a state of :func:`jaxmp.low_precision` itself stores in bfloat16 are left out. A half moment is found if
    the optimizer stores its moments in another format.
    """
    for value, path in _state(audited, "optimizer"):
        if value.dtype != np.float32:
            yield _dtype_fault(value, path, np.dtype(np.float32), "optimizer state is kept in")


def half_statistics(audited: Audited) -> Faults:
    """Find statistics, such as those of BatchNorm, that are not float32.

    State that the program returns unchanged is frozen, such as the base of a LoRA, and may have any dtype.
    """
    frozen = _returned_unchanged(audited.program)
    for value, path in _state(audited, "model_state"):
        if value.dtype != np.float32 and value not in frozen:
            yield _dtype_fault(value, path, np.dtype(np.float32), "statistics are kept in")


def _returned_unchanged(program: Program) -> set[Value]:
    """Return the values that are results of a program without a change.

    A step that may be skipped selects between the new state and the old one. If both are the same, it is unchanged.
    """
    unchanged: set[Value] = set()
    for result in program.results:
        sources = set(origins(result, lambda value: value.is_move))
        if len(sources) == 1:
            unchanged |= sources
    return unchanged


def _state(audited: Audited, kind: str) -> list[tuple[Value, tuple[str, ...]]]:
    """Return each floating array of a kind of state, with its path; omit float8."""
    state = []
    for value, leaf in zip(audited.program.arguments, audited.arguments, strict=True):
        if leaf.kind == kind and leaf.path_in_state is not None and value.is_float and value.dtype.itemsize > 1:
            state.append((value, leaf.path_in_state))
    return state


def _dtype_fault(value: Value, path: tuple[str, ...], expected: np.dtype, rule: str) -> Fault:
    where = "/".join(path), value.reader.source if value.reader else ""
    return Fault(where, f"{value.dtype.name} where {rule} {expected.name}", f"keep it in {expected.name}")


def strong_float64(audited: Audited) -> Faults:
    """Find where float64 enters a program that has half-precision products, or should have them.

    Weakly typed float64 values are left out, and so is the backward pass: the derivative of each cast back from float64
    is a cast to float64.
    """
    if audited.has_half_products:
        what = "float64 in a program with half products"
    elif any(_should_be_half(audited, product) for product, _ in audited.products):
        what = "float64 under a half policy makes products float64"
    else:
        return
    for value in audited.program.values:
        if not _enters_float64(value) or (value.equation and value.equation.phase == "backward"):
            continue
        yield Fault(
            computed_at(value),
            what,
            "use float32, and do not combine arrays of the program with strongly typed float64 (np.float64, astype)",
        )


def _should_be_half(audited: Audited, product: Value) -> bool:
    """Return whether a product is float64 under a half policy, or under autocast."""
    names = product.at.names
    is_float64 = any(operand.dtype == np.float64 for operand in product.inputs)
    is_under_autocast = DECIDED in names and region_of(names).level in (None, "half")
    return is_float64 and (is_under_autocast or half_of(audited, product.at) is not None)


def _enters_float64(value: Value) -> bool:
    """Return whether a value is strong float64 but computed from other dtypes.

    Constant operands may be float64.
    """
    if value.dtype != np.float64 or getattr(value.aval, "weak_type", False):
        return False
    return all(operand.dtype != np.float64 or operand.name == "constant" for operand in value.inputs)
