"""Colours, frames and labels that all pictures share."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

# Okabe and Ito's palette, which colour-blind readers can tell apart (Wong 2011, Nature Methods 8, 441).
COLORS = ("#222222", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
BLACK, RED, BLUE, GREEN, PINK, ORANGE, SKY, BROWN = COLORS
GREY, LIGHT = "#6B6B6B", "#E6E6E6"
BORDER = "#BBBBBB"
INK = "#1A1A1A"  # on coloured bars
DASHED = (0, (4, 3))
_MAX_LABELS = 70
_TITLE_LETTER = 10.5
"""The width of the widest letter of a title, in pixels."""


def figure(width: float, height: float) -> Any:
    """Return an empty figure.

    Args:
      width: in inches.
      height: in inches.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def style(axes: Any, title: str, x: str = "", y: str = "", grid: str = "y") -> None:
    """Give axes a plain frame: no box, the title on the left, a light grid.

    Args:
      axes: the axes of matplotlib.
      title: the title above the axes.
      x: the label of the x axis.
      y: the label of the y axis.
      grid: the axis that the grid lines cross; empty for no grid.
    """
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x, fontsize=9, color=GREY)
    axes.set_ylabel(y, fontsize=9, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(BORDER)
    axes.tick_params(labelsize=8, colors=GREY)
    if grid:
        axes.grid(axis=grid, color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)


def set_title(page: Any, *texts: str) -> None:
    """Write texts above a figure, each in as many lines as it needs."""
    width = int(page.bbox.width / _TITLE_LETTER)
    page.suptitle(
        "\n".join(textwrap.fill(text, width) for text in texts), x=0.01, ha="left", fontsize=11, fontweight="bold"
    )


def ink(color: str) -> str:
    """Return a colour for text that is readable on ``color``."""
    return "white" if color in (RED, BLUE, GREEN, BROWN, BLACK) else INK


def label_rows(axes: Any, paths: Sequence[str], offset: float = 0.0) -> None:
    """Write paths at the y axis, but only as many as are readable."""
    shown = range(0, len(paths), -(-len(paths) // _MAX_LABELS))
    axes.set_yticks([n + offset for n in shown], [short_path(paths[n]) for n in shown])
    axes.tick_params(axis="y", length=0, labelcolor=BLACK, labelsize=7.5)


def short_path(path: str) -> str:
    """Return a path without the methods of Flax modules, which follow a dot."""
    *parents, last = path.split("/")
    modules = [part for part in parents if "." not in part]
    return "/".join([*modules, last]) or "the result"


def percent(share: float) -> str:
    """Return a share as text: "0%" only for exactly 0, and "100%" only for exactly 1."""
    if share in (0, 1):
        return f"{share:.0%}"
    if share < 0.001:
        return "<0.1%"
    if share > 0.999:
        return ">99.9%"
    return f"{share:.1%}"
