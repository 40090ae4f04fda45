"""The picture of a comparison, with a row for each task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments.comparison.outcomes import Outcome
from experiments.report import plots


@plots.drawn
def picture(results: dict[str, list[Outcome]], metrics: dict[str, str], path: Path, caption: str) -> None:
    """Draw each variant's training loss, held-out result and zero gradients.

    The picture has a row for each task.
    """
    figure = plots.figure(12, 0.5 + 3.1 * len(results))
    grid = figure.subplots(len(results), 3, squeeze=False, width_ratios=(1.15, 1, 0.85))
    for (task, outcomes), (left, middle, right) in zip(results.items(), grid, strict=True):
        _training(left, task, outcomes)
        _held_out(middle, outcomes, metrics[task])
        _zeros(right, outcomes)
        for axes in (middle, right):
            plots.row_axis(axes, [outcome.label for outcome in outcomes], named=axes is middle)
            axes.tick_params(axis="y", labelsize=9)
    plots.save(figure, path, caption)


def _training(axes: Any, task: str, outcomes: list[Outcome]) -> None:
    from matplotlib import ticker

    plots.style(axes, f"{task}: training loss", "step")
    for i, outcome in enumerate(outcomes):
        runs = [run["curve"] for run in outcome.runs if run["curve"]]
        length = min(map(len, runs), default=0)
        if not length:
            continue
        values = np.mean([run[:length] for run in runs], axis=0)
        width = max(1, length // 40)
        values = np.convolve(values, np.ones(width) / width, "valid")
        skip = len(values) // 6  # the first steep fall is the same in all curves and would flatten the rest
        # The baseline is a broad line, and every second curve is dashed, so that equal curves can all be seen.
        dashes = {"linestyle": (0, (4, 3)), "zorder": 3} if i % 2 == 0 else {}
        look = {"linewidth": 1.6, **dashes} if i else {"linewidth": 5, "alpha": 0.25}
        axes.plot(range(width + skip, length + 1), values[skip:], color=plots.color(i), label=outcome.label, **look)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = (1, 2, 5) if high > 5 * low else (1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=ticks))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.legend(frameon=False, fontsize=8, handlelength=2.6)


def _held_out(axes: Any, outcomes: list[Outcome], metric: str) -> None:
    from matplotlib import ticker

    unit, scale, digits = (" in %", 100, 1) if metric == "accuracy" else ("", 1, 3)
    plots.style(axes, f"held-out {metric}{unit}{', mean and seeds' if len(outcomes[0].runs) > 1 else ''}")
    means = [scale * np.mean([run["test"][metric] for run in outcome.runs]) for outcome in outcomes]
    axes.axvline(means[0], color=plots.COLORS[0], linewidth=1, linestyle=(0, (4, 3)))
    for i, (outcome, mean) in enumerate(zip(outcomes, means, strict=True)):
        if not np.isfinite(mean):
            axes.text(means[0], i, "  not finite", va="center", fontsize=9, color=plots.color(i))
            continue
        if len(outcome.runs) > 1:
            seeds = [scale * run["test"][metric] for run in outcome.runs]
            axes.plot(seeds, [i] * len(seeds), "o", color=plots.color(i), markersize=4, alpha=0.35, markeredgewidth=0)
        axes.plot([mean], [i], "o", color=plots.color(i), markersize=9)
        axes.annotate(f"{mean:.{digits}f}", (mean, i), (9, 5), textcoords="offset points", fontsize=9)
    axes.margins(x=0.22)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))


def _zeros(axes: Any, outcomes: list[Outcome]) -> None:
    plots.style(axes, "activation gradients zeroed, %")
    shares = [100 * outcome.of_first("zero_activations") for outcome in outcomes]
    axes.barh(range(len(shares)), shares, color=[plots.color(i) for i in range(len(shares))], height=0.5)
    for i, share in enumerate(shares):
        axes.annotate(f"{share:.3g}", (share, i), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, max(1.0, 1.2 * np.nanmax(shares)))
