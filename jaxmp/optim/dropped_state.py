"""Warn if a training loop drops the optimizer's new state.

``updates, _ = tx.update(grads, opt_state, params)`` keeps the state of the first step: the loss scale never changes,
and the moments stay zero. Inside of ``jax.jit``, the step cannot see what its caller keeps. So the loop tells: the
state that it passes to :func:`jaxmp.raise_if_stuck` again and again is that before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.user_warnings import warn_user
from jaxmp.optim.loss_scale import DynamicLossScale, HeadroomLossScale, LossScale

_CALLS = 20
"""The number of calls in a row after which a state without a step is a mistake.

A loop that checks every 100 steps is told after 2,000 steps. A correct loop may pass several such states: one for each
microbatch before the first update, or one for each run of a sweep.
"""

_calls = 0
"""The number of calls in a row so far."""


def warn_if_dropped(scaling: Any, counts: Sequence[Any]) -> None:
    """Warn at the 20th call in a row with a state before its first step.

    Args:
      scaling: a :class:`jaxmp.LossScalingState` of NumPy arrays, whose inner state is ignored.
      counts: the other counts of steps in the state of the run, which are NumPy arrays.
    """
    global _calls
    shows_steps = bool(counts) or _changes_in_each_step(scaling.loss_scale)
    if not shows_steps or not _has_no_step(scaling, counts):
        _calls = 0
        return
    _calls += 1
    if _calls == _CALLS:
        warn_user(
            f"raise_if_stuck got an optimizer's state before its first step, in {_CALLS} calls in a row; if your step "
            "has run, it does not return the new state:\nwrite updates, opt_state = tx.update(grads, opt_state, "
            "params), and return opt_state (for NNX, use nnx.jit in place of jax.jit)"
        )


def counts_among(leaves: Sequence[Any], like: Any) -> list[Any]:
    """Return the leaves that may count steps: integers of the shape of ``like``."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, (jax.Array, np.ndarray, np.generic))]
    return [array for array in arrays if array.shape == like.shape and jnp.issubdtype(array.dtype, np.integer)]


def _has_no_step(scaling: Any, counts: Sequence[Any]) -> bool:
    """Return whether all counters of a state are zero."""
    counters = [scaling.skipped_steps]
    if isinstance(scaling.loss_scale, DynamicLossScale):
        counters.append(scaling.loss_scale.counter)
    if isinstance(scaling.loss_scale, HeadroomLossScale):
        counters.append(scaling.loss_scale.running_max)
    return not any(np.any(counter) for counter in (*counters, *counts))


def _changes_in_each_step(scale: LossScale) -> bool:
    """Return whether each step changes the numbers of a loss scale.

    At its maximum, a ``DynamicLossScale`` has the same numbers again after each period.
    """
    if isinstance(scale, DynamicLossScale):
        return bool(np.all(np.asarray(scale.loss_scale) * scale.factor <= scale.max_loss_scale))
    return isinstance(scale, HeadroomLossScale)
