"""Two looks beside the table of benchmarks.train_step: where half precision stops paying, and a busy host."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rich.console

from experiments.benchmarks.shared import kept
from experiments.benchmarks.shared.workloads import FULL, SMOKE, Name, Workload, workload
from experiments.benchmarks.train_step import jax_steps, measure
from experiments.benchmarks.train_step.config import Config, case_of
from experiments.benchmarks.train_step.rows import ROWS, Row, broken, peers, rows_of
from experiments.measure import timing
from experiments.measure.environment import environment
from experiments.report.progress import Progress
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.runs import write_json

SWEEPS = {"width": (1536, 1024, 768, 512, 256, 128, 64), "depth": (24, 12, 6, 3, 1)}
SMOKE_SWEEPS = {"width": (128, 64), "depth": (2, 1)}
BASE = "jaxmp-tf32"
SWEEP_ROWS = ("jaxmp-bf16", "jaxmp-fp16", BASE)
"""Half precision against what JAX does by itself."""
BUSY_BLOCKS = 4
"""Times that the host is idle, and then busy, in turn."""
BUSY_ROWS = ("jaxmp-bf16", "jaxmp-fp16", "hand-bf16", "torch-bf16", "compile-bf16")


def check(config: Config) -> None:
    """Checks the flags that sweeps and a busy host have to do with.

    Raises:
      ValueError: there is nothing to measure, or a flag that would be ignored.
    """
    if config.sweep and config.busy:
        raise ValueError("--sweep and --busy are measured one after the other; give one of them")
    if config.report_only:
        raise ValueError("--sweep and --busy write their report when they measure, got --report-only; leave it out")
    if "train" not in config.passes:
        raise ValueError("--sweep and --busy are of the train step, got --passes forward")
    if config.sweep and not _models(config):
        raise ValueError("--sweep is of transformers, which have a width and a depth, got --models resnet50")


def run(config: Config, folder: Path) -> dict[str, Any]:
    """Measures what the flags ask for, and writes and shows its tables."""
    name = config.sweep or "busy"
    models = _models(config)
    kept_in = _Kept(folder, config, environment(peers()))
    with measure.caches_in(folder / "cache"), Progress(name, len(models) * _steps(config)) as progress:
        found = {model: (sweep if config.sweep else busy)(model, config, progress, kept_in) for model in models}
    results = {model: result for model, result in found.items() if result}
    where = kept.joined(kept_in.environments) if results else kept_in.where
    tables = [(sweep_table if config.sweep else busy_table)(result) for result in results.values()]
    facts = [f"- {key}: {value}" for key, value in where.items()]
    title = f"Half precision by {name}" if config.sweep else "A train step while the host is busy"
    (folder / f"train_step_{name}.md").write_text(
        "\n".join([f"# {title}", "", *facts, "", *(each.markdown() for each in tables)])
    )
    write_json(folder / f"train_step_{name}.json", {"environment": where, "models": results})
    console = rich.console.Console()
    for each in tables:
        each.show(console)
    console.print(*facts, f"written to {folder}", sep="\n", markup=False, highlight=False, soft_wrap=True)
    if kept_in.clock.unfinished:
        print(kept.UNFINISHED)
    return results


class _Kept:
    """What a run folder has of sweeps and of a busy host, a file for each width, depth or model.

    Attributes:
      clock: what is left to the next command.
      environments: of all that was found or measured.
    """

    def __init__(self, folder: Path, config: Config, where: dict[str, str]) -> None:
        self.where, self._folder = where, folder
        self.clock = kept.Clock(config.minutes)
        self.environments: list[dict[str, str]] = []
        held = {name: where[name] for name in ("device", "versions")}
        self._setting = held | {name: getattr(config, name) for name in ("rows", "rounds", "block_ms", "smoke")}

    def get(self, name: str, case: Workload, find: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """What was found before, or what ``find`` does now; None if there is no time left for it."""
        file = self._folder / f"{name}.json"
        setting = {"sizes": dataclasses.asdict(case.sizes), **self._setting}
        if file.exists():
            with cli.bad_values_end_it():
                kept.require_alike(file, setting)
        elif self.clock.late():
            return None
        else:
            kept.save(file, case, setting, self.where, {"found": find()})
        record = kept.read(file)
        self.environments.append(record["environment"])
        return record["found"]


def sweep(name: Name, config: Config, progress: Progress, kept_in: _Kept) -> dict[str, Any] | None:
    """The train step at each width, or depth: milliseconds a row, and what half precision gains over TF32."""
    axis = config.sweep
    field = {"width": "width", "depth": "layers"}[axis]
    points = []
    for value in (SMOKE_SWEEPS if config.smoke else SWEEPS)[axis]:
        sizes = dataclasses.replace((SMOKE if config.smoke else FULL)[name], **{field: value})
        case = workload(name, dataclasses.replace(sizes, batch_size=config.batch_size or sizes.batch_size))
        find = functools.partial(_point, case, value, config, progress)
        if point := kept_in.get(f"sweep-{axis}-{name}-{value}", case, find):
            points.append(point)
        progress.advance(1, f"{axis} {value}", name)
    return {"axis": axis, "text": case.text, "points": points} if points else None


def _point(case: Workload, value: int, config: Config, progress: Progress) -> dict[str, Any]:
    rows = _rows(case.name, config, SWEEP_ROWS)
    times, errors = _time(case, rows, config, progress, f"{config.sweep} {value}")
    base = times.get(BASE)
    gains = {key: _gain(base, own) for key, own in times.items() if base and _half(key)}
    return {"value": value, "milliseconds": times, "gain": gains, "errors": errors}


def busy(name: Name, config: Config, progress: Progress, kept_in: _Kept) -> dict[str, Any] | None:
    """The train step with idle cores, and with a process at work on every one, block by block in turn."""
    case = case_of(name, config)
    return kept_in.get(f"busy-{name}", case, functools.partial(_busy, case, config, progress))


def _busy(case: Workload, config: Config, progress: Progress) -> dict[str, Any]:
    name = case.name
    rows = _rows(name, config, BUSY_ROWS)
    prepared, errors = _prepare(case, rows, config, progress)
    found: dict[str, dict[str, list[float]]] = {label: {key: [] for key in prepared} for label in ("idle", "busy")}
    rounds, block_ms = _length(config)
    blocks = min(BUSY_BLOCKS, rounds)
    for i in range(2 * blocks if prepared else 0):
        label = ("idle", "busy")[i % 2]
        progress.advance(0, f"timing, {label}: {i // 2 + 1} of {blocks}", name)
        with busy_cores() if label == "busy" else contextlib.nullcontext():
            times = measure.together(prepared, -(-rounds // blocks), block_ms, lambda _: None)
        for key, each in times.items():
            found[label][key] += each.get("milliseconds", [])
            errors |= {key: why} if (why := each.get("error") or broken(each)) else {}
    found = {label: {key: own for key, own in rows.items() if key not in errors} for label, rows in found.items()}
    progress.advance(2, "timed", name)
    return {"text": case.text, "cores": os.cpu_count(), "errors": errors, **found}


@contextlib.contextmanager
def busy_cores(count: int | None = None) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Within it a process of its own works on every core of the host, or so many processes do: those."""
    program = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    processes = [subprocess.Popen(program, stdout=subprocess.PIPE) for _ in range(count or os.cpu_count() or 1)]
    try:
        for process in processes:
            process.stdout.readline()  # it is at work
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def sweep_table(result: dict[str, Any]) -> Table:
    """A row a width or depth; the note says from where on half precision pays."""
    points, axis = result["points"], result["axis"]
    keys = list(dict.fromkeys(key for point in points for key in (*point["milliseconds"], *point["errors"])))
    half = [key for key in keys if _half(key)]
    rows = []
    for point in points:
        times = {key: timing.quartiles(own)[1] for key, own in point["milliseconds"].items()}
        cells = [f"{times[key]:.4g}" if key in times else point["errors"].get(key, "") for key in keys]
        gains = [f"{point['gain'][key][1]:.2f}" if key in point["gain"] else "" for key in half]
        rows.append((str(point["value"]), *cells, *gains))
    notes = []
    for key in half:
        gains = {point["value"]: point["gain"][key][1] for point in points if key in point["gain"]}
        pays = [str(value) for value, gain in gains.items() if gain > 1]
        where = f"pays at {axis} {', '.join(pays)}" if pays else f"pays at no {axis} here"
        unknown = [str(point["value"]) for point in points if point["value"] not in gains]
        if unknown:
            lacking = f"not compared at {axis} {', '.join(unknown)}: not measured there beside {ROWS[BASE].label}"
            where = f"{where}; {lacking}" if gains else lacking
        notes.append(f"{ROWS[key].label}: {where}")
    columns = (axis, *(f"{ROWS[key].label}, ms" for key in keys), *(f"TF32 / {ROWS[key].label}" for key in half))
    return Table(f"{result['text'].split(',')[0]}: the train step by {axis}", columns, rows, notes=tuple(notes))


def busy_table(result: dict[str, Any]) -> Table:
    """A row a variant: milliseconds with idle cores, with busy ones, and their ratio."""
    rows: list[tuple[str, ...]] = [(ROWS[key].label, why, "", "") for key, why in result["errors"].items()]
    for key, idle in result["idle"].items():
        before, after = (timing.quartiles(times)[1] for times in (idle, result["busy"][key]))
        rows.append((ROWS[key].label, f"{before:.4g}", f"{after:.4g}", f"{after / before:.3f}"))
    columns = ("row", "idle, ms", "busy, ms", "busy / idle")
    return Table(f"{result['text']}: the train step with {result['cores']} cores idle and busy", columns, rows)


def _rows(name: Name, config: Config, names: tuple[str, ...]) -> dict[str, Row]:
    return rows_of(name, config.rows or names)


def _models(config: Config) -> list[Name]:
    return [model for model in config.models if model != "resnet50" or not config.sweep]


def _steps(config: Config) -> int:
    return len((SMOKE_SWEEPS if config.smoke else SWEEPS)[config.sweep]) if config.sweep else 2


def _length(config: Config) -> tuple[int, float]:
    return (2, 1.0) if config.smoke else (config.rounds, config.block_ms)


def _prepare(case: Workload, rows: dict[str, Row], config: Config, progress: Progress) -> tuple[Any, dict[str, str]]:
    missing = {key: f"not installed: {row.missing}" for key, row in rows.items() if row.missing}
    there = {key: row for key, row in rows.items() if not row.missing}
    prepared, errors = measure.prepare_all(
        case,
        there,
        "train",
        lambda key: progress.advance(0, f"{ROWS[key].label}: getting ready", case.name),
    )
    return prepared, {**missing, **errors}


def _time(
    case: Workload, rows: dict[str, Row], config: Config, progress: Progress, text: str
) -> tuple[dict[str, list[float]], dict[str, str]]:
    prepared, errors = _prepare(case, rows, config, progress)
    progress.advance(0, f"timing, {text}", case.name)
    times = measure.together(prepared, *_length(config), lambda _: None) if prepared else {}
    prepared.clear()
    gc.collect()
    errors |= {key: why for key, each in times.items() if (why := each.get("error") or broken(each))}
    return {key: each["milliseconds"] for key, each in times.items() if key not in errors}, errors


def _gain(base: list[float], own: list[float]) -> tuple[float, float, float]:
    return timing.quartiles([a / b for a, b in zip(base, own, strict=True)])


def _half(key: str) -> bool:
    return ROWS[key].precision in jax_steps.HALF
