"""Draw a training run: underflow, and the loss scale."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp.base import dtypes
from jaxmp.inspect._watch.watch import Watch, line
from jaxmp.inspect.plots.drawing import BLUE, RED, figure, label_rows, percent, set_title, short_path, style
from jaxmp.inspect.run_files import read_metrics, read_watched_steps

_MARKS = 800
"""The largest number of marks for skipped steps in a picture."""


def underflow(run: Watch | str | Path, kind: str = "activation_gradients", dtype: Any = "float16") -> Any:
    """Draw the share of values that underflow, as a heat map of layers and steps.

    The left map shows the share of values that become 0 in ``dtype`` under the step's loss scale. The right map shows
    the share of values that were already 0. In a float16 run, the right map includes values that became 0 during the
    computation. Colours go from 0 (light) to 100 % (dark).

    Args:
      run: a :class:`Watch`, or the folder of a run with ``--watch N``.
      kind: ``"activations"``, ``"activation_gradients"``, ``"gradients"`` or ``"updates"``.
      dtype: the dtype. For a folder, it must be the dtype in the folder's ``watch.jsonl``.

    Raises:
      ValueError: no step was watched, or the folder's ``watch.jsonl`` has another dtype.
      FileNotFoundError: the folder has no ``watch.jsonl``.
      ModuleNotFoundError: matplotlib is not installed.

    >>> watch = jaxmp.inspect.Watch(lambda w, x: 1e-9 * jnp.sum(x @ w), every=1)
    >>> for step in range(3):
    ...     _ = watch(step, jnp.ones((4, 2)), jnp.ones((3, 4)), loss_scale=8.0**step)
    >>> underflow(watch, "gradients").get_suptitle()
    'The gradients of the result vanish most in float16: 100% at step 0'
    """
    name = dtypes.canonical_dtype(dtype).name
    if isinstance(run, Watch):
        rows = [json.loads(line(step, numerics, name)) for step, numerics in run.steps.items()]
    else:
        rows = read_watched_steps(Path(run))
    _require_watched(rows)
    if rows[0]["dtype"] != name:
        raise ValueError(
            f"the file of {run} has counts for {rows[0]['dtype']}, got dtype={name!r}; use that dtype, or a Watch "
            "object, which has counts for all dtypes"
        )
    page = figure(9.5, heat_height(rows, kind))
    draw_heat(page, rows, kind)
    return page


def loss_scale(run: str | Path | Iterable[Mapping[str, Any]]) -> Any:
    """Draw the loss scale of a run, step by step, and the steps that were skipped.

    Args:
      run: a run's folder with ``metrics.csv``, or the metrics of each step: ``step``, ``loss_scale``, and ``skipped``
        (True or nonzero if the step was skipped).

    Raises:
      ValueError: there are no steps.
      FileNotFoundError: the folder has no ``metrics.csv``.
      ModuleNotFoundError: matplotlib is not installed.

    >>> steps = [{"step": n, "loss_scale": 2.0 ** (15 - (n > 4)), "skipped": n == 4} for n in range(9)]
    >>> loss_scale(steps).get_suptitle()
    '1 of 9 steps was skipped; the loss scale went from 2^15 to 2^14'
    """
    page = figure(9.5, 2.9)
    _draw_timeline(page, read_metrics(Path(run)) if isinstance(run, (str, Path)) else list(run))
    return page


def training(run: str | Path, kind: str = "activation_gradients") -> Any:
    """Draw a run's folder in one picture: :func:`underflow` above :func:`loss_scale`.

    The command ``jaxmp watch RUN --plot FILE`` writes the same figure.

    Args:
      run: the folder of a run with ``--watch N``.
      kind: as for :func:`underflow`.

    Raises:
      ValueError: no step was watched, or ``metrics.csv`` has no steps.
      FileNotFoundError: a file of the run is missing.
      ModuleNotFoundError: matplotlib is not installed.
    """
    rows = read_watched_steps(Path(run))
    _require_watched(rows)
    height = heat_height(rows, kind)
    page = figure(9.5, height + 2.9)
    above, below = page.subfigures(2, 1, height_ratios=[height, 2.9])
    draw_heat(above, rows, kind)
    _draw_timeline(below, read_metrics(Path(run)))
    return page


def _require_watched(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        raise ValueError("a heat map needs a watched step, but there is none yet; watch every step, or wait")


def heat_height(rows: Sequence[Mapping[str, Any]], kind: str) -> float:
    """Return the height of a heat map, in inches."""
    return min(2.2 + 0.19 * len(rows[0]["vanished"][kind]), 14)


def draw_heat(page: Any, rows: Sequence[Mapping[str, Any]], kind: str) -> None:
    """Draw the heat maps of watched steps into a figure or a part of one."""
    paths = list(dict.fromkeys(path for row in rows for path in row["vanished"][kind]))
    left, right = page.subplots(1, 2, sharey=True)
    style(left, "becomes 0 under\nthe loss scale", "step", grid="")
    style(right, "was already 0", "step", grid="")
    for axes, share in ((left, "vanished"), (right, "zeros")):
        shares = np.array([[row[share][kind].get(path, np.nan) for row in rows] for path in paths])
        image = axes.pcolormesh(100 * shares, cmap="magma_r", vmin=0, vmax=100, rasterized=True)
        shown = range(0, len(rows), -(-len(rows) // 8))
        axes.set_xticks([n + 0.5 for n in shown], [f"{rows[n]['step']}" for n in shown])
    label_rows(left, paths, 0.5)
    left.set_ylim(len(paths), 0)
    right.tick_params(axis="y", length=0)
    page.colorbar(image, ax=[left, right], label="share of the values (%)", fraction=0.04, pad=0.02)
    set_title(page, _heat_title(rows, kind))


def _heat_title(rows: Sequence[Mapping[str, Any]], kind: str) -> str:
    worst_share, worst_path, worst_step = 0.0, "", 0
    for row in rows:
        for path, share in row["vanished"][kind].items():
            if share > worst_share:
                worst_share, worst_path, worst_step = share, path, row["step"]
    tensors, dtype = kind.replace("_", " "), rows[0]["dtype"]
    if not worst_share:
        return f"No {tensors} vanish in {dtype}"
    worst = f"{percent(worst_share)} at step {worst_step}"
    return f"The {tensors} of {short_path(worst_path)} vanish most in {dtype}: {worst}"


def _draw_timeline(page: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        raise ValueError("a timeline needs a step, but there is none yet; wait for the first step")
    draw_loss_scale(page.subplots(), rows)
    scales = [float(row["loss_scale"]) for row in rows]
    set_title(page, _timeline_title(scales, sum(map(_is_skipped, rows))))


def draw_loss_scale(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the loss scale and the skipped steps, from the metrics of each step."""
    style(axes, "", "step", "loss scale")
    axes.set_yscale("log", base=2)
    known = [row for row in rows if 0 < float(row["loss_scale"]) < math.inf]
    if not known:
        return
    steps, scales = ([float(row[name]) for row in known] for name in ("step", "loss_scale"))
    marker = "o" if len(known) == 1 else None  # one point makes no line
    axes.step(steps, scales, where="post", color=BLUE, linewidth=1.6, label="loss scale", marker=marker)
    skipped = list(filter(_is_skipped, known))
    if skipped:
        shown = skipped[:: -(-len(skipped) // _MARKS)]
        x, y = ([float(row[name]) for row in shown] for name in ("step", "loss_scale"))
        axes.vlines(x, 0, 1, transform=axes.get_xaxis_transform(), color=RED, linewidth=0.9, alpha=0.45)
        axes.plot(x, y, "X", color=RED, markersize=7, label="skipped step", linestyle="none", zorder=3)
    axes.set_ylim(min(scales) / 2.5, max(scales) * 2.5)
    axes.legend(frameon=False, fontsize=8)


def _is_skipped(row: Mapping[str, Any]) -> bool:
    return float(row["skipped"]) != 0


def _timeline_title(scales: Sequence[float], skipped: int) -> str:
    count = f"{skipped} of {len(scales)} steps {'was' if skipped == 1 else 'were'} skipped"
    first, last = _power(scales[0]), _power(scales[-1])
    if len(set(scales)) == 1:
        return f"{count}; the loss scale stayed at {first}"
    return f"{count}; the loss scale went from {first} to {last}"


def _power(scale: float) -> str:
    if scale > 0 and math.log2(scale).is_integer():
        return f"2^{math.log2(scale):.0f}"
    return f"{scale:g}"
