"""Loss scaling as an optax transform, which skips non-finite steps.

The transform wraps an optimizer, stores the loss scale in the optimizer's state, and takes the true gradients of
:func:`jaxmp.value_and_grad`. To skip a step, the device selects the old values, so it does not wait for the host. The
method is that of Micikevicius et al., "Mixed Precision Training",
arXiv:1710.03740, with the semantics of torch's GradScaler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp.base.arguments import printed
from jaxmp.base.donation import require_not_deleted
from jaxmp.base.trees import all_finite, is_finite_sum, is_key, max_abs, select_tree, sum_of_squares, widen
from jaxmp.optim.checks import as_optimizer, check_same_shapes, check_state
from jaxmp.optim.discarded_grads import without_discarded
from jaxmp.optim.half_params import warn_if_updates_vanish
from jaxmp.optim.loss_scale import LossScale, as_loss_scale
from jaxmp.optim.loss_scale_state import is_concrete
from jaxmp.optim.low_precision import (
    BEHIND_LOW_PRECISION,
    LowPrecision,
    LowPrecisionState,
    rounds_params,
)
from jaxmp.optim.remembered import remembered
from jaxmp.optim.scale_power import warn_if_scaled
from jaxmp.optim.scaled_grad import global_norm, nan_if_infinite
from jaxmp.optim.scaling_state import LossScalingState, get_loss_scaling_state, require_every_step, wrap_opt_state
from jaxmp.optim.stored_moments import decoded


def loss_scaling(
    inner: optax.GradientTransformation,
    loss_scale: LossScale,
    *,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    grad_norm: bool = False,
    check_updates: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it skips non-finite steps and adapts the loss scale.

    ``update`` takes the true gradients of :func:`value_and_grad` and tests whether the sum of their squares is finite
    in float32. If it is finite, ``inner`` updates the params and the scale may grow. If not, the step is skipped: the
    scale backs off, ``inner``'s state does not change, and all updates are -0.0. (Adding -0.0 changes no bit of a
    param.) ``inner`` gets float32 gradients and params, so its state is float32. Only a :func:`jaxmp.low_precision`
    optimizer gets the params without a cast. In ``jax.jit``, gradients that ``inner`` discards do not count, such as
    those of params that ``optax.set_to_zero`` freezes.

    Put clipping, momentum, weight decay and schedules into ``inner``. A transform that follows ``loss_scaling`` in a
    chain does not know that a step was skipped. :func:`value_and_grad` refuses such a transform if it has a state. It
    cannot see one without a state: ``optax.add_decayed_weights`` after ``loss_scaling`` shrinks the weights in skipped
    steps. (Train steps and ``TrainState.apply_gradients`` restore the weights.)

    Put ``optax.MultiSteps`` into ``inner`` too: a non-finite microbatch is then dropped on its own. Do not put
    ``optax.zero_nans`` or ``optax.apply_if_finite`` before or around ``loss_scaling``, because they hide the overflow.
    For bfloat16 and float32, use ``NoOpLossScale``, which only skips non-finite steps.

    ``init`` warns if ``inner`` updates half-precision params and is not :func:`jaxmp.low_precision`.

    Args:
      inner: any optax transform. Extra arguments of ``update`` are passed to it.
      loss_scale: a ``DynamicLossScale``, ``StaticLossScale``, ``HeadroomLossScale`` or ``NoOpLossScale``, a subclass of
        :class:`LossScale`, or a loss scale of jmp.
      axis_name: the names of mapped axes (of ``pmap``, ``vmap`` or ``shard_map``). If the gradients at one index of
        these axes are not finite, the step is skipped at all indices. Under ``jit`` with sharded arrays, ``axis_name``
        is not needed.
      grad_norm: whether to store the global norm of the gradients in the state.
      check_updates: whether to skip a step also if its updates are not finite. Use it for optimizers that may overflow
        or divide by zero although the gradients are finite. The optimizer's state is then read once more in each step.

    Raises:
      RuntimeError: the state or the params were donated to an earlier step.
      TypeError: ``inner`` is not an optimizer; ``loss_scale`` is not a loss scale; or ``update`` got a state that does
        not come from ``init``.
      ValueError: ``inner`` already has a loss scale; ``inner`` has ``low_precision`` inside another transform; or an
        update does not have the shape of its param.

    >>> tx = loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale(loss_scale=2.0**10))
    >>> params = {"w": jnp.array([2.0])}
    >>> opt_state = tx.init(params)
    >>> loss, grads = jaxmp.value_and_grad(lambda p: jnp.sum(p["w"] ** 2), opt_state)(params)
    >>> grads["w"]  # 2 * w: the gradient of the true loss
    Array([4.], dtype=float32)
    >>> updates, opt_state = tx.update(grads, opt_state, params)
    >>> optax.apply_updates(params, updates)["w"]
    Array([1.6], dtype=float32)
    """
    if not isinstance(grad_norm, bool):  # a number would look as if it clipped the gradients
        raise TypeError(
            f"grad_norm must be True or False, got {printed(grad_norm)}; to clip, put optax.clip_by_global_norm(1.0) "
            "inside loss_scaling"
        )
    inner, scale = as_optimizer(inner), _ByValue.of(as_loss_scale(loss_scale))
    return _scaling_of(inner, scale, axis_name, grad_norm, check_updates)


class LossScaling(optax.GradientTransformationExtraArgs):
    """The transform that :func:`loss_scaling` returns."""

    inner: optax.GradientTransformationExtraArgs


def without_loss_scaling(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer inside of :func:`loss_scaling`, or an optimizer without it as it is."""
    return tx.inner if isinstance(tx, LossScaling) else tx


@dataclasses.dataclass(frozen=True)
class _ByValue:
    """A loss scale that equals another one with the same numbers, also if they are arrays."""

    numbers: Hashable
    loss_scale: LossScale = dataclasses.field(compare=False)

    @classmethod
    def of(cls, loss_scale: LossScale) -> _ByValue:
        leaves, structure = jax.tree.flatten(loss_scale)
        numbers = []
        for leaf in leaves:
            is_known = isinstance(leaf, jax.Array) and is_concrete(leaf)
            numbers.append((type(leaf), np.asarray(leaf)[()] if is_known else leaf))
        return cls((structure, *numbers), loss_scale)


@remembered  # so that another state of the same optimizer does not compile the step again
def _scaling_of(
    inner: optax.GradientTransformationExtraArgs,
    scale: _ByValue,
    axis_name: Hashable | Sequence[Hashable] | None,
    grad_norm: bool,
    check_updates: bool,
) -> LossScaling:
    transform = _ScalingTransform(inner, scale.loss_scale, axis_name, grad_norm, check_updates)
    tx = LossScaling(transform.init, transform.update)
    tx.inner = inner
    return tx


@dataclasses.dataclass(frozen=True)
class _ScalingTransform:
    """The arguments and the methods of the transform :func:`loss_scaling`."""

    inner: optax.GradientTransformationExtraArgs
    loss_scale: LossScale
    axis_name: Hashable | Sequence[Hashable] | None
    grad_norm: bool
    check_updates: bool

    def init(self, params: optax.Params) -> LossScalingState:
        warn_if_updates_vanish(self.inner, params)
        inner_state = jax.tree.map(_copied_key, self.inner.init(self._params_of_inner(params)))
        if not isinstance(self.inner, LowPrecision) and rounds_params(inner_state):
            raise ValueError(BEHIND_LOW_PRECISION)
        return wrap_opt_state(inner_state, self.loss_scale, grad_norm=self.grad_norm)

    def update(
        self, updates: optax.Updates, state: LossScalingState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, LossScalingState]:
        try:
            return self._update(updates, state, params, extra_args)
        except (RuntimeError, ValueError) as error:
            require_not_deleted({"opt_state": state, "params": params}, error)
            raise

    def _update(
        self, updates: optax.Updates, state: LossScalingState, params: optax.Params | None, extra_args: dict[str, Any]
    ) -> tuple[optax.Updates, LossScalingState]:
        check_state(state)
        warn_if_scaled(updates, state.loss_scale)
        grads = widen(updates)
        squares = sum_of_squares(grads)
        new_updates, inner_state = self.inner.update(
            grads, state.inner_state, self._params_of_inner(params), **extra_args
        )
        check_same_shapes(new_updates, updates if params is None else params)
        counted = without_discarded(grads, (new_updates, inner_state))
        if counted is not grads:
            squares = sum_of_squares(counted)
        finite = is_finite_sum(squares)
        if self.check_updates:
            finite &= all_finite(new_updates)
        finite, grad_max = self._agreed(finite, max_abs(counted) if state.loss_scale.needs_grad_max else None)
        inner_state = select_tree(finite, inner_state, state.inner_state)
        new_state = self._new_state(state, inner_state, finite, grad_max, squares)
        return zero_unless(finite, new_updates), new_state

    def _params_of_inner(self, params: Any) -> Any:
        """Return the params for ``inner``, in float32 unless ``inner`` is low_precision."""
        return params if isinstance(self.inner, LowPrecision) else widen(params)

    def _agreed(self, finite: jax.Array, grad_max: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Return ``finite`` and ``grad_max``, combined over the mapped axes."""
        if self.axis_name is None:
            return finite, grad_max
        finite = jax.lax.pmin(finite.astype(jnp.int32), self.axis_name).astype(jnp.bool_)
        return finite, None if grad_max is None else jax.lax.pmax(grad_max, self.axis_name)

    def _new_state(
        self, state: LossScalingState, inner_state: Any, finite: jax.Array, grad_max: Any, squares: jax.Array
    ) -> LossScalingState:
        return LossScalingState(
            inner_state=inner_state,
            loss_scale=state.loss_scale.adjust(finite, grad_max),
            **state.counters_after(finite),
            grad_norm=jnp.sqrt(squares).astype(jnp.float32) if self.grad_norm else None,
        )


def require_outermost(tx: Any, opt_state: Any) -> None:
    """Raise an error if ``loss_scaling`` or ``low_precision`` is inside of the wrong transform."""
    require_every_step(opt_state)
    if rounds_params(opt_state) and not _is_outermost_low_precision(tx):
        raise ValueError(BEHIND_LOW_PRECISION)


def _is_outermost_low_precision(tx: Any) -> bool:
    return isinstance(tx, LossScaling) and isinstance(tx.inner, LowPrecision)


def in_precision_of(tx: Any, inner_state: Any, params: Any) -> Any:
    """Return the state of an optimizer in the dtypes in which ``tx`` stores it."""
    before = inner_state if isinstance(inner_state, LowPrecisionState) else None
    inner_state = decoded(before.inner_state) if before else inner_state
    if _is_outermost_low_precision(tx):
        return tx.inner.transform.wrap(inner_state, params, before)
    return inner_state


def _copied_key(leaf: Any) -> Any:
    """Return a copy of a key, so that a donating step does not delete the user's key."""
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) and is_key(leaf) else leaf


def zero_unless(finite: jax.Array, updates: Any) -> Any:
    """Return the updates if ``finite`` is true, else updates of -0.0, which change no bit of a param.

    The gradient of an integer (``float0``) has no numbers. It is unchanged.
    """

    def zero(update: Any) -> Any:
        is_empty = update.dtype == jax.dtypes.float0
        return update if is_empty else jnp.where(finite, update, -jnp.zeros((), update.dtype))

    return jax.tree.map(zero, updates)


def take_step(
    tx: optax.GradientTransformationExtraArgs,
    grads: Any,
    opt_state: Any,
    params: Any,
    extra_args: Mapping[str, Any],
) -> tuple[Any, Any, jax.Array]:
    """Take one step of an optimizer that has ``loss_scaling`` in it.

    Transforms around ``loss_scaling`` may drop non-finite gradients themselves (MultiSteps), so that ``loss_scaling``
    counts no skip. Or their states may change in a step that ``loss_scaling`` skips.

    Args:
      tx: the optimizer.
      grads: the true gradients.
      opt_state: the state of the optimizer.
      params: the params.
      extra_args: other arguments of ``tx.update``.

    Returns:
      The updates, the new state, and whether the step was not skipped. In a skipped step, only the loss scale, the
      counters and the gradient norm in the state change.
    """
    if isinstance(tx, LossScaling):
        updates, new_state = tx.update(grads, opt_state, params, **extra_args)
        return updates, new_state, new_state.last_finite
    # If the chain clips by value before loss_scaling, clipping would make infinities finite. But clipping keeps NaN.
    updates, new_state = tx.update(nan_if_infinite(grads), opt_state, params, **extra_args)
    # The counter shows whether loss_scaling skipped: a transform around it may not have called it in this step.
    was_skipped = get_loss_scaling_state(new_state).skipped_steps > get_loss_scaling_state(opt_state).skipped_steps
    finite = jnp.isfinite(global_norm(without_discarded(grads, (updates, new_state)))) & ~was_skipped
    return updates, _keep_scale(finite, new_state, opt_state), finite


def _keep_scale(finite: jax.Array, new: Any, old: Any) -> Any:
    """Return ``new`` if ``finite``, else ``old`` with the new scale. The counters count this step."""

    def keep(new: Any, old: Any) -> Any:
        if isinstance(new, LossScalingState):
            inner_state = select_tree(finite, new.inner_state, old.inner_state)
            return new._replace(inner_state=inner_state, **old.counters_after(finite))
        return select_tree(finite, new, old)

    return jax.tree.map(keep, new, old, is_leaf=lambda node: isinstance(node, LossScalingState))
