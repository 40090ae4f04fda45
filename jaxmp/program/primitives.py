"""Sets of primitives, by their effect on the elements of their operands."""

from __future__ import annotations

# A cast before one of these operations is equivalent to a cast after the operation. Either each element of the
# operand becomes one element of the result, or the operation picks an extreme element, and rounding keeps the order.
# The set has no operation whose gradient is a sum, such as a gather or a broadcast. A cast before such an operation
# would compute the sum in half precision (float16 or bfloat16).
MONOTONE = frozenset(
    {"reshape", "transpose", "squeeze", "rev", "copy", "name", "convert_element_type"}
    | {"reduce_window_max", "reduce_window_min"}
)
# Each element of the result is an element of the operand. So a cast before such an operation gives the same bits as a
# cast after the operation.
PICKS = frozenset(
    {"reshape", "transpose", "squeeze", "rev", "copy", "name", "broadcast_in_dim", "slice", "dynamic_slice", "gather"}
    | {"tile", "split", "unstack", "optimization_barrier", "sharding_constraint", "pvary"}
)
COMBINES = frozenset(
    {"concatenate", "select_n", "pad", "dynamic_update_slice", "stack", "max", "min", "clamp"}
    | {"scatter", "scatter-min", "scatter-max"}
)
"""Operations of several operands that do not round. In a loop, they accumulate no error."""
BROADCAST = frozenset({"add", "sub", "mul", "div", "max", "min", "pow", "rem", "atan2"})
"""Operations whose operands JAX broadcasts implicitly, along axes of size 1 and from scalars."""
MEETS = BROADCAST | COMBINES
"""Operations of several operands, some of which JAX may broadcast to the shape of the others."""
SUMS = frozenset({"add", "sub", "add_any"})
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
EXTREMES = frozenset({"reduce_max", "reduce_min", "cummax", "cummin"})
"""Operations that pick the largest or smallest element along an axis."""
