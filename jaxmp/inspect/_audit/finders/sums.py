"""Find half-precision sums with more terms than their dtype can count.

A bfloat16 sum of ones, for example, stops at 256. A sum is one operation, such as ``reduce_sum``.
"""

from __future__ import annotations

import math

from jaxmp.inspect._audit.evidence import EXACT, Audited, Fault, Faults
from jaxmp.program.primitives import COMBINATIONS, Trait, with_trait
from jaxmp.program.values import Value

_SCATTERS = frozenset(name for name in with_trait(Trait.SCATTERS) if COMBINATIONS.get(name) == "add")
_REMEDY = "sum in float32: cast before, or pass dtype=jnp.float32"


def half_sums(audited: Audited) -> Faults:
    """Find half sums that one operation computes."""
    operands = set(audited.program.results)
    for value in audited.program.values:
        operands.update(value.inputs)
    for value in audited.program.values:
        if not value.is_half or not value.equation or value not in operands:
            continue  # nothing reads some sums, such as the count of ties in the derivative of a maximum
        count, dtype = _terms(value), value.dtype.name
        if count > EXACT[dtype]:
            what = f"{value.name} of {count:,} terms in {dtype}, which counts exactly only to {EXACT[dtype]:,}"
            yield Fault(value.equation, what, _REMEDY)


def _terms(value: Value) -> int:
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
