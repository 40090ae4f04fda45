"""The plan as text, JSON and a table."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmp.engine.plan import CastPlan, Row

_HEADER = ("primitive", "operands -> result", "FLOPs", "casts", "class", "path", "why", "source")


def text(plan: CastPlan) -> str:
    """One line for each equation, then the totals; no width depends on another row."""
    rows = (_line(_cells(row)) for row in plan.rows)
    return "\n".join([*_title(plan), "", _line(_HEADER), *rows, "", *_totals(plan)])


def _title(plan: CastPlan) -> Iterator[str]:
    yield f"autocast plan under {plan.policy}"
    yield from (f"override {key!r}: {level}" for key, level in plan.overrides.items())


def _line(cells: Sequence[str]) -> str:
    primitive, dtypes, flops, casts, cls, path, why, place = cells
    return f"{primitive:<24} {dtypes:<36} {flops:>8} {casts:>8}  {cls:<12} {path or '-'} | {why} | {place or '-'}"


def _cells(row: Row) -> tuple[str, ...]:
    dtypes = f"{_runs(row.operands)} -> {_runs(row.result.split(', '))}"
    sizes = (_short(row.flops), f"{_short(row.cast_bytes)}B" if row.casts else "-")
    return (f"{'  ' * row.depth}{row.primitive}", dtypes.strip(), *sizes, row.cls, row.path, row.why, row.source)


def _runs(names: Sequence[str]) -> str:
    """Names with their repetitions told by a number."""
    groups = ((name, len(list(group))) for name, group in itertools.groupby(names))
    return ", ".join(name if count == 1 else f"{count}×{name}" for name, count in groups)


def _short(number: int) -> str:
    """A number with three digits and a prefix: 1.05M."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size * 0.9995:
            return f"{number / size:.3g}{prefix}"
    return str(number)


def _totals(plan: CastPlan) -> Iterator[str]:
    summary = plan.summary
    yield f"operations: {_counts(summary.operations) or 'none'}"
    yield f"FLOPs: {summary.flops}, {_share(summary.half_flops, summary.flops)} in half precision"
    yield (
        f"FLOPs of products: {summary.product_flops}, "
        f"{_share(summary.half_product_flops, summary.product_flops)} in half precision"
    )
    yield f"casts added: {summary.casts}, which write {summary.cast_bytes} bytes"
    yield f"islands in float32: {_counts(summary.islands) or 'none'}"
    for place, why in summary.full_products:
        yield f"float32 product: {place}: {why}"
    if not summary.changes:
        yield "no product in half: nothing changes"
    if summary.unknown:
        yield f"unknown primitives, which keep their dtypes: {', '.join(summary.unknown)}"
    if summary.uncounted:
        yield f"FLOPs not counted: {', '.join(summary.uncounted)}"
    if summary.unknown_trips:
        yield f"loops of unknown trips, counted as one trip each: {summary.unknown_trips}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"


def to_json(plan: CastPlan) -> str:
    """The plan with all its numbers in full."""
    value = dataclasses.asdict(plan)
    value["summary"]["half_share"] = plan.summary.half_share
    return json.dumps(value, indent=2, allow_nan=False)


def table(plan: CastPlan, width: int) -> Any:
    """A table of the rows and the totals below it, for rich; below 110 columns without sizes, class and source."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shown = [n for n, name in enumerate(_HEADER) if width >= 110 or name in ("primitive", _HEADER[1], "path", "why")]
    for name in (_HEADER[n] for n in shown):
        grid.add_column(name, justify="right" if name in ("FLOPs", "casts") else "left", overflow="fold")
    for row in plan.rows:
        in_half = {"float16", "bfloat16"} & {*row.operands, *row.result.split(", ")}
        cells = _cells(row)
        grid.add_row(*(Text(cells[n]) for n in shown), style="green" if in_half else "")
    title, totals = ("\n".join(lines(plan)) for lines in (_title, _totals))
    return Group(Text(title, style="bold"), Text(""), grid, Text(""), Text(totals))
