"""A jitted evaluation step: the loss function of a train step, without gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxmp.base import trees as _tree
from jaxmp.base.arguments import checks_arguments, require_step_arguments
from jaxmp.base.donation import require_not_deleted
from jaxmp.sharding.mesh_plan import BATCH_AXES, on_auto_axes
from jaxmp.sharding.mesh_types import explicit_mesh_of, typed
from jaxmp.training.batches import require_examples
from jaxmp.training.error_notes import note_for_explicit_axes
from jaxmp.training.loss_function import CheckedLossFn, LossFn, under_policy
from jaxmp.training.state import TrainState
from jaxmp.training.step import TrainStep
from jaxmp.training.update import Metrics


def make_eval_step(
    loss_fn: LossFn, *, policy: Any = None, overrides: Mapping[str, str] | None = None, use_ema: bool = False
) -> EvalStep:
    """Return a jitted evaluation step, ``step(state, batch) -> metrics``.

    The step computes no gradients and does not change the state. ``metrics`` has ``loss`` (float32) and the metrics
    that the loss function returns.

    Args:
      loss_fn: as for :func:`jaxmp.make_train_step`; the model state that it returns is ignored.
      policy: as for :func:`jaxmp.make_train_step`.
      overrides: as for :func:`jaxmp.make_train_step`.
      use_ema: whether to evaluate ``state.ema_params``, cast to the params' dtypes, in place of ``state.params``.

    Raises:
      ValueError: ``use_ema`` is set and the state has no moving average; the batch has no examples.
      TypeError: the loss function has other parameters or results; the state is not a :class:`jaxmp.TrainState`.
      RuntimeError: the state was donated to an earlier step.

    >>> def loss_fn(params, model_state, batch, rng):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2), model_state
    >>> state = TrainState.create(params={"w": jnp.zeros((2, 1))}, tx=optax.sgd(0.1))
    >>> make_eval_step(loss_fn)(state, {"x": jnp.ones((4, 2)), "y": jnp.ones((4, 1))})
    {'loss': Array(1., dtype=float32)}
    """
    loss_fn = under_policy(loss_fn, policy, overrides)

    @jax.jit
    def jitted(state: TrainState, batch: Any) -> Metrics:
        EvalStep.require_state(state)
        require_examples(batch)
        params = state.params
        if use_ema:
            if state.ema_params is None:
                raise ValueError("use_ema needs a state with a moving average: TrainState.create(..., ema=True)")
            params = jax.tree.map(lambda ema, param: ema.astype(param.dtype), state.ema_params, params)

        def metrics_of(loss_fn: CheckedLossFn, *args: Any) -> Metrics:
            loss, (_, metrics) = loss_fn(*args)
            return {"loss": _tree.widen(loss), **metrics}

        args, mesh = (params, state.model_state, batch, state.rng), explicit_mesh_of(params)
        if mesh is None:
            with note_for_explicit_axes():
                return metrics_of(loss_fn, *args)
        typed_metrics = functools.partial(metrics_of, typed(loss_fn, mesh, BATCH_AXES))
        with note_for_explicit_axes(), jax.sharding.use_abstract_mesh(mesh):
            return on_auto_axes(typed_metrics, PartitionSpec())(*args)

    return EvalStep(jitted)


class EvalStep:
    """A jitted evaluation step, the result of :func:`make_eval_step`.

    ``jitted`` is the step as a jitted function, for ``lower`` and ``trace``.
    """

    jitted: jax.stages.Wrapped

    def __init__(self, jitted: jax.stages.Wrapped) -> None:
        self.jitted = jitted

    @classmethod
    def require_arguments(cls, *args: Any) -> None:
        """Raise a TypeError if ``args`` are not a :class:`TrainState` and a batch."""
        require_step_arguments(args, "(state, batch)", cls.require_state)

    @staticmethod
    def require_state(state: Any) -> None:
        """Raise a TypeError if ``state`` is not a :class:`TrainState`."""
        TrainStep.require_state(state, "jit the loss function: nnx.jit(loss_fn)(model, batch)")

    @checks_arguments
    def __call__(self, state: TrainState, batch: Any) -> Metrics:
        """Evaluate one batch; see :func:`make_eval_step`."""
        self.require_state(state)
        try:
            metrics: Metrics = self.jitted(state, batch)
        except (RuntimeError, ValueError) as error:
            require_not_deleted(state, error)
            raise
        return metrics
