"""The table of docs/real_libraries.md with the programs in which each rule of autocast matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.benchmarks.real_libraries import ablation
from experiments.report.json_files import numbers

Row = dict[str, Any]
HEADER = (
    "| rule | switched off | programs that change | error matters | bytes matter | for example |",
    "|---|---|---:|---:|---:|---|",
)


def block(record: Path) -> list[str]:
    """Return the lines of the page: two sentences about programs without a graph, and a row for each rule.

    Args:
      record: ablation.json of the benchmark.
    """
    data = numbers(json.loads(record.read_text()))
    rows = data["programs"]
    table = [_line(cells) for cells in ablation.rows_of_rules(data["rules"], rows, examples=1)]
    return [_without_a_graph(rows), "", *HEADER, *table]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _without_a_graph(rows: list[Row]) -> str:
    """Return sentences that compare the programs without a graph with those under all rules."""
    worse = [row for row in rows if ablation.is_worse(row["all_rules"]["error"], row["each_alone"]["error"])]
    names = "; ".join(f"{row['library']}: {row['program']}" for row in worse)
    return (
        f"If the dtype of each operation is decided on its own, the error matters in {len(worse)} of {len(rows)} "
        f"programs: {names}."
    )
