"""The measurements of ``--look``: widths, depths, a busy host."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from experiments.benchmarks.measure import processes, turns
from experiments.benchmarks.measure.caches import caches_in
from experiments.benchmarks.models.workloads import Name, Workload
from experiments.benchmarks.shared import measurements, records
from experiments.benchmarks.train_step import jax_steps, measure
from experiments.benchmarks.train_step.config import Config, case_of
from experiments.benchmarks.train_step.rows import PEERS, ROWS, rows_of
from experiments.measure import timing
from experiments.report.progress import Progress
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.environment import environment

VALUES = {"width": (1536, 1024, 768, 512, 256, 128, 64), "depth": (24, 12, 6, 3, 1), "busy": (0,)}
SMOKE_VALUES = {**VALUES, "width": (128, 64), "depth": (2, 1)}
"""The widths or depths to measure; 0 for the model's own width."""
BASE = "jaxmp-tf32"
SWEEP_ROWS = ("jaxmp-bf16", "jaxmp-fp16", BASE)
"""Half precision, and JAX's default precision to compare with."""
BUSY_BLOCKS = 4
"""The number of times that an idle and a busy period alternate."""
BUSY_ROWS = ("jaxmp-bf16", "jaxmp-fp16", "hand-bf16", "torch-bf16", "compile-bf16")
Point = dict[str, Any]
"""The measurement at a ``value`` (a width, a depth, idle or busy): ``milliseconds`` by row, and ``errors`` by row."""


def check(config: Config) -> None:
    """Check the flags that must fit ``--look``.

    Raises:
      ValueError: there is nothing to measure, or a flag would be ignored.
    """
    if config.report_only:
        raise ValueError("--look writes its report when it measures, got --report-only; leave it out")
    if "train" not in config.passes:
        raise ValueError("--look measures the train step, got --passes forward")
    if not _models(config):
        raise ValueError("--look width and --look depth need a transformer, got --models resnet50")


def run(config: Config, folder: Path) -> dict[str, Any]:
    """Measure what the flags ask for, and write and print the tables."""
    look, results = config.look, dict[Name, Any]()
    setting = {field: getattr(config, field) for field in ("rows", "rounds", "block_ms", "smoke")}
    saved = measurements.Measurements(folder, config.minutes, environment(PEERS), **setting)
    size = "layers" if look == "depth" else "width"
    cases = [
        (f"{look}-{model}-{value}", str(value), case_of(model, config, **{size: value}))
        for model in _models(config)
        for value in (SMOKE_VALUES if config.smoke else VALUES)[look]
    ]
    with cli.bad_values_end_it():
        for record, _, case in cases:
            saved.require_alike(f"{record}.json", sizes=dataclasses.asdict(case.sizes))
    with caches_in(folder / "cache"), Progress(look, len(cases)) as progress:
        for record, value, case in cases:
            find = functools.partial(_points, case, config, value, progress)
            if measured := saved.get(record, find, progress, sizes=dataclasses.asdict(case.sizes)):
                about = {"axis": look, "text": case_of(case.name, config).text, "points": []}
                results.setdefault(case.name, about)["points"] += measured["points"]
    where = measurements.joined(saved.environments) if results else saved.where
    title = f"A train step while {os.cpu_count()} cores are busy" if look == "busy" else f"Half precision by {look}"
    tables = [table(result) for result in results.values()]
    records.record(folder, f"train_step_{look}", title, where, tables, {"models": results})
    saved.end()
    return results


def _points(case: Workload, config: Config, value: str, progress: Progress) -> dict[str, Any]:
    """Measure the train step at a width or depth, or with idle and busy cores.

    Idle and busy cores alternate in blocks of rounds.
    """
    chosen = rows_of(case.name, config.rows or (BUSY_ROWS if config.look == "busy" else SWEEP_ROWS))
    errors = {key: f"{turns.LACKS}{row.missing}" for key, row in chosen.items() if row.missing}
    there = {key: row for key, row in chosen.items() if not row.missing}
    prepared, failed = measure.prepare_all(case, there, "train", progress)
    errors |= failed
    rounds, block_ms = config.length
    labels, blocks = (("idle", "busy"), min(BUSY_BLOCKS, rounds)) if config.look == "busy" else ((value,), 1)
    times_by_label: dict[str, dict[str, list[float]]] = {label: {} for label in labels}
    for _ in range(blocks):
        for label, times in times_by_label.items():
            progress.advance(0, f"timing, {label}", case.name)
            with processes.busy_cores() if label == "busy" else contextlib.nullcontext():
                timed = turns.together(prepared, -(-rounds // blocks), block_ms) if prepared else {}
            for key, row in timed.items():
                times.setdefault(key, []).extend(row.get("milliseconds", []))
                errors |= {key: row["error"]} if "error" in row else {}
            errors |= turns.not_judged(timed)
    prepared.clear()
    measure.start_anew(there.values())
    sound = {
        label: {key: time for key, time in times.items() if key not in errors}
        for label, times in times_by_label.items()
    }
    points = [{"value": label, "milliseconds": times, "errors": errors} for label, times in sound.items()]
    return {
        "points": points,
        **({"error": "of a row"} if set(errors) & set(there) else {}),
    }  # the next command tries again


def table(result: dict[str, Any]) -> Table:
    """Return a table of the milliseconds of each row at each point.

    The lines below the table say where half precision is faster, or what busy cores cost.
    """
    points, axis = result["points"], result["axis"]
    keys = list(dict.fromkeys(key for point in points for key in (*point["milliseconds"], *point["errors"])))
    rows = []
    for point in points:
        times = {key: timing.quartiles(times)[1] for key, times in point["milliseconds"].items()}
        cells = (f"{times[key]:.4g}" if key in times else point["errors"].get(key, "") for key in keys)
        rows.append((point["value"], *cells))
    half = [key for key in keys if ROWS[key].precision in jax_steps.HALF]
    notes = busy_notes(points) if axis == "busy" else [gain_note(points, key, axis) for key in half]
    columns = ("cores" if axis == "busy" else axis, *(f"{ROWS[key].label}, ms" for key in keys))
    return Table(f"{result['text']}: the train step, {axis}", columns, rows, notes=tuple(notes))


def busy_notes(points: list[Point]) -> list[str]:
    """Return a sentence for each row: its time on busy cores relative to idle cores."""
    idle, busy = (point["milliseconds"] for point in points)
    return [f"{ROWS[key].label}: {timing.ratio(busy[key], times)[1]:.3f}× on busy cores" for key, times in idle.items()]


def gain_note(points: list[Point], key: str, axis: str) -> str:
    """Return a sentence on how much faster a row is than TF32 at each width or depth."""
    gains = []
    for point in points:
        time, base = (point["milliseconds"].get(row) for row in (key, BASE))
        if time and base:
            gain = timing.ratio(base, time)[1]
            gains.append(f"{gain:.2f}× at {point['value']}{' (does not pay)' if gain <= 1 else ''}")
        else:
            gains.append(f"not measured at {point['value']}")
    return f"{ROWS[key].label}: faster than {ROWS[BASE].label} by {axis}: {', '.join(gains)}"


def _models(config: Config) -> list[Name]:
    return [model for model in config.models if model != "resnet50" or config.look == "busy"]
