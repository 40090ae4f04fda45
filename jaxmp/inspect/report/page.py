"""Write the page of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmp.inspect.report import charts
from jaxmp.inspect.report.reading import Run, read_run

TOLERANCE = 0.02
"""A run reaches the loss of another one if it ends at most 2 % above it."""


def write_report(run: str | Path, against: Sequence[str | Path] = (), file: str | Path | None = None) -> Path:
    """Write a page on a run as one HTML file, which needs no network.

    Args:
      run: the folder of a script's run, or of :func:`jaxmp.inspect.record`.
      against: folders of runs to compare with, the float32 one first.
      file: the page; by default ``report.html`` in the run's folder.

    Returns:
      The path of the page.

    Raises:
      FileNotFoundError: a folder has no ``metrics.csv``.
      ValueError: a file is another program's, or has no step.
      ModuleNotFoundError: Jinja or matplotlib is not installed (the extra ``report``).
    """
    from jinja2 import Environment, PackageLoader, select_autoescape

    main, references = read_run(Path(run)), [read_run(Path(folder)) for folder in against]
    environment = Environment(loader=PackageLoader("jaxmp.inspect.report", "."), autoescape=select_autoescape())
    text = environment.get_template("page.html").render(
        run=main,
        verdict=verdict(main, references),
        losses=charts.losses([main, *references]),
        scales=charts.scales(main),
        underflow=charts.underflow(main) if main.watched else None,
        columns=PLAN_COLUMNS,
        plan=plan_rows(main),
        findings=(main.plan or {}).get("findings", []),
        memory=charts.memory(main.memory["by_kind"]) if main.memory else None,
        peak=main.memory["peak"] / 2**20 if main.memory else None,
        about={name: main.summary[name] for name in ("device", "versions", "date", "command") if name in main.summary},
    )
    path = Path(file) if file is not None else Path(run) / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


PLAN_COLUMNS = ("path", "operation", "dtypes", "FLOPs", "reason", "source")


def plan_rows(run: Run) -> list[tuple[Any, ...]]:
    """Return the products of the audit, or the operations of the plan, as table cells."""
    plan = run.plan or {"rows": []}
    rows = []
    for row in plan["products"] if "products" in plan else plan["rows"]:
        dtypes = f"{', '.join(row['operands'])} → {row['result']}"
        rows.append((row["path"], row["primitive"], dtypes, row["flops"], row.get("why", ""), row["source"]))
    return rows


def verdict(run: Run, references: Sequence[Run]) -> str:
    """Return a sentence on the run's loss and gains beside the first reference run."""
    steps = f"{len(run.train)} steps, {run.skipped} of them skipped, end at a loss of {run.final_loss:.4g}"
    if not references:
        return f"{steps}. Name a float32 run with --against to compare."
    reference = references[0]
    change = run.final_loss / reference.final_loss - 1
    if not math.isfinite(change):
        return f"{steps}; it cannot be compared with {reference.name}, which ends at {reference.final_loss:.4g}."
    reached = "reaches" if change <= TOLERANCE else "does not reach"
    parts = [
        f"{run.name} {reached} the loss of {reference.name}: {run.final_loss:.4g} and {reference.final_loss:.4g} "
        f"({100 * change:+.1f} %; at most {100 * TOLERANCE:+.0f} % counts as reached)"
    ]
    times = run.summary.get("ms_per_step"), reference.summary.get("ms_per_step")
    if all(times):
        parts.append(f"a step takes {times[0]:.3g} ms and {times[1]:.3g} ms")
    if run.memory and reference.memory and run.memory["device"] != "cpu":  # XLA widens half arrays on a CPU
        saved = 1 - run.memory["peak"] / reference.memory["peak"]
        parts.append(f"its peak memory is {100 * abs(saved):.0f} % {'lower' if saved >= 0 else 'higher'}")
    return f"{'; '.join(parts)}."
