"""A training run's folder (config, metrics, curves, summary) and what is shown meanwhile, without syncs every step."""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import jax

import jaxmp
from experiments import plots
from experiments.environment import environment
from experiments.experiment import Batch, Experiment
from experiments.metrics import Late
from experiments.progress import Progress

COLUMNS = (
    "step", "split", "loss", "accuracy", "grad_norm", "loss_scale", "skipped", "examples_per_s", "input_wait",
)  # fmt: skip


def run_folder(name: str, folder: Path | None) -> Path:
    """``folder``, or a new one below ``runs/`` with the name and the time."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    stem = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for suffix in itertools.count(1):
        folder = Path("runs") / (stem if suffix == 1 else f"{stem}-{suffix}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("itertools.count ends")


class Run:
    """One training run. A context manager: the bar stops and the metrics' file is closed when it ends."""

    def __init__(
        self, name: str, config: dict[str, Any], experiment: Experiment, folder: Path | None, evaluate_every: int
    ) -> None:
        self.folder = run_folder(name, folder)
        self._name, self._experiment, self._evaluate_every = name, experiment, evaluate_every
        self._environment = environment()
        record = {"config": config, "precision": experiment.precision, "environment": self._environment}
        write_json(self.folder / "config.json", record)
        self._file = (self.folder / "metrics.csv").open("w", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, restval="")
        self._writer.writeheader()
        self._rows: list[dict[str, Any]] = []
        self._late = Late()
        self._progress = Progress(name, experiment.steps)
        self._step = self._skipped = 0
        self._started = time.perf_counter()
        self._compile_s = self._evaluating_s = self._waiting_s = self._last_read = 0.0
        self._test: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._progress.__exit__(*args)
        self._file.close()

    def steps(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """As many batches as there are steps, timing how long each is waited for."""
        while self._step < self._experiment.steps:
            self._step += 1
            started = time.perf_counter()
            batch = next(batches)
            if self._step > 1:
                self._waiting_s += time.perf_counter() - started
            yield batch

    def log(self, metrics: dict[str, jax.Array]) -> None:
        """Takes a step's metrics, still on the device, and writes those of some steps ago."""
        if self._step == 1:  # the first call compiles: the clock starts when its step is done
            jax.block_until_ready(metrics)
            self._compile_s = time.perf_counter() - self._started
            self._started = self._last_read = time.perf_counter()
        self._read(self._late.push(self._step, metrics))

    @property
    def evaluation_due(self) -> bool:
        return self._step == self._experiment.steps or (
            self._evaluate_every > 0 and self._step % self._evaluate_every == 0
        )

    def log_evaluation(self, state: jaxmp.TrainState) -> None:
        """Evaluates on the held-out examples and writes the result; the time it takes does not count as training."""
        self._read(self._late.drain())
        started = time.perf_counter()
        self._test = self._experiment.evaluate(state)
        self._write({"step": self._step, "split": "test", **self._test})
        pause = time.perf_counter() - started
        self._evaluating_s += pause
        self._last_read += pause

    def finish(self, state: jaxmp.TrainState) -> dict[str, Any]:
        """Writes the curves and the summary, and returns it."""
        self._read(self._late.drain())
        seconds = time.perf_counter() - self._started - self._evaluating_s
        timed = self._experiment.steps - 1
        summary = {
            "experiment": self._name,
            **{f"test_{name}": value for name, value in self._test.items()},
            "steps": self._experiment.steps,
            "skipped": int(state.skipped),
            "loss_scale": float(jaxmp.get_loss_scale(state.opt_state).loss_scale),
            "ms_per_step": 1000 * seconds / timed if timed else None,
            "examples_per_s": timed * self._experiment.batch_size / seconds if timed else None,
            "input_wait": self._waiting_s / seconds if timed else None,
            "first_step_s": self._compile_s,
            **self._experiment.precision,
            **self._environment,
        }
        write_json(self.folder / "summary.json", summary)
        lines = [f"# {self._name}", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {_shown(name, value)} |" for name, value in summary.items() if name != "experiment"]
        (self.folder / "summary.md").write_text("\n".join([*lines, "", "![curves](curves.png)", ""]))
        plots.curves(self._rows, self.folder / "curves.png", self._name)
        return summary

    def _read(self, old: Iterable[tuple[int, dict[str, float]]]) -> None:
        for step, metrics in old:
            now = time.perf_counter()
            elapsed, self._last_read = now - self._last_read, now
            training = now - self._started - self._evaluating_s
            row: dict[str, Any] = {**metrics, "step": step, "split": "train", "skipped": int(metrics["skipped"])}
            self._skipped += row["skipped"]
            if step > 1:
                row["examples_per_s"] = self._experiment.batch_size / max(elapsed, 1e-9)
                row["input_wait"] = self._waiting_s / max(training, 1e-9)
            self._write(row)
            rate = (step - 1) * self._experiment.batch_size / max(training, 1e-9)
            self._progress.advance(
                1,
                f"loss {row['loss']:.4f}  accuracy {row['accuracy']:.1%}  {rate:,.0f} examples/s  "
                f"scale {row['loss_scale']:g}  skipped {self._skipped}  input wait {row.get('input_wait', 0):.1%}",
            )

    def _write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._writer.writerow({name: _compact(row[name]) for name in COLUMNS if name in row})


def write_json(path: Path, value: Any) -> None:
    """Writes strict JSON: numbers that are not finite become their names."""
    path.write_text(json.dumps(_strict(value), indent=2, default=str) + "\n")


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _compact(value: Any) -> Any:
    return f"{value:.7g}" if isinstance(value, float) else value


def _shown(name: str, value: Any) -> str:
    if name == "loss_scale":
        return f"{value:g}"
    if isinstance(value, float):
        return f"{value:.2%}" if name in ("input_wait", "test_accuracy") else f"{value:,.5g}"
    return str(value)
