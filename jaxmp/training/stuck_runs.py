"""Detect runs that skip every step at a loss scale that cannot fall."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._internals.flax.nnx_if_imported import imported_nnx
from jaxmp.base import trees as _tree
from jaxmp.base.arguments import require_whole_number
from jaxmp.base.donation import is_deleted, require_not_deleted
from jaxmp.optim.scaling_state import get_loss_scaling_state


class NonFiniteTrainingError(FloatingPointError):
    """Too many steps in a row were skipped, and the loss scale could not fall.

    The message names the arrays that are not finite. To find the operation that made the first infinity or NaN, call
    ``jaxmp.inspect.first_nonfinite(step)(state, error.batch)``.

    Attributes:
      batch: the batch of the step that raised the error; None if :func:`raise_if_stuck` raised it.
    """

    def __init__(self, message: str, batch: Any = None) -> None:
        super().__init__(message)
        self.batch = batch


def raise_if_stuck(state: Any, max_consecutive_skips: int = 25) -> None:
    """Raise an error if a run skips every step and the loss scale cannot fall.

    Call it in the loop of your own step, outside of ``jax.jit``, for example every 100 steps. A step of
    :func:`jaxmp.make_train_step` does this check itself, unless you wrap the step in your own ``jax.jit``. The function
    reads a few numbers from the device, so it waits until the step that computes ``state`` is finished.

    Args:
      state: a :class:`jaxmp.TrainState`, a :class:`jaxmp.nnx.Optimizer`, or the state of an optimizer with
        :func:`jaxmp.loss_scaling`.
      max_consecutive_skips: the number of skipped steps in a row that is an error if the loss scale cannot fall.

    Raises:
      NonFiniteTrainingError: the last ``max_consecutive_skips`` steps were skipped, and the loss scale cannot fall.
      TypeError: the function is called inside ``jax.jit``.
      ValueError: the optimizer's state has no loss scale, or several; or ``max_consecutive_skips`` is below 1.
      RuntimeError: the state was donated to a step.

    >>> tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(8.0))
    >>> opt_state = tx.init(jnp.ones(2))
    >>> for _ in range(3):
    ...     _, opt_state = tx.update(jnp.full(2, jnp.nan), opt_state, jnp.ones(2))
    >>> raise_if_stuck(opt_state)
    >>> raise_if_stuck(opt_state, max_consecutive_skips=3)
    Traceback (most recent call last):
    jaxmp.training.stuck_runs.NonFiniteTrainingError: 3 steps in a row were skipped, and the loss scale 8 ...
    """
    require_whole_number("max_consecutive_skips", max_consecutive_skips)
    opt_state = getattr(state, "opt_state", state)
    if (nnx := imported_nnx()) is not None:  # the arrays of an NNX optimizer are in Variables
        opt_state = nnx.as_pure(opt_state)
    scaling = get_loss_scaling_state(opt_state)
    if _tree.is_traced(scaling.consecutive_skipped):
        raise TypeError(
            "raise_if_stuck reads a number from the device, got a state inside jax.jit; call it outside, with the "
            "state that the step returned"
        )
    require_not_deleted(scaling.consecutive_skipped)
    skips, scales, is_stuck = _read(scaling, max_consecutive_skips)
    if is_stuck.any():
        raise NonFiniteTrainingError(message(int(skips[is_stuck].max()), float(scales[is_stuck].min())))


def _read(scaling: Any, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read the counters of a :class:`jaxmp.LossScalingState` from the device.

    Return the number of steps that were skipped in a row, the loss scale, and whether at least ``limit`` steps were
    skipped in a row and the loss scale cannot fall. The state of a ``vmap`` has an element for each run.
    """
    with jax.transfer_guard("allow"):
        numbers = jax.tree.map(np.asarray, scaling._replace(inner_state=None))
        scale = numbers.loss_scale
        is_stuck = numbers.consecutive_skipped >= limit
        if is_stuck.any():
            is_stuck = is_stuck & np.asarray(scale.adjust(False, np.inf).is_stuck(scale))
    skips, scales, is_stuck = np.broadcast_arrays(numbers.consecutive_skipped, scale.loss_scale, is_stuck)
    return skips, scales, is_stuck


class StuckRuns:
    """Read the counters of skipped steps in one of about ``limit`` calls of a step.

    Reading waits for the device, so most calls do not read. Runs may share a step, and each read concerns only the
    run whose state is passed. The distances between the reads are random, because equal distances could miss some of
    the runs that take turns. All processes draw the same distances, so they read in the same calls.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._random = random.Random(0)
        self._calls_before_read = limit

    def is_stuck(self, state: Any) -> bool:
        """Return whether this call reads the counters of ``state``, and they say that its run is stuck."""
        if self._calls_before_read > 0:
            self._calls_before_read -= 1
            return False
        self._calls_before_read = self._random.randrange((self.limit - 1) // 2, self.limit)
        scaling = get_loss_scaling_state(state.opt_state)._replace(inner_state=None)
        if _tree.is_traced(scaling) or is_deleted(scaling):
            return False
        _, _, is_stuck = _read(scaling, self.limit)
        return bool(is_stuck.any())


def message(skips: int, scale: float, non_finite: Sequence[str] | None = None) -> str:
    """Return the message of the error that ends a stuck run.

    Args:
      skips: the number of steps that were skipped in a row.
      scale: the loss scale.
      non_finite: the result of :func:`non_finite_parts`; None if it is unknown.
    """
    text = f"{skips} steps in a row were skipped, and the loss scale {scale:g} cannot fall further"
    if non_finite is not None:
        listed = "; ".join(non_finite)
        listed = listed or "no gradient, so it must be the gradients' norm or the optimizer's updates"
        text += f"; not finite now: {listed}"
    return f"{text}. {_REMEDY}"


_REMEDY = (
    "Look for NaN in the data, lower the learning rate, compute modules in float32 (by overrides), or write "
    "jax.lax.stop_gradient(...) for params that are not trained. To find the operation, call "
    "jaxmp.inspect.first_nonfinite(step) with the arguments of the step"
)

FLOAT16_RANGE = (
    '.\nIf a residual stream passes 65,504, the largest float16 number, write the override {"primitive:add": "float32"}'
)
"""Another remedy, for a forward pass with float16 products that is not finite although its inputs are."""


def non_finite_parts(loss: Any, grads: Any, params: Any, batch: Any) -> list[str]:
    """Return descriptions of all non-finite arrays of a step.

    Args:
      loss: the true loss.
      grads: the gradients of the scaled loss.
      params: the params.
      batch: the batch.
    """
    parts = [] if np.isfinite(loss) else [f"the loss ({loss})"]
    for of_leaves, of_array, tree in (
        ("gradients of", "the gradient", grads),
        ("params", "the params", params),
        ("batch entries", "the batch", batch),
    ):
        names = _tree.non_finite(tree)
        if names:
            listed = ", ".join(repr(name) for name in names[:8]) + (", …" if len(names) > 8 else "")
            parts.append(f"{of_leaves} {listed}" if names[0] else of_array)
    return parts
