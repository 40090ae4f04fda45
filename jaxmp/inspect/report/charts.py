"""Charts as SVG, which take the page's colours and fonts."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxmp.inspect.plots.drawing import COLORS, RED, figure, style
from jaxmp.inspect.plots.runs import draw_heat, heat_height
from jaxmp.inspect.report.reading import Row, Run

_POINTS = 800
_GREY = "#888888"
_BLUE = "#3D8FD1"  # can be read on light and on dark pages


def losses(runs: Sequence[Run]) -> str:
    """Draw the training losses of several runs, and their held-out losses as dots."""
    page = figure(9, 3.2)
    axes = page.subplots()
    for run, color in zip(runs, (_BLUE, *COLORS[3:]), strict=False):
        _line(axes, run.train, lambda row: row.loss, color, run.name)
        if run.test:
            axes.plot([row.step for row in run.test], [row.loss for row in run.test], "o", color=color, markersize=4)
    style(axes, "", "step", "loss")
    axes.legend(frameon=False, fontsize=8)
    return svg(page)


def scales(run: Run) -> str:
    """Draw the loss scale, skipped steps, and the norm of the gradients."""
    page = figure(9, 4.6)
    above, below = page.subplots(2, 1, sharex=True)
    _line(above, run.train, lambda row: row.loss_scale, _BLUE, "loss scale")
    skipped = [row for row in run.train if row.skipped]
    shown = skipped[:: max(1, len(skipped) // _POINTS)]
    above.plot([row.step for row in shown], [row.loss_scale for row in shown], "x", color=RED, label="skipped step")
    above.set_yscale("log", base=2)
    above.legend(frameon=False, fontsize=8)
    style(above, "", "", "loss scale")
    _line(below, run.train, lambda row: row.grad_norm, COLORS[3], "gradient norm")
    below.set_yscale("log")
    style(below, "", "step", "gradient norm")
    return svg(page)


def underflow(run: Run) -> str:
    """Draw the share of activation gradients that vanish, layer by step."""
    kind = "activation_gradients"
    rows = run.watched[:: max(1, len(run.watched) // 200)]
    page = figure(9, heat_height(rows, kind))
    draw_heat(page, rows, kind)
    return svg(page)


def memory(parts: dict[str, float]) -> str:
    """Draw the memory at the peak by kind, in MiB."""
    page = figure(9, 0.4 * len(parts) + 0.8)
    axes = page.subplots()
    names = sorted((name for name in parts if parts[name]), key=lambda name: parts[name])
    axes.barh(names, [parts[name] / 2**20 for name in names], color=_BLUE)
    style(axes, "", "MiB", grid="x")
    return svg(page)


def svg(page: Any) -> str:
    """Return a figure as SVG without a size, in the page's text colour."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxmp"}):
        file = io.StringIO()
        page.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    for dark in ("#000000", "#222222", "#6b6b6b", "#6B6B6B"):
        text = text.replace(dark, "currentColor")
    return text.replace("#e6e6e6", _GREY + "44").replace("#bbbbbb", _GREY)


def _line(axes: Any, rows: Sequence[Row], value: Callable[[Row], float], color: str, label: str) -> None:
    """Draw a line through the smallest and the largest value of each of ``_POINTS`` spans."""
    points = [(row.step, value(row)) for row in rows if math.isfinite(value(row))]
    length = max(1, math.ceil(len(points) / _POINTS))
    extremes: list[tuple[int, float]] = []
    for start in range(0, len(points), length):
        span = points[start : start + length]
        smallest, largest = min(span, key=lambda point: point[1]), max(span, key=lambda point: point[1])
        extremes += sorted({smallest, largest})
    steps, values = [step for step, _ in extremes], [number for _, number in extremes]
    axes.plot(steps, values, color=color, linewidth=1.3, label=label, marker="o" if len(steps) == 1 else None)
