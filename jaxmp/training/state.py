"""The state of a training run: params, optimizer, model state, rng and counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxmp.base import trees as _tree
from jaxmp.base.donation import require_not_deleted
from jaxmp.optim.checked_params import params_are_checked
from jaxmp.optim.checks import as_optimizer, require_no_functions
from jaxmp.optim.half_params import warn_about_params
from jaxmp.optim.loss_scale import NoOpLossScale
from jaxmp.optim.loss_scaling import (
    in_precision_of,
    loss_scaling,
    require_outermost,
    take_step,
    without_loss_scaling,
)
from jaxmp.optim.low_precision import in_dtype_of, with_compensation
from jaxmp.optim.scaling_state import get_loss_scale, get_loss_scaling_state, has_loss_scale
from jaxmp.program.traced_program import is_array
from jaxmp.sharding.mesh_plan import Sharding
from jaxmp.sharding.placement import require_params, settled
from jaxmp.training.loss_function import as_key, require_same_structure


class TrainState(flax.struct.PyTreeNode):
    """The state of a training run, a Flax ``TrainState`` for mixed precision.

    Attributes:
      step: the number of steps so far, including skipped ones, an int32 scalar.
      params: the params, in their param dtype.
      opt_state: the state of ``tx``, including the loss scale and the counters of skipped steps.
      model_state: other variables of the model, such as ``{"batch_stats": …}``; or None.
      ema_params: the float32 exponential moving average of the params, or None.
      rng: the PRNG key, which each step splits; None if there is none.
      apply_fn: the model's apply function, a static field.
      tx: the optimizer, a static field.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    ema_params: Any
    rng: Any
    apply_fn: Callable[..., Any] | None = flax.struct.field(pytree_node=False)
    tx: optax.GradientTransformationExtraArgs = flax.struct.field(pytree_node=False)

    if TYPE_CHECKING:  # Flax's method has no types, and strict checkers would complain in every subclass

        def __init_subclass__(cls, **kwargs: Any) -> None: ...

    @property
    def loss_scale(self) -> jax.Array:
        """The loss scale that the next step will use, a float32 scalar.

        It is 1 if the optimizer has no loss scale. :func:`jaxmp.get_loss_scale` returns the object with its settings.

        Raises:
          RuntimeError: the state was donated to an earlier step.
        """
        loss_scale = get_loss_scale(self.opt_state)
        require_not_deleted(loss_scale)
        return jnp.asarray(loss_scale.loss_scale, jnp.float32)

    @property
    def skipped_steps(self) -> jax.Array:
        """The number of skipped steps so far, an int32 scalar."""
        return get_loss_scaling_state(self.opt_state).skipped_steps

    @classmethod
    def create_sharded(
        cls,
        make_params: Callable[[], Any],
        tx: optax.GradientTransformation,
        sharding: Sharding,
        **fields: Any,
    ) -> Self:
        """Create a state in shards, so that no device ever holds the whole state.

        Args:
          make_params: a function that returns the params. It is called under ``jit``, and its random numbers do not
            depend on the devices.
          tx: as for :meth:`create`.
          sharding: the mesh and the specs of the params. The optimizer's moments get the specs of their params.
          **fields: the other arguments of :meth:`create`. Arrays in them must be equal on all processes, and are copied
            to every device.

        Raises:
          ValueError: the specs do not have the structure of the params, or do not fit their shapes.

        >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> make_params = lambda: {"w": jax.random.normal(jax.random.key(0), (512, 512))}
        >>> specs = jaxmp.sharding.fsdp_specs(jax.eval_shape(make_params), mesh)
        >>> sharding = jaxmp.sharding.Sharding(mesh, specs)
        >>> state = TrainState.create_sharded(make_params, optax.adam(1e-3), sharding, rng=1)
        >>> state.opt_state.inner_state[0].mu["w"].sharding == state.params["w"].sharding
        True
        """
        arrays: dict[str, Any] = {}
        static: dict[str, Any] = {}
        for name, value in fields.items():
            has_arrays = any(map(is_array, jax.tree.leaves(value)))
            (arrays if has_arrays else static)[name] = value

        @jax.jit  # the second call reuses the trace of the first, so that ``create`` warns once
        def make(arrays: Any) -> Any:
            return cls.create(params=make_params(), tx=tx, **static, **arrays)

        with sharding.plan().set():
            shapes = jax.eval_shape(make, arrays)
            shardings = jax.tree.leaves(sharding.plan().shardings(shapes))
            leaves = jax.jit(lambda arrays: jax.tree.leaves(make(arrays)), out_shardings=shardings)(arrays)
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

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
    ) -> Self:
        """Create the state of a new run.

        The call warns if ``tx`` updates half-precision params and is not :func:`jaxmp.low_precision`.

        Args:
          params: the params. The state uses these arrays, and the arrays of ``model_state`` and ``rng``, without a
            copy. A step that donates its state deletes them.
          tx: an optimizer that :func:`jaxmp.loss_scaling` wraps. Any other optimizer is wrapped with ``NoOpLossScale``,
            which only skips non-finite steps.
          apply_fn: the model's apply function. It is stored for your own use; jaxmp does not call it.
          model_state: variables that the loss function updates (batch statistics).
          rng: a PRNG key or an integer seed; None for loss functions without random numbers. If you save with
            ``flax.serialization.to_bytes``, which cannot save typed keys, pass a ``jax.random.PRNGKey``.
          ema: whether to keep a float32 moving average of the params, which ``make_train_step(ema_decay=…)`` updates.
          **fields: the additional fields of a subclass.

        Raises:
          TypeError: ``tx`` is not an optimizer, a leaf of ``params`` is a function, or an array has a dtype of raw
            bytes.
          ValueError: ``tx`` has several loss scales; a transform other than ``loss_scaling`` wraps ``low_precision``;
            ``params`` are empty; or ``params`` are Flax variables with other collections beside the params.
          RuntimeError: the params were donated to an earlier step.
        """
        tx = as_optimizer(tx)
        require_params(params)
        require_no_functions(params, "TrainState.create")
        require_not_deleted({"params": params, "model_state": model_state, "rng": rng})
        _tree.require_no_raw_bytes({"params": params, "model_state": model_state})
        warn_about_params(without_loss_scaling(tx), params)
        with params_are_checked():
            if not has_loss_scale(jax.eval_shape(tx.init, params)):
                tx = loss_scaling(tx, NoOpLossScale())
            opt_state = tx.init(params)
        get_loss_scale(opt_state)  # raises if there are several
        require_outermost(tx, opt_state)
        state = cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=opt_state,
            model_state=model_state,
            ema_params=_tree.widen(params) if ema else None,
            rng=as_key(rng),
            apply_fn=apply_fn,
            tx=tx,
            **fields,
        )
        return settled(state)

    def with_tx(self, tx: optax.GradientTransformation) -> Self:
        """Return this state with the same optimizer in another precision.

        The optimizer's state and the loss scale are kept. The params keep their dtypes. To change their dtypes, first
        cast them: ``state.replace(params=policy.cast_to_param(state.params))``. If you cast a param to float32, its
        compensation is added to it. The call warns if ``tx`` updates half-precision params and is not
        :func:`jaxmp.low_precision`.

        Raises:
          TypeError: ``tx`` is not an optimizer.
          ValueError: ``tx`` is another optimizer, whose state does not have the structure of ``opt_state``.
          RuntimeError: the state was donated to an earlier step.
        """
        tx = as_optimizer(tx)
        require_not_deleted(self)
        old = get_loss_scaling_state(self.opt_state)
        params = with_compensation(self.params, old.inner_state)
        warn_about_params(without_loss_scaling(tx), params)
        with params_are_checked():
            if not has_loss_scale(jax.eval_shape(tx.init, self.params)):
                scale = jax.tree.map(jnp.copy, old.loss_scale)  # a step that donates this state must not delete it
                tx = loss_scaling(tx, scale, grad_norm=old.grad_norm is not None)
            fresh = jax.eval_shape(tx.init, params)
        new = old._replace(inner_state=in_precision_of(tx, old.inner_state, params))
        wanted: Any = jax.tree.structure(fresh)
        if wanted != jax.tree.structure(new):
            raise ValueError(
                "with_tx takes the same optimizer in another precision, got an optimizer whose state has another "
                "structure; make a fresh state with TrainState.create"
            )
        new = jax.tree.map(in_dtype_of, new, fresh)  # tx may have another mu_dtype, for example
        return settled(self.replace(tx=tx, params=params, opt_state=new))

    def apply_gradients(
        self,
        *,
        grads: Any,
        model_state: Any = None,
        ema_decay: float | None = None,
        extra_args: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Self:
        """Return the state after one optimizer step with true gradients.

        Compute the gradients with :func:`jaxmp.value_and_grad`.

        A skipped step changes only the loss scale, the counters, the gradient norm in the optimizer's state, and the
        fields in ``changes``. Everything else stays the same, bit for bit. ``extra_args`` are passed to the
        optimizer's update, for example ``{"value": loss}`` for ``optax.contrib.reduce_on_plateau``.

        Raises:
          ValueError: ``ema_decay`` is set and the state has no moving average, or the reverse; or the new
            ``model_state`` has another structure.
          RuntimeError: the state was donated to an earlier step.
        """
        require_not_deleted(self)
        if model_state is not None:
            require_same_structure(model_state, self.model_state)
        if ema_decay is not None and self.ema_params is None:
            raise ValueError(
                "ema_decay needs a moving average to update: TrainState.create(..., ema=True), or "
                "jaxmp.nnx.Optimizer(..., ema=True)"
            )
        if ema_decay is None and self.ema_params is not None and "ema_params" not in changes:
            raise ValueError(
                "the state keeps a moving average that this step would not update; pass ema_decay=0.999, say, or "
                "ema_decay=1.0 for a step that keeps the average"
            )
        updates, opt_state, finite = take_step(self.tx, grads, self.opt_state, self.params, extra_args or {})
        params = optax.apply_updates(_tree.widen(self.params), updates)  # select_tree restores the dtypes
        new, old = {"params": params}, {"params": self.params}
        if model_state is not None:
            new["model_state"], old["model_state"] = model_state, self.model_state
        if ema_decay is not None:
            new["ema_params"] = optax.incremental_update(params, self.ema_params, 1 - ema_decay)
            old["ema_params"] = self.ema_params
        selected = _tree.select_tree(finite, new, old)
        return self.replace(step=self.step + 1, opt_state=opt_state, **selected, **changes)
