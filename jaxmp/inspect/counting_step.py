"""A train step that also counts its values by magnitude."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxmp.base.trees import widen
from jaxmp.inspect.numerics_records import StepRecords, gradients_and_records, records_of_step
from jaxmp.optim.checks import as_optimizer
from jaxmp.optim.scaled_grad import scaled_loss
from jaxmp.optim.scaling_state import get_loss_scale
from jaxmp.training.state import TrainState
from jaxmp.training.step import Metrics, S, TrainStep

_RECORDS = "jaxmp.inspect"
"""The key under which a step's metrics contain the records."""


class CountingStep(TrainStep):
    """A train step that counts its weights, activations, gradients and updates.

    Microbatches are counted together.

    Attributes:
      records: the counts of the last call.
      loss_scale: the loss scale of the last call.
    """

    def __init__(self, step: TrainStep) -> None:
        super().__init__(step.options)
        self.records: StepRecords | None = None
        self.loss_scale: Any = None

    def __call__(self, state: S, batch: Any) -> tuple[S, Metrics]:
        """Take a step, and keep its records and loss scale as attributes."""
        state, metrics = super().__call__(state, batch)
        counted: dict[str, Any] = metrics
        self.records, self.loss_scale = counted.pop(_RECORDS), metrics["loss_scale"]
        return state, metrics

    def differentiate(self, loss_fn: Callable[[Any], Any], state: TrainState) -> tuple[Any, Any, dict[str, Any]]:
        """See :class:`jaxmp.training.step.TrainStep`."""
        fun = scaled_loss(loss_fn, get_loss_scale(state.opt_state), has_aux=True)
        result, grads, activations = gradients_and_records(fun, state.params)
        return result, grads, {_RECORDS: activations}

    def gradients(self, state: TrainState, batch: Any, rng: Any) -> tuple[jax.Array, Any, Any, dict[str, Any]]:
        """See :class:`jaxmp.training.step.TrainStep`."""
        loss, grads, model_state, metrics = super().gradients(state, batch, rng)
        true_grads = get_loss_scale(state.opt_state).unscale(widen(grads))
        # The train step computes the same updates again, and XLA merges the two computations.
        updates = updates_of(state.tx, true_grads, state.opt_state, state.params, loss)
        metrics[_RECORDS] = records_of_step(loss, state.params, grads, updates, metrics[_RECORDS])
        return loss, grads, model_state, metrics

    def count(self, state: Any, batch: Any, rng: Any) -> StepRecords:
        """Return the records of a step, without its new state."""
        *_, metrics = self.placed_gradients(state, batch, rng)
        records: StepRecords = metrics[_RECORDS]
        return records


def updates_of(tx: Any, grads: Any, opt_state: Any, params: Any, loss: Any, **more: Any) -> Any:
    """Return an optimizer's updates for unscaled gradients."""
    updates, _ = as_optimizer(tx).update(grads, opt_state, params, value=loss, **more)
    return updates
