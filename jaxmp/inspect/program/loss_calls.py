"""Call the loss function that a user passed to a tool, and differentiate it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmp.base.trees import widen
from jaxmp.inspect.program.calls import (
    RESULTS_ONLY,
    StepCall,
    differentiated,
    is_step,
    loss_and_rest,
    named,
    require_arguments_not_deleted,
    require_own_settings,
    step_call,
    with_leaves,
)
from jaxmp.inspect.program.function_leaves import of_arrays
from jaxmp.sharding.devices import DevicesOfMesh
from jaxmp.training.state import TrainState
from jaxmp.training.update import Update


class LossCall(NamedTuple):
    """A call of a loss function, or of any other function of arrays.

    Attributes:
      fun: the function; for a train step, its loss function.
      args: its arguments. Their leaves are arrays and numbers.
      loss_scale: the factor by which the loss is multiplied before the differentiation.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    loss_scale: float


def loss_call(fun: Callable[..., Any], args: tuple[Any, ...], loss_scale: float = 1.0) -> LossCall:
    """Return the call ``fun(*args)``; for a train step, the call of its loss function.

    Raises:
      ValueError: a train step is on a mesh, or ``loss_scale`` is set for a train step.
      RuntimeError: an argument was donated to an earlier step.
    """
    if is_step(fun):
        require_own_settings(loss_scale=None if loss_scale == 1 else loss_scale)
        call = step_call(fun, args)
        fun, args = loss_of(call)
        loss_scale = call.loss_scale
    require_arguments_not_deleted(fun, args)
    return LossCall(*of_arrays(fun, args), loss_scale)


def loss_of(call: StepCall) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the loss function of a train step, and the arguments to call it with.

    The loss function also takes a random key as the last argument. The default is the key of the step.

    Raises:
      ValueError: the train step is on a mesh.
    """
    step, state, batch = call
    if isinstance(step.update.devices, DevicesOfMesh):
        raise ValueError(
            "this tool runs a train step without a mesh, got one with sharding=; pass the same step without sharding="
        )
    update = _LossOnly(
        step.update.loss_fn, step.update.devices, step.update.accumulate_steps, mean_over=step.update.mean_over
    )

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any = call.rng) -> Any:
        step_state = state.replace(params=params, model_state=model_state)
        return update.gradients(step_state, batch, rng).loss

    return loss_fn, (state.params, state.model_state, batch)


class _LossOnly(Update):
    """A computation of the loss without gradients. The caller differentiates the loss."""

    def differentiate(self, loss_fn: Callable[[Any], Any], state: TrainState) -> tuple[Any, Any]:
        """Return the results of a loss function, and zeros in place of gradients."""
        loss, (model_state, metrics) = loss_fn(state.params)
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        return (loss, (jax.lax.stop_gradient(model_state), metrics)), zeros


def with_gradients(fun: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """Return a function of a loss scale and of ``fun``'s arguments, which also returns gradients.

    It returns the loss and the scaled loss, then the other results of ``fun``, and then the gradients of the scaled
    loss with respect to the first argument that has floating arrays. If the loss scale is None, the loss is not scaled.
    """
    numbers = differentiated(args)

    def program(scale: Any, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)

        def losses(differentiated_leaves: Sequence[Any]) -> Any:
            all_leaves = with_leaves(leaves, numbers, differentiated_leaves)
            loss, aux = loss_and_rest(fun(*named(jax.tree.unflatten(structure, all_leaves))), RESULTS_ONLY)
            scaled = loss
            if scale is not None:
                with jax.named_scope("loss_scale"):
                    scaled = widen(loss) * scale.astype(widen(loss).dtype)
            return scaled, (loss, aux)

        (scaled, (loss, aux)), grads = jax.value_and_grad(losses, has_aux=True)([leaves[n] for n in numbers])
        return (loss, scaled), aux, grads

    return program
