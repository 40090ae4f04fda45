"""Sets of primitives, by their effect on the elements of their operands."""

from __future__ import annotations

# To cast before or after is the same: each element has one origin and one destination, or the largest is picked, and
# rounding keeps the order. (Not so where the gradient is a sum: after a gather, a broadcast.)
MONOTONE = frozenset(
    {"reshape", "transpose", "squeeze", "rev", "copy", "name", "convert_element_type"}
    | {"reduce_window_max", "reduce_window_min"}
)
# Each element of the result is an element of the operand: to cast before or after gives the same bits.
PICKS = frozenset(
    {"reshape", "transpose", "squeeze", "rev", "copy", "name", "broadcast_in_dim", "slice", "dynamic_slice", "gather"}
    | {"tile", "split", "unstack", "optimization_barrier", "sharding_constraint", "pvary"}
)
COMBINES = frozenset(
    {"concatenate", "select_n", "pad", "dynamic_update_slice", "stack", "max", "min", "clamp"}
    | {"scatter", "scatter-min", "scatter-max"}
)
"""Operations of several operands that round nothing, and so add up no error round a loop."""
BROADCAST = frozenset({"add", "sub", "mul", "div", "max", "min", "pow", "rem", "atan2"})
"""Operations whose operands JAX broadcasts by itself, along axes of size 1 and from scalars."""
MEETS = BROADCAST | COMBINES
"""Operations of several operands, of which JAX may repeat some to meet the others."""
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
EXTREMES = frozenset({"reduce_max", "reduce_min", "cummax", "cummin"})
"""Operations that pick the largest or smallest element along an axis."""
