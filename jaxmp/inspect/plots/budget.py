"""Draw the shares of an error budget, module by module."""

from __future__ import annotations

from typing import Any

from jaxmp.base import tables
from jaxmp.inspect._budget.budget import ErrorBudget
from jaxmp.inspect.plots.drawing import BLUE, GREY, RED, figure, label_rows, percent, set_title, short_path, style

_PHASES = (("forward", BLUE), ("backward", RED))
_MOST = 24
"""The number of modules that are drawn; the others share one bar."""


def budget(result: ErrorBudget) -> Any:
    """Draw the share of each module in the error of the gradients, one bar each.

    The bar has two parts: the roundings of the forward pass and those of the backward pass. Equal layers share a bar.
    A share is negative if roundings cancel others, so a bar may begin left of 0.

    Args:
      result: a result of :func:`jaxmp.inspect.error_budget`.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.

    >>> def loss_fn(w, x):
    ...     with jax.named_scope("layer"):
    ...         return jnp.mean((x @ w) ** 2)
    >>> x = jnp.linspace(0, 1, 64).reshape(8, 8)
    >>> budget(jaxmp.inspect.error_budget(loss_fn, "mixed_bfloat16")(x, x)).axes[0].get_xlabel()
    'share of the error of the gradients'
    """
    shares = _shares_by_module(result)
    page = figure(9, 1.8 + 0.3 * len(shares))
    axes = page.subplots()
    style(axes, "", x="share of the error of the gradients", grid="x")
    for phase, color in _PHASES:
        ends = [forward if phase == "backward" else 0.0 for forward, _ in shares.values()]
        widths = [backward if phase == "backward" else forward for forward, backward in shares.values()]
        # Parts of different signs begin at 0 both.
        starts = [end if end * width > 0 else 0.0 for end, width in zip(ends, widths, strict=True)]
        axes.barh(range(len(shares)), widths, left=starts, height=0.66, color=color, linewidth=0, label=phase)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    label_rows(axes, list(shares))
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1))
    set_title(page, _summary(result, shares))
    return page


def _shares_by_module(result: ErrorBudget) -> dict[str, tuple[float, float]]:
    """Return the shares of the forward and the backward pass by path, the largest sum first."""
    shares: dict[str, list[float]] = {}
    for row in result.rows:
        if not row.is_float32:
            parts = shares.setdefault(tables.without_numbers(row.path), [0.0, 0.0])
            parts[row.phase != "forward"] += row.share
    ordered = sorted(shares.items(), key=lambda item: -sum(item[1]))
    drawn = {path: (forward, backward) for path, (forward, backward) in ordered[:_MOST]}
    if rest := ordered[_MOST:]:
        sums = [sum(parts[n] for _, parts in rest) for n in (0, 1)]
        drawn[f"{len(rest)} others"] = (sums[0], sums[1])
    return drawn


def _summary(result: ErrorBudget, shares: dict[str, tuple[float, float]]) -> str:
    path = next(iter(shares))
    where = short_path(path) if path else "code outside of modules"
    error = f"an error of {result.measured.gradient_error:.1e}"
    return f"{percent(min(sum(shares[path]), 1))} of {error} comes from {where}"
