"""The style of plots, and plots of benchmark results.

No display is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report.curves import drawn
from jaxmp.inspect.plots.drawing import COLORS as COLORS
from jaxmp.inspect.plots.drawing import GREY, LIGHT
from jaxmp.inspect.plots.drawing import figure as figure
from jaxmp.inspect.plots.drawing import style as style


def save(figure: Any, path: Path, caption: str = "", dpi: int = 110) -> None:
    """Write a picture, with a small caption at the bottom right."""
    figure.supxlabel(caption, fontsize=7.5, color=GREY, x=0.995, ha="right")
    figure.savefig(path, dpi=dpi)


def color(i: int) -> str:
    """Return the colour of line ``i``.

    The colours repeat if there are more lines than colours.
    """
    return COLORS[i % len(COLORS)]


def row_axis(axes: Any, labels: list[str], named: bool = True, above: float = 0.6, below: float = 0.6) -> None:
    """Make one row for each label, from the top down.

    There is a light grid line at each tick of the x axis.

    Args:
      axes: matplotlib axes, styled by :func:`style`.
      labels: the labels of the rows.
      named: whether the labels are shown. The panel to the left may already show them.
      above: the space above the first row.
      below: the space below the last row.
    """
    axes.set_yticks(range(len(labels)), labels if named else [""] * len(labels))
    axes.set_ylim(len(labels) - 1 + below, -above)
    axes.tick_params(axis="y", length=0, labelcolor="#222222")
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=LIGHT, linewidth=0.8)


@dataclasses.dataclass(frozen=True)
class Panel:
    """A plot with one row for each name: bars, dots or both.

    Attributes:
      title: the title above the panel.
      x: the label of the x axis.
      bars: the figure of each row, by the row's name. A row whose figure is None has no bar.
      dots: for each kind of dots, the figure of each row, by the row's name. A row may have three quartiles in place
        of a figure. They are drawn as a dot at the median, on a line from the first quartile to the last.
      colors: the colours of the bars; None makes all of them blue.
      line: a figure to compare the others with, and its name. It is drawn as a vertical line.
      form: the format specification of the figures beside the bars. Dots have figures beside them only if there is a
        single kind of dots. An empty string leaves all figures out.
      log: whether the x axis is logarithmic.
    """

    title: str
    x: str = ""
    bars: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    dots: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    colors: Sequence[str] | None = None
    line: tuple[float, str] | None = None
    form: str = ".3g"
    log: bool = False


@drawn
def panels(grid: Sequence[Sequence[Panel]], path: Path, caption: str = "") -> None:
    """Write a picture of a grid of panels.

    Panels beside one another share the names of their rows if the names are equal. Each row of the grid may have a
    different number of panels.
    """
    names = [
        [list(dict.fromkeys([*p.bars, *(row for dots in p.dots.values() for row in dots)])) for p in r] for r in grid
    ]
    most = [max(map(len, row)) for row in names]
    shared = [all(column == row[0] for column in row) for row in names]
    columns = max(map(len, grid))
    widest = next(i for i, row in enumerate(grid) if len(row) == columns)
    width = sum(3.4 if shared[widest] and i else 5.6 for i in range(columns))
    page = figure(width, sum(1.3 + 0.34 * rows for rows in most))
    ratios = [1.3 + 0.34 * rows for rows in most]
    for i, (row, places) in enumerate(
        zip(grid, page.subplots(len(grid), columns, squeeze=False, height_ratios=ratios), strict=True)
    ):
        for axes in places[len(row) :]:
            axes.set_axis_off()
        # the same space above all panels of a row, so that rows with the same name are at the same height
        above = 1.2 if any(panel.line for panel in row) else 0.6
        for j, (panel, axes) in enumerate(zip(row, places, strict=False)):
            _panel(axes, panel, names[i][j], named=not (shared[i] and j), above=above)
    handles = dict(zip(*reversed(places[len(row) - 1].get_legend_handles_labels()), strict=True))
    if handles:
        page.legend(
            handles.values(), handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=8.5
        )
    save(page, path, caption)


def _panel(axes: Any, panel: Panel, names: list[str], named: bool, above: float) -> None:
    style(axes, panel.title, panel.x)
    if panel.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()

    def note(text: str, x: float, y: float, **look: Any) -> None:
        around = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=8, bbox=around, **look)

    bars = [name for name in names if panel.bars.get(name) is not None]
    colors = dict(zip(panel.bars, panel.colors or [COLORS[2]] * len(panel.bars), strict=True))
    axes.barh([names.index(name) for name in bars], [panel.bars[name] for name in bars], height=0.7,
              color=[colors[name] for name in bars])  # fmt: skip
    for name in bars if panel.form else ():
        note(f"{panel.bars[name]:{panel.form}}", panel.bars[name], names.index(name))
    for i, (kind, dots) in enumerate(panel.dots.items()):
        for name, figure_ in dots.items():
            low, middle, high = figure_ if isinstance(figure_, tuple | list) else (figure_,) * 3
            y = names.index(name) + 0.15 * (i - (len(panel.dots) - 1) / 2)
            look = {"color": color(i + 1)}
            axes.plot([low, high], [y, y], linewidth=3, alpha=0.4, solid_capstyle="round", **look)
            axes.plot([middle], [y], "o", markersize=6, label=kind if len(panel.dots) > 1 else None, **look)
            if panel.form and len(panel.dots) == 1:
                note(f"{middle:{panel.form}}", high, y)
    if panel.line:
        axes.axvline(panel.line[0], color=COLORS[1], linewidth=1.2, linestyle=(0, (4, 3)))
        note(panel.line[1], panel.line[0], -0.8, color=COLORS[1])
    row_axis(axes, names, named, above)
    axes.margins(x=0.16)
