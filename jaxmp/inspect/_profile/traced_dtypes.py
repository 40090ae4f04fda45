"""The dtypes of products in the traced program, for a CPU.

On a CPU, XLA computes most half products in float32. A profile on a CPU shows the dtypes that the program asks for, so
that a layer in float32 is visible there too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxmp._internals.jax.walk import PRODUCTS
from jaxmp.inspect._profile import kinds
from jaxmp.inspect._profile.kernel_rows import ProfileRow
from jaxmp.inspect.program.products import multiplied, widest
from jaxmp.inspect.program.reading_values import values_of

_PathAndPass = tuple[str, bool]
"""The path of a product, and whether it is in the backward pass."""


def with_traced_dtypes(rows: Sequence[ProfileRow], trace: Any) -> list[ProfileRow]:
    """Return the rows with the dtypes of the traced program.

    A row keeps its dtype if the products with its path and pass have several dtypes.

    Args:
      rows: the rows of the compiled program.
      trace: a result of :func:`jaxmp.inspect.program.compiling.trace_of_call`.
    """
    traced = _traced_dtypes(trace)
    return [_with_dtype(row, traced.get((row.path, _is_backward(row)), set())) for row in rows]


def _is_backward(row: ProfileRow) -> bool:
    return row.phase in ("backward", "recomputed")


def _traced_dtypes(trace: Any) -> dict[_PathAndPass, set[str]]:
    dtypes: dict[_PathAndPass, set[str]] = {}
    for value in values_of(getattr(trace, "traced", trace).jaxpr).all:  # nnx.jit wraps the trace of jax.jit
        if value.name in PRODUCTS:
            key = value.at.path, value.at.phase == "backward"
            operands = [multiplied(operand) for operand in value.inputs[:2]]
            dtypes.setdefault(key, set()).add(widest(operands))
    return dtypes


def _with_dtype(row: ProfileRow, dtypes: set[str]) -> ProfileRow:
    if not row.dtype or len(dtypes) != 1:
        return row
    (dtype,) = dtypes
    kind = row.kind
    if kind in (kinds.HALF, kinds.FLOAT32):
        kind = kinds.HALF if kinds.is_half(dtype) else kinds.FLOAT32
    return dataclasses.replace(row, dtype=dtype, kind=kind)
