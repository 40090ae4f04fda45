"""Tables of the rules of autocast, and of the memory that they save."""

from __future__ import annotations

from typing import Any

from experiments.benchmarks.real_libraries import ablation
from experiments.benchmarks.real_libraries.ablation_memory import ALL_RULES, EACH_ALONE
from experiments.report.tables import markdown, percent

LEAST_CHANGE = 0.005
"""The smallest change of memory that the table shows."""


def without_a_graph(programs: list[dict[str, Any]]) -> str:
    """Return a sentence and a list of the programs whose error matters without a graph."""
    lines = []
    for row in programs:
        before, after = row["all_rules"]["error"], row["each_alone"]["error"]
        if ablation.is_worse(before, after):
            lines.append(f"- {row['library']}: {row['program']} ({percent(before)} → {percent(after)})")
    text = "If the dtype of each operation is decided on its own, the error matters in"
    return f"{text} {len(lines)} of {len(programs)} programs:\n\n" + "\n".join(lines)


def rules(data: dict[str, Any]) -> str:
    """Return the table of rules, from the result of the benchmark `ablation`."""
    columns = ("rule", "switched off", "programs that change", "error matters", "bytes matter", "for example")
    return markdown(columns, ablation.rows_of_rules(data["rules"], data["programs"], examples=1), left=2)


def memory(rows: list[dict[str, Any]]) -> str:
    """Return the table of memory without each rule, from the result of the benchmark `ablation_memory`."""
    peaks = {row["model"]: row["peak"] for row in rows if row["off"] == ALL_RULES}
    cells = []
    for row in rows:
        change = row["peak"] / peaks[row["model"]] - 1
        if row["off"] == EACH_ALONE or abs(change) >= LEAST_CHANGE:
            cells.append((row["model"], row["off"], f"{100 * change:+.1f} %"))
    return markdown(("model, compiled for an H200", "switched off", "memory compared with all rules"), cells, left=2)
