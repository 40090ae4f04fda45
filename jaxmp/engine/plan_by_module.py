"""The short form of a plan: one row for each module or scope."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxmp.base import tables
from jaxmp.program.primitives import Class

_COLUMNS = ("path", "modules", "half products", "wider products", "% of FLOPs", "why")


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """The operations of one module or scope, without those of modules inside.

    Attributes:
      path: its path; empty for operations outside of scopes.
      half_products: the number of its products in half precision.
      wider_products: the number of its other floating products, which are float32 in general.
      flops_share: its share of the FLOPs of the plan, from 0 to 1.
      why: the reason of its first float32 product. If there is none, the reason of its first product, or else of its
        first operation.
    """

    path: str
    half_products: int
    wider_products: int
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
            return (*_numbers(row), tables.without_numbers(row.path), tables.without_numbers(row.why))

        rows = []
        for group in tables.grouped(self.rows, key):
            path = tables.common_path([row.path for row in group]) or "(no scope)"
            why = tables.common_path([row.why for row in group])
            rows.append((path, len(group), *_numbers(group[0]), why))
        return self.title, _COLUMNS, rows, ()


def _numbers(row: ModuleRow) -> tuple[float, ...]:
    return row.half_products, row.wider_products, round(100 * row.flops_share, 1)


def rows_by_module(rows: Sequence[Any]) -> tuple[ModuleRow, ...]:
    """Return one row for each path among the rows of a plan (``plan.PlanRow``)."""
    flops = sum(row.flops for row in rows)
    of_operations = [row for row in rows if row.cls != Class.RECURSE]
    return tuple(_module_row(group, flops) for group in tables.grouped(of_operations, lambda row: row.path))


def _module_row(rows: Sequence[Any], flops: int) -> ModuleRow:
    products = [row for row in rows if row.cls == Class.HALF and row.is_floating]
    wider = [row for row in products if not row.is_half]
    return ModuleRow(
        path=rows[0].path,
        half_products=len(products) - len(wider),
        wider_products=len(wider),
        flops_share=sum(row.flops for row in rows) / flops if flops else 0.0,
        why=(wider or products or rows)[0].why,
    )
