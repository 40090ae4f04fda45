"""The state of :func:`jaxmp.loss_scaling`, and how to find it in the state of an optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxmp.base.donation import require_not_deleted
from jaxmp.base.trees import path_name, select_tree
from jaxmp.optim.loss_scale import LossScale, as_loss_scale

T = TypeVar("T")


class LossScalingState(NamedTuple):
    """State of :func:`loss_scaling`.

    Attributes:
      inner_state: the state of the wrapped optimizer, as it was after the last step that was not skipped.
      loss_scale: the loss-scale object that the next loss is to be scaled with.
      skipped: int32 scalar, the steps skipped so far.
      consecutive_skipped: int32 scalar, the steps skipped since the last one that was not.
      grad_norm: float32 scalar, the global norm of the last gradients; None unless asked for.
    """

    inner_state: Any
    loss_scale: LossScale
    skipped: jax.Array
    consecutive_skipped: jax.Array
    grad_norm: jax.Array | None

    @property
    def last_finite(self) -> jax.Array:
        """Return whether the last step was applied, a bool scalar; True before the first."""
        return self.consecutive_skipped == 0  # each array of a state costs more than a microsecond a step


def wrap_opt_state(opt_state: optax.OptState, loss_scale: LossScale, *, grad_norm: bool = False) -> LossScalingState:
    """Return the state of ``loss_scaling(tx, loss_scale)`` around a trained state of ``tx``.

    ``grad_norm`` is the argument of :func:`loss_scaling`.

    >>> tx = optax.adam(1e-3)
    >>> opt_state = tx.init(jnp.ones(3))  # … and many steps later
    >>> opt_state = wrap_opt_state(opt_state, jaxmp.DynamicLossScale())  # goes with jaxmp.loss_scaling(tx, …)

    Raises:
      ValueError: the state has a loss scale already.
    """
    if scalings_in(opt_state):
        raise ValueError(
            "loss_scaling was put inside loss_scaling: the optimizer's state has a loss scale already; remove the "
            "inner one"
        )
    return LossScalingState(
        inner_state=opt_state,
        # Copies, so that a step that donates its state does not delete the arrays of the object the user holds.
        loss_scale=jax.tree.map_with_path(_own_array, as_loss_scale(loss_scale)),
        skipped=jnp.zeros((), jnp.int32),
        consecutive_skipped=jnp.zeros((), jnp.int32),
        grad_norm=jnp.zeros((), jnp.float32) if grad_norm else None,
    )


def _own_array(path: Any, leaf: Any) -> jax.Array:
    """Return a leaf of a loss scale as a new array; an integer scale becomes float32, as it may be halved."""
    dtype = jnp.result_type(leaf)
    is_whole = path_name(path) == "loss_scale" and jnp.issubdtype(dtype, jnp.integer)
    return jnp.array(leaf, jnp.float32 if is_whole else dtype)


def has_loss_scale(opt_state: optax.OptState) -> bool:
    """Return whether an optimizer's state has a loss scale, wherever it is nested."""
    return bool(scalings_in(opt_state))


def get_loss_scaling_state(opt_state: optax.OptState) -> LossScalingState:
    """Return the one :class:`LossScalingState` in an optimizer's state, wherever it is nested.

    Raises:
      ValueError: there is none, or there are several.
    """
    if isinstance(opt_state, optax.GradientTransformation):
        raise ValueError("an optimizer's state is needed, got the optimizer itself; pass opt_state = tx.init(params)")
    scalings = scalings_in(opt_state)
    if not scalings:
        raise ValueError(
            f"the optimizer's state has no loss scale, got {type(opt_state).__name__}; wrap the optimizer, "
            "tx = jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale()), and call tx.init again"
        )
    if len(scalings) > 1:
        raise ValueError(
            f"one loss has one scale, but the optimizer's state has {len(scalings)}; put one loss_scaling around the "
            "whole optimizer"
        )
    return scalings[0]


def get_loss_scale(opt_state: optax.OptState) -> LossScale:
    """Return the loss-scale object in an optimizer's state, wherever it is nested.

    >>> tx = optax.chain(jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(8.0)))
    >>> get_loss_scale(tx.init(jnp.ones(2))).loss_scale
    8.0

    Raises:
      ValueError: there is none, or there are several.
    """
    return get_loss_scaling_state(opt_state).loss_scale


def at_hand(opt_state: optax.OptState) -> LossScale:
    """Return the loss scale in ``opt_state``, and raise an error if a donating step has deleted it."""
    loss_scale = get_loss_scale(opt_state)
    require_not_deleted(loss_scale)
    return loss_scale


def keep_if_skipped(opt_state: optax.OptState, new: T, old: T) -> T:
    """Return ``new`` if the last step was taken, and ``old`` bit for bit if it was skipped.

    Use it in a step of your own for everything that a skipped step must leave as it was, such as batch statistics,
    moving averages of params or target networks.

    Args:
      opt_state: the optimizer's state that ``tx.update`` returned in this step, with :func:`loss_scaling` outermost or
        in a chain. Inside of ``optax.MultiSteps`` or ``optax.apply_if_finite`` it does not see every step.
      new: any pytree of arrays, computed in this step.
      old: the same pytree before this step; its dtypes are kept.

    Raises:
      ValueError: ``opt_state`` has no loss scale, several, or one inside of a transform that may hide a step from it;
        the trees differ in structure.
      TypeError: two leaves differ in shape.

    >>> tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale())
    >>> params, mean = jnp.ones(2), jnp.zeros(())
    >>> _, opt_state = tx.update(jnp.array([jnp.inf, 0.0]), tx.init(params), params)
    >>> keep_if_skipped(opt_state, jnp.array(jnp.nan), mean)
    Array(0., dtype=float32)
    """
    if isinstance(opt_state, (optax.MultiStepsState, optax.ApplyIfFiniteState)):
        raise ValueError(
            f"keep_if_skipped needs a loss scale that sees every step, got one inside of {type(opt_state).__name__}; "
            "wrap the other way round: jaxmp.loss_scaling(optax.MultiSteps(tx, 4), loss_scale), say"
        )
    return select_tree(get_loss_scaling_state(opt_state).last_finite, new, old)


def scalings_in(opt_state: optax.OptState) -> list[LossScalingState]:
    """Return the loss-scaling states in an optimizer's state, wherever they are nested."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, LossScalingState))
    return [node for node in nodes if isinstance(node, LossScalingState)]
