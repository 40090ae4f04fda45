"""The tables of docs/real_libraries.md with the programs in which each rule of autocast matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.benchmarks.real_libraries import ablation
from experiments.benchmarks.real_libraries.ablation_memory import ALL_RULES, EACH_ALONE
from experiments.report.json_files import numbers
from experiments.report.tables import percent

Row = dict[str, Any]
LEAST_CHANGE = 0.005
"""The smallest change of memory that the table shows."""


def block(errors: Path, memory: Path) -> list[str]:
    """Return the lines of the generated part of the page.

    Args:
      errors: ablation.json of the benchmark `ablation`.
      memory: ablation_memory.json of the benchmark `ablation_memory`.
    """
    data = numbers(json.loads(errors.read_text()))
    rows = ablation.rows_of_rules(data["rules"], data["programs"], examples=1)
    return [
        *_without_a_graph(data["programs"]),
        "",
        "| rule | switched off | programs that change | error matters | bytes matter | for example |",
        "|---|---|---:|---:|---:|---|",
        *map(_line, rows),
        "",
        "| model, compiled for an H200 | switched off | memory compared with all rules |",
        "|---|---|---:|",
        *_memory_lines(json.loads(memory.read_text())["rows"]),
    ]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _without_a_graph(programs: list[Row]) -> list[str]:
    """Return a sentence and a list of the programs whose error matters without a graph."""
    worse = [row for row in programs if ablation.is_worse(row["all_rules"]["error"], row["each_alone"]["error"])]
    lines = [
        f"If the dtype of each operation is decided on its own, the error matters in {len(worse)} of {len(programs)} "
        "programs:",
        "",
    ]
    for row in worse:
        before, after = row["all_rules"]["error"], row["each_alone"]["error"]
        lines.append(f"- {row['library']}: {row['program']} ({percent(before)} → {percent(after)})")
    return lines


def _memory_lines(rows: list[Row]) -> list[str]:
    peaks = {row["model"]: row["peak"] for row in rows if row["off"] == ALL_RULES}
    lines = []
    for row in rows:
        change = row["peak"] / peaks[row["model"]] - 1
        if row["off"] == EACH_ALONE or abs(change) >= LEAST_CHANGE:
            lines.append(_line((row["model"], row["off"], f"{100 * change:+.1f} %")))
    return lines
