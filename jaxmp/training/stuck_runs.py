"""Detect runs that skip every step at a loss scale that cannot fall."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp._internals.flax.nnx_if_imported import imported_nnx
from jaxmp.base import trees as _tree
from jaxmp.base.arguments import require_whole_number
from jaxmp.base.donation import is_deleted, require_not_deleted
from jaxmp.optim.scaling_state import get_loss_scaling_state

_LAG = 4
"""The number of calls after which a report is read if there are several processes."""
_DISTANCE = 16
"""The largest distance of reports, in calls, while no step is skipped and reports are finished at once."""
_PATIENCE = 1_000
"""The number of calls in which a stuck run that others take turns with must come up. Later, it counts as given up."""


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
        raise NonFiniteTrainingError(message(int(skips[worst]), float(scales[worst])))


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


class Report(NamedTuple):
    """The report of a step.

    Attributes:
      counter: a copy of the counter of steps that were skipped in a row. The next step may donate the counter itself.
      skipped: whether the step was skipped.
      loss_scale: the loss scale of the step.
      batch: the batch of the step.
      call: the number of the call.
    """

    counter: Any
    skipped: Any
    loss_scale: Any
    batch: Any
    call: int


class StuckRuns:
    """Detect a run that has been skipping steps for too long.

    Runs may share a step, so the counters in the state of each run decide. A step reports its counter, and a later call
    reads the report when the device has finished the step. So no call waits for the device, with one exception: after
    a report with too many skipped steps, each call waits for the counters of its own state.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._calls = 0
        self._next_report = 0  # the call that makes the next report
        self._report: Report | None = None  # the report of a step that may not be finished
        self._suspect: Report | None = None  # the last report with too many skipped steps
        self._random = random.Random(0)  # gives the same numbers in all processes

    def add(self, state: Any, metrics: Mapping[str, Any], batch: Any) -> None:
        """Report a step: the state and the metrics that it returned, and its batch.

        A step inside another JAX transformation, such as ``jit``, has no report.
        """
        self._calls += 1
        skipped, loss_scale = metrics["skipped"], metrics["loss_scale"]
        if self._report is None and self._calls >= self._next_report and not _tree.is_traced(skipped):
            counter = get_loss_scaling_state(state.opt_state).consecutive_skipped
            self._report = Report(_copied(counter), skipped, loss_scale, batch, self._calls)

    def report_if_stuck(self, state: Any) -> Report | None:
        """Return the report of a skipped step if the run of ``state`` is stuck, else None.

        A run is stuck if ``limit`` steps in a row were skipped, the last of them at a loss scale that cannot fall.
        """
        self._read_report()
        suspect = self._suspect
        if suspect is None:
            return None
        scaling = get_loss_scaling_state(state.opt_state)._replace(inner_state=None)
        if _tree.is_traced(scaling) or is_deleted(scaling):
            return None
        scaling = _read_now(scaling)
        has_fallen = np.any(_read_now(suspect.loss_scale) > scaling.loss_scale.loss_scale)
        is_stuck = not has_fallen and _are_stuck(scaling, self.limit).any()
        if is_stuck or self._calls - suspect.call > _PATIENCE:
            self._suspect = None
        return suspect if is_stuck else None

    def _read_report(self) -> None:
        """Read the last report if its step is finished."""
        report = self._report
        if report is None:
            return
        age = self._calls - report.call
        # The device copies the counter right after the step. Processes may finish a step at different times, but all
        # must raise the error in the same call.
        if not (report.skipped.is_ready() if report.counter.is_fully_addressable else age >= _LAG):
            return
        self._report, skips = None, _read_now(report.counter)
        # If runs take turns, reports at equal distances could miss some of the runs.
        most = age + (1 if np.any(skips) else _DISTANCE)
        self._next_report = self._calls + 1 + self._random.randrange(most)
        if np.any(skips >= self.limit):
            self._suspect = report


def _copied(counter: jax.Array) -> jax.Array:
    """Return a copy on the same devices, without a compilation and without waiting for the device."""
    return jax.device_put(counter, counter.sharding, may_alias=False)


def _read_now(arrays: Any) -> Any:
    """Return the arrays of a tree as NumPy arrays, also if a transfer guard is on."""
    with jax.transfer_guard_device_to_host("allow"):
        return jax.tree.map(np.asarray, arrays)


def message(skips: int, scale: float, non_finite: Sequence[str] | None = None) -> str:
    """Return the message of the error that ends a stuck run.

    Args:
      skips: the number of steps that were skipped in a row.
      scale: the loss scale.
      non_finite: the result of :func:`non_finite_parts` for the last step; None if it is unknown.
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
