"""Compute equations that read whole weights.

``weight_products.py`` computes the products and lookups in which each device sums the weight's gradient over its rows.
*Half* is short for half precision: float16 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmp._internals.jax.sources import user_source_of
from jaxmp.base.dtypes import at_least_float32, is_narrow
from jaxmp.base.trees import is_float_array
from jaxmp.program.binding import bind_equation
from jaxmp.program.invariants import SAME_FOR_EXAMPLES
from jaxmp.program.primitives import BROADCAST, COMBINES, PRODUCTS, Class, Trait, classify, with_trait
from jaxmp.program.walk import equations, jaxprs_in
from jaxmp.sharding.weight_products import computed_wide, may_be_wide
from jaxmp.sharding.weights import RewrittenValue, Use, weight_of

_FLOAT32 = np.dtype(np.float32)
WIDE_PRODUCTS = PRODUCTS - {"ragged_dot_general"}
"""The products whose derivatives :func:`computed_wide` sums in float32."""
# Classes of operations that sum the cotangents of operands in the operands' dtype. Unknown primitives (None) may do so.
_SUMS = frozenset({Class.HALF, Class.ACCUMULATION, Class.LINALG, Class.RECURSE, None})
# Classes of operations that run in float32 if all their operands are weights, even half ones.
_MAY_BE_WIDE = frozenset({Class.CLEAR, Class.WIDEST, Class.INFER, Class.POINTWISE, Class.ACCUMULATION})
# The cotangents of a fill value and of looked-up rows are sums; a dynamic slice reads each element at most once.
_ALWAYS_WIDE = (with_trait(Trait.LOOKS_UP) - {"dynamic_slice"}) | {"pad"}
_ACCUMULATES = (with_trait(Trait.SCATTERS) - COMBINES) | {"add_any"}  # these sum operands, not cotangents


def computed_whole(
    eqn: Any, operands: Sequence[RewrittenValue], uses: Sequence[tuple[int, Use]]
) -> list[RewrittenValue]:
    """Return the results of an equation that reads whole weights.

    Args:
      eqn: the equation.
      operands: the operands of the equation.
      uses: the weights among the operands, with their positions.

    Raises:
      ValueError: the equation would sum the gradient of a weight in half.
    """
    name, (_, first_use) = eqn.primitive.name, uses[0]
    are_common = SAME_FOR_EXAMPLES.solve_equation(eqn, [is_common for _, is_common in operands])
    is_wide = _is_widened(eqn, all(are_common))
    sums_cotangents = not is_wide and name not in _ACCUMULATES and classify(name) in _SUMS
    arrays = [value for value, _ in operands]
    for position, use in uses:
        if sums_cotangents and not (all(are_common) and _repeats_nothing(eqn, position)):
            _require_float32(use, eqn, position)
        arrays[position] = read_whole(use, eqn, position, is_wide)
    results = computed_wide(eqn, arrays) if is_wide else bind_equation(eqn, arrays, eqn.params)
    values = list[RewrittenValue]()
    for var, result, is_common in zip(eqn.outvars, results, are_common, strict=True):
        if is_common and is_float_array(result):  # kept in float32, as are the sums of its cotangents
            values.append((weight_of(first_use.source, result, var.aval.dtype), True))
        else:
            values.append((result.astype(var.aval.dtype) if is_wide else result, is_common))
    return values


def _is_widened(eqn: Any, are_all_common: bool) -> bool:
    """Return whether an equation of weights is computed in float32."""
    name = eqn.primitive.name
    is_always_wide = name in WIDE_PRODUCTS or name in _ALWAYS_WIDE
    return (is_always_wide or (are_all_common and classify(name) in _MAY_BE_WIDE)) and may_be_wide(eqn)


def read_whole(use: Use, eqn: Any, position: int, is_wide: bool = False) -> Any:
    """Return a weight as the operand of an equation that reads all of it."""
    aval, shapes = eqn.invars[position].aval, [var.aval.shape for var in eqn.outvars]
    repeats = eqn.primitive.name in BROADCAST and aval.shape != shapes[0]
    return use.read(at_least_float32(aval.dtype) if is_wide else aval.dtype, shapes[0] if repeats else None)


def _repeats_nothing(eqn: Any, position: int) -> bool:
    """Return whether no result of an equation is larger than the operand."""
    return all(var.aval.size <= eqn.invars[position].aval.size for var in eqn.outvars)


def _require_float32(use: Use, eqn: Any, position: int) -> None:
    """Raise an error if an equation sums a weight's cotangents in half."""
    avals = [eqn.invars[position].aval, *(var.aval for inner in equations_inside(eqn) for var in inner.outvars)]
    halves = [aval.dtype.name for aval in avals if is_narrow(getattr(aval, "dtype", np.int32))]
    if halves and use.source.plan.reduce_dtype == _FLOAT32:
        raise ValueError(
            f"the gradient of {use.source.name!r} cannot be summed in float32: {eqn.primitive.name} at "
            f"{user_source_of(eqn)} computes it in {halves[0]}; compute in float32 there, or pass "
            f"Sharding(…, reduce_dtype={halves[0]!r})"
        )


def equations_inside(eqn: Any) -> list[Any]:
    """Return the equations of all bodies of an equation."""
    return [inner for jaxpr in jaxprs_in(eqn) for inner in equations(jaxpr)]
