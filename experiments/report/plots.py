"""How pictures look, drawn without a display, and the curves of a run; every other picture is beside what it shows."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Okabe and Ito's palette, which colour-blind readers can tell apart; float32 is the black line.
COLORS = ("#222222", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
GREY, LIGHT = "#6B6B6B", "#E6E6E6"


def drawn(draw: Callable[..., None]) -> Callable[..., None]:
    """``draw``, which where matplotlib is not installed says so and leaves its picture out: the figures are written."""

    @functools.wraps(draw)
    def draws(*args: Any, **kwargs: Any) -> None:
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            print("warning: matplotlib is not installed: the report has no picture", file=sys.stderr)
        else:
            draw(*args, **kwargs)

    return draws


def figure(width: float, height: float) -> Any:
    """An empty picture, its sides in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path, caption: str = "", dpi: int = 110) -> None:
    """Writes a picture, with a small caption below it to the right."""
    figure.supxlabel(caption, fontsize=7.5, color=GREY, x=0.995, ha="right")
    figure.savefig(path, dpi=dpi)


def color(i: int) -> str:
    """The colour of line ``i``, whatever their number."""
    return COLORS[i % len(COLORS)]


def style(axes: Any, title: str, x: str = "", y: str = "") -> None:
    """A plain frame: no box, a light grid, the title to the left."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x, fontsize=9, color=GREY)
    axes.set_ylabel(y, fontsize=9, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#BBBBBB")
    axes.tick_params(labelsize=8, colors=GREY)
    axes.grid(axis="y", color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)


def row_axis(axes: Any, labels: list[str], named: bool = True, above: float = 0.6, below: float = 0.6) -> None:
    """A row a label, from the top down, with a light line for each mark of the x axis.

    Args:
      axes: styled, see :func:`style`.
      labels: of the rows.
      named: whether they are shown; a picture beside this one may have them.
      above: room above the first row.
      below: room below the last one.
    """
    axes.set_yticks(range(len(labels)), labels if named else [""] * len(labels))
    axes.set_ylim(len(labels) - 1 + below, -above)
    axes.tick_params(axis="y", length=0, labelcolor="#222222")
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=LIGHT, linewidth=0.8)


@drawn
def curves(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Loss, accuracy and loss scale of one run against its steps; held-out values as dots, skipped steps as ticks."""
    train, test = ([row for row in rows if row["split"] == split] for split in ("train", "test"))
    page = figure(10.5, 3.2)
    for axes, name in zip(page.subplots(1, 3), ("loss", "accuracy", "loss_scale"), strict=True):
        style(axes, name if name != "loss_scale" else "loss scale; upright lines: skipped steps", "step")
        seen = [(row["step"], row[name]) for row in train if name in row]  # a fused loss never has the logits
        if seen:
            axes.plot(*zip(*seen, strict=True), color=COLORS[2], linewidth=1.2, label="training")
        if name == "loss_scale":
            axes.set_yscale("log", base=2)
            for row in train:
                if row["skipped"]:
                    axes.axvline(row["step"], color=COLORS[1], linewidth=0.8, alpha=0.6)
        else:
            axes.plot([row["step"] for row in test], [row[name] for row in test], "o-", color=COLORS[1],
                      markersize=4, linewidth=1, label="held out")  # fmt: skip
            axes.legend(frameon=False, fontsize=8)
    page.suptitle(title, fontsize=11, x=0.01, ha="left")
    page.savefig(path, dpi=110)
