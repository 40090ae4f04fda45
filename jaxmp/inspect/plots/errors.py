"""Draw the relative errors of a comparison, scope by scope."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxmp.base import formats
from jaxmp.inspect._compare.compare import Comparison
from jaxmp.inspect.plots.drawing import (
    BLUE,
    DASHED,
    GREY,
    ORANGE,
    RED,
    figure,
    label_rows,
    set_title,
    style,
)

_MARKS = (("forward", "forward", BLUE, "o"), ("backward", "gradient", RED, "D"))
"""The phase, label, colour and marker of each line."""


def errors(comparison: Comparison) -> Any:
    """Draw the relative errors of values and gradients, in program order.

    The program runs from top to bottom, and the x axis is the relative L2 error. A dashed line marks the error of one
    rounding to half precision (float16 or bfloat16). The lower panel has the gradients of the arguments. Errors of 0
    are not drawn. Errors that are not finite are drawn at the right border.

    Args:
      comparison: a result of :func:`jaxmp.inspect.compare`.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.

    >>> def loss_fn(w, x):
    ...     with jax.named_scope("layer"):
    ...         y = x @ w
    ...     return jnp.mean(y**2)
    >>> x = jnp.linspace(0, 1, 64).reshape(8, 8)
    >>> errors(jaxmp.inspect.compare(loss_fn, "mixed_bfloat16")(x, x)).get_suptitle()
    'The error enters nowhere; worst: ...'
    """
    scopes = list(dict.fromkeys(row.path for row in comparison.rows if row.phase == "forward"))
    arguments = list(dict.fromkeys(row.path for row in comparison.rows if row.path not in scopes))
    titles = {"results of scopes, and their gradients": scopes, "gradients of the arguments": arguments}
    parts = {title: paths for title, paths in titles.items() if paths}
    heights = [len(paths) + 1.5 for paths in parts.values()]
    page = figure(9, min(2 + 0.19 * (len(scopes) + len(arguments)), 16))
    panels = page.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    is_half = comparison.dtype != "float32"
    rounding = formats.format_of(comparison.dtype if is_half else "bfloat16").eps / 2
    low, high = _limits(comparison, rounding)
    for axes, (title, paths) in zip(panels, parts.items(), strict=True):
        style(axes, title, grid="x")
        axes.set_xscale("log")
        if is_half:
            label = f"one rounding to {comparison.dtype}"
            axes.axvline(rounding, color=GREY, linewidth=1, linestyle=DASHED, label=label)
        _draw_errors(axes, comparison, paths, high, is_connected=paths is scopes)
    panels[0].set_xlim(low, high * 1.2)
    if panels[0].get_legend_handles_labels()[0]:
        panels[0].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    panels[-1].set_xlabel("relative error: L2 norm of the difference over the reference's", fontsize=9, color=GREY)
    set_title(page, comparison.headline)
    return page


def _limits(comparison: Comparison, rounding: float) -> tuple[float, float]:
    finite = [row.relative_error for row in comparison.rows if 0 < row.relative_error < math.inf]
    return min([*finite, rounding]) / 2, max([*finite, rounding]) * 3


def _draw_errors(axes: Any, comparison: Comparison, paths: Sequence[str], high: float, is_connected: bool) -> None:
    for phase, label, color, marker in _MARKS:
        rows = [row for row in comparison.rows if row.phase == phase and row.path in paths and row.relative_error]
        y = [paths.index(row.path) for row in rows]
        x = [
            row.relative_error if row.relative_error < high else high for row in rows
        ]  # NaN is drawn at the border, too
        if rows:
            linestyle = "-" if is_connected else "none"
            axes.plot(
                x, y, marker=marker, color=color, linewidth=0.8, markersize=4, alpha=0.9, linestyle=linestyle,
                label=label,
            )  # fmt: skip
    if is_connected and comparison.entered in paths:
        n = paths.index(comparison.entered)
        axes.axhspan(n - 0.5, n + 0.5, color=ORANGE, alpha=0.25, linewidth=0, label="enters here")
    label_rows(axes, paths)
    axes.set_ylim(len(paths) - 0.4, -0.6)
