"""Measure the roundings that cause the errors of autocast in programs of real libraries.

python -m experiments.benchmarks.real_libraries.budgets --libraries flowjax distrax

The programs are those of `experiments.benchmarks.real_libraries`, in bfloat16. One `jaxmp.inspect.error_budget` of each
program gives:

- the largest share of the gradient's error that one line of code causes, by values that autocast left half
- for each reason of the cast plan, the error that float32 avoids: the error of the gradient if the values that are
  float32 for this reason were half, and all others exact

A share is of the error that the roundings explain. A value of the backward pass has the reason of the operation that it
differentiates. A program is named as not measured if it takes longer than `--seconds`, where a compilation is not
interrupted, or if it is not reached within `--minutes`. The run folder holds budgets.md and budgets.json.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jaxmp
from experiments.benchmarks.real_libraries import collect
from experiments.benchmarks.real_libraries.registry import Program
from experiments.benchmarks.shared import records
from experiments.report.tables import Table, percent
from experiments.training import cli
from experiments.training.environment import environment
from jaxmp.inspect._budget.reasons import rule_of

HALF_REASONS = ("product", "between half operations")
"""Reasons of half values. The derivative of such a value may be float32."""
NOTICEABLE = 0.001
"""The smallest error that counts as avoided."""
PROGRAM_COLUMNS = ("program", "line with the largest share", "its operation", "share", "error", "predicted")
RULE_COLUMNS = ("reason of float32", "programs", "avoids more than 0.1 %", "the largest error that it avoids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(collect.Config):
    """Flags of the benchmark."""

    probes: int = 4
    """Random directions in which the errors of a gradient are measured."""
    seconds: int = 90
    """Stop the measurement of a program after so many seconds."""
    minutes: float = 0.0
    """Measure no further program after so many minutes; 0 for no limit."""


def measure(program: Program, config: Config) -> dict[str, Any]:
    """Return the figures of a program's error budget."""
    loss, params = program.make()
    with time_limit(config.seconds):
        budget = jaxmp.inspect.error_budget(loss, "mixed_bfloat16", probes=config.probes, float32=True)(params)
    half = [row for row in budget.rows if not row.is_float32]
    avoided = collections.defaultdict[str, float](float)
    for row in budget.rows:
        reason = rule_of(row.why)
        if row.is_float32 and reason not in HALF_REASONS:
            avoided[reason] += row.gradient_error**2
    return {
        "library": program.library,
        "program": program.name,
        "measured": budget.measured.gradient_error,
        "explained": budget.predicted.gradient_error,
        "largest": _largest_line(half),
        "avoided": {reason: math.sqrt(square) for reason, square in sorted(avoided.items())},
    }


def _largest_line(rows: Sequence[Any]) -> dict[str, Any]:
    """Return the line with the largest share, and its operation with the largest share."""
    shares = collections.Counter[str]()
    for row in rows:
        shares[row.source] += row.share
    if not shares:
        return {"line": "", "operation": "", "share": 0.0}
    line, share = shares.most_common(1)[0]
    row = max((row for row in rows if row.source == line), key=lambda row: row.share)
    return {"line": line, "operation": row.operation, "share": share}


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError if the code inside takes longer, when Python runs the next line."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def rows_of_programs(programs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of the table of programs, the largest share first."""
    return [_cells(row) for row in sorted(programs, key=lambda row: -row["largest"]["share"])]


def is_explained(row: dict[str, Any]) -> bool:
    """Return whether the predicted error of a program is near the measured error."""
    return row["measured"] / 1.5 <= row["explained"] <= 1.5 * row["measured"]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    largest = row["largest"]
    line = largest["line"], largest["operation"], f"{100 * largest['share']:.0f} %"
    return (f"{row['library']}: {row['program']}", *line, percent(row["measured"]), percent(row["explained"]))


def rows_of_reasons(programs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of the table of reasons, the reason that avoids the largest error first."""
    by_reason = collections.defaultdict[str, list[tuple[float, str]]](list)
    for row in programs:
        for reason, error in row["avoided"].items():
            by_reason[reason].append((error, f"{row['library']}: {row['program']}"))
    cells = []
    for reason, errors in sorted(by_reason.items(), key=lambda item: -max(item[1])[0]):
        error, title = max(errors)
        count = sum(error > NOTICEABLE for error, _ in errors)
        cells.append((reason, str(len(errors)), str(count), f"{percent(error)} ({title})"))
    return cells


def main(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        folder = records.folder_of("budgets", config, probes=1, seconds=1)
    setting = {"versions": environment()["versions"], "probes": config.probes}
    end = time.monotonic() + (60 * config.minutes or math.inf)

    def measure_until_the_end(program: Program) -> list[dict[str, Any]]:
        if time.monotonic() > end:
            raise TimeoutError("not reached in time")
        return [measure(program, config)]

    collected = collect.collect(folder, config, setting, measure_until_the_end, lambda row: " ".join(_cells(row)))
    rows, notes = collected.rows, collected.notes()
    tables = [
        Table("The line with the largest share of the error", PROGRAM_COLUMNS, rows_of_programs(rows), 3, notes),
        Table("The errors that float32 avoids, by the reason of the plan", RULE_COLUMNS, rows_of_reasons(rows), 1, ()),
    ]
    data = {"programs": rows, "not_installed": collected.not_installed, "failed": collected.failed}
    where = {**environment(), "half": "bfloat16"}
    records.record(folder, "budgets", "Error budgets of programs of real libraries", where, tables, data)
    (folder / collect.PART).unlink(missing_ok=True)
    return data


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
