"""Write the counts of watched steps, for the flags --watch and --tensorboard.

The counts are written to the run folder.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import jax

from jaxmp.inspect import Watch
from jaxmp.inspect._watch.watch import line
from jaxmp.inspect.run_files import WATCH_FILE, read_watched_steps


class Watching:
    """The watched steps of a run. Each step is a line of watch.jsonl.

    A resumed run keeps the lines up to its checkpoint.
    """

    def __init__(self, step: Any, config: Any, folder: Path, start: int) -> None:
        self.step = Watch(step, every=config.watch)
        self._metrics: dict[int, dict[str, jax.Array]] = {}
        self._path = folder / WATCH_FILE
        before = read_watched_steps(folder) if start and self._path.is_file() else []
        self._path.write_text("".join(f"{json.dumps(row)}\n" for row in before if row["step"] <= start))

    def log(self, step: int, metrics: dict[str, jax.Array], board: Any) -> None:
        """Take a step's metrics, and write the finished watched steps."""
        if step % self.step.every == 0:
            self._metrics[step] = metrics
        self.write(board, wait=False)

    def write(self, board: Any, wait: bool = True) -> None:
        """Write the watched steps that the device has finished.

        With ``wait``, wait for all of them.
        """
        for step, numerics in self.step.take(wait).items():
            metrics = self._metrics.pop(step, None)
            if metrics is None:  # the run was stopped before it logged the step
                continue
            text = line(step, numerics, {name: float(metrics[name]) for name in ("loss", "grad_norm", "skipped")})
            with self._path.open("a") as file:
                file.write(text + "\n")
            row = json.loads(text)
            for what in ("vanished", "zeros") if board else ():
                for kind, shares in row[what].items():
                    for path, share in shares.items():
                        board.add_scalar(f"{kind}/{what}/{path}", share, step)


def tensorboard(folder: Path, start: int = 0) -> Any:
    """Return a writer for TensorBoard.

    Everything that an earlier process wrote after the step ``start`` is removed.

    Raises:
      ValueError: no package with a writer is installed.
    """
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return importlib.import_module(module).SummaryWriter(
                str(folder / "tensorboard"), purge_step=start + 1 if start else None
            )
        except ImportError:
            continue
    raise ValueError(
        "--tensorboard needs a package that writes its files, but neither torch with tensorboard nor tensorboardX is "
        "installed; pip install tensorboardX, or leave out --tensorboard"
    )
