"""The numerics of a run: every n-th step counted beside the training step, kept by step, and as lines of a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxmp import tables
from jaxmp.inspect.measuring import Numerics, numerics

FILE = "watch.jsonl"
"""What a run's folder calls the file with a :func:`line` for each step that was watched."""


class Watch:
    """Counts what the values of every n-th step are, before it is taken.

    Args:
      loss_fn, policy, tx: those of :func:`jaxmp.inspect.numerics`.
      every: of how many steps one is watched.

    Attributes:
      steps: the numerics of the steps that were watched, by number.

    Raises:
      ValueError: ``every`` is less than 1.

    >>> watch = Watch(lambda params, x: jnp.sum(x * params), every=100)
    >>> for step in range(1, 201):
    ...     found = watch(step, jnp.float32(2), jnp.ones(3))
    >>> list(watch.steps), found.loss
    ([100, 200], 6.0)
    """

    def __init__(self, loss_fn: Callable[..., Any], *, every: int, policy: Any = None, tx: Any = None) -> None:
        if every < 1:
            raise ValueError(f"every n-th step is watched, with n of at least 1, got {every}; 100 costs little")
        self.every = every
        self.steps: dict[int, Numerics] = {}
        self._numerics = numerics(loss_fn, policy=policy, tx=tx)

    def __call__(
        self, step: int, params: Any, *args: Any, opt_state: Any = None, loss_scale: float = 1.0
    ) -> Numerics | None:
        """The numerics of a step if it is to be watched, else None; ``loss_scale`` is a power of two."""
        if step % self.every:
            return None
        found = self._numerics(params, *args, opt_state=opt_state, loss_scale=loss_scale)
        self.steps[step] = found
        return found

    def shares(self, kind: str = "activation_gradients", dtype: Any = "float16") -> dict[str, list[float]]:
        """Of each path the share of values that vanish in ``dtype`` under the scale of the step, step by step."""
        paths = dict.fromkeys(path for found in self.steps.values() for path in getattr(found, kind))
        return {path: [_shares(found, kind, dtype).get(path, 0.0) for found in self.steps.values()] for path in paths}


def _shares(found: Numerics, kind: str, dtype: Any) -> dict[str, float]:
    scale = found.loss_scale if kind.endswith("gradients") else 1.0
    return {path: each.under(dtype, scale).vanished / max(each.count, 1) for path, each in getattr(found, kind).items()}


def line(step: int, found: Numerics, metrics: Mapping[str, float], dtype: Any = "float16") -> str:
    """One watched step as a line of JSON: metrics, and by kind and path what of the values is lost.

    ``vanished`` is the share that becomes 0 in ``dtype`` under the step's scale; ``zeros`` the share that is 0 as it
    was computed; ``ratio`` that of the norms of update and weight.
    """
    kinds = ("activations", "activation_gradients", "gradients", "updates")
    vanished = {kind: _shares(found, kind, dtype) for kind in kinds}
    zeros = {
        kind: {path: each.zeros / max(each.count, 1) for path, each in getattr(found, kind).items()} for kind in kinds
    }
    row = {
        "step": step,
        **metrics,
        "loss_scale": found.loss_scale,
        "recommended_scale": found.recommended_scale(dtype),
        "dtype": str(dtype),
        "not_finite": sum(each.overflow for _, _, each in found.rows()),
        "vanished": vanished,
        "zeros": zeros,
        "ratio": {path: each.ratio for path, each in found.updates.items()},
    }
    return json.dumps(tables.plain(row), allow_nan=False)


def metrics(folder: Path) -> list[dict[str, str]]:
    """The rows of a run's ``metrics.csv`` that are steps of training.

    Raises:
      FileNotFoundError: it is no folder of a run.
    """
    file = folder / "metrics.csv"
    if not file.is_file():
        raise FileNotFoundError(f"a run's folder has metrics.csv, but {folder} has none; give the folder of --run-dir")
    with file.open() as opened:
        return [row for row in csv.DictReader(opened) if row["split"] == "train" and row["skipped"]]


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's folder; one that is being written is left out.

    Raises:
      FileNotFoundError: the run is not watched, or has not had its first step that is.
    """
    if not (folder / FILE).is_file():
        raise FileNotFoundError(f"{folder} has no {FILE}: train with --watch 100, say, or wait for the first such step")
    rows = []
    for text in (folder / FILE).read_text().splitlines():
        try:
            rows.append(json.loads(text))
        except ValueError:
            break
    return rows
