"""Draw charts as SVG, with the colours and fonts of the report page."""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from jaxmp.base import dtypes, formats
from jaxmp.inspect._report.reading import Row, Run
from jaxmp.inspect.plots.drawing import COLORS, RED, figure, style
from jaxmp.inspect.plots.exponents import draw_histogram
from jaxmp.inspect.plots.memory import draw_by_kind
from jaxmp.inspect.plots.runs import draw_heat, draw_loss_scale, heat_height

_POINTS = 800
"""The largest number of points in a band."""
_WIDTH = 5.5
"""The width of a chart in inches, at which its text is readable on a phone and on a wide screen."""
_GREY = "#888888"
_BLUE = "#3D8FD1"  # can be read on light and on dark pages


def losses(runs: Sequence[Run]) -> str:
    """Draw the losses of runs, and their accuracies if a run has any.

    Lines are training metrics, and dots are held-out metrics.
    """
    values: dict[str, Callable[[Row], float]] = {"loss": lambda row: row.loss}
    if any(math.isfinite(row.accuracy) for run in runs for row in (*run.train, *run.test)):
        values["accuracy"] = lambda row: row.accuracy
    page = figure(_WIDTH, 1 + 2.4 * len(values))
    panels = page.subplots(len(values), 1, sharex=True, squeeze=False)[:, 0]
    colored = list(zip(runs, colors_of(runs), strict=True))
    for axes, (name, value) in zip(panels, values.items(), strict=True):
        for run, color in reversed(colored):  # the first run, which the page is about, is drawn on top
            _curve(axes, run, value, color)
        style(axes, "", "step" if axes is panels[-1] else "", name)
    return svg(page)


def colors_of(runs: Sequence[Run]) -> list[str]:
    """Return the colours in which :func:`losses` draws runs.

    The table of runs on the page is the legend.
    """
    return list(itertools.islice(itertools.cycle((_BLUE, RED, *COLORS[3:])), len(runs)))


def _curve(axes: Any, run: Run, value: Callable[[Row], float], color: str) -> None:
    """Draw a metric of a run as the mean over its seeds.

    A band reaches from the lowest to the highest value of the seeds. Dots are held-out metrics.
    """
    steps = list(zip(*(seed.train for seed in run.seeds), strict=False))
    means = [(rows[0].step, statistics.fmean(map(value, rows))) for rows in steps]
    _line(axes, means, color)
    if run.other_seeds:
        shown = steps[:: math.ceil(len(steps) / _POINTS)]
        bounds = [[bound(map(value, rows)) for rows in shown] for bound in (min, max)]
        axes.fill_between([rows[0].step for rows in shown], *bounds, color=color, alpha=0.2, linewidth=0)
    for seed in run.seeds:
        axes.plot([row.step for row in seed.test], [value(row) for row in seed.test], "o", color=color, markersize=4)


def scales(run: Run) -> str:
    """Draw the loss scale, the skipped steps and the gradient norm of a run."""
    page = figure(_WIDTH, 4.6)
    above, below = page.subplots(2, 1, sharex=True)
    draw_loss_scale(above, [vars(row) for row in run.train])
    above.set_xlabel("")
    _line(below, [(row.step, row.grad_norm) for row in run.train], COLORS[3])
    below.set_yscale("log")
    _label_plainly(below.yaxis)
    style(below, "", "step", "gradient norm")
    return svg(page)


def underflow(run: Run) -> str:
    """Draw the share of activation gradients that become 0, by layer and step."""
    kind = "activation_gradients"
    page = figure(_WIDTH, heat_height(run.watched, kind))
    draw_heat(page, run.watched, kind)
    return svg(page)


def exponents(run: Run) -> str:
    """Draw a histogram of the last watched step's magnitudes for each kind of tensor.

    Dashed lines mark the smallest number, the smallest normal number and the largest number of the watched dtype.
    """
    row = run.watched[-1]
    by_kind = {kind: counts for kind, counts in row["exponents"].items() if counts}
    form = formats.format_of(dtypes.canonical_dtype(row["dtype"]))
    page = figure(_WIDTH, 0.6 + 0.9 * len(by_kind))
    panels = page.subplots(len(by_kind), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (kind, counts) in zip(panels, by_kind.items(), strict=True):
        histogram = {int(exponent): count for exponent, count in counts.items()}
        draw_histogram(axes, kind.replace("_", " "), histogram, sum(histogram.values()), form)
    return svg(page)


def memory(runs: Sequence[Run]) -> str:
    """Draw the memory of runs at the peak, by kind."""
    sizes = {run.name: run.memory["by_kind"] for run in runs if run.memory}
    page = figure(_WIDTH, 1.4 + 0.5 * len(sizes))
    axes = page.subplots()
    style(axes, "", grid="x")
    draw_by_kind(axes, sizes)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=3)
    return svg(page)


def svg(page: Any) -> str:
    """Return a figure as SVG without a size, with the text colour of the page."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxmp"}):
        file = io.StringIO()
        page.savefig(file, format="svg", transparent=True, dpi=200, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:width|height)="[^"]*"', "", text, count=2)  # the size of the figure comes first
    for dark in ("#000000", "#222222", "#6b6b6b", "#6B6B6B"):
        text = text.replace(dark, "currentColor")
    return text.replace("#e6e6e6", _GREY + "44").replace("#bbbbbb", _GREY)


def _label_plainly(axis: Any) -> None:
    """Label a logarithmic axis with numbers such as 1.7, without a power of ten."""
    from matplotlib.ticker import LogFormatter

    class PlainFormatter(LogFormatter):
        def __call__(self, value: float, position: int | None = None) -> str:
            return f"{value:g}" if super().__call__(value, position) else ""

    axis.set_major_formatter(PlainFormatter())
    axis.set_minor_formatter(PlainFormatter())


def _line(axes: Any, points: Sequence[tuple[int, float]], color: str) -> None:
    """Draw a line through the finite values.

    In the SVG, matplotlib leaves out points that change no pixel.
    """
    points = [(step, value) for step, value in points if math.isfinite(value)]
    steps, values = [step for step, _ in points], [value for _, value in points]
    axes.plot(steps, values, color=color, linewidth=1.3, marker="o" if len(steps) == 1 else None)
