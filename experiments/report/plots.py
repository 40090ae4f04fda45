"""Pictures of runs and comparisons, drawn without a display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from experiments.comparison.outcomes import Outcome

# Okabe and Ito's palette, which colour-blind readers can tell apart; float32 is the black line.
COLORS = ("#222222", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
_GREY, _LIGHT = "#6B6B6B", "#E6E6E6"


def style(axes: Any, title: str, x: str = "", y: str = "") -> None:
    """A plain frame: no box, a light grid, the title to the left."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x, fontsize=9, color=_GREY)
    axes.set_ylabel(y, fontsize=9, color=_GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#BBBBBB")
    axes.tick_params(labelsize=8, colors=_GREY)
    axes.grid(axis="y", color=_LIGHT, linewidth=0.8)
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
    axes.grid(axis="x", color=_LIGHT, linewidth=0.8)


def curves(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Loss, accuracy and loss scale of one run against its steps; held-out values as dots, skipped steps as ticks."""
    train, test = ([row for row in rows if row["split"] == split] for split in ("train", "test"))
    figure = Figure(figsize=(10.5, 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), ("loss", "accuracy", "loss_scale"), strict=True):
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
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=110)


def comparison(results: dict[str, list[Outcome]], metrics: dict[str, str], path: Path, caption: str) -> None:
    """A row a task: training loss against steps, held-out result, and gradients that became zero of each variant."""
    figure = Figure(figsize=(12, 0.5 + 3.1 * len(results)), layout="constrained")
    grid = figure.subplots(len(results), 3, squeeze=False, width_ratios=(1.15, 1, 0.85))
    for (task, outcomes), (left, middle, right) in zip(results.items(), grid, strict=True):
        _training(left, task, outcomes)
        _held_out(middle, outcomes, metrics[task])
        _zeros(right, outcomes)
        for axes in (middle, right):
            row_axis(axes, [outcome.label for outcome in outcomes], named=axes is middle)
            axes.tick_params(axis="y", labelsize=9)
    figure.supxlabel(caption, fontsize=7.5, color=_GREY, x=0.995, ha="right")
    figure.savefig(path, dpi=110)


def _training(axes: Any, task: str, outcomes: list[Outcome]) -> None:
    style(axes, f"{task}: training loss", "step")
    for i, outcome in enumerate(outcomes):
        runs = [run for run in outcome.curves if run]
        length = min(map(len, runs), default=0)
        if not length:
            continue
        values = np.mean([run[:length] for run in runs], axis=0)
        width = max(1, length // 40)
        values = np.convolve(values, np.ones(width) / width, "valid")
        skip = len(values) // 6  # the first fall, alike in all, would flatten the rest
        # The baseline lies broad beneath, and every other curve is dashed, so that curves that coincide all show.
        dashes = {"linestyle": (0, (4, 3)), "zorder": 3} if i % 2 == 0 else {}
        look = {"linewidth": 1.6, **dashes} if i else {"linewidth": 5, "alpha": 0.25}
        axes.plot(range(width + skip, length + 1), values[skip:], color=_color(i), label=outcome.label, **look)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = (1, 2, 5) if high > 5 * low else (1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=ticks))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.legend(frameon=False, fontsize=8, handlelength=2.6)


def _held_out(axes: Any, outcomes: list[Outcome], metric: str) -> None:
    unit, scale, digits = (" in %", 100, 1) if metric == "accuracy" else ("", 1, 3)
    style(axes, f"held-out {metric}{unit}{', mean and seeds' if len(outcomes[0].test) > 1 else ''}")
    means = [scale * np.mean([test[metric] for test in outcome.test]) for outcome in outcomes]
    axes.axvline(means[0], color=COLORS[0], linewidth=1, linestyle=(0, (4, 3)))
    for i, (outcome, mean) in enumerate(zip(outcomes, means, strict=True)):
        if not np.isfinite(mean):
            axes.text(means[0], i, "  not finite", va="center", fontsize=9, color=_color(i))
            continue
        if len(outcome.test) > 1:
            seeds = [scale * test[metric] for test in outcome.test]
            axes.plot(seeds, [i] * len(seeds), "o", color=_color(i), markersize=4, alpha=0.35, markeredgewidth=0)
        axes.plot([mean], [i], "o", color=_color(i), markersize=9)
        axes.annotate(f"{mean:.{digits}f}", (mean, i), (9, 5), textcoords="offset points", fontsize=9)
    axes.margins(x=0.22)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))


def _zeros(axes: Any, outcomes: list[Outcome]) -> None:
    style(axes, "activation gradients zeroed, %")
    shares = [100 * outcome.zero_activations for outcome in outcomes]
    axes.barh(range(len(shares)), shares, color=[_color(i) for i in range(len(shares))], height=0.5)
    for i, share in enumerate(shares):
        axes.annotate(f"{share:.3g}", (share, i), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(0, max(1.0, 1.2 * max(shares)))


def _color(i: int) -> str:
    return COLORS[i % len(COLORS)]


def ratios(results: list[dict[str, Any]], reference: str, path: Path, caption: str) -> None:
    """A panel a model: what each variant adds to the reference's step, in percent, with the rounds' quartiles."""
    figure = Figure(figsize=(4.2 + 3.4 * len(results), 2.9), layout="constrained")
    for i, (axes, result) in enumerate(zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True)):
        variants = {label: row for label, row in result["variants"].items() if label != reference}
        style(axes, result["model"].split(", batch")[0], f"% added to {reference}")
        axes.axvline(0, color=_GREY, linewidth=1)
        for y, row in enumerate(variants.values()):
            low, middle, high = (100 * (ratio - 1) for ratio in row["ratio"])
            axes.plot([low, high], [y, y], color=_color(y), linewidth=3, alpha=0.4, solid_capstyle="round")
            axes.plot([middle], [y], "o", color=_color(y), markersize=8)
            axes.annotate(f"{middle:+.2f}", (middle, y), (0, 8), textcoords="offset points", ha="center", fontsize=9)
        row_axis(axes, list(variants), named=i == 0, above=0.8, below=0.5)
        axes.margins(x=0.1)
    figure.supxlabel(caption, fontsize=7.5, color=_GREY, x=0.995, ha="right")
    figure.savefig(path, dpi=110)


def learning(tasks: dict[str, dict[str, Any]], path: Path, caption: str) -> None:
    """A row a task: loss and accuracy against steps, and the held-out difference to float32; mean over the seeds.

    Args:
      tasks: title to ``runs`` (policy to records of runs, each with curves ``train`` and ``test``), ``differences``
        (policy to curves of a ``difference``), ``unit`` (its own) and ``goal`` (the largest that counts as met).
      path: of the picture.
      caption: below it.
    """
    figure = Figure(figsize=(14, 0.6 + 3.2 * len(tasks)), layout="constrained")
    grid = figure.subplots(len(tasks), 3, squeeze=False)
    for (title, task), row in zip(tasks.items(), grid, strict=True):
        others = [label for label in task["runs"] if label != "float32"]
        colors = {label: COLORS[1 + i % (len(COLORS) - 1)] for i, label in enumerate(others)} | {"float32": "#9A9A9A"}
        for axes, name in zip(row, ("loss", "accuracy"), strict=False):
            style(axes, f"{title}: {name}" if name == "loss" else name, "step")
            for label, runs in task["runs"].items():
                for split, width in (("train", 0.8), ("test", 2.2)):
                    wide = width * (3 if label == "float32" else 1)  # it lies beneath the others
                    _mean_line(axes, [run[split] for run in runs], name, color=colors[label], linewidth=wide, alpha=0.8,
                               label=label if split == "test" else None)  # fmt: skip
        style(row[2], f"held out, {task['unit']} from float32; grey: goal", "step")
        row[2].axhspan(-task["goal"], task["goal"], color="#F0F0F0", zorder=0)
        row[2].axhline(0, color=colors["float32"], linewidth=2)
        for label, found in task["differences"].items():
            _mean_line(row[2], found, "difference", color=colors[label], linewidth=2.2, alpha=0.8)
        row[1].legend(frameon=False, fontsize=7.5, title="thin: training, thick: held out", title_fontsize=7.5)
    figure.supxlabel(caption, fontsize=7.5, color=_GREY, x=0.995, ha="right")
    figure.savefig(path, dpi=100)


def _mean_line(axes: Any, curves: list[dict[str, list[float]]], name: str, **look: Any) -> None:
    """The mean of curves over the steps that all of them have."""
    length = min((len(curve.get(name, ())) for curve in curves), default=0)
    if length:
        axes.plot(curves[0]["step"][:length], np.mean([curve[name][:length] for curve in curves], axis=0), **look)


def remat(groups: list[dict[str, Any]], path: Path, caption: str) -> None:
    """A panel a model: memory of a step against its time, both over those without remat; a line a policy.

    Where no times were measured, the largest batch takes their place.
    """
    models = dict.fromkeys(group["model"] for group in groups)
    figure = Figure(figsize=(1 + 4.4 * len(models), 3.6), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        own = [group for group in groups if group["model"] == model]
        timed = any("ratio" in row for group in own for row in group["rows"].values())
        style(axes, own[0]["text"], "memory ÷ none", "time ÷ none" if timed else "largest batch")
        axes.grid(axis="x", color=_LIGHT, linewidth=0.8)
        for i, group in enumerate(own):
            points, none = [], group["rows"].get("none", {}).get("step_bytes")
            for kind, row in group["rows"].items():
                y = row["ratio"][1] if "ratio" in row else None if timed else row.get("largest", {}).get("batch")
                if none and y is not None and "step_bytes" in row:
                    points.append((row["step_bytes"] / none, y))
                    axes.annotate(kind, points[-1], (6, 5), textcoords="offset points", fontsize=8)
            if points:
                axes.plot(*zip(*points, strict=True), "o", color=COLORS[2 + i], markersize=7, label=group["policy"])
        axes.margins(x=0.2, y=0.2)
        axes.legend(fontsize=8, framealpha=1, edgecolor="#BBBBBB")  # in a frame: its dots are no measurements
    figure.supxlabel(caption, fontsize=7.5, color=_GREY, x=0.995, ha="right")
    figure.savefig(path, dpi=110)


def gradient_sums(results: list[dict[str, Any]], path: Path, caption: str) -> None:
    """A panel a half format, a row a case: each way's error on a log axis; grey: what rounding alone explains."""
    halves = list(dict.fromkeys(result["half"] for result in results))
    ways = dict(zip(dict.fromkeys(way for result in results for way in result["ways"]), COLORS[1:], strict=False))
    figure = Figure(figsize=(2.2 + 3.9 * len(halves), 4.8), layout="constrained")
    for i, (axes, half) in enumerate(zip(figure.subplots(1, len(halves), squeeze=False)[0], halves, strict=True)):
        own = [result for result in results if result["half"] == half]
        style(axes, half, "relative error of the gradient, %")
        axes.set_xscale("log")
        for y, result in enumerate(own):
            axes.barh(y, 100 * result["rounding"], height=0.86, color=_LIGHT)
            for n, (way, color) in enumerate(ways.items()):
                if way in result["ways"]:
                    place = y + 0.15 * (n - (len(ways) - 1) / 2)
                    axes.plot([100 * result["ways"][way]["error"]], [place], "o", color=color, markersize=6, label=way)
        row_axis(axes, [result["case"] for result in own], named=i == 0)
        axes.set_xlim(1e-4, 200)
        axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=8.5)
    figure.supxlabel(f"grey: what rounding alone explains. {caption}", fontsize=7.5, color=_GREY, x=0.995, ha="right")
    figure.savefig(path, dpi=110)
