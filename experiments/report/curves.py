"""The curves of a run as a picture.

No display is needed.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmp.inspect.plots.drawing import BLUE, COLORS, RED, figure, style

_MARKS = 800
"""The largest number of marks for skipped steps in a picture."""


def drawn(draw: Callable[..., None]) -> Callable[..., None]:
    """Make ``draw`` print a warning and do nothing if matplotlib is not installed.

    The report is then written without the picture.
    """

    @functools.wraps(draw)
    def draws(*args: Any, **kwargs: Any) -> None:
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            print("warning: matplotlib is not installed: the report has no picture", file=sys.stderr)
        else:
            draw(*args, **kwargs)

    return draws


@drawn
def curves(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw loss, accuracy and loss scale of one run against its steps.

    Dots are held-out values.
    """
    train, test = ([row for row in rows if row["split"] == split] for split in ("train", "test"))
    page = figure(10.5, 3.2)
    *panels, last = page.subplots(1, 3)
    for axes, name in zip(panels, ("loss", "accuracy"), strict=True):
        style(axes, name, "step")
        points = [(row["step"], row[name]) for row in train if name in row]  # no accuracy if the loss is fused
        if points:
            axes.plot(*zip(*points, strict=True), color=COLORS[2], linewidth=1.2, label="training")
        axes.plot([row["step"] for row in test], [row[name] for row in test], "o-", color=COLORS[1],
                  markersize=4, linewidth=1, label="held out")  # fmt: skip
        axes.legend(frameon=False, fontsize=8)
    _draw_loss_scale(last, train)
    page.suptitle(title, fontsize=11, x=0.01, ha="left")
    page.savefig(path, dpi=110)


def _draw_loss_scale(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the loss scale and the skipped steps, from the metrics of each step."""
    style(axes, "", "step", "loss scale")
    axes.set_yscale("log", base=2)
    known = [row for row in rows if 0 < row["loss_scale"] < math.inf]
    if not known:
        return
    scales = [row["loss_scale"] for row in known]
    marker = "o" if len(known) == 1 else None  # one point makes no line
    axes.step(
        [row["step"] for row in known], scales, where="post", color=BLUE, linewidth=1.6, label="loss scale",
        marker=marker,
    )  # fmt: skip
    skipped = [row for row in known if row["skipped"]]
    if skipped:
        shown = skipped[:: -(-len(skipped) // _MARKS)]
        x, y = ([row[name] for row in shown] for name in ("step", "loss_scale"))
        axes.vlines(x, 0, 1, transform=axes.get_xaxis_transform(), color=RED, linewidth=0.9, alpha=0.45)
        axes.plot(x, y, "X", color=RED, markersize=7, label="skipped step", linestyle="none", zorder=3)
    axes.set_ylim(min(scales) / 2.5, max(scales) * 2.5)
    axes.legend(frameon=False, fontsize=8)
