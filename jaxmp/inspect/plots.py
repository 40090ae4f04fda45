"""Pictures of what the tools of :mod:`jaxmp.inspect` find, and of the plan of autocast.

Each function returns a ``matplotlib.figure.Figure`` that is drawn without a display: ``.savefig(file)`` writes it, a
notebook shows it. The title says what is to be seen. Only these functions import matplotlib, and raise
ModuleNotFoundError where it is not installed.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmp import dtypes, formats, tables
from jaxmp.engine.plan import CastPlan
from jaxmp.engine.plan import Row as Operation
from jaxmp.inspect import statistics
from jaxmp.inspect.comparing import Comparison
from jaxmp.inspect.measuring import TENSORS, Numerics
from jaxmp.inspect.memory_plan import Memory
from jaxmp.inspect.statistics import Statistics
from jaxmp.inspect.watch import Watch, line, metrics, read

# Okabe and Ito's palette, which colour-blind readers can tell apart (Wong 2011, Nature Methods 8, 441).
COLORS = ("#222222", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
GREY, LIGHT = "#6B6B6B", "#E6E6E6"
_BLACK, _RED, _BLUE, _GREEN, _PINK, _ORANGE, _SKY, _BROWN = COLORS
_LABELS = 70  # of an axis, at most
_BORDERED = 60  # rows and columns of a heat map whose cells have a border, at most
_BOXES = 40  # of a plan
_MiB = 2**20


def figure(width: float, height: float) -> Any:
    """An empty figure, its sides in inches.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def style(axes: Any, title: str, x: str = "", y: str = "", grid: str = "y") -> None:
    """A plain frame: no box, a light grid across the axis of that name, if any, the title to the left."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x, fontsize=9, color=GREY)
    axes.set_ylabel(y, fontsize=9, color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#BBBBBB")
    axes.tick_params(labelsize=8, colors=GREY)
    if grid:
        axes.grid(axis=grid, color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)


def _ink(color: str) -> str:
    """What can be read on a colour."""
    return "white" if color in (_RED, _BLUE, _GREEN, _BROWN, _BLACK) else _BLACK


def _title(page: Any, text: str) -> None:
    """Above a figure, in lines that fit: a letter is at most 10.5 pixels wide."""
    page.suptitle(textwrap.fill(text, int(page.bbox.width / 10.5)), x=0.01, ha="left", fontsize=11, fontweight="bold")


# What becomes of a value in a format, and its colour.
_FATES = {"becomes 0": _RED, "subnormal": _ORANGE, "normal": _BLUE, "overflows": _PINK}


def exponents(found: Numerics | Statistics | Mapping[str, Statistics], dtype: Any = "float16", *,
              loss_scale: float = 1.0) -> Any:  # fmt: skip
    """Histograms of binary exponents, coloured by what becomes of the values in a format; the formats' ranges below.

    A bar counts the values of one ``floor(log2|x|)``, as a share of all values of the tensor in percent; what is 0 has
    no bar. The shares beside it are those of :meth:`Statistics.under`, exactly.

    Args:
      found: of one tensor, of several by name, or of a step, whose tensors are then counted together by kind.
      dtype: the format that colours the bars: one of :meth:`Statistics.under`.
      loss_scale: a power of two that the values are multiplied by first, of a step the gradients only; a grey line is
        the histogram without it.

    Raises:
      ValueError: another dtype, or no power of two.
      ModuleNotFoundError: matplotlib is not installed.

    The picture is that of Micikevicius et al. 2018 (arXiv 1710.03740), figure 3.

    >>> found = jaxmp.inspect.numerics(lambda w, x: 1e-9 * jnp.sum(x @ w))(jnp.ones((4, 2)), jnp.ones((3, 4)))
    >>> exponents(found.gradients[""]).get_suptitle()
    '100% of the values become 0 in float16'
    """
    tensors = list(_tensors(found, dtype, loss_scale))
    name, form = tensors[0].under.dtype, formats.format_of(dtypes.canonical_dtype(dtype))
    page = figure(8.5, 1.5 + 0.85 * len(tensors))
    rows = page.subplots(len(tensors) + 1, 1, sharex=True, height_ratios=[1] * len(tensors) + [0.8]).tolist()
    sides = [side for each in tensors for side in (each.before, each.under)]
    seen = [e for side in sides for e, count in side.histogram.items() if count > 5e-4 * side.count]  # can be seen
    smallest = form.min_exponent - form.mantissa_bits
    low, high = min([*seen, smallest - 4]) - 1, max([*seen, min(form.max_exponent, 20) + 2]) + 2
    fates = list(_FATES.values())
    for axes, each in zip(rows, tensors, strict=False):
        style(axes, "")
        axes.set_ylabel(each.name.replace(" ", "\n"), rotation=0, ha="right", va="center", fontsize=9, color=_BLACK)
        for e, count in sorted(each.under.histogram.items()):
            fate = (e >= smallest - 1) + (e >= form.min_exponent) + (e > form.max_exponent)
            axes.bar(e, 100 * count / each.under.count, width=1, align="edge", color=fates[fate], linewidth=0)
        if each.scale != 1:
            shown = range(low, high + 1)
            heights = [100 * each.before.histogram.get(e, 0) / max(each.before.count, 1) for e in shown]
            axes.step(shown, heights, where="post", color=GREY, linewidth=0.9, label="without the loss scale")
            axes.legend(frameon=False, fontsize=7, loc="upper right", labelcolor=GREY)
        for border in (smallest, form.min_exponent, form.max_exponent + 1):
            axes.axvline(border, color="#BBBBBB", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        axes.text(1.01, 0.5, each.shares(), transform=axes.transAxes, va="center", fontsize=8, color=_BLACK)
        axes.yaxis.set_major_formatter("{x:g}%")
        axes.locator_params(axis="y", nbins=2)
    _strips(rows[-1], low, high)
    _title(page, _finding(tensors, name))
    return page


class _Tensor(NamedTuple):
    name: str
    before: Statistics
    under: Statistics
    scale: float

    def shares(self) -> str:
        """What is lost of it."""
        counts = {"become 0": self.under.vanished, "subnormal": self.under.below_normal,
                  "overflow": self.under.overflow, "were 0": self.under.zeros}  # fmt: skip
        return "\n".join(f"{_percent(count / max(self.under.count, 1))} {what}" for what, count in counts.items())


def _tensors(found: Any, dtype: Any, loss_scale: float) -> Iterator[_Tensor]:
    named: Mapping[str, Statistics]
    if isinstance(found, Numerics):
        kinds = {kind: list(getattr(found, kind).values()) for kind in TENSORS}
        named = {kind.replace("_", " "): statistics.merged(each) for kind, each in kinds.items() if each}
    else:
        named = {"values": found} if isinstance(found, Statistics) else found
    for name, each in named.items():
        scale = 1.0 if isinstance(found, Numerics) and not name.endswith("gradients") else loss_scale
        yield _Tensor(name or "the result", each, each.under(dtype, scale), scale)


def _finding(tensors: Sequence[_Tensor], dtype: str) -> str:
    def share(found: Statistics, what: str = "vanished") -> float:
        return float(getattr(found, what) / max(found.count, 1))

    worst = max(tensors, key=lambda each: share(each.before.under(dtype)))
    before = share(worst.before.under(dtype))
    lost = f"{_percent(before)} of the {worst.name} become 0 in {dtype}" if before else f"Nothing becomes 0 in {dtype}"
    if worst.scale != 1 and before:
        lost += f", {_percent(share(worst.under))} under a loss scale of {worst.scale:g}"
    over = max(tensors, key=lambda each: share(each.under, "overflow"))
    overflows = f"; {_percent(share(over.under, 'overflow'))} of the {over.name} overflow"
    return lost + (overflows if over.under.overflow else "")


def _strips(axes: Any, low: int, high: int) -> None:
    """The ranges of the formats, one under the other."""
    style(axes, "", "binary exponent of the magnitude: floor(log2|x|)", grid="")
    names = ("float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
    for y, name in enumerate(names):
        form = formats.format_of(dtypes.canonical_dtype(name))
        borders = (low, form.min_exponent - form.mantissa_bits, form.min_exponent, form.max_exponent + 1, high)
        edges = [min(max(border, low), high) for border in borders]
        for (start, stop), (fate, color) in zip(itertools.pairwise(edges), _FATES.items(), strict=True):
            axes.barh(y, stop - start, left=start, height=0.78, color=color, linewidth=0)
            if stop - start >= 1.4 * len(fate) * (high - low) / 100:
                axes.text((start + stop) / 2, y, fate, ha="center", va="center", fontsize=7, color=_ink(color))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=_BLACK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(low, high)


def _percent(share: float) -> str:
    """A share as text that is 0% or 100% only if it is."""
    if share in (0, 1):
        return f"{share:.0%}"
    return "<0.1%" if share < 0.001 else ">99.9%" if share > 0.999 else f"{share:.1%}"


def underflow(run: Watch | str | Path, kind: str = "activation_gradients", dtype: Any = "float16") -> Any:
    """A heat map of layer × step: the share of a tensor's values that becomes 0 in a format, and what was 0 already.

    To the left what vanishes of the values under the step's loss scale, to the right what is 0 as it was computed: of a
    run in float16 that is where the vanished ones are, beside true zeros. Colours go from 0 (light) to 100 % (dark).

    Args:
      run: a :class:`Watch`, or the folder of a run with ``--watch N``.
      kind: ``"activations"``, ``"activation_gradients"``, ``"gradients"`` or ``"updates"``.
      dtype: the format; of a folder that which it was counted for.

    Raises:
      ValueError: nothing was watched, or the folder's file is for another format.
      FileNotFoundError: the folder has no ``watch.jsonl``.
      ModuleNotFoundError: matplotlib is not installed.

    >>> watch = jaxmp.inspect.Watch(lambda w, x: 1e-9 * jnp.sum(x @ w), every=1)
    >>> for step in range(3):
    ...     found = watch(step, jnp.ones((4, 2)), jnp.ones((3, 4)), loss_scale=8.0**step)
    >>> underflow(watch, "gradients").get_suptitle()
    'The gradients of the result vanish most in float16: 100% at step 0'
    """
    rows = _watched(run, dtype)
    page = figure(9.5, _height(rows, kind))
    _heat(page, rows, kind)
    return page


def _height(rows: Sequence[Mapping[str, Any]], kind: str) -> float:
    """Of a heat map, in inches."""
    return min(2.2 + 0.19 * len(rows[0]["vanished"][kind]), 14)


def _heat(page: Any, rows: Sequence[Mapping[str, Any]], kind: str) -> None:
    paths = [*dict.fromkeys(path for row in rows for path in row["vanished"][kind])]
    both = page.subplots(1, 2, sharey=True)
    for axes, what, title in zip(both, ("vanished", "zeros"), ("vanishes under the scale", "is 0 as computed"),
                                 strict=True):  # fmt: skip
        shares = np.array([[row[what][kind].get(path, np.nan) for row in rows] for path in paths])
        style(axes, title, "step", grid="")
        border = 0.2 if max(shares.shape) <= _BORDERED else 0  # would hide small cells
        image = axes.pcolormesh(100 * shares, cmap="magma_r", vmin=0, vmax=100, edgecolors="white", linewidth=border)
        shown = range(0, len(rows), -(-len(rows) // 8))
        axes.set_xticks([n + 0.5 for n in shown], [f"{rows[n]['step']}" for n in shown])
    _rows_of(both[0], paths, 0.5)
    both[0].set_ylim(len(paths), 0)
    both[1].tick_params(axis="y", length=0)
    page.colorbar(image, ax=both, label="share of the values (%)", fraction=0.04, pad=0.02)
    vanished = {(path, row["step"]): row["vanished"][kind].get(path, 0.0) for row in rows for path in paths}
    (path, step), share = max(vanished.items(), key=lambda each: each[1])
    name = rows[0]["dtype"]
    _title(page, f"The {kind.replace('_', ' ')} of {_short(path)} vanish most in {name}: {_percent(share)} at "
                 f"step {step}" if share else f"No {kind.replace('_', ' ')} vanish in {name}")  # fmt: skip


def _watched(run: Any, dtype: Any = None) -> list[dict[str, Any]]:
    """The lines of a run; those of a file in its own format if none is named."""
    name = dtypes.canonical_dtype("float16" if dtype is None else dtype).name
    if isinstance(run, Watch):
        rows = [json.loads(line(step, found, {}, name)) for step, found in run.steps.items()]
    else:
        rows = read(Path(run))
    if not rows:
        raise ValueError("a heat map needs a step that was watched, but there is none yet; watch every step, or wait")
    if dtype is not None and rows[0]["dtype"] != name:
        raise ValueError(
            f"the file of {run} counts what vanishes in {rows[0]['dtype']}, got dtype={name!r}; take that one, or "
            "a Watch, which has the histograms"
        )
    return rows


def _rows_of(axes: Any, labels: Sequence[str], offset: float = 0.0) -> None:
    """Names at the y axis, not more than can be read."""
    shown = range(0, len(labels), -(-len(labels) // _LABELS))
    axes.set_yticks([n + offset for n in shown], [_short(labels[n]) for n in shown])
    axes.tick_params(axis="y", length=0, labelcolor=_BLACK, labelsize=7.5)


def _short(path: str) -> str:
    """A path without the names of Flax's methods."""
    *parts, last = path.split("/")
    return "/".join([*(part for part in parts if "." not in part), last]) or "the result"


def loss_scale(run: str | Path | Iterable[Mapping[str, Any]]) -> Any:
    """The loss scale of a run, step by step, and the steps that were skipped.

    Args:
      run: a run's folder, whose ``metrics.csv`` is read; or the metrics of each step: ``step``, ``loss_scale``, and
        ``skipped``, true or not 0 where the step was not taken.

    Raises:
      ValueError: there is no step.
      FileNotFoundError: the folder has no ``metrics.csv``.
      ModuleNotFoundError: matplotlib is not installed.

    >>> steps = [{"step": n, "loss_scale": 2.0 ** (15 - (n > 4)), "skipped": n == 4} for n in range(9)]
    >>> loss_scale(steps).get_suptitle()
    '1 of 9 steps was skipped; the loss scale went from 2^15 to 2^14'
    """
    page = figure(9.5, 2.9)
    _timeline(page, metrics(Path(run)) if isinstance(run, (str, Path)) else list(run))
    return page


def training(run: str | Path, kind: str = "activation_gradients") -> Any:
    """A run's folder in one picture: :func:`underflow` above :func:`loss_scale`.

    Args:
      run: the folder of a run with ``--watch N``.
      kind: as for :func:`underflow`.

    Raises:
      What these two raise.

    ``jaxmp watch RUN --plot FILE`` writes it.
    """
    rows = _watched(run)
    high = _height(rows, kind)
    page = figure(9.5, high + 2.9)
    above, below = page.subfigures(2, 1, height_ratios=[high, 2.9])
    _heat(above, rows, kind)
    _timeline(below, metrics(Path(run)))
    return page


def _timeline(page: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        raise ValueError("a timeline needs a step, but there is none yet; wait for the first one")
    steps, scales = ([float(row[name]) for row in rows] for name in ("step", "loss_scale"))
    skipped = [(step, scale) for step, scale, row in zip(steps, scales, rows, strict=True) if float(row["skipped"])]
    axes = page.subplots()
    style(axes, "", "step", "loss scale")
    axes.set_yscale("log", base=2)
    alone = "o" if len(rows) == 1 else None  # one point makes no line
    axes.step(steps, scales, where="post", color=_BLUE, linewidth=1.6, label="loss scale", marker=alone)
    if skipped:
        x, y = zip(*skipped, strict=True)
        axes.vlines(x, 0, 1, transform=axes.get_xaxis_transform(), color=_RED, linewidth=0.9, alpha=0.45)
        axes.plot(x, y, "X", color=_RED, markersize=7, label="skipped step", linestyle="none", zorder=3)
    axes.set_ylim(min(scales) / 2.5, max(scales) * 2.5)
    axes.legend(frameon=False, fontsize=8)
    count = f"{len(skipped)} of {len(rows)} steps {'was' if len(skipped) == 1 else 'were'} skipped"
    first, last = _power(scales[0]), _power(scales[-1])
    went = f"stayed at {first}" if len({*scales}) == 1 else f"went from {first} to {last}"
    _title(page, f"{count}; the loss scale {went}")


def _power(scale: float) -> str:
    exponent = math.log2(scale) if scale > 0 else 0.5
    return f"2^{exponent:.0f}" if exponent == int(exponent) else f"{scale:g}"


def errors(comparison: Comparison) -> Any:
    """The relative error of what each scope returns, and of the gradient that reaches it, from the input down.

    An axis from the top down is the program's order, the other one the relative L2 error, without a unit; a line marks
    one rounding to the half dtype. Below are the gradients of the arguments. Errors of 0 have no mark; those that are
    not finite stand at the right border.

    Args:
      comparison: of :func:`jaxmp.inspect.compare`.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.

    >>> def loss_fn(w, x):
    ...     with jax.named_scope("layer"):
    ...         y = x @ w
    ...     return jnp.mean(y**2)
    >>> x = jnp.linspace(0, 1, 64).reshape(8, 8)
    >>> errors(jaxmp.inspect.compare(loss_fn, "mixed_bfloat16")(x, x)).get_suptitle()
    'The error enters nowhere at once; largest: ... in w, backward'
    """
    forward = [row.path for row in comparison.rows if row.phase == "forward"]
    scopes = [*dict.fromkeys(forward)]
    given = [*dict.fromkeys(row.path for row in comparison.rows if row.path not in scopes)]
    parts = [part for part in (scopes, given) if part]
    page = figure(9, min(2 + 0.19 * (len(scopes) + len(given)), 16))
    panels = page.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=[len(part) + 1.5 for part in parts])
    half = comparison.dtype if comparison.dtype in _HALF else None
    rounding = formats.format_of(half or "bfloat16").eps / 2
    finite = [row.relative_error for row in comparison.rows if 0 < row.relative_error < math.inf]
    low, high = min([*finite, rounding]) / 2, max([*finite, rounding]) * 3
    titles = ("what scopes return, and the gradients that reach them", "gradients of the arguments")
    for axes, part, title in zip(panels[:, 0], parts, titles, strict=False):
        style(axes, title, grid="x")
        axes.set_xscale("log")
        if half:
            axes.axvline(rounding, color=GREY, linewidth=1, linestyle=(0, (4, 3)), label=f"one rounding to {half}")
        for phase, color, marker in (("forward", _BLUE, "o"), ("backward", _RED, "D")):
            rows = [row for row in comparison.rows if row.phase == phase and row.path in part and row.relative_error]
            places = [part.index(row.path) for row in rows]
            values = [row.relative_error if row.relative_error < high else high for row in rows]  # NaN is high, too
            if rows:
                axes.plot(values, places, marker=marker, color=color, linewidth=0.8, markersize=4, alpha=0.9,
                          linestyle="-" if part is scopes else "none",
                          label="forward" if phase == "forward" else "gradient")  # fmt: skip
        if comparison.entered in part and part is scopes:
            n = part.index(comparison.entered)
            axes.axhspan(n - 0.5, n + 0.5, color=_ORANGE, alpha=0.25, linewidth=0, label="enters here")
        _rows_of(axes, part)
        axes.set_ylim(len(part) - 0.4, -0.6)
    panels[0, 0].set_xlim(low, high * 1.2)
    if panels[0, 0].get_legend_handles_labels()[0]:
        panels[0, 0].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    panels[-1, 0].set_xlabel("relative error: L2 norm of the difference over the reference's", fontsize=9, color=GREY)
    scope = comparison.entered
    entered = "nowhere at once" if scope is None else f"in {_short(scope)}" if scope else "in code in no scope"
    worst = comparison.worst
    _title(page, f"The error enters {entered}; largest: {worst.relative_error:.1e} in {_short(worst.path)}"
                 f"{', backward' if worst.phase == 'backward' else ''}")  # fmt: skip
    return page


def memory(plans: Mapping[str, Memory]) -> Any:
    """What several plans need at the peak, side by side: by kind, and by dtype.

    Args:
      plans: name to a result of :func:`jaxmp.inspect.memory`: of policies, choices of remat, batches; the first is what
        the others are compared with.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.

    Bars are in MiB on one device, in KiB where all are smaller than 10 MiB.

    >>> shapes = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> plan = jaxmp.inspect.memory(lambda params, batch: (batch @ params).sum())(*shapes)
    >>> memory({"float32": plan}).axes[1].get_xlabel()
    'KiB at the peak'
    """
    first = next(iter(plans))
    most = max(plan.peak for plan in plans.values())
    size, unit = (_MiB, "MiB") if most >= 10 * _MiB else (2**10, "KiB")
    digits = 0 if most >= 10 * size else 2
    page = figure(9.5, 1.9 + 0.62 * len(plans) * 2)
    of_kinds = (_BLUE, _SKY, _GREEN, _BROWN, _PINK, _ORANGE, _BLACK)
    of_dtypes = {"float32": _BLUE, "bfloat16": _ORANGE, "float16": _RED}
    for axes, what in zip(page.subplots(2, 1, sharex=True), ("kind", "dtype"), strict=True):
        sizes = [getattr(plan, f"by_{what}") for plan in plans.values()]
        style(axes, f"by {what}", grid="x")
        parts = list(dict.fromkeys(part for each in sizes for part in each))
        if what == "dtype":
            parts.sort(key=lambda part: -max(each.get(part, 0) for each in sizes))
        others = itertools.cycle((_SKY, _GREEN, _BROWN, _PINK, _BLACK))
        colors = [of_dtypes.get(part) or next(others) for part in parts] if what == "dtype" else of_kinds
        starts = np.zeros(len(plans))
        for part, color in zip(parts, colors, strict=False):
            widths = np.array([each.get(part, 0) for each in sizes]) / size
            label = part if widths.max() * size > 0.003 * most else None  # who cannot be seen has no colour either
            axes.barh(range(len(plans)), widths, left=starts, height=0.66, color=color, label=label, linewidth=0)
            for y, (start, width) in enumerate(zip(starts, widths, strict=True)):
                if width * size > 0.055 * most:
                    axes.text(start + width / 2, y, f"{width:,.{digits}f}", ha="center", va="center", fontsize=7.5,
                              color=_ink(color))  # fmt: skip
            starts += widths
        for y, plan in enumerate(plans.values()):
            less = f" ({plan.peak / plans[first].peak - 1:+.0%})" if y else ""
            axes.text(plan.peak / size, y, f" {plan.peak / size:,.{digits}f}{less}", va="center", fontsize=8.5,
                      color=_BLACK)  # fmt: skip
        axes.set_yticks(range(len(plans)), list(plans))
        axes.tick_params(axis="y", length=0, labelcolor=_BLACK, labelsize=9)
        axes.set_ylim(len(plans) - 0.5, -0.5)
        axes.set_xlim(0, 1.16 * most / size)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1))
    axes.set_xlabel(f"{unit} at the peak", fontsize=9, color=GREY)
    where = f"on {plans[first].device}"
    if len(plans) > 1:
        best = min(plans, key=lambda name: plans[name].peak)
        saved = 1 - plans[best].peak / plans[first].peak
        _title(page, f"{best} needs {saved:.0%} less memory than {first} {where}" if saved > 0 else
               f"Nothing needs less memory than {first} {where}")  # fmt: skip
    else:
        _title(page, f"{first} needs {plans[first].peak / size:,.{digits}f} {unit} {where}")
    return page


class _Box(NamedTuple):
    """Operations of a plan that follow each other in one scope, and in one dtype if that is given."""

    path: str
    dtype: str
    rows: list[Operation]
    reads: set[int]  # numbers of boxes


def casts(plan: CastPlan) -> Any:
    """A plan of autocast as a coloured graph, from the top down, column by column.

    A box is what follows in one scope and one dtype; of a large program in one scope alone, and then it is coloured by
    its shares of operations in each dtype. A red arrow changes the dtype on its way, a red diamond counts the casts
    that autocast adds and what they write. Weights, masks and indices are left out.

    Args:
      plan: of :func:`jaxmp.cast_plan`.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.

    >>> plan = jaxmp.cast_plan(lambda w, x: jax.nn.logsumexp(x @ w), "mixed_bfloat16")(jnp.ones((4, 4)), jnp.ones(4))
    >>> casts(plan).get_suptitle()
    '100% of the FLOPs of products are half; autocast adds 4 casts'
    """
    boxes = _boxes(plan.rows)
    places, height = _places(boxes)
    right = max(place.x for place in places) + 1.5
    page = figure(max(8.0, 1.2 + 0.95 * right), 1.3 + 0.8 * height)
    axes = page.add_subplot()
    axes.axis("off")
    axes.set_xlim(-1.9, right)
    axes.set_ylim(height - 0.4, -0.7)
    for n, box in enumerate(boxes):
        _arrows(axes, n, boxes, places)
        _draw_box(axes, n, box, places[n])
    _legend(page, boxes)
    summary = plan.summary
    half = summary.half_product_flops / summary.product_flops if summary.product_flops else 0.0
    _title(page, f"{_percent(half)} of the FLOPs of products are half; autocast adds {summary.casts} casts"
                 if summary.changes else "Nothing changes: no product is half")  # fmt: skip
    return page


_FILL = {"bfloat16": "#F2A65A", "float16": "#F2A65A", "float32": "#8DB7E2", "float64": "#CFCFCF"}
_OTHER = "#C7A6DB"  # float8
_CAST = "#B3123F"
_HALF = ("bfloat16", "float16")


def _float(row: Operation) -> str:
    """The widest floating dtype that an operation computes in; of one that moves data that of its result."""
    results = row.result.split(", ")
    names = [name for name in (results if row.cls == "clear" else row.operands) if "float" in name]
    names = names or [name for name in results if "float" in name]
    return max(names, key=lambda name: (int(re.findall(r"\d+", name)[0]), name), default="")


def _boxes(rows: Sequence[Operation]) -> list[_Box]:
    """As fine as can be read: by path and dtype, then by path alone, ever shorter."""
    leaves = list[int]()
    for n, row in enumerate(rows):
        is_leaf = n + 1 == len(rows) or rows[n + 1].depth <= row.depth
        is_weight = row.cls == "clear" and row.primitive != "gather" and not {*row.reads} & {*leaves}
        if is_leaf and _float(row) and not is_weight:
            leaves.append(n)
    deepest = max((rows[n].path.count("/") + 1 for n in leaves), default=1)

    def grouped(level: int, by_dtype: bool) -> list[list[int]]:
        def key(n: int) -> tuple[str, str]:
            return "/".join(rows[n].path.split("/")[:level]), _float(rows[n]) if by_dtype else ""

        return [list(group) for _, group in itertools.groupby(leaves, key)]

    ways = [(level, by_dtype) for by_dtype in (True, False) for level in range(deepest, 0, -1)]
    level, by_dtype = next((way for way in ways if len(grouped(*way)) <= _BOXES), (1, False))
    runs = grouped(level, by_dtype)
    box_of = {n: place for place, run in enumerate(runs) for n in run}
    return [
        _Box(
            "/".join(rows[run[0]].path.split("/")[:level]),
            _float(rows[run[0]]) if by_dtype else "",
            [rows[n] for n in run],
            {box_of[m] for n in run for m in rows[n].reads if m in box_of} - {place},
        )
        for place, run in enumerate(runs)
    ]


class _Place(NamedTuple):
    x: float
    y: int
    column: int


def _places(boxes: Sequence[_Box]) -> tuple[list[_Place], int]:
    """Each box below what it reads, straight below it if that is free, in columns of so many layers."""
    layers = list[int]()
    for box in boxes:
        layers.append(1 + max((layers[n] for n in box.reads), default=-1))
    for n, box in enumerate(boxes):
        if not box.reads:  # beside what is done then, not at the top
            layers[n] = max(0, min((layers[m] for m, other in enumerate(boxes) if n in other.reads), default=0) - 1)
    columns = -(-(max(layers) + 1) // 13)
    height = -(-(max(layers) + 1) // columns)
    taken, lanes = set[tuple[int, int]](), dict[int, int]()
    for n in sorted(range(len(boxes)), key=lambda n: (not boxes[n].reads, layers[n])):
        above = max(boxes[n].reads, key=lambda m: layers[m], default=None)
        wanted = 0 if above is None else lanes.get(above, 0)
        lanes[n] = min((lane for lane in range(len(boxes)) if (layers[n], lane) not in taken),
                       key=lambda lane: abs(lane - wanted))  # fmt: skip
        taken.add((layers[n], lanes[n]))
    widths = [1 + max(lanes[n] for n, layer in enumerate(layers) if layer // height == c) for c in range(columns)]
    starts = [sum(3.0 * width + 1.2 for width in widths[:c]) for c in range(columns)]
    places = [
        _Place(starts[layer // height] + 3.0 * lanes[n], layer % height, layer // height)
        for n, layer in enumerate(layers)
    ]
    return places, height


def _dtypes_of(box: _Box) -> dict[str, float]:
    """The shares of its operations by dtype."""
    counts = collections.Counter(box.dtype or _float(row) for row in box.rows)
    return {name: count / len(box.rows) for name, count in counts.most_common()}


def _arrows(axes: Any, n: int, boxes: Sequence[_Box], places: Sequence[_Place]) -> None:
    x, y, column = places[n]
    far = list[int]()
    for m in sorted(boxes[n].reads):
        above, up, its = places[m]
        changes = bool(boxes[m].dtype and boxes[n].dtype and boxes[m].dtype != boxes[n].dtype)
        if its != column:
            far.append(m + 1)
            continue
        bow = -0.35 if y - up > 1 and above == x else 0.0
        start, end = ((above + 1.2, up), (x + 1.2, y)) if bow else ((above, up + 0.3), (x, y - 0.3))
        look = {"arrowstyle": "-|>", "color": _CAST if changes else "#8A8A8A", "linewidth": 1.6 if changes else 0.9,
                "shrinkA": 0, "shrinkB": 0, "connectionstyle": f"arc3,rad={bow}"}  # fmt: skip
        axes.annotate("", end, start, arrowprops=look, zorder=1)
    if far:
        look = {"arrowstyle": "-|>", "color": "#8A8A8A", "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x - 1.2, y), (x - 1.55, y), arrowprops=look)
        axes.text(x - 1.6, y, f"from {', '.join(map(str, far))}", ha="right", va="center", fontsize=7.5, color=GREY,
                  style="italic")  # fmt: skip


def _draw_box(axes: Any, n: int, box: _Box, place: _Place) -> None:
    x, y, _ = place
    left, share_before = x - 1.2, 0.0
    for name, share in _dtypes_of(box).items():
        axes.barh(y, 2.4 * share, 0.6, left + 2.4 * share_before, color=_FILL.get(name, _OTHER), zorder=2)
        share_before += share
    axes.barh(y, 2.4, 0.6, left, color="none", edgecolor="#777777", linewidth=0.9, zorder=3)
    path = _short(box.path) if box.path else "in no scope"
    path = path if len(path) <= 28 else f"…{path[-27:]}"
    axes.text(x, y - 0.1, f"{n + 1}  {path}", ha="center", va="center",
              fontsize=8, fontweight="bold", color=_BLACK, zorder=4)  # fmt: skip
    axes.text(x, y + 0.13, _contents(box), ha="center", va="center", fontsize=7, color=_BLACK, zorder=4)
    added, size = (sum(getattr(row, what) for row in box.rows) for what in ("casts", "cast_bytes"))
    if added:
        axes.plot([left], [y - 0.3], "D", color=_CAST, markersize=5, zorder=5, clip_on=False)
        axes.text(left + 0.1, y - 0.33, f"{added}: {tables.short(size)}B", ha="left", va="bottom", fontsize=6.5,
                  color=_CAST, zorder=5)  # fmt: skip


_WORDS = {
    "dot_general": "product",
    "conv_general_dilated": "convolution",
    "reduce_sum": "sum",
    "reduce_max": "max",
    "convert_element_type": "cast as written",
    "select_n": "select",
}


def _contents(box: _Box) -> str:
    """What is computed in it: groups that stay float32, products, then the rest, what moves data last."""
    named = [row.why.partition(":")[0] for row in box.rows if ": " in row.why and row.why[:1].islower()]
    groups = [name for name in dict.fromkeys(named) if len(name) <= 20]
    counts = collections.Counter(_WORDS.get(row.primitive, row.primitive) for row in box.rows if row.cls != "clear")
    products = [name for name in counts if name in ("product", "convolution")]
    words = [f"{counts[name]} {name}s" if counts[name] > 1 else name for name in products]
    words += groups or [name for name, _ in counts.most_common() if name not in products]
    return ", ".join(words[:3]) + (", …" if len(words) > 3 else "") if words else "moves data"


def _legend(page: Any, boxes: Sequence[_Box]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = dict.fromkeys(name for box in boxes for name in _dtypes_of(box))
    handles: list[Any] = [
        Patch(facecolor=_FILL.get(name, _OTHER), edgecolor="#777777", label=f"computed in {name}") for name in names
    ]
    if any(row.casts for box in boxes for row in box.rows):
        handles.append(Line2D([], [], color=_CAST, marker="D", markersize=5, label="cast: how many, bytes written"))
    page.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8.5)
