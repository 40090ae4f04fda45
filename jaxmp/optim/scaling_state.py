"""The state of :func:`jaxmp.loss_scaling`, at any depth of an optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxmp.base.donation import require_not_deleted
from jaxmp.base.trees import nodes_of_type, path_name, select_tree
from jaxmp.optim.loss_scale import LossScale, as_loss_scale

T = TypeVar("T")


class LossScalingState(NamedTuple):
    """The state of the optimizer that :func:`loss_scaling` returns.

    Attributes:
      inner_state: the state of the wrapped optimizer after the last step that was not skipped.
      loss_scale: the loss scale of the next step.
      skipped_steps: the number of skipped steps so far, an int32 scalar.
      consecutive_skipped: the number of skipped steps in a row, an int32 scalar.
      grad_norm: the global norm of the last gradients, a float32 scalar; None without ``grad_norm=True``.
    """

    inner_state: Any
    loss_scale: LossScale
    skipped_steps: jax.Array
    consecutive_skipped: jax.Array
    grad_norm: jax.Array | None

    @property
    def last_finite(self) -> jax.Array:
        """Return whether the last step was not skipped; True before the first step."""
        return self.consecutive_skipped == 0

    def counters_after(self, finite: jax.Array) -> dict[str, jax.Array]:
        """Return both counters after a step; ``finite`` is false if the step was skipped."""
        skipped = 1 - finite.astype(jnp.int32)
        return {
            "skipped_steps": self.skipped_steps + skipped,
            "consecutive_skipped": (self.consecutive_skipped + skipped) * skipped,
        }


def wrap_opt_state(opt_state: optax.OptState, loss_scale: LossScale, *, grad_norm: bool = False) -> LossScalingState:
    """Turn a trained state of ``tx`` into a state of ``loss_scaling(tx, …)``.

    Pass the same ``grad_norm`` as to :func:`loss_scaling`.

    >>> tx = optax.adam(1e-3)
    >>> opt_state = tx.init(jnp.ones(3))  # … and many steps later
    >>> opt_state = wrap_opt_state(opt_state, jaxmp.DynamicLossScale())  # a state of jaxmp.loss_scaling(tx, …)

    Raises:
      ValueError: the state already has a loss scale.
    """
    if scalings_in(opt_state):
        raise ValueError(
            "loss_scaling was put inside loss_scaling: the optimizer's state already has a loss scale; remove the "
            "inner loss_scaling"
        )
    return LossScalingState(
        inner_state=opt_state,
        # Copies, so that a donating step does not delete the arrays of the user's loss scale.
        loss_scale=jax.tree.map_with_path(_own_array, as_loss_scale(loss_scale)),
        skipped_steps=jnp.zeros((), jnp.int32),
        consecutive_skipped=jnp.zeros((), jnp.int32),
        grad_norm=jnp.zeros((), jnp.float32) if grad_norm else None,
    )


def _own_array(path: Any, leaf: Any) -> jax.Array:
    """Return a leaf of a loss scale as a new array.

    If the scale itself is an integer, it becomes float32, because a later step may halve it.
    """
    dtype = jnp.result_type(leaf)
    is_whole = path_name(path) == "loss_scale" and jnp.issubdtype(dtype, jnp.integer)
    return jnp.array(leaf, jnp.float32 if is_whole else dtype)


def has_loss_scale(opt_state: optax.OptState) -> bool:
    """Return whether an optimizer's state has a loss scale, at any depth."""
    return bool(scalings_in(opt_state))


def get_loss_scaling_state(opt_state: optax.OptState) -> LossScalingState:
    """Return the only loss-scaling state in an optimizer's state, at any depth.

    Raises:
      ValueError: ``opt_state`` has no loss scale, or several.
    """
    scalings = scalings_in(opt_state)
    if not scalings:
        raise ValueError(
            f"an optimizer's state with a loss scale is needed, got {type(opt_state).__name__}; wrap the optimizer, "
            "tx = jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale()), and pass opt_state = tx.init(params)"
        )
    if len(scalings) > 1:
        raise ValueError(
            f"an optimizer's state must have one loss scale, got {len(scalings)}; put one loss_scaling around the "
            "whole optimizer"
        )
    return scalings[0]


def _require_no_state_beside(opt_state: optax.OptState) -> None:
    """Raise a ValueError if ``loss_scaling`` is chained with a transform that has a state.

    A skipped step changes the state of such a transform. If the transform comes after ``loss_scaling``, it still moves
    the params, for example by Adam's momentum. Only a train step of jaxmp, which knows the whole update, restores both.
    """
    for beside in _states_beside(opt_state):
        for state in jax.tree.leaves(beside, is_leaf=_has_fields):
            if jax.tree.leaves(state):
                raise ValueError(
                    f"loss_scaling must be around all transforms with a state, got {type(state).__name__} beside it, "
                    "which does not skip steps; write loss_scaling(optax.chain(...), loss_scale)"
                )


def _require_all_params(opt_state: optax.OptState) -> None:
    """Raise a ValueError if ``loss_scaling`` is inside of a partition or a mask.

    It then sees only some params, and non-finite gradients reach the others. The state does not show what happens to
    them: ``optax.set_to_zero`` and ``optax.scale`` have the same state. Inside of ``loss_scaling``, both are correct.
    """
    for state in nodes_of_type(opt_state, optax.MaskedState):  # a partition has one for each label
        if has_loss_scale(state):
            raise ValueError(
                "loss_scaling must be around the whole optimizer, got it inside of a partition or a mask: it does not "
                "skip the steps of the other params;\nwrite loss_scaling(optax.partition(...), loss_scale)"
            )


def require_every_step(opt_state: optax.OptState) -> None:
    """Raise a ValueError if ``loss_scaling`` is inside of ``MultiSteps`` or ``apply_if_finite``.

    They do not call it in every step. So an overflow does not lower the scale, and ``MultiSteps`` adds non-finite
    gradients to its sum, where they stay.
    """
    for state in nodes_of_type(opt_state, (optax.MultiStepsState, optax.ApplyIfFiniteState)):
        if has_loss_scale(state):
            raise ValueError(
                f"loss_scaling must see every step, got it inside of {type(state).__name__}; put it around, as in "
                "jaxmp.loss_scaling(optax.MultiSteps(tx, 4), loss_scale)"
            )


def _states_beside(opt_state: Any) -> Iterator[Any]:
    """Yield the states of the transforms that are chained with ``loss_scaling``, at any depth."""
    children: list[Any] = []
    if isinstance(opt_state, dict):  # of a named chain or a partition
        children = list(opt_state.values())
    elif isinstance(opt_state, tuple) and not isinstance(opt_state, LossScalingState):
        children = list(opt_state)
    for child in children:
        if not has_loss_scale(child):
            continue
        if not _has_fields(opt_state):  # the fields of a named tuple belong to one transform
            yield from (other for other in children if other is not child)
        yield from _states_beside(child)


def _has_fields(node: Any) -> bool:
    return hasattr(node, "_fields")


def get_loss_scale(opt_state: optax.OptState) -> LossScale:
    """Return the loss scale in an optimizer's state, at any depth.

    >>> tx = optax.chain(jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(8.0)))
    >>> get_loss_scale(tx.init(jnp.ones(2))).loss_scale
    8.0

    Raises:
      ValueError: ``opt_state`` has no loss scale, or several.
    """
    return get_loss_scaling_state(opt_state).loss_scale


def usable_loss_scale(opt_state: optax.OptState) -> LossScale:
    """Return the loss scale in a state that was not donated, for a step that is not a train step of jaxmp.

    Raises:
      ValueError: ``opt_state`` has no loss scale, or several; a transform with a state is chained with
        ``loss_scaling``; or ``loss_scaling`` is inside of a partition, a mask, or a transform that does not call it in
        every step.
      RuntimeError: ``opt_state`` was donated to an earlier step.
    """
    loss_scale = get_loss_scale(opt_state)
    _require_all_params(opt_state)
    _require_no_state_beside(opt_state)
    require_every_step(opt_state)
    require_not_deleted(loss_scale)
    return loss_scale


def keep_if_skipped(opt_state: optax.OptState, new: T, old: T) -> T:
    """Return ``old`` if the last step was skipped, and ``new`` otherwise.

    Use it in your own step for everything that a skipped step must not change, such as batch statistics, moving
    averages of params or target networks.

    Args:
      opt_state: the optimizer's state that ``tx.update`` returned in this step. :func:`loss_scaling` must be the
        outermost transform, or part of an ``optax.chain``.
      new: any pytree of arrays, computed in this step.
      old: the same pytree before this step. The result has the dtypes of ``old``.

    Raises:
      ValueError: ``opt_state`` has no loss scale, or several; ``loss_scaling`` is inside of ``optax.MultiSteps`` or
        ``optax.apply_if_finite``; or the trees differ in structure.
      TypeError: two leaves differ in shape.

    >>> tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale())
    >>> params, mean = jnp.ones(2), jnp.zeros(())
    >>> _, opt_state = tx.update(jnp.array([jnp.inf, 0.0]), tx.init(params), params)
    >>> keep_if_skipped(opt_state, jnp.array(jnp.nan), mean)
    Array(0., dtype=float32)
    """
    require_every_step(opt_state)
    return select_tree(get_loss_scaling_state(opt_state).last_finite, new, old)


def scalings_in(opt_state: optax.OptState) -> list[LossScalingState]:
    """Return the loss-scaling states in an optimizer's state, at any depth."""
    return nodes_of_type(opt_state, LossScalingState)
