"""Record a training loop in a folder, for ``jaxmp watch`` and ``jaxmp report``."""

from __future__ import annotations

import collections
import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxmp.base import tables
from jaxmp.base.environment import environment
from jaxmp.inspect._watch.watch import Watch
from jaxmp.inspect.run_writer import RunWriter

_WAITING = 20


class Record:
    """A folder with the files of a training loop. Create it with :func:`record`.

    Attributes:
      folder: the path of the folder.
    """

    def __init__(self, folder: Path, tensorboard: bool, wandb: bool) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = RunWriter(folder, tensorboard=tensorboard, wandb=wandb)
        for name in ("plan.json", "memory.json"):
            (folder / name).unlink(missing_ok=True)  # left by an earlier record
        _write_json(folder / "summary.json", {**environment(), "platform": jax.default_backend()})
        self._waiting: collections.deque[tuple[int, str, Mapping[str, Any]]] = collections.deque()
        self._watches: dict[Watch, Any] = {}

    def log(self, step: int, metrics: Mapping[str, Any], split: str = "train") -> None:
        """Write the metrics of a step.

        The call does not wait for the device. The metrics are written some steps later.

        Args:
          step: the number of the step.
          metrics: the metrics that a train step returns. ``metrics.csv`` has only ``loss``, ``accuracy``,
            ``grad_norm``, ``loss_scale`` and ``skipped``. TensorBoard and Weights & Biases have all.
          split: ``"train"``, or ``"test"`` for held-out metrics.

        Raises:
          ValueError: the split is unknown, or there is neither a loss nor an accuracy.
        """
        if split not in ("train", "test"):
            raise ValueError(f"split must be 'train' or 'test', got {split!r}")
        if not {"loss", "accuracy"}.intersection(metrics):
            raise ValueError(
                f"metrics need a 'loss' or an 'accuracy', got {', '.join(map(repr, metrics)) or 'none'}; for held-out "
                "metrics write log(step, {'loss': …}, split='test')"
            )
        self._waiting.append((step, split, metrics))
        while len(self._waiting) > _WAITING:
            self._write_oldest()
        self._write_watched(wait=False)

    def plan(self, plan: Any) -> None:
        """Write the result of :func:`jaxmp.cast_plan` or :func:`jaxmp.inspect.audit`.

        A second call replaces the result of the first call.
        """
        (self.folder / "plan.json").write_text(plan.to_json())

    def memory(self, plan: Any) -> None:
        """Write the result of :func:`jaxmp.inspect.memory`."""
        (self.folder / "memory.json").write_text(plan.to_json())

    def watch(self, watch: Watch, dtype: Any = "float16") -> None:
        """Write the counts of all watched steps, also of steps that follow.

        Call this method once, before or after the loop. The written steps are removed from ``watch.steps``.

        Args:
          watch: the watch of this training loop.
          dtype: the dtype for which underflow is counted.
        """
        self._watches[watch] = dtype
        self._write_watched(wait=True)

    def summary(self, **values: Any) -> None:
        """Add values to the summary, such as ``test_loss`` or ``ms_per_step``."""
        file = self.folder / "summary.json"
        _write_json(file, {**json.loads(file.read_text()), **values})

    def close(self) -> None:
        """Write the metrics and counts that still wait for the device, and close the file."""
        while self._waiting:
            self._write_oldest()
        self._write_watched(wait=True)
        self._writer.close()

    def _write_watched(self, wait: bool) -> None:
        for watch, dtype in self._watches.items():
            self._writer.write_watched(watch, dtype, wait=wait)

    def _write_oldest(self) -> None:
        step, split, metrics = self._waiting.popleft()
        defaults = {"grad_norm": math.nan, "loss_scale": 1, "skipped": 0} if split == "train" else {}
        self._writer.write_metrics(step, split, metrics, defaults)


@contextlib.contextmanager
def record(folder: str | Path, *, tensorboard: bool = False, wandb: bool = False) -> Iterator[Record]:
    """Record a training loop in a folder, for ``jaxmp report``.

    Call :func:`record` in a ``with`` statement. The statement's variable is a :class:`jaxmp.inspect.Record`, which has
    the methods ``log``, ``plan``, ``memory``, ``watch`` and ``summary``.

    Args:
      folder: the path of the folder, which is created if necessary. Files of an earlier record are replaced.
      tensorboard: whether to write metrics and watched steps for TensorBoard too, to the subfolder ``tensorboard``.
      wandb: whether to send them to Weights & Biases too, as a run with the name of the folder.

    Raises:
      ModuleNotFoundError: tensorboardX or wandb is asked for and not installed.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with record(folder) as run:
    ...     for step in range(3):
    ...         run.log(step, {"loss": 1.0 / (step + 1), "loss_scale": 1024.0, "skipped": False})
    >>> sorted(path.name for path in Path(folder).iterdir())
    ['metrics.csv', 'summary.json']
    """
    run = Record(Path(folder), tensorboard, wandb)
    try:
        yield run
    finally:
        run.close()


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(tables.plain(value), indent=1))
