"""The computation of a train step: the gradients of a batch, and the new state.

If the norm of the gradients is not finite, the params, the optimizer's state, the batch statistics and the moving
average do not change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxmp.base import trees as _tree
from jaxmp.optim.discarded_grads import without_discarded
from jaxmp.optim.scaled_grad import global_norm, scaled_value_and_grad
from jaxmp.optim.scaling_state import get_loss_scale, get_loss_scaling_state
from jaxmp.sharding.devices import DevicesOfArrays
from jaxmp.training.accumulation import Gradients, accumulate, average, mean_gradients
from jaxmp.training.batches import microbatches, require_examples
from jaxmp.training.error_notes import note_for_explicit_axes
from jaxmp.training.loss_function import OWN_METRICS, CheckedLossFn, require_count, require_same_structure
from jaxmp.training.remat import REMAT
from jaxmp.training.state import TrainState

S = TypeVar("S", bound="TrainState")
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """The computation of a train step, as a function ``update(state, batch) -> (state, metrics)``.

    Attributes:
      loss_fn: the loss function with its policy, mesh and rematerialisation.
      devices: the devices of the step.
      accumulate_steps: the number of microbatches.
      ema_decay: the decay of the moving average; None without one.
      mean_over: the name of the metric that counts what the loss is a mean over; None if microbatches count equally.
    """

    loss_fn: CheckedLossFn
    devices: DevicesOfArrays
    accumulate_steps: int = 1
    ema_decay: float | None = None
    mean_over: str | None = None

    def __call__(self, state: S, batch: Any) -> tuple[S, Metrics]:
        """Compute the gradients of a batch, and update the state with them.

        Return the new state and the metrics.
        """
        if self.ema_decay is None and state.ema_params is not None:
            raise ValueError(
                "the state keeps a moving average that this step would never update; pass "
                "make_train_step(ema_decay=0.999), say, or leave ema=True out"
            )
        with note_for_explicit_axes(), self.devices.set():  # the caller may not have set a mesh
            rng, loss_rng = (None, None) if state.rng is None else jax.random.split(state.rng)
            result = self.gradients(state, batch, loss_rng)
            loss_scale = get_loss_scale(state.opt_state)
            grads = loss_scale.unscale(_tree.widen(result.grads))
            norm = global_norm(grads)
            new_state = self._update_state(state, grads, result.model_state, result.loss, rng)
            counted = without_discarded(grads, (new_state.params, new_state.opt_state))
            if counted is not grads:
                norm = global_norm(counted)
            skipped = ~get_loss_scaling_state(new_state.opt_state).last_finite
            metrics = self.metrics(state, result)
        own_metrics = dict(zip(OWN_METRICS, (result.loss, norm, state.loss_scale, skipped), strict=True))
        return new_state, {**own_metrics, **metrics}

    def _update_state(self, state: S, grads: Any, model_state: Any, loss: Any, rng: Any) -> S:
        """Return the state after one step of the optimizer with true gradients."""

        def update(state: S, grads: Any, model_state: Any, loss: Any, rng: Any) -> S:
            extra_args = {"value": loss}  # for optax's plateaus
            return state.apply_gradients(
                grads=grads, model_state=model_state, ema_decay=self.ema_decay, extra_args=extra_args, rng=rng
            )

        new_state: S = self.devices.around_update(update, state)(state, grads, model_state, loss, rng)
        return new_state

    def gradients(self, state: TrainState, batch: Any, rng: Any) -> Gradients:
        """Return the loss, gradients, model state and metrics of a whole batch.

        The loss is not scaled, but the gradients are those of the scaled loss. With several microbatches, the metrics
        are stacked, not averaged.
        """
        with self.devices.set():
            batch = self.devices.place_batch(batch, self.accumulate_steps)
            return Gradients(*self.devices.around_gradients(self._gradients, state)(state, batch, rng))

    def metrics(self, state: TrainState, result: Gradients) -> dict[str, Any]:
        """Return the metrics of a whole batch from the results of :meth:`gradients`."""
        return average(result.metrics, self.accumulate_steps, self.mean_over)

    def _gradients(self, state: TrainState, batch: Any, rng: Any) -> tuple[Any, ...]:
        require_examples(batch)
        if self.accumulate_steps > 1:
            return tuple(self._accumulate(state, batch, rng))
        return tuple(self._gradients_of(self.loss_fn, state, state.model_state, batch, rng))

    def _accumulate(self, state: TrainState, batch: Any, rng: Any) -> Gradients:
        """Compute the gradients of a batch in a scan over microbatches."""
        count = self.accumulate_steps
        inputs = microbatches(batch, count), None if rng is None else jax.random.split(rng, count)
        first_inputs = jax.tree.map(lambda leaf: leaf[0], inputs)
        other_args = (state.model_state, *first_inputs)
        microbatch_loss = self.devices.loss_of_microbatch(self.loss_fn, state.params, other_args, REMAT["float8"])

        learned = microbatch_loss.learned

        def gradients_of_microbatch(model_state: Any, batch: Any, rng: Any) -> Gradients:
            state_of_learned = state.replace(params=learned)
            return self._gradients_of(microbatch_loss.loss_fn, state_of_learned, model_state, batch, rng)

        result = accumulate(gradients_of_microbatch, learned, state.model_state, inputs, count, self.mean_over)
        result = result._replace(grads=microbatch_loss.reduce(result.grads))
        return result._replace(grads=mean_gradients(result, count, self.mean_over))

    def _gradients_of(
        self, loss_fn: CheckedLossFn, state: TrainState, model_state: Any, batch: Any, rng: Any
    ) -> Gradients:
        """Return the gradients of a microbatch, and the other results."""

        def loss_of_params(params: Any) -> Any:
            return loss_fn(params, model_state, batch, rng)

        (loss, (new_model_state, metrics)), grads = self.differentiate(loss_of_params, state)
        if self.mean_over is not None:
            require_count(metrics, self.mean_over)
        return Gradients(loss, grads, require_same_structure(new_model_state, model_state), metrics)

    def differentiate(self, loss_fn: Callable[[Any], Any], state: TrainState) -> tuple[Any, Any]:
        """Return the results of a loss function, and the gradients of the scaled loss.

        Args:
          loss_fn: a function of the params that returns ``(loss, (model_state, metrics))``.
          state: the state with the params and the loss scale.
        """
        results, grads = scaled_value_and_grad(loss_fn, get_loss_scale(state.opt_state), has_aux=True)(state.params)
        return results, grads
