"""A full train step without loss scaling, and with each of the libraries that offer it, used as its documentation says.

Every function takes a loss function and an optimizer and returns ``init(params) -> state`` and ``step(state, batch) ->
(state, loss)``, not yet jitted. The optimizer, the params (float32) and the loss function are the same for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale

import jaxmp

LossFn = Callable[[Any, Any], jax.Array]
Steps = tuple[Callable[[Any], Any], Callable[[Any, Any], tuple[Any, jax.Array]]]


def no_scaling(loss_fn: LossFn, tx: optax.GradientTransformation) -> Steps:
    """What a user writes without loss scaling: nothing is checked."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return lambda params: (params, tx.init(params)), step


def with_jaxmp(loss_fn: LossFn, tx: optax.GradientTransformation, check_updates: bool = True) -> Steps:
    """The same step, two names changed; after the README of jaxmp."""
    scaled = jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale(), check_updates=check_updates)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jaxmp.scaled_value_and_grad(loss_fn, opt_state)(params, batch)
        updates, opt_state = scaled.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return lambda params: (params, scaled.init(params)), step


def with_jmp(loss_fn: LossFn, tx: optax.GradientTransformation) -> Steps:
    """After jmp's README, "Loss scaling", but with a float32 scale: the float16 one of that text raises in adjust."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, loss_scale = state
        loss, grads = jax.value_and_grad(lambda p: loss_scale.scale(loss_fn(p, batch)))(params)
        loss, grads = loss_scale.unscale(loss), loss_scale.unscale(grads)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        finite = jmp.all_finite(grads)
        params, opt_state = jmp.select_tree(finite, new, (params, opt_state))
        return (params, opt_state, loss_scale.adjust(finite)), loss

    return lambda params: (params, tx.init(params), jmp.DynamicLossScale(jnp.float32(2**15))), step


def with_flax(loss_fn: LossFn, tx: optax.GradientTransformation) -> Steps:
    """After the docstring of ``flax.training.dynamic_scale.DynamicScale`` and flax's ImageNet example."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, dynamic_scale = state
        dynamic_scale, finite, loss, grads = dynamic_scale.value_and_grad(loss_fn)(params, batch)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        params, opt_state = jax.tree.map(functools.partial(jnp.where, finite), new, (params, opt_state))
        return (params, opt_state, dynamic_scale), loss

    return lambda params: (params, tx.init(params), DynamicScale()), step


def with_optax(loss_fn: LossFn, tx: optax.GradientTransformation) -> Steps:
    """``optax.apply_if_finite``: steps that are not finite are skipped, the loss is not scaled."""
    return no_scaling(loss_fn, optax.apply_if_finite(tx, max_consecutive_errors=25))
