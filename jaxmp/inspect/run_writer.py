"""Write the files of a run's folder that grow during training: ``metrics.csv`` and ``watch.jsonl``."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxmp.inspect._watch.watch import Watch, line
from jaxmp.inspect.run_files import WATCH_FILE, read_watched_steps

COLUMNS = ("step", "split", "loss", "accuracy", "grad_norm", "loss_scale", "skipped")


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
        columns: Sequence[str] = COLUMNS,
        *,
        start: int = 0,
        metrics_bytes: int = 0,
        tensorboard: bool = False,
        wandb: bool = False,
    ) -> None:
        self._wandb = _wandb(folder) if wandb else None
        self._board = _tensorboard(folder, start) if tensorboard else None
        self._watch_file = folder / WATCH_FILE
        earlier = read_watched_steps(folder) if start and self._watch_file.is_file() else []
        self._watch_file.unlink(missing_ok=True)  # left by an earlier run
        if earlier:
            lines = [f"{json.dumps(row)}\n" for row in earlier if row["step"] <= start]
            self._watch_file.write_text("".join(lines))
        file = folder / "metrics.csv"
        if metrics_bytes:
            with file.open("r+") as earlier_metrics:
                earlier_metrics.truncate(metrics_bytes)
        self._columns = columns
        self._metrics = file.open("a" if metrics_bytes else "w", buffering=1, newline="")
        self._writer = csv.DictWriter(self._metrics, columns, restval="")
        if not metrics_bytes:
            self._writer.writeheader()

    def write_metrics(
        self, step: int, split: str, metrics: Mapping[str, Any], defaults: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Write the metrics of a step.

        ``metrics.csv`` has only those with a column, and ``defaults`` for those that are missing. The other writers get
        all metrics that are numbers.
        """
        cells = {name: _text(float(value)) for name, value in {**defaults, **metrics}.items() if name in self._columns}
        self._writer.writerow({"step": step, "split": split, **cells})
        numbers = {f"{split}/{name}": float(value) for name, value in metrics.items() if _is_number(value)}
        self._track(step, numbers)

    def write_watched(self, watch: Watch, dtype: Any = "float16", *, wait: bool = False) -> None:
        """Write the watched steps that the device has finished; with ``wait``, wait for all of them."""
        for step, numerics in watch.take(wait).items():
            text = line(step, numerics, dtype)
            with self._watch_file.open("a") as file:
                file.write(f"{text}\n")
            row, shares = json.loads(text), dict[str, float]()
            for name in ("vanished", "zeros"):
                for kind, by_path in row[name].items():
                    shares |= {f"{kind}/{name}/{path}": share for path, share in by_path.items()}
            self._track(step, shares)

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
