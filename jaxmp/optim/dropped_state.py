"""Warn if a training loop drops the optimizer's new state.

``updates, _ = tx.update(grads, opt_state, params)`` keeps the state of the first step: the loss scale never changes,
and the moments stay zero. Inside of ``jax.jit``, the step cannot see what its caller keeps. So the loop tells: the
state that it passes to :func:`jaxmp.raise_if_stuck` again and again is that before the first step.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmp.base.donation import is_deleted
from jaxmp.base.user_warnings import warn_user
from jaxmp.optim.loss_scale import DynamicLossScale, HeadroomLossScale, LossScale

_CALLS = 3
"""The number of calls in a row after which a state without a step is a mistake.

A correct loop may pass such a state once, before its first step.
"""


@dataclasses.dataclass
class _Last:
    """The last call with a state without a step.

    Attributes:
      counter: a reference to an array of the state.
      loss_scale: the numbers of the loss scale.
      calls: the number of calls in a row.
    """

    counter: weakref.ref[Any]
    loss_scale: list[np.ndarray]
    calls: int

    def is_same_run(self, counter: Any, loss_scale: list[np.ndarray]) -> bool:
        """Return whether a state replaces the state of the last call.

        The states of other runs, such as those of an ensemble, exist at the same time.
        """
        last = self.counter()
        is_replaced = last is None or last is counter or is_deleted(last)
        return is_replaced and all(map(np.array_equal, self.loss_scale, loss_scale))


_last: _Last | None = None


def forget_calls() -> None:
    """Forget all earlier calls, because a new run begins."""
    global _last
    _last = None


def warn_if_dropped(scaling: Any, other_leaves: Sequence[Any]) -> None:
    """Warn at the third call in a row with the state before the first step.

    Args:
      scaling: a :class:`jaxmp.LossScalingState`, whose inner state is ignored.
      other_leaves: the other leaves of the state of the run. The integers among them count steps.
    """
    global _last
    if not isinstance(scaling.skipped_steps, jax.Array):  # a state that was read into NumPy, between two programs
        return
    counts = [leaf for leaf in other_leaves if _is_count(leaf, scaling.skipped_steps)]
    scale = scaling.loss_scale
    if not _has_no_step(scaling, counts) or not (counts or _changes_in_each_step(scale)):
        _last = None
        return
    numbers = [np.asarray(leaf) for leaf in jax.tree.leaves(scale)]
    calls = _last.calls if _last is not None and _last.is_same_run(scaling.skipped_steps, numbers) else 0
    _last = _Last(weakref.ref(scaling.skipped_steps), numbers, calls + 1)
    if _last.calls == _CALLS:
        warn_user(
            f"raise_if_stuck got the optimizer's state before its first step, in {_CALLS} calls in a row, so your step "
            "does not return the new state;\nwrite updates, opt_state = tx.update(grads, opt_state, params), and "
            "return opt_state (for NNX, use nnx.jit in place of jax.jit)"
        )


def _is_count(leaf: Any, like: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.shape == like.shape and jax.numpy.issubdtype(leaf.dtype, np.integer)


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
