"""What training carries from step to step, and how a step that is skipped leaves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp import tree as _tree
from jaxmp.loss_scale import NoOpLossScale
from jaxmp.optimizer import (
    LossScalingState,
    get_loss_scale,
    get_loss_scaling_state,
    has_loss_scale,
    loss_scaling,
)


class TrainState(flax.struct.PyTreeNode):
    """What training carries from step to step; Flax's ``TrainState`` and what mixed precision adds. A pytree.

    Attributes:
      step: int32 scalar, the calls so far, skipped ones included.
      skipped: int32 scalar, the calls that changed nothing.
      stuck: int32 scalar, the calls in a row that were skipped although the loss scale could not fall.
      params: the params, in their param dtype.
      opt_state: the state of ``tx``, with the loss scale in it.
      model_state: other variables of the model, such as ``{"batch_stats": …}``; None if there are none.
      ema_params: float32 exponential moving average of the params, or None.
      rng: the key that each step splits, or None.
      apply_fn: the model's apply function, static.
      tx: the optimizer, static.
    """

    step: jax.Array
    skipped: jax.Array
    stuck: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    ema_params: Any
    rng: Any
    apply_fn: Callable[..., Any] | None = flax.struct.field(pytree_node=False)
    tx: optax.GradientTransformationExtraArgs = flax.struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        *,
        params: Any,
        tx: optax.GradientTransformation,
        apply_fn: Callable[..., Any] | None = None,
        model_state: Any = None,
        rng: Any = None,
        ema: bool = False,
        **fields: Any,
    ) -> TrainState:
        """A fresh state.

        Args:
          params: the params. The state takes over these arrays, like those of ``model_state`` and ``rng``, and a step
            that donates its state deletes them.
          tx: an optimizer in :func:`jaxmp.loss_scaling`; a bare one is wrapped with ``NoOpLossScale``, which skips
            non-finite steps and scales nothing.
          apply_fn: kept for the user, not used here.
          model_state: variables that the loss function returns anew (batch statistics).
          rng: a PRNG key, or an int to make one of; None for loss functions that draw nothing. Flax writes no typed
            keys into bytes: use ``jax.random.PRNGKey`` with ``flax.serialization.to_bytes``.
          ema: whether to keep a float32 moving average of the params, which ``make_train_step(ema_decay=…)`` updates.
          **fields: further fields of a subclass.

        Raises:
          ValueError: the optimizer has several loss scales.
        """
        if not hasattr(tx, "init"):
            raise TypeError(f"tx must be an optax optimizer, got {tx!r}; jaxmp.loss_scaling(optax.adam(1e-3), {tx!r})")
        if not has_loss_scale(jax.eval_shape(tx.init, params)):
            tx = loss_scaling(tx, NoOpLossScale())
        opt_state = tx.init(params)
        get_loss_scale(opt_state)  # raises if there are several
        state = cls(
            step=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            stuck=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            ema_params=_tree.widen(params) if ema else None,
            rng=jax.random.key(rng) if isinstance(rng, (int, np.integer)) else rng,
            apply_fn=apply_fn,
            tx=optax.with_extra_args_support(tx),
            **fields,
        )
        return _settled(state)

    def apply_gradients(
        self,
        *,
        grads: Any,
        model_state: Any = None,
        ema_decay: float | None = None,
        extra_args: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> TrainState:
        """The state after one optimizer step with ``grads``, the gradients of the scaled loss.

        When the step is skipped, params, optimizer state (but for the loss scale and its counters), ``model_state`` and
        the moving average are those of before, bit for bit. Other ``changes`` are set in any case. ``extra_args`` go to
        the optimizer's update (``{"value": loss}`` for ``optax.contrib.reduce_on_plateau``).

        Raises:
          ValueError: ``ema_decay`` without a moving average, or a ``model_state`` of another structure.
        """
        _, params, opt_state, skipped = take_step(self.tx, grads, self.opt_state, self.params, extra_args or {})
        new = {"params": params}  # float32 still; the selection below brings the params' own dtypes back
        if model_state is not None:
            new["model_state"] = require_same_structure(model_state, self.model_state)
        if ema_decay is not None:
            if self.ema_params is None:
                raise ValueError("ema_decay needs a moving average to update: TrainState.create(..., ema=True)")
            new["ema_params"] = optax.incremental_update(params, self.ema_params, 1 - ema_decay)
        kept = _tree.select_tree(skipped == 0, new, {name: getattr(self, name) for name in new})
        new_scale, scale = get_loss_scale(opt_state), get_loss_scale(self.opt_state)
        return self.replace(
            step=self.step + 1,
            skipped=self.skipped + skipped,
            stuck=jnp.where((skipped > 0) & new_scale.is_stuck(scale), self.stuck + 1, 0),
            opt_state=opt_state,
            **kept,
            **changes,
        )


def take_step(
    tx: optax.GradientTransformationExtraArgs, grads: Any, opt_state: Any, params: Any, extra_args: Mapping[str, Any]
) -> tuple[Any, Any, Any, jax.Array]:
    """One step of an optimizer with ``loss_scaling`` in it.

    Returns:
      The updates; the new params, float32, which are not to be used if the step was skipped; the new state, of which
      only the loss scale changed then; and whether it was, int32 0 or 1.
    """
    updates, new_state = tx.update(grads, opt_state, params, **extra_args)
    skipped = get_loss_scaling_state(new_state).skipped - get_loss_scaling_state(opt_state).skipped
    if not isinstance(new_state, LossScalingState):
        # A transform around loss_scaling may drop bad gradients before it (MultiSteps), or go on when it skips.
        skipped = jnp.maximum(skipped, 1 - _tree.all_finite(grads).astype(jnp.int32))
        new_state = _keep(skipped == 0, new_state, opt_state)
    return updates, optax.apply_updates(_tree.widen(params), updates), new_state, skipped


def _keep(finite: jax.Array, new: Any, old: Any) -> Any:
    """An optimizer's state ``new`` where ``finite``, else ``old``, but for the loss scale and its counters."""

    def is_scaling(node: Any) -> bool:
        return isinstance(node, LossScalingState)

    def keep(new: Any, old: Any) -> Any:
        if is_scaling(new):
            return new._replace(inner_state=_tree.select_tree(finite, new.inner_state, old.inner_state))
        return _tree.select_tree(finite, new, old)

    return jax.tree.map(keep, new, old, is_leaf=is_scaling)


def require_same_structure(new: Any, old: Any) -> Any:
    """The model state ``new``, if it has the structure and the shapes of ``old``."""
    returned: Any = jax.tree.structure(new)
    given: Any = jax.tree.structure(old)
    if returned != given:
        raise ValueError(
            f"the loss function must return a model state of the structure it was given, but it was given {given} and "
            f"returned {returned}; pass the whole of it to "
            "TrainState.create(model_state=…), or return None if there is none"
        )
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if jnp.shape(leaf) != jnp.shape(other):
            raise ValueError(
                "the loss function must return a model state of the shapes it was given, but "
                f"{_tree.path_name(path)!r} had {jnp.shape(other)} and has {jnp.shape(leaf)}; "
                "make it the same in every batch"
            )
    return new


def _settled(state: TrainState) -> TrainState:
    """``state`` in the form that a step gives it, so that the first step and those after it share one compilation.

    That is arrays of strong type on all devices of sharded params; and none twice, for a buffer can be donated only
    once.
    """
    arrays = [leaf for leaf in jax.tree.leaves(state.params) if isinstance(leaf, jax.Array)]
    shardings = [leaf.sharding for leaf in arrays if not isinstance(leaf, jax.core.Tracer)]
    mesh = next((sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)), None)
    seen: set[int] = set()

    def settle(leaf: Any) -> Any:
        again = id(leaf) in seen
        seen.add(id(leaf))
        leaf = jnp.array(leaf, jnp.asarray(leaf).dtype, copy=again)
        if mesh is None or isinstance(leaf, jax.core.Tracer) or isinstance(leaf.sharding, NamedSharding):
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(settle, state)
