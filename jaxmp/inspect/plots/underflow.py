"""Draw the underflow of a watched run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmp.base import dtypes
from jaxmp.inspect._watch.watch import Watch, vanished_shares, zero_shares
from jaxmp.inspect.plots.drawing import figure, label_rows, percent, set_title, short_path, style

_SharesByStep = Mapping[int, Mapping[str, float]]
"""For each watched step, the share of values by path."""


def underflow(watch: Watch, kind: str = "activation_gradients", dtype: Any = "float16") -> Any:
    """Draw the share of values that underflow, as a heat map of layers and steps.

    The left map shows the share of values that become 0 in ``dtype`` under the step's loss scale. The right map shows
    the share of values that were already 0. In a float16 run, the right map includes values that became 0 during the
    computation. Colours go from 0 (light) to 100 % (dark).

    Args:
      watch: a :class:`Watch` with at least one watched step.
      kind: ``"activations"``, ``"activation_gradients"``, ``"gradients"`` or ``"updates"``.
      dtype: the dtype.

    Raises:
      ValueError: no step was watched.
      ModuleNotFoundError: matplotlib is not installed.

    >>> watch = jaxmp.inspect.Watch(lambda w, x: 1e-9 * jnp.sum(x @ w), every=1)
    >>> for step in range(3):
    ...     _ = watch(step, jnp.ones((4, 2)), jnp.ones((3, 4)), loss_scale=8.0**step)
    >>> underflow(watch, "gradients").get_suptitle()
    'The gradients of the result vanish most in float16: 100% at step 0'
    """
    name = dtypes.canonical_dtype(dtype).name
    steps = watch.steps
    if not steps:
        raise ValueError("a heat map needs a watched step, but there is none yet; watch every step, or wait")
    vanished = {step: vanished_shares(numerics, kind, name) for step, numerics in steps.items()}
    zeros = {step: zero_shares(numerics, kind) for step, numerics in steps.items()}
    paths = list(dict.fromkeys(path for shares in vanished.values() for path in shares))
    page = figure(9.5, min(2.2 + 0.19 * len(paths), 14))
    left, right = page.subplots(1, 2, sharey=True)
    style(left, "becomes 0 under\nthe loss scale", "step", grid="")
    style(right, "was already 0", "step", grid="")
    numbers = list(steps)
    for axes, by_step in ((left, vanished), (right, zeros)):
        shares = np.array([[by_step[step].get(path, np.nan) for step in numbers] for path in paths])
        image = axes.pcolormesh(100 * shares, cmap="magma_r", vmin=0, vmax=100, rasterized=True)
        shown = range(0, len(numbers), -(-len(numbers) // 8))
        axes.set_xticks([n + 0.5 for n in shown], [f"{numbers[n]}" for n in shown])
    label_rows(left, paths, 0.5)
    left.set_ylim(len(paths), 0)
    right.tick_params(axis="y", length=0)
    page.colorbar(image, ax=[left, right], label="share of the values (%)", fraction=0.04, pad=0.02)
    set_title(page, _title(vanished, kind.replace("_", " "), name))
    return page


def _title(vanished: _SharesByStep, tensors: str, dtype: str) -> str:
    worst_share, worst_path, worst_step = 0.0, "", 0
    for step, shares in vanished.items():
        for path, share in shares.items():
            if share > worst_share:
                worst_share, worst_path, worst_step = share, path, step
    if not worst_share:
        return f"No {tensors} vanish in {dtype}"
    worst = f"{percent(worst_share)} at step {worst_step}"
    return f"The {tensors} of {short_path(worst_path)} vanish most in {dtype}: {worst}"
