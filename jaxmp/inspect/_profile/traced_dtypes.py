"""The dtypes of products in the traced program, for a CPU.

On a CPU, XLA computes most half products in float32. A profile on a CPU shows the dtypes that the program asks for, so
that a layer in float32 is visible there too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmp.inspect._profile import kinds
from jaxmp.inspect._profile.kernel_rows import ProfileRow
from jaxmp.inspect.compiled.hlo import BACKWARD
from jaxmp.inspect.program.product_dtypes import operand_dtypes, widest
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.reading import read_program

_PathAndPass = tuple[str, bool]
"""The path of a product, and whether it is in the backward pass."""


def with_traced_dtypes(rows: Sequence[ProfileRow], trace: Any) -> list[ProfileRow]:
    """Return the rows with the dtypes of the traced program.

    The products of a row have its path, or a longer path if XLA dropped a scope, and its pass. If they have several
    dtypes, the row keeps its own.

    Args:
      rows: the rows of the compiled program.
      trace: a result of :func:`jaxmp.inspect.compiled.compiling.trace_of_call`.
    """
    traced = _traced_dtypes(trace)
    return [_with_dtype(row, _dtypes_of(row, traced)) for row in rows]


def _dtypes_of(row: ProfileRow, traced: Mapping[_PathAndPass, set[str]]) -> set[str]:
    is_backward = row.phase in BACKWARD
    dtypes = traced.get((row.path, is_backward))
    if dtypes is not None:
        return dtypes
    below = [
        dtypes for (path, of_pass), dtypes in traced.items() if of_pass == is_backward and _is_below(path, row.path)
    ]
    return set[str]().union(*below)


def _is_below(path: str, scope: str) -> bool:
    return path.startswith(f"{scope}/")


def _traced_dtypes(trace: Any) -> dict[_PathAndPass, set[str]]:
    dtypes: dict[_PathAndPass, set[str]] = {}
    for value in read_program(getattr(trace, "traced", trace).jaxpr).values:  # nnx.jit wraps the trace of jax.jit
        if value.name in PRODUCTS:
            key = value.at.path, value.at.phase == "backward"
            dtypes.setdefault(key, set()).add(widest(operand_dtypes(value)))
    return dtypes


def _with_dtype(row: ProfileRow, dtypes: set[str]) -> ProfileRow:
    if not row.dtype or len(dtypes) != 1:
        return row
    (dtype,) = dtypes
    kind = row.kind
    if kind in (kinds.HALF, kinds.FLOAT32):
        kind = kinds.HALF if kinds.has_at_most_16_bits(dtype) else kinds.FLOAT32
    return dataclasses.replace(row, dtype=dtype, kind=kind)
