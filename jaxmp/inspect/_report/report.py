"""Write the report page about a run."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp.base import tables
from jaxmp.inspect._report import charts
from jaxmp.inspect._report.reading import Run, read_run

TOLERANCE = 0.02
"""A run reaches the reference's final loss if the run's final loss is higher by at most this share."""


def write_report(run: str | Path, against: Sequence[str | Path] = (), file: str | Path | None = None) -> Path:
    """Write a page about a run as one HTML file that needs no network.

    Args:
      run: the run's folder, written by :func:`jaxmp.inspect.record` or by a script with ``--run-dir``. A run of several
        seeds is a folder with the subfolders ``seed0``, ``seed1``, ….
      against: folders of runs to compare with, the float32 run first.
      file: the path of the page; by default ``report.html`` in the run's folder.

    Returns:
      The path of the page.

    Raises:
      FileNotFoundError: a folder has no ``metrics.csv``.
      ValueError: a file was written by another program, or has no training step.
      ModuleNotFoundError: Jinja or matplotlib is not installed (the extra ``report``).
    """
    from jinja2 import Environment, PackageLoader, select_autoescape

    main, *references = _read_runs([Path(folder) for folder in (run, *against)])
    environment = Environment(loader=PackageLoader("jaxmp.inspect._report", "."), autoescape=select_autoescape())
    environment.filters["short"] = tables.short
    text = environment.get_template("page.html").render(
        run=main,
        verdict=verdict(main, references),
        losses=charts.losses([main, *references]),
        runs=list(zip(charts.colors_of([main, *references]), run_rows([main, *references]), strict=True)),
        run_columns=RUN_COLUMNS,
        scales=charts.scales(main),
        underflow=charts.underflow(main) if main.watched else None,
        exponents=charts.exponents(main) if main.watched and "exponents" in main.watched[-1] else None,
        watched_step=main.watched[-1] if main.watched else None,
        plan_columns=PLAN_COLUMNS,
        plan=plan_rows(main),
        findings=(main.plan or {}).get("findings", []),
        memory=charts.memory([main, *references]) if main.memory else None,
        peak=tables.byte_text(main.memory["peak"]) if main.memory else None,
        half_flops=(main.plan or {}).get("half_flops"),
        about={name: main.summary[name] for name in ABOUT if name in main.summary},
    )
    path = Path(file) if file is not None else Path(run) / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


ABOUT = ("policy", "loss_scale_rule", "device", "versions", "date", "command")
PLAN_COLUMNS = ("path", "operation", "dtypes", "FLOPs", "phase or reason", "source")


def _read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs, and give each a name of its own.

    If two folders have the same name, all names begin with the folder around them.
    """
    runs = [read_run(folder) for folder in folders]
    if len({run.name for run in runs}) == len(runs):
        return runs
    return [
        dataclasses.replace(run, name=f"{folder.resolve().parent.name}/{run.name}")
        for folder, run in zip(folders, runs, strict=True)
    ]


def plan_rows(run: Run) -> list[tuple[Any, ...]]:
    """Return the rows of a run's plan, with the columns :data:`PLAN_COLUMNS`.

    The plan is an audit with its products, or a cast plan with its operations.
    """
    plan = run.plan or {"rows": []}
    rows = []
    for row in plan["products"] if "products" in plan else plan["rows"]:
        dtypes = f"{tables.runs(row['operands'])} → {row['result']}"
        why = row.get("why") or row.get("phase")
        rows.append((row["path"], row["primitive"], dtypes, row["flops"], why, row["source"]))
    return rows


RUN_COLUMNS = ("run", "loss", "accuracy", "skipped steps", "time/step", "peak memory")


def run_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return the results of runs, with the columns :data:`RUN_COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        milliseconds = run.summary.get("ms_per_step")
        rows.append(
            (
                f"{run.name} ({len(run.seeds)} seeds)" if run.other_seeds else run.name,
                _with_spread(run.final_losses, ".4g", ".2g"),
                _with_spread(run.final_accuracies, ".2%", ".2%") if _has_accuracy(run) else "",
                str(run.skipped_steps),
                tables.time_text(milliseconds) if milliseconds else "",
                tables.byte_text(run.memory["peak"]) if run.memory else "",
            )
        )
    return rows


def _has_accuracy(run: Run) -> bool:
    """Return whether a run recorded an accuracy."""
    return any(math.isfinite(accuracy) for accuracy in run.final_accuracies)


def _with_spread(values: Sequence[float], form: str, spread: str) -> str:
    """Return the mean and the standard deviation of values."""
    mean = statistics.fmean(values)
    return f"{mean:{form}} ± {np.std(values, ddof=1):{spread}}" if len(values) > 1 else f"{mean:{form}}"


def verdict(run: Run, references: Sequence[Run]) -> str:
    """Return a sentence that compares a run with the first reference run."""
    loss = statistics.fmean(run.final_losses)
    steps = f"{sum(len(seed.train) for seed in run.seeds)} recorded steps, {run.skipped_steps} of them skipped, "
    steps += f"end at a loss of {loss:.4g}"
    if not references:
        return f"{steps}. Name a float32 run with --against to compare."
    reference = references[0]
    other = statistics.fmean(reference.final_losses)
    if not math.isfinite(other):
        return f"{steps}; it cannot be compared with {reference.name}, which ends at {other:.4g}."
    if not math.isfinite(loss):
        return (
            f"{run.name} does not reach the loss of {reference.name}: it diverged, but {reference.name} ends at "
            f"{other:.4g}."
        )
    spread = 2 * float(np.std(reference.final_losses, ddof=1)) if reference.other_seeds else 0.0
    reached = "reaches" if loss - other <= max(TOLERANCE * abs(other), spread) else "does not reach"
    rule = f"at most {100 * TOLERANCE:+.0f} %"
    if reference.other_seeds:
        rule += f", or two standard deviations over {len(reference.seeds)} seeds,"
    change = f"{100 * (loss - other) / abs(other):+.1f} %; " if other else ""
    parts = [
        f"{run.name} {reached} the loss of {reference.name}: {loss:.4g} and {other:.4g} "
        f"({change}{rule} counts as reached)"
    ]
    times = [compared.summary.get("ms_per_step") or 0 for compared in (run, reference)]
    if run.is_on_cpu:
        parts.append("a CPU does not show gains in time and memory")
    elif all(times):
        parts.append(f"a step takes {tables.time_text(times[0])} instead of {tables.time_text(times[1])}")
    if run.memory and reference.memory and not run.is_on_cpu:
        saved = 1 - run.memory["peak"] / reference.memory["peak"]
        parts.append(f"the peak memory is {100 * abs(saved):.0f} % {'lower' if saved >= 0 else 'higher'}")
    return f"{'; '.join(parts)}."
