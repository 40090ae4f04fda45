"""Write the files of a run's folder that grow during training: ``metrics.csv`` and ``watch.jsonl``."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp.base import tables
from jaxmp.inspect import Watch
from jaxmp.inspect._watch.watch import scalars_of

METRICS_FILE, WATCH_FILE = "metrics.csv", "watch.jsonl"


class RunWriter:
    """Write the metrics and the watched steps of a run to its folder.

    TensorBoard and Weights & Biases get them too if asked for. Other programs can read a line as soon as it is written.

    Args:
      folder: the folder, which must exist.
      columns: the columns of ``metrics.csv``.
      start: the step from which the run continues. Later lines of an earlier process are removed.
      tensorboard: whether tensorboardX writes the numbers to the subfolder ``tensorboard`` too.
      wandb: whether the numbers are sent to Weights & Biases too, as a run with the name of the folder.

    Attributes:
      rows: the metrics of an earlier process, up to the step ``start``.

    Raises:
      ModuleNotFoundError: tensorboardX or wandb is asked for and not installed.
    """

    def __init__(
        self, folder: Path, columns: Sequence[str], *, start: int = 0, tensorboard: bool = False, wandb: bool = False
    ) -> None:
        self._wandb = _wandb(folder) if wandb else None
        self._board = _tensorboard(folder, start) if tensorboard else None
        self._watch_file = folder / WATCH_FILE
        self.rows = _rows_until(folder / METRICS_FILE, start)
        watched = [line for line in _lines(self._watch_file) if json.loads(line)["step"] <= start]
        self._watch_file.unlink(missing_ok=True)
        if watched:
            self._watch_file.write_text("".join(f"{line}\n" for line in watched))
        self._columns = columns
        self._metrics = (folder / METRICS_FILE).open("w", buffering=1, newline="")
        self._writer = csv.DictWriter(self._metrics, columns, restval="")
        self._writer.writeheader()
        for row in self.rows:
            self._write(row["step"], row["split"], row)

    def write_metrics(self, step: int, split: str, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step.

        ``metrics.csv`` has only those with a column. The trackers get all metrics that are numbers.
        """
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        self._write(step, split, numbers)
        self._track(step, {f"{split}/{name}": number for name, number in numbers.items()})

    def write_watched(self, watch: Watch, *, wait: bool = False) -> None:
        """Write the watched steps that the device has finished; with ``wait``, wait for all of them."""
        for step, numerics in watch.take(wait).items():
            scalars = scalars_of(numerics)
            with self._watch_file.open("a") as file:
                file.write(f"{json.dumps(tables.plain({'step': step, **scalars}), allow_nan=False)}\n")
            self._track(step, scalars)

    def close(self) -> None:
        """Close all files."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._metrics.close()

    def _write(self, step: int, split: str, numbers: Mapping[str, Any]) -> None:
        names = [name for name in self._columns if name in numbers and name not in ("step", "split")]
        self._writer.writerow({"step": step, "split": split, **{name: _text(numbers[name]) for name in names}})

    def _track(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._board is not None:
            for name, number in numbers.items():
                self._board.add_scalar(name, number, step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **numbers})


def _rows_until(file: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.csv`` up to a step."""
    rows = []
    for row in csv.DictReader(_lines(file)) if step else []:
        numbers = {name: float(text) for name, text in row.items() if text and name != "split"}
        if numbers["step"] <= step:
            rows.append({**numbers, "split": row["split"], "step": int(row["step"])})
    return rows


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and not isinstance(value, str)


def _text(number: float) -> str:
    return f"{number:.0f}" if number.is_integer() else f"{number:.7g}"  # a loss scale of 2^24 has eight digits


def _tensorboard(folder: Path, start: int) -> Any:
    """Return a writer that removes what an earlier process wrote after the step ``start``."""
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("TensorBoard's files need tensorboardX: pip install tensorboardX") from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)


def _wandb(folder: Path) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Weights & Biases needs its package: pip install wandb") from error
    run = wandb.init(name=folder.resolve().name, dir=str(folder))
    run.define_metric("*", step_metric="step")  # counts of watched steps come later than metrics
    return run
