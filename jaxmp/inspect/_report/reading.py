"""Read the folders of runs."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

from jaxmp.inspect.run_files import WATCH_FILE, read_metrics, read_watched_steps


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a run's metrics; NaN where a number is missing."""

    step: int
    loss: float
    accuracy: float
    grad_norm: float
    loss_scale: float
    skipped: bool


@dataclasses.dataclass(frozen=True)
class Run:
    """The content of a run's folder.

    Attributes:
      name: the folder's name.
      train: the metrics of training steps.
      test: held-out metrics by step.
      summary: the content of summary.json; empty if the file is missing.
      watched: the watched steps; empty if the run was not watched.
      plan: the content of plan.json, a cast plan or an audit; None if the file is missing.
      memory: the content of memory.json; None if the file is missing.
      other_seeds: the runs that differ from this run only in their seed.
    """

    name: str
    train: list[Row]
    test: list[Row]
    summary: dict[str, Any]
    watched: list[dict[str, Any]]
    plan: dict[str, Any] | None
    memory: dict[str, Any] | None
    other_seeds: tuple[Run, ...] = ()

    @property
    def seeds(self) -> tuple[Run, ...]:
        """Return this run, and the runs with other seeds."""
        return (self, *self.other_seeds)

    @property
    def final_losses(self) -> list[float]:
        """Return the loss at the end of the run for each seed."""
        return [seed._final_loss for seed in self.seeds]

    @property
    def final_accuracies(self) -> list[float]:
        """Return the last held-out accuracy for each seed."""
        return [seed._final_accuracy for seed in self.seeds]

    @property
    def skipped_steps(self) -> int:
        """Return the number of skipped steps of all seeds."""
        return sum(row.skipped for seed in self.seeds for row in seed.train)

    @property
    def is_on_cpu(self) -> bool:
        """Return whether the run was on a CPU.

        On a CPU, half precision saves neither time nor memory.
        """
        return bool(self.summary.get("platform") == "cpu")

    @property
    def _final_loss(self) -> float:
        """Return the last held-out loss, or the mean training loss of the last steps.

        The mean leaves skipped steps out. The loss is NaN if the run diverged.
        """
        if "test_loss" in self.summary:
            return _from_json(self.summary["test_loss"])
        if self.test:
            return self.test[-1].loss
        last = self.train[-max(10, len(self.train) // 20) :]
        losses = [row.loss for row in last if not row.skipped]
        return statistics.fmean(losses) if losses else math.nan

    @property
    def _final_accuracy(self) -> float:
        if "test_accuracy" in self.summary:
            return _from_json(self.summary["test_accuracy"])
        return self.test[-1].accuracy if self.test else math.nan


def read_run(folder: Path) -> Run:
    """Read a folder written by :func:`jaxmp.inspect.record` or by a script's run.

    A run of several seeds is a folder with the subfolders ``seed0``, ``seed1``, ….

    Raises:
      FileNotFoundError: the folder has no ``metrics.csv``.
      ValueError: ``metrics.csv`` was written by another program, or has no training step.
    """
    seeds = sorted(file.parent for file in folder.glob("seed*/metrics.csv"))
    if (folder / "metrics.csv").is_file() or not seeds:
        return _read_seed(folder)
    first, *others = map(_read_seed, seeds)
    return dataclasses.replace(first, name=folder.resolve().name, other_seeds=tuple(others))


def _read_seed(folder: Path) -> Run:
    train = [_row(cells) for cells in read_metrics(folder, "train")]
    if not train:
        raise ValueError(f"a report needs a training step, but {folder / 'metrics.csv'} has none")
    return Run(
        name=folder.resolve().name,
        train=train,
        test=[_row(cells) for cells in read_metrics(folder, "test")],
        summary=_json(folder / "summary.json") or {},
        watched=read_watched_steps(folder) if (folder / WATCH_FILE).is_file() else [],
        plan=_json(folder / "plan.json"),
        memory=_json(folder / "memory.json"),
    )


def _row(cells: dict[str, str]) -> Row:
    return Row(
        step=int(float(cells["step"])),
        loss=_number(cells.get("loss")),
        accuracy=_number(cells.get("accuracy")),
        grad_norm=_number(cells.get("grad_norm")),
        loss_scale=_number(cells.get("loss_scale")),
        skipped=_number(cells.get("skipped")) > 0,
    )


def _number(text: str | None) -> float:
    return float(text) if text else math.nan


def _from_json(number: float | None) -> float:
    """Return a number from a JSON file, and NaN for null.

    The files have null in place of NaN and infinities.
    """
    return math.nan if number is None else float(number)


def _json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    content: dict[str, Any] = json.loads(file.read_text())
    return content
