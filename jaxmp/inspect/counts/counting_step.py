"""A train step that also counts its values by magnitude."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxmp.base.trees import widen
from jaxmp.inspect.counts.step_records import StepRecords, gradients_and_records, records_of_step
from jaxmp.optim.checks import as_optimizer
from jaxmp.optim.scaled_grad import scaled_loss
from jaxmp.optim.scaling_state import get_loss_scale
from jaxmp.training.accumulation import Gradients
from jaxmp.training.state import TrainState
from jaxmp.training.step import TrainStep
from jaxmp.training.update import Metrics, S, Update

_RECORDS = "jaxmp.inspect"
"""The key under which the metrics contain the records."""


class CountingStep:
    """A train step that counts its weights, activations, gradients and updates.

    Microbatches are counted together.

    Attributes:
      records: the counts of the last call.
      loss_scale: the loss scale of the last call.
    """

    def __init__(self, step: TrainStep) -> None:
        update = step.update
        self._update = _CountingUpdate(
            update.loss_fn, update.devices, update.accumulate_steps, update.ema_decay, update.mean_over
        )
        self._step = step.with_update(self._update)
        self.records: StepRecords | None = None
        self.loss_scale: Any = None

    def __call__(self, state: S, batch: Any) -> tuple[S, Metrics]:
        """Take a step, and keep its records and loss scale as attributes."""
        state, metrics = self._step(state, batch)
        counted: dict[str, Any] = metrics
        self.records, self.loss_scale = counted.pop(_RECORDS), metrics["loss_scale"]
        return state, metrics

    def count(self, state: Any, batch: Any, rng: Any) -> StepRecords:
        """Return the records of a step, without its new state."""
        records: StepRecords = self._update.metrics(state, self._update.gradients(state, batch, rng))[_RECORDS]
        return records


class _CountingUpdate(Update):
    def differentiate(self, loss_fn: Callable[[Any], Any], state: TrainState) -> tuple[Any, Any]:
        """Differentiate a loss, and add the records of the activations and their gradients to its metrics."""
        fun = scaled_loss(loss_fn, get_loss_scale(state.opt_state), has_aux=True)
        (loss, (model_state, metrics)), grads, activations = gradients_and_records(fun, state.params)
        return (loss, (model_state, {**metrics, _RECORDS: activations})), grads

    def metrics(self, state: TrainState, result: Gradients) -> dict[str, Any]:
        """Return the metrics of the loss function, and all records of the step."""
        activations = result.metrics[_RECORDS]
        metrics_of_loss = {name: metric for name, metric in result.metrics.items() if name != _RECORDS}
        true_grads = get_loss_scale(state.opt_state).unscale(widen(result.grads))
        # The train step computes the same updates again, and XLA merges the two computations.
        updates = updates_of(state.tx, true_grads, state.opt_state, state.params, result.loss)
        records = records_of_step(result.loss, state.params, result.grads, updates, activations)
        return {**super().metrics(state, result._replace(metrics=metrics_of_loss)), _RECORDS: records}


def updates_of(tx: Any, grads: Any, opt_state: Any, params: Any, loss: Any) -> Any:
    """Return an optimizer's updates for unscaled gradients."""
    updates, _ = as_optimizer(tx).update(grads, opt_state, params, value=loss)
    return updates
