"""The short form of a plan: one row for each module or scope."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxmp.base import tables
from jaxmp.program.primitives import Class

_COLUMNS = ("path", "modules", "products", "other results", "% of FLOPs", "why")
_OTHERS = (Class.POINTWISE, Class.ACCUMULATION, Class.LINALG, Class.WIDEST, Class.INFER)
"""The classes of operations that compute and are not products."""


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """The operations of one module or scope, without those of modules inside.

    Attributes:
      path: its path; empty for operations outside of scopes.
      products: the number of its floating products by the dtype of their operands, the most common dtype first.
      others: the dtypes of the results of its other operations that compute, the most common dtype first.
      flops_share: its share of the FLOPs of the plan, from 0 to 1.
      why: the reason of its first float32 product. If there is none, the reason of its first product, or else of its
        first operation.
    """

    path: str
    products: Mapping[str, int]
    others: tuple[str, ...]
    flops_share: float
    why: str


@dataclasses.dataclass(frozen=True)
class PlanByModule(tables.Shown):
    """A plan with one row for each module or scope.

    In the printed table, modules share a row if their rows differ only in numbers of paths and reasons. A ``*`` stands
    for the numbers that differ.

    Attributes:
      title: the policy of the plan, and the shares of half precision.
      rows: the modules and scopes, in program order.
    """

    title: str
    rows: tuple[ModuleRow, ...]

    def _shown(self) -> tuple[str, Sequence[str], Sequence[Sequence[object]], Sequence[str]]:
        def key(row: ModuleRow) -> tuple[object, ...]:
            return (*_dtypes_and_share(row), tables.without_numbers(row.path), tables.without_numbers(row.why))

        rows = []
        for group in tables.grouped(self.rows, key):
            path = tables.common_path([row.path for row in group]) or "(no scope)"
            why = tables.common_path([row.why for row in group])
            rows.append((path, len(group), *_dtypes_and_share(group[0]), why))
        return self.title, _COLUMNS, rows, ()


def _dtypes_and_share(row: ModuleRow) -> tuple[str, str, float]:
    """Return the cells for the dtypes of a row, and for its share of the FLOPs."""
    products = tables.counts(row.products) if row.products else "-"
    return products, ", ".join(row.others) or "-", round(100 * row.flops_share, 1)


def rows_by_module(rows: Sequence[Any]) -> tuple[ModuleRow, ...]:
    """Return one row for each path among the rows of a plan (``plan.PlanRow``)."""
    flops = sum(row.flops for row in rows)
    of_operations = [row for row in rows if row.cls != Class.RECURSE]
    return tuple(_module_row(group, flops) for group in tables.grouped(of_operations, lambda row: row.path))


def _module_row(rows: Sequence[Any], flops: int) -> ModuleRow:
    products = [row for row in rows if row.cls == Class.HALF and row.is_floating]
    wider = [row for row in products if not row.is_half]
    others = Counter(row.result for row in rows if row.cls in _OTHERS and "float" in row.result)
    return ModuleRow(
        path=rows[0].path,
        products=dict(Counter(map(_operand_dtype, products)).most_common()),
        others=tuple(dtype for dtype, _ in others.most_common()),
        flops_share=sum(row.flops for row in rows) / flops if flops else 0.0,
        why=(wider or products or rows)[0].why,
    )


def _operand_dtype(product: Any) -> str:
    """Return the widest dtype of a product's floating operands."""
    return max((name for name in product.operands if "float" in name), key=lambda name: jnp.dtype(name).itemsize)
