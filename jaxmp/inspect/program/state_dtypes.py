"""Find state in the wrong dtype, and float64."""

from __future__ import annotations

import numpy as np

from jaxmp.inspect.program.evidence import Argument, Audited, Fault, Faults
from jaxmp.inspect.program.values import Value, computed_at


def half_params(audited: Audited) -> Faults:
    """Find params in another dtype than the param dtype of their policy."""
    for value, argument in _state(audited, "params"):
        policies = audited.policies_of(argument.path[:-1])
        if policies and value.dtype != policies[0].param_dtype:
            yield _dtype_fault(value, argument, policies[0].param_dtype, "the policy keeps params in")


def half_optimizer_state(audited: Audited) -> Faults:
    """Find optimizer state that is not float32."""
    for value, argument in _state(audited, "optimizer"):
        if value.dtype != np.float32:
            yield _dtype_fault(value, argument, np.dtype(np.float32), "optimizer state is kept in")


def half_statistics(audited: Audited) -> Faults:
    """Find statistics, such as those of BatchNorm, that are not float32."""
    for value, argument in _state(audited, "statistics"):
        if value.dtype != np.float32:
            yield _dtype_fault(value, argument, np.dtype(np.float32), "statistics are kept in")


def _state(audited: Audited, role: str) -> list[tuple[Value, Argument]]:
    """Return the floating arguments of a role; float8 is left out."""
    return [
        (value, argument)
        for value, argument in zip(audited.values.arguments, audited.arguments, strict=True)
        if argument is not None and argument.role == role and value.is_float and value.dtype.itemsize > 1
    ]


def _dtype_fault(value: Value, argument: Argument, expected: np.dtype, rule: str) -> Fault:
    where = "/".join(argument.path), value.reader.source if value.reader else ""
    return Fault(where, f"{value.dtype.name} where {rule} {expected.name}", f"keep it in {expected.name}")


def strong_float64(audited: Audited) -> Faults:
    """Find the first float64 values of a program that has half products."""
    if not audited.has_half_products:
        return
    phases = set[str]()
    for value in audited.values.all:
        if not _enters_float64(value):
            continue
        phase = value.place.phase if value.place else "forward"
        if phase == "backward" and "forward" in phases:  # the derivative of a cast back
            continue
        phases.add(phase)
        yield Fault(
            computed_at(value),
            "float64 in a program with half products",
            "use float32, and do not combine arrays of the program with strong float64 (np.float64, astype)",
        )


def _enters_float64(value: Value) -> bool:
    """Return whether a value is strongly float64 and does not depend on such a value."""
    if value.dtype != np.float64 or getattr(value.aval, "weak_type", False):
        return False
    return all(operand.dtype != np.float64 or operand.name == "constant" for operand in value.inputs)
