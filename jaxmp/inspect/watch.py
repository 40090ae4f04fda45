"""The numerics of a run: every n-th step counted while it is taken, kept by step, and as lines of a file."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxmp.base import tables
from jaxmp.inspect.measuring import TENSORS, CountingStep, Found, Numerics, numerics
from jaxmp.inspect.program.calls import require_own_settings
from jaxmp.training.step import TrainStep

FILE = "watch.jsonl"
"""What a run's folder calls the file with a :func:`line` for each step that was watched."""


class Watch:
    """Counts what the values of every n-th step are.

    Of a train step it takes the step: every n-th time with a program that counts too, and returns what the step does.
    Such a step computes what a plain one does, in another program, whose roundings may differ. Nothing waits for the
    device: what was counted is read when a later call finds it there, or when it is asked for.

    Args:
      loss_fn: that of :func:`jaxmp.inspect.numerics`; or what :func:`jaxmp.make_train_step` or
        :func:`jaxmp.nnx.make_train_step` returns, which is called with a step's number before its arguments.
      every: of how many steps one is watched.
      policy, tx: those of :func:`jaxmp.inspect.numerics`; a train step has its own.

    Attributes:
      counting: the train step that counts, for ``jaxmp.inspect.roofline`` and its like; None of a loss function.

    Raises:
      ValueError: ``every`` is less than 1; ``policy`` or ``tx`` with a train step.

    >>> watch = Watch(lambda params, x: jnp.sum(x * params), every=100)
    >>> for step in range(1, 201):
    ...     found = watch(step, jnp.float32(2), jnp.ones(3))
    >>> list(watch.steps), found.loss
    ([100, 200], 6.0)

    >>> train = jaxmp.make_train_step(lambda params, model_state, x, rng: (jnp.sum((x * params) ** 2), model_state))
    >>> state, watch = jaxmp.TrainState.create(params=jnp.ones(3), tx=optax.sgd(0.1)), Watch(train, every=2)
    >>> for step in range(1, 5):
    ...     state, metrics = watch(step, state, jnp.ones((4, 3)))
    >>> {step: round(found.loss, 6) for step, found in watch.steps.items()}
    {2: 0.48, 4: 0.000768}
    """

    def __init__(self, loss_fn: Callable[..., Any], *, every: int, policy: Any = None, tx: Any = None) -> None:
        if every < 1:
            raise ValueError(f"every n-th step is watched, with n of at least 1, got {every}; 100 costs little")
        self.every = every
        self._steps: dict[int, Numerics] = {}
        self._unread: dict[int, tuple[Found, Any]] = {}
        self.counting: CountingStep | None = None
        own, nnx = loss_fn, sys.modules.get("jaxmp.nnx.training")
        if nnx and isinstance(loss_fn, nnx.TrainStep):
            self.counting = CountingStep(loss_fn.of_trees)
            own = nnx.TrainStep(self.counting)
        elif isinstance(loss_fn, TrainStep):
            own = self.counting = CountingStep(loss_fn)
        if self.counting is None:
            own = numerics(loss_fn, policy=policy, tx=tx)
        else:
            require_own_settings(policy=policy, tx=tx)
        self._plain, self._own = loss_fn, own

    @property
    def steps(self) -> dict[int, Numerics]:
        """The numerics of the steps that were watched, by number; waits for them."""
        self._read(wait=True)
        return self._steps

    def __call__(self, step: int, *args: Any, **kwargs: Any) -> Any:
        """The step of that number: what the train step returns for the arguments, watched or not.

        Of a loss function its numerics for ``params, *args, opt_state=None, loss_scale=1.0`` if the step is to be
        watched, else None.
        """
        is_watched = step % self.every == 0
        if self.counting is None:
            if not is_watched:
                return None
            found = self._steps[step] = self._own(*args, **kwargs)
            return found
        self._read(wait=False)
        if not is_watched:
            return self._plain(*args, **kwargs)
        result = self._own(*args, **kwargs)
        self._unread[step] = self.counting.found
        return result

    def take(self, wait: bool = True) -> dict[int, Numerics]:
        """The numerics of the steps that are there, or, with ``wait``, of all; they are forgotten here."""
        self._read(wait)
        steps, self._steps = self._steps, {}
        return steps

    def _read(self, wait: bool) -> None:
        while self._unread:
            step, (found, scale) = next(iter(self._unread.items()))
            if not wait and not scale.is_ready():
                break
            self._steps[step] = found.read(math.floor(math.log2(float(scale))))
            del self._unread[step]

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
    kinds = TENSORS[1:]  # weights need no scale
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
      ValueError: the file is another program's.
    """
    file = folder / "metrics.csv"
    if not file.is_file():
        raise FileNotFoundError(f"a run's folder has metrics.csv, but {folder} has none; give the folder of --run-dir")
    with file.open() as opened:
        rows = csv.DictReader(opened)
        if lacking := [name for name in _COLUMNS if name not in (rows.fieldnames or _COLUMNS)]:
            raise ValueError(
                f"the metrics.csv of a run has the columns {', '.join(_COLUMNS)}, but {file} has no "
                f"{', '.join(lacking)}; give the folder of --run-dir"
            )
        return [row for row in rows if row["split"] == "train" and row["skipped"]]


_COLUMNS = ("step", "split", "loss", "grad_norm", "loss_scale", "skipped")


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's folder; one that is being written is left out.

    Raises:
      FileNotFoundError: the run is not watched, or has not had its first step that is.
      ValueError: the file is another program's.
    """
    if not (folder / FILE).is_file():
        raise FileNotFoundError(f"{folder} has no {FILE}: train with --watch 100, say, or wait for the first such step")
    rows = []
    for text in (folder / FILE).read_text().splitlines():
        with contextlib.suppress(ValueError):  # cut off where a run was killed, or not whole yet
            rows.append(json.loads(text))
    if any(not isinstance(row, dict) or "vanished" not in row for row in rows):
        raise ValueError(f"{folder / FILE} has lines that are no watched step; give the folder of a run with --watch N")
    return rows
