"""Write the files of a run's folder that grow during training: ``metrics.csv`` and ``watch.jsonl``."""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
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
      start: the last step of an earlier process whose watched steps stay; 0 for a new run.
      metrics_bytes: the size of ``metrics.csv`` after the step ``start``. The rest of the file is removed.
      tensorboard: whether tensorboardX writes the numbers to the subfolder ``tensorboard`` too.
      wandb: whether the numbers are sent to Weights & Biases too, as a run with the name of the folder.

    Raises:
      ModuleNotFoundError: tensorboardX or wandb is asked for and not installed.
    """

    def __init__(
        self,
        folder: Path,
        columns: Sequence[str],
        *,
        start: int = 0,
        metrics_bytes: int = 0,
        tensorboard: bool = False,
        wandb: bool = False,
    ) -> None:
        self._wandb = _wandb(folder) if wandb else None
        self._board = _tensorboard(folder, start) if tensorboard else None
        self._watch_file = folder / WATCH_FILE
        _keep_steps(self._watch_file, start)
        file = folder / METRICS_FILE
        if metrics_bytes:
            with file.open("r+") as earlier_metrics:
                earlier_metrics.truncate(metrics_bytes)
        self._columns = columns
        self._metrics = file.open("a" if metrics_bytes else "w", buffering=1, newline="")
        self._writer = csv.DictWriter(self._metrics, columns, restval="")
        if not metrics_bytes:
            self._writer.writeheader()

    def write_metrics(self, step: int, split: str, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step.

        ``metrics.csv`` has only those with a column. The trackers get all metrics that are numbers.
        """
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        cells = {name: _text(number) for name, number in numbers.items() if name in self._columns}
        self._writer.writerow({"step": step, "split": split, **cells})
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

    def _track(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._board is not None:
            for name, number in numbers.items():
                self._board.add_scalar(name, number, step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **numbers})


def _keep_steps(file: Path, start: int) -> None:
    """Remove the lines of watched steps after ``start``; without any others, remove the file."""
    lines = []
    for text in file.read_text().splitlines() if start and file.is_file() else []:
        with contextlib.suppress(ValueError):  # the run was killed while it wrote the last line
            if json.loads(text)["step"] <= start:
                lines.append(f"{text}\n")
    file.unlink(missing_ok=True)
    if lines:
        file.write_text("".join(lines))


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
    events = folder / "tensorboard"
    if not start:
        shutil.rmtree(events, ignore_errors=True)  # left by an earlier run
    return SummaryWriter(str(events), purge_step=start + 1 if start else None)


def _wandb(folder: Path) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Weights & Biases needs its package: pip install wandb") from error
    run = wandb.init(name=folder.resolve().name, dir=str(folder))
    run.define_metric("*", step_metric="step")  # counts of watched steps come later than metrics
    return run
