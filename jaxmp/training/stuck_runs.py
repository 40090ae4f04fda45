"""Detect runs that skip every step at a loss scale that cannot fall."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp._internals.flax.nnx_if_imported import imported_nnx
from jaxmp.base import trees as _tree
from jaxmp.base.arguments import require_whole_number
from jaxmp.base.donation import is_deleted, require_not_deleted
from jaxmp.optim.scaling_state import get_loss_scaling_state

_LAG = 4  # the number of steps after which a report is read if there are several processes


class NonFiniteTrainingError(FloatingPointError):
    """Too many steps in a row were skipped, and the loss scale could not fall.

    The message names the arrays that are not finite. To find the operation that made the first infinity or NaN, call
    ``jaxmp.inspect.first_nonfinite(step)(state, error.batch)``.

    Attributes:
      batch: the batch of the last skipped step, or None if it is unknown.
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
    numbers = _read_now(scaling._replace(inner_state=None))
    is_stuck = _are_stuck(numbers, max_consecutive_skips)
    if is_stuck.any():
        skips, scales = np.broadcast_arrays(numbers.consecutive_skipped, numbers.loss_scale.loss_scale)
        worst = np.unravel_index(np.argmax(np.where(is_stuck, skips, -1)), is_stuck.shape)
        raise NonFiniteTrainingError(f"{_cause(int(skips[worst]), float(scales[worst]))}. {_REMEDY}")


def _are_stuck(scaling: Any, limit: int) -> np.ndarray:
    """Return whether ``limit`` steps in a row were skipped and the loss scale cannot fall.

    Args:
      scaling: a :class:`jaxmp.LossScalingState` of NumPy arrays, whose inner state is ignored. It may hold several runs
        under ``vmap``; the result has an element for each.
      limit: the number of steps.
    """
    is_skipping = np.asarray(scaling.consecutive_skipped) >= limit
    if not is_skipping.any():
        return is_skipping
    scale = scaling.loss_scale
    with jax.transfer_guard("allow"):
        return is_skipping & np.asarray(scale.adjust(False, np.inf).is_stuck(scale))


def _cause(skips: int, scale: float) -> str:
    return f"{skips} steps in a row were skipped, and the loss scale {scale:g} cannot fall further"


class _Report(NamedTuple):
    """The report of a step: whether it was skipped, its loss scale and its batch."""

    skipped: Any
    loss_scale: Any
    batch: Any


class StuckRuns:
    """Detect a run that has been skipping steps for too long.

    A step reports whether it was skipped. The report is read some steps later, when the device has finished the step.
    So the host does not wait for the device. It waits only after a skipped step, for the counter in the state.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._reports: deque[_Report] = deque()

    def add(self, skipped: Any, loss_scale: Any, batch: Any) -> None:
        """Remember the report of a step: whether it was skipped, its loss scale and its batch.

        A step inside another JAX transformation, such as ``jit``, has no report.
        """
        if not isinstance(skipped, jax.core.Tracer):
            self._reports.append(_Report(skipped, loss_scale, batch))

    def bad_batches_of(self, state: Any) -> list[Any]:
        """Return the latest skipped batches if the run of ``state`` is stuck.

        Otherwise return an empty list. A run is stuck if ``limit`` steps in a row were skipped, the last of them at a
        loss scale that cannot fall. Batches whose arrays were deleted are left out.
        """
        bad: list[_Report] = []
        with contextlib.suppress(IndexError):  # another thread has read the last report
            while self._reports and self._is_due(self._reports[0].skipped):
                report = self._reports.popleft()
                if _is_true(report.skipped) and not is_deleted(report.batch):
                    bad.append(report)
        if not bad:
            return []
        scaling = get_loss_scaling_state(state.opt_state)._replace(inner_state=None)
        if _tree.is_traced(scaling) or is_deleted(scaling):
            return []
        scaling = _read_now(scaling)
        has_fallen = np.any(_read_now(bad[-1].loss_scale) > scaling.loss_scale.loss_scale)
        return [] if has_fallen or not _are_stuck(scaling, self.limit).any() else [report.batch for report in bad]

    def _is_due(self, report: Any) -> bool:
        # Processes may finish at different times, but all must raise the error at the same step.
        return report.is_ready() if report.is_fully_addressable else len(self._reports) > _LAG


def _is_true(flag: Any) -> bool:
    """Return the value of a bool array, also if a transfer guard is on.

    Each step calls this function, and ``jax.tree.map`` would take longer than the rest of it.
    """
    with jax.transfer_guard_device_to_host("allow"):
        return bool(np.asarray(flag))


def _read_now(arrays: Any) -> Any:
    """Return the arrays of a tree as NumPy arrays, also if a transfer guard is on."""
    with jax.transfer_guard_device_to_host("allow"):
        return jax.tree.map(np.asarray, arrays)


def explanation(loss: Any, grads: Any, scale: Any, params: Any, batch: Any, skips: int) -> str:
    """Return the message of the error that ends a stuck run.

    The message names the arrays that are not finite, and the remedy.

    Args:
      loss: the true loss of the step.
      grads: the gradients of the scaled loss.
      scale: the factor of the loss in this step.
      params: the params of the step.
      batch: the batch of the step.
      skips: the number of steps that were skipped in a row.
    """
    parts = _non_finite_parts(loss, grads, params, batch)
    listed = "; ".join(parts) or "no gradient, so it must be the gradients' norm or the optimizer's updates"
    return f"{_cause(skips, float(scale))}; not finite now: {listed}. {_REMEDY}"


_REMEDY = (
    "Look for NaN in the data, lower the learning rate, compute modules in float32 (by overrides), or write "
    "jax.lax.stop_gradient(...) for params that are not trained. To find the operation, call "
    "jaxmp.inspect.first_nonfinite(step) with the arguments of the step"
)


def _non_finite_parts(loss: Any, grads: Any, params: Any, batch: Any) -> list[str]:
    """Return descriptions of all non-finite arrays of a step."""
    parts = []
    if not np.isfinite(loss):
        parts.append(f"the loss ({loss})")
    for of_leaves, of_array, tree in (
        ("gradients of", "the gradient", grads),
        ("params", "the params", params),
        ("batch entries", "the batch", batch),
    ):
        names = _tree.non_finite(tree)
        if names:
            parts.append(f"{of_leaves} {_listed(names)}" if names[0] else of_array)
    return parts


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return f"{shown}, …" if len(names) > 8 else shown
