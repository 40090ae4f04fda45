"""The flags --watch and --tensorboard: what every n-th step counts, in the run's folder."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import jax

import jaxmp
from experiments.training.experiment import Batch, Experiment
from jaxmp.inspect import Numerics, Watch
from jaxmp.inspect.watch import FILE, line


class Watching:
    """The watched steps of a run, each a line of watch.jsonl; of a resumed run those up to its checkpoint stay."""

    def __init__(self, experiment: Experiment, config: Any, tx: Any, folder: Path, start: int) -> None:
        self.found: Numerics | None = None
        self._watch = Watch(experiment.loss_fn, every=config.watch, tx=tx)
        self._path = folder / FILE
        before = self._path.read_text().splitlines(keepends=True) if start and self._path.is_file() else []
        self._path.write_text("".join(text for text in before if json.loads(text)["step"] <= start))

    def look(self, step: int, state: jaxmp.TrainState, batch: Batch) -> None:
        """Counts the step that comes, whose state the step takes over. A scale counts as a power of two."""
        scale = float(jaxmp.get_loss_scale(state.opt_state).loss_scale)
        args = (state.params, state.model_state, batch, state.rng)
        power = 2.0 ** math.floor(math.log2(scale))
        self.found = self._watch(step, *args, opt_state=state.opt_state, loss_scale=power)
        self._watch.steps.clear()  # the file has them

    def write(self, step: int, metrics: dict[str, jax.Array], board: Any) -> None:
        """Writes what was counted, with the metrics of the step; waits for it."""
        assert self.found is not None
        names = ("loss", "grad_norm", "skipped")
        text = line(step, self.found, {name: float(metrics[name]) for name in names})
        with self._path.open("a") as file:
            file.write(text + "\n")
        row = json.loads(text)
        for what in ("vanished", "zeros") if board else ():
            for kind, shares in row[what].items():
                for path, share in shares.items():
                    board.add_scalar(f"{kind}/{what}/{path}", share, step)
        self.found = None


def tensorboard(folder: Path, start: int = 0) -> Any:
    """A writer for TensorBoard, which forgets what a resumed run had written after the step ``start``.

    Raises:
      ValueError: no package that has one is installed.
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
        "installed; pip install tensorboardX, or leave --tensorboard away"
    )
