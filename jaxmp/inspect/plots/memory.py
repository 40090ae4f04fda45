"""Draw the memory of several programs, side by side."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp.base import tables
from jaxmp.inspect._memory.memory import Memory
from jaxmp.inspect.plots.drawing import (
    BLACK,
    BLUE,
    BORDER,
    BROWN,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    figure,
    ink,
    set_title,
    style,
)

_COLORS_OF_KINDS = (BLUE, SKY, GREEN, BROWN, PINK, ORANGE, BORDER)
_COLORS_OF_DTYPES = {"float32": BLUE, "bfloat16": ORANGE, "float16": RED}
_COLORS_OF_OTHERS = (SKY, GREEN, BROWN, PINK, BLACK)


class _Scale(NamedTuple):
    """The unit of the sizes in a picture, and the largest peak in bytes."""

    name: str
    bytes: int
    most: int

    def text(self, size: float) -> str:
        """Return a size in bytes as a number of units."""
        digits = 0 if self.most >= 10 * self.bytes else 2
        return f"{size / self.bytes:,.{digits}f}"


def memory(plans: Mapping[str, Memory]) -> Any:
    """Draw the memory of several plans, side by side, by kind and by dtype.

    Bars show the memory of one device in MiB, or in KiB if all plans are smaller than 10 MiB.

    Args:
      plans: a mapping from name to a result of :func:`jaxmp.inspect.memory`. The other plans are compared with the
        first plan.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.

    >>> shapes = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> plan = jaxmp.inspect.memory(lambda params, batch: (batch @ params).sum())(*shapes)
    >>> memory({"float32": plan}).axes[1].get_xlabel()
    'KiB at the peak'
    """
    page = figure(9.5, 1.9 + 0.62 * len(plans) * 2)
    by_kind, by_dtype = page.subplots(2, 1, sharex=True)
    style(by_kind, "by kind", grid="x")
    _draw_by_kind(by_kind, {name: plan.by_kind for name, plan in plans.items()})
    by_kind.set_xlabel("")
    style(by_dtype, "by dtype", grid="x")
    sizes = {name: plan.by_dtype for name, plan in plans.items()}
    _draw_bars(by_dtype, sizes, _colors_of_dtypes(sizes))
    set_title(page, *(f"{name}: {plan.headline}" for name, plan in plans.items()))
    return page


def _draw_by_kind(axes: Any, sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Draw a bar for each program, with a part for each kind of arrays.

    Args:
      axes: the axes of matplotlib.
      sizes: the bytes by kind for each program, by its name. The other programs are compared with the first one.
    """
    kinds = list(dict.fromkeys(kind for parts in sizes.values() for kind in parts))
    _draw_bars(axes, sizes, dict(zip(kinds, _COLORS_OF_KINDS, strict=False)))


def _colors_of_dtypes(sizes: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Return the dtypes, largest first, with their colours."""
    largest: dict[str, int] = {}
    for parts in sizes.values():
        for dtype, size in parts.items():
            largest[dtype] = max(size, largest.get(dtype, 0))
    others = itertools.cycle(_COLORS_OF_OTHERS)
    in_order = sorted(largest, key=lambda dtype: -largest[dtype])
    return {dtype: _COLORS_OF_DTYPES.get(dtype) or next(others) for dtype in in_order}


def _draw_bars(axes: Any, sizes: Mapping[str, Mapping[str, int]], colors: Mapping[str, str]) -> None:
    totals = [sum(parts.values()) for parts in sizes.values()]
    scale = _scale_of(totals)
    starts = np.zeros(len(sizes))
    for part, color in colors.items():
        widths = np.array([parts.get(part, 0) for parts in sizes.values()])
        label = part if widths.max() > 0.003 * scale.most else None  # the legend names only visible parts
        axes.barh(
            range(len(sizes)), widths / scale.bytes, left=starts / scale.bytes, height=0.66, color=color, label=label,
            linewidth=0,
        )  # fmt: skip
        for y, (start, width) in enumerate(zip(starts, widths, strict=True)):
            if width > 0.055 * scale.most:
                middle = (start + width / 2) / scale.bytes
                axes.text(middle, y, scale.text(width), ha="center", va="center", fontsize=7.5, color=ink(color))
        starts += widths
    for y, total in enumerate(totals):
        change = f" ({total / totals[0] - 1:+.0%})" if y else ""
        text = f" {scale.text(total)}{change}"
        axes.text(total / scale.bytes, y, text, va="center", fontsize=8.5, color=BLACK)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1))
    axes.set_xlabel(f"{scale.name} at the peak", fontsize=9, color=GREY)
    axes.set_yticks(range(len(sizes)), list(sizes))
    axes.tick_params(axis="y", length=0, labelcolor=BLACK, labelsize=9)
    axes.set_ylim(len(sizes) - 0.5, -0.5)
    axes.set_xlim(0, 1.16 * scale.most / scale.bytes)


def _scale_of(totals: Sequence[int]) -> _Scale:
    return _Scale(*tables.byte_unit(max(totals)), max(totals))
