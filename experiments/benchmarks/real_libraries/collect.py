"""Measure one program after the other, with flags to choose programs, and continue a stopped run."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.benchmarks.real_libraries.registry import PAPER, PROGRAMS, Program
from experiments.benchmarks.shared import records
from experiments.report.json_files import numbers, write_json

FAMILIES = ("differential", "flows", "probability", "optimisation", "graphs", "agents", "networks", "papers")
Row = dict[str, Any]
PART = "part.json"
"""The file with the rows so far. Delete it when the result is recorded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Config):
    """Flags that choose programs."""

    libraries: tuple[str, ...] = ()
    """Libraries to measure, by their names on PyPI, or paper for programs of papers. (default: all)"""
    programs: tuple[str, ...] = ()
    """Measure the programs whose names contain one of these texts. (default: all)"""


@dataclasses.dataclass
class Collected:
    """The rows of all programs, the libraries that are not installed, and the programs that failed."""

    rows: list[Row]
    not_installed: list[str]
    failed: dict[str, str]

    def notes(self) -> tuple[str, ...]:
        """Return the notes below a table."""
        absent = [f"not installed: {', '.join(self.not_installed)}"] if self.not_installed else []
        return (*absent, *(f"failed: {title}: {text}" for title, text in self.failed.items()))


def collect(
    folder: Path,
    config: Config,
    setting: dict[str, Any],
    measure: Callable[[Program], list[Row]],
    show: Callable[[Row], str],
) -> Collected:
    """Measure the programs that the flags choose.

    Args:
      folder: the run folder. A file in it holds the rows so far. If the run is stopped, the next run continues.
      config: the flags.
      setting: everything else that the rows depend on. Rows of a stopped run with another setting are dropped.
      measure: a function that measures a program.
      show: a function that returns a line of text for a row.
    """
    for family in FAMILIES:
        importlib.import_module(f"experiments.benchmarks.real_libraries.{family}")
    part = folder / PART
    rows = _rows_of(part, setting)
    finished = {(row["library"], row["program"]) for row in rows}
    absent: set[str] = set()
    failures: dict[str, str] = {}
    for program in filter(lambda program: _is_chosen(program, config), PROGRAMS):
        title = f"{program.library}: {program.name}"
        if not is_installed(program.library):
            absent.add(program.library)
            continue
        if (program.library, program.name) in finished:
            continue
        started = time.perf_counter()
        try:
            measured = measure(program)
        except Exception as error:  # if one program fails, the others still run
            failures[title] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{title}: {failures[title]}", flush=True)
            continue
        rows += measured
        write_json(part, {"setting": setting, "programs": rows})
        for row in measured:
            print(show(row), f"({time.perf_counter() - started:.0f} s)", flush=True)
    return Collected(rows, sorted(absent), failures)


def _is_chosen(program: Program, config: Config) -> bool:
    is_of_library = not config.libraries or program.library in config.libraries
    return is_of_library and (not config.programs or any(part in program.name for part in config.programs))


def _rows_of(part: Path, setting: dict[str, Any]) -> list[Row]:
    """Return the rows of a stopped run; none if the run had another setting."""
    stopped = json.loads(part.read_text()) if part.is_file() else {}
    rows: list[Row] = numbers(stopped["programs"]) if stopped.get("setting") == setting else []
    return rows


def is_installed(library: str) -> bool:
    """Return whether the package of a program's library is installed."""
    if library == PAPER:
        return True
    try:
        importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
