"""Draw histograms of binary exponents above the ranges of number formats."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxmp.base import dtypes, formats
from jaxmp.inspect._numerics.numerics import Numerics
from jaxmp.inspect.counts import statistics
from jaxmp.inspect.counts.statistics import Statistics
from jaxmp.inspect.counts.step_records import TENSORS
from jaxmp.inspect.plots.drawing import (
    BLACK,
    BLUE,
    BORDER,
    DASHED,
    GREY,
    ORANGE,
    PINK,
    RED,
    figure,
    ink,
    percent,
    set_title,
    style,
)

_FATES = {"becomes 0": RED, "subnormal": ORANGE, "normal": BLUE, "overflows": PINK}
"""The fates of a value in a format, from small to large magnitudes, and their colours."""
_FORMATS = ("float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
_EXPONENT_LABEL = "binary exponent of the magnitude: floor(log2|x|)"
_VISIBLE = 5e-4
"""The share of a tensor's values below which a bar is too small to see."""


class _Tensor(NamedTuple):
    name: str
    unscaled: Statistics
    in_format: Statistics
    scale: float


def exponents(
    counted: Numerics | Statistics | Mapping[str, Statistics], dtype: Any = "float16", *, loss_scale: float = 1.0
) -> Any:
    """Draw histograms of binary exponents, coloured by the effect of a format.

    There is a bar for each exponent ``floor(log2|x|)``. The height of a bar is the percentage of the tensor's values
    with this exponent. The bar's colour shows whether the format keeps these values. Zeros have no bar. The shares
    beside a histogram come from :meth:`Statistics.under`. The rows at the bottom show the ranges of the formats.

    Args:
      counted: the :class:`Statistics` of one tensor, a mapping from name to statistics, or a :class:`Numerics`, whose
        tensors are counted together by kind.
      dtype: the format that decides the colours, as for :meth:`Statistics.under`.
      loss_scale: a power of two that multiplies the values. In a :class:`Numerics`, it multiplies only gradients. A
        grey line shows the histogram without the loss scale.

    Raises:
      ValueError: the dtype is unknown, or the loss scale is not a power of two.
      ModuleNotFoundError: matplotlib is not installed.

    The plot follows figure 3 of Micikevicius et al. 2018 (arXiv 1710.03740).

    >>> counted = jaxmp.inspect.numerics(lambda w, x: 1e-9 * jnp.sum(x @ w))(jnp.ones((4, 2)), jnp.ones((3, 4)))
    >>> exponents(counted.gradients[""]).get_suptitle()
    '100% of the values become 0 in float16'
    """
    tensors = _tensors(counted, dtype, loss_scale)
    name = tensors[0].in_format.dtype
    form = formats.format_of(dtypes.canonical_dtype(dtype))
    page = figure(8.5, 1.5 + 0.85 * len(tensors))
    panels = page.subplots(len(tensors) + 1, 1, sharex=True, height_ratios=[1] * len(tensors) + [0.8]).tolist()
    low, high = _limits(tensors, form)
    for axes, tensor in zip(panels, tensors, strict=False):
        counts = tensor.in_format
        _draw_histogram(axes, tensor.name, counts.histogram, counts.count, form)
        axes.text(1.01, 0.5, _fate_lines(counts), transform=axes.transAxes, va="center", fontsize=8, color=BLACK)
        if tensor.scale != 1:
            _draw_unscaled(axes, tensor.unscaled, low, high)
    _draw_ranges(panels[-1], low, high)
    set_title(page, _summary(tensors, name))
    return page


def _tensors(counted: Any, dtype: Any, loss_scale: float) -> list[_Tensor]:
    if isinstance(counted, Numerics):
        tensors = []
        for kind in TENSORS:
            by_path = getattr(counted, kind)
            if by_path:
                scale = loss_scale if kind.endswith("gradients") else 1.0
                together = statistics.merged_statistics(list(by_path.values()))
                tensors.append(_Tensor(kind.replace("_", " "), together, together.under(dtype, scale), scale))
        return tensors
    by_name = {"values": counted} if isinstance(counted, Statistics) else counted
    return [
        _Tensor(name or "the result", tensor, tensor.under(dtype, loss_scale), loss_scale)
        for name, tensor in by_name.items()
    ]


def _limits(tensors: Sequence[_Tensor], form: Any) -> tuple[int, int]:
    """Return the exponents at the left and right border of the picture.

    All visible bars are between the borders. So is the range of the format, but only up to 2^20.
    """
    low, high = _smallest_exponent(form) - 4, min(form.max_exponent, 20) + 2
    for tensor in tensors:
        for side in (tensor.unscaled, tensor.in_format):
            visible = [exponent for exponent, count in side.histogram.items() if count > _VISIBLE * side.count]
            low, high = min([low, *visible]), max([high, *visible])
    return low - 1, high + 2


def _smallest_exponent(form: Any) -> int:
    """Return the binary exponent of the smallest subnormal number."""
    return int(form.min_exponent - form.mantissa_bits)


def _draw_histogram(axes: Any, name: str, histogram: Mapping[int, int], total: int, form: Any) -> None:
    """Draw one histogram of binary exponents, coloured by the effect of a format.

    Args:
      axes: the axes of matplotlib.
      name: the label of the y axis, one word on each line.
      histogram: the number of values by exponent.
      total: the number of values that are 100 %.
      form: the format, as :func:`jaxmp.base.formats.format_of` returns it.
    """
    style(axes, "", _EXPONENT_LABEL if axes.get_subplotspec().is_last_row() else "")
    axes.set_ylabel(name.replace(" ", "\n"), rotation=0, ha="right", va="center", fontsize=9, color=BLACK)
    smallest = _smallest_exponent(form)
    colors = list(_FATES.values())
    for exponent, count in sorted(histogram.items()):
        # A value above 0.5 times the smallest subnormal number is rounded up to that number.
        fate = (exponent >= smallest - 1) + (exponent >= form.min_exponent) + (exponent > form.max_exponent)
        axes.bar(exponent, 100 * count / total, width=1, align="edge", color=colors[fate], linewidth=0)
    for border in (smallest, form.min_exponent, form.max_exponent + 1):
        axes.axvline(border, color=BORDER, linewidth=0.8, linestyle=DASHED, zorder=0)
    axes.yaxis.set_major_formatter("{x:g}%")
    axes.locator_params(axis="y", nbins=2)


def _draw_unscaled(axes: Any, unscaled: Statistics, low: int, high: int) -> None:
    exponents = range(low, high + 1)
    heights = [100 * unscaled.histogram.get(exponent, 0) / max(unscaled.count, 1) for exponent in exponents]
    axes.step(exponents, heights, where="post", color=GREY, linewidth=0.9, label="without the loss scale")
    axes.legend(frameon=False, fontsize=7, loc="upper right", labelcolor=GREY)


def _fate_lines(in_format: Statistics) -> str:
    counts = {
        "become 0": in_format.vanished,
        "subnormal": in_format.below_normal,
        "overflow": in_format.overflow,
        "were 0": in_format.zeros,
    }
    return "\n".join(f"{percent(_share(count, in_format))} {fate}" for fate, count in counts.items())


def _share(count: int, tensor: Statistics) -> float:
    return float(count / max(tensor.count, 1))


def _summary(tensors: Sequence[_Tensor], dtype: str) -> str:
    def share_unscaled(tensor: _Tensor) -> float:
        return _share(tensor.unscaled.under(dtype).vanished, tensor.unscaled)

    def share_scaled(tensor: _Tensor) -> float:
        return _share(tensor.in_format.vanished, tensor.in_format)

    def share_overflowed(tensor: _Tensor) -> float:
        return _share(tensor.in_format.overflow, tensor.in_format)

    worst = max(tensors, key=share_unscaled)
    if share_unscaled(worst) == 0:
        text = f"Nothing becomes 0 in {dtype}"
    else:
        text = f"{percent(share_unscaled(worst))} of the {worst.name} become 0 in {dtype}"
        if worst.scale != 1:
            text += f", {percent(share_scaled(worst))} under a loss scale of {worst.scale:g}"
    largest = max(tensors, key=share_overflowed)
    if largest.in_format.overflow:
        text += f"; {percent(share_overflowed(largest))} of the {largest.name} overflow"
    return text


def _draw_ranges(axes: Any, low: int, high: int) -> None:
    """Draw the ranges of the formats, one below the other."""
    style(axes, "", _EXPONENT_LABEL, grid="")
    for y, name in enumerate(_FORMATS):
        form = formats.format_of(dtypes.canonical_dtype(name))
        borders = (low, _smallest_exponent(form), form.min_exponent, form.max_exponent + 1, high)
        edges = [min(max(border, low), high) for border in borders]
        for (start, stop), (fate, color) in zip(itertools.pairwise(edges), _FATES.items(), strict=True):
            axes.barh(y, stop - start, left=start, height=0.78, color=color, linewidth=0)
            if stop - start >= 1.4 * len(fate) * (high - low) / 100:
                axes.text((start + stop) / 2, y, fate, ha="center", va="center", fontsize=7, color=ink(color))
    axes.set_yticks(range(len(_FORMATS)), _FORMATS)
    axes.tick_params(axis="y", length=0, labelcolor=BLACK)
    axes.set_ylim(len(_FORMATS) - 0.5, -0.5)
    axes.set_xlim(low, high)
