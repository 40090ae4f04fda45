"""Draw an error budget, module by module."""

from __future__ import annotations

import math
from typing import Any

from jaxmp.inspect._budget.budget import ErrorBudget
from jaxmp.inspect.plots.drawing import BLUE, GREY, RED, figure, label_rows, percent, set_title, short_path, style


def budget(result: ErrorBudget) -> Any:
    """Draw two bars for each module: its error alone, and the error that remains if it is float32.

    Equal layers share their bars. A line shows the error under the policy.

    Args:
      result: a result of :func:`jaxmp.inspect.error_budget`.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.

    >>> def loss_fn(w, x):
    ...     with jax.named_scope("layer"):
    ...         return jnp.mean((x @ w) ** 2)
    >>> x = jnp.linspace(0, 1, 64).reshape(8, 8)
    >>> budget(jaxmp.inspect.error_budget(loss_fn, "mixed_bfloat16")(x, x)).axes[0].get_xlabel()
    'relative error of the gradients'
    """
    modules, error = result.by_path, result.measured.gradient_error
    page = figure(9, 1.8 + 0.45 * len(modules))
    axes = page.subplots()
    style(axes, "", x="relative error of the gradients", grid="x")
    bars = {"alone": [group.error_alone for group in modules], "if float32": [g.error_in_float32 for g in modules]}
    for (label, errors), color, offset in zip(bars.items(), (RED, BLUE), (-0.18, 0.18), strict=True):
        finite = [size if math.isfinite(size) else 0.0 for size in errors]
        positions = [number + offset for number in range(len(modules))]
        axes.barh(positions, finite, height=0.32, color=color, linewidth=0, label=label)
    if math.isfinite(error):
        axes.axvline(error, color=GREY, linewidth=0.8)
    label_rows(axes, [group.name for group in modules])
    axes.set_ylim(len(modules) - 0.5, -0.5)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1))
    largest = modules[0]
    where = short_path(largest.name) if largest.name else "code outside of modules"
    set_title(page, f"{percent(largest.share)} of an error of {error:.1e} comes from {where}")
    return page
