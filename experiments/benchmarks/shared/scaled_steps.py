"""Build train steps without loss scaling, and with each library's loss scaling.

Each library is used as its documentation says. Every function takes a loss function (see
:data:`experiments.benchmarks.models.workloads.LossFn`), an optimizer and ``init(key) -> (params, model state)``.
It returns ``start() -> state`` and ``step(state, batch) -> (state, loss)``. The step is not jitted, and its state
may be donated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

import jaxmp
from experiments.benchmarks.models.workloads import LossFn

Init = Callable[[Any], tuple[Any, Any]]
Start = Callable[[], Any]
Step = Callable[[Any, Any], tuple[Any, jax.Array]]
LEARNING_RATE = 1e-10
"""The learning rate of every timed step, torch's too.

A step must not train: on a batch that a model knows by heart, gradients are zeros, and a GPU computes faster on zeros,
because it needs less power. With this rate the loss stays where it begins. It is not 0, so that no compiler can leave
out the update.
"""


def no_scaling(loss_fn: LossFn, tx: optax.GradientTransformation, init: Init) -> tuple[Start, Step]:
    """Return a step without loss scaling and without checks for non-finite values."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, model_state = state
        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, model_state, batch, None)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, model_state), loss

    def start() -> Any:
        params, model_state = init(jax.random.key(0))
        return params, tx.init(params), model_state

    return jax.jit(start), step


INITIAL_SCALE = 2.0**15
"""The scale with which jaxmp's and jmp's dynamic scales begin."""


def with_constant_scale(
    loss_fn: LossFn, tx: optax.GradientTransformation, init: Init
) -> tuple[Callable[..., Any], Step]:
    """Return a step with a scale that never changes, and without checks for non-finite values.

    On a GPU, compare dynamic scaling with this step, not with a step without a scale. Without a scale, float16
    gradients can be zero or subnormal, and a GPU at its power limit may multiply such numbers faster. ``start`` takes
    the scale. See :func:`settled` for a scale with which gradients are finite.
    """

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, model_state, scale = state

        def scaled_loss_fn(*args: Any) -> tuple[jax.Array, Any]:
            loss, model_state = loss_fn(*args)
            return loss * scale, model_state

        gradients = jax.value_and_grad(scaled_loss_fn, has_aux=True)
        (loss, model_state), grads = gradients(params, model_state, batch, None)
        inverse = 1 / scale
        grads = jax.tree.map(lambda grad: grad * inverse, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, model_state, scale), loss * inverse

    inner_start, _ = no_scaling(loss_fn, tx, init)

    def start(scale: float = INITIAL_SCALE) -> Any:
        return (*inner_start(), jnp.float32(scale))

    return start, step


def settled(start: Callable[[float], Any], step: Step, batch: Any) -> Any:
    """Return a state of :func:`with_constant_scale` with the scale that a dynamic scale would find.

    While a step is not finite, the scale is halved. So the row with a constant scale computes on the same numbers as
    the row with a dynamic scale.

    Raises:
      FloatingPointError: the loss is not finite with any scale.
    """
    scale = INITIAL_SCALE
    while scale >= 1:
        state, _ = step(start(scale), batch)
        state, loss = step(state, batch)  # not finite if the first step's gradients were not
        if jnp.isfinite(loss):
            return state
        scale /= 2
    raise FloatingPointError("the loss is not finite, even without a scale")


def with_jaxmp(
    loss_fn: LossFn, tx: optax.GradientTransformation, init: Init, check_updates: bool = False
) -> tuple[Start, Step]:
    """Return a step with jaxmp's loss scaling, as in jaxmp's README."""
    scaled = jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale(), check_updates=check_updates)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, model_state = state
        gradients = jaxmp.value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, model_state), grads = gradients(params, model_state, batch, None)
        updates, opt_state = scaled.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, model_state), loss

    return no_scaling(loss_fn, scaled, init)[0], step


def with_jmp(loss_fn: LossFn, tx: optax.GradientTransformation, init: Init) -> tuple[Start, Step]:
    """Return a step with jmp's loss scaling, as in "Loss scaling" in jmp's README.

    There are two differences to the README. The scale is float32, because ``adjust`` raises with the float16 scale of
    the README. The state holds the scale's two numbers in place of the scale object, because a step with the object
    cannot be lowered.
    """
    import jmp

    inner_start, _ = no_scaling(loss_fn, tx, init)

    def step(state: Any, batch: Any) -> Any:
        (params, opt_state, model_state), (scale, counter) = state
        loss_scale = jmp.DynamicLossScale(scale, counter)

        def scaled(params: Any) -> Any:
            loss, new_model_state = loss_fn(params, model_state, batch, None)
            return loss_scale.scale(loss), new_model_state

        (loss, new_model_state), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        loss, grads = loss_scale.unscale(loss), loss_scale.unscale(grads)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state, new_model_state
        finite = jmp.all_finite(grads)
        selected = jmp.select_tree(finite, new, (params, opt_state, model_state))
        loss_scale = loss_scale.adjust(finite)
        return (selected, (loss_scale.loss_scale, loss_scale.counter)), loss

    return lambda: (inner_start(), (jnp.float32(INITIAL_SCALE), jnp.int32(0))), step


def with_flax(loss_fn: LossFn, tx: optax.GradientTransformation, init: Init) -> tuple[Start, Step]:
    """Return a step with Flax's ``DynamicScale``.

    The scale is used as in its docstring and in Flax's ImageNet example.
    """
    inner_start, _ = no_scaling(loss_fn, tx, init)

    def step(state: Any, batch: Any) -> Any:
        (params, opt_state, model_state), dynamic_scale = state
        grad_fn = dynamic_scale.value_and_grad(loss_fn, has_aux=True)
        dynamic_scale, finite, (loss, new_model_state), grads = grad_fn(params, model_state, batch, None)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        params, opt_state = jax.tree.map(functools.partial(jnp.where, finite), new, (params, opt_state))
        return ((params, opt_state, new_model_state), dynamic_scale), loss

    return lambda: (inner_start(), jax.tree.map(jnp.asarray, DynamicScale())), step


def with_optax(loss_fn: LossFn, tx: optax.GradientTransformation, init: Init) -> tuple[Start, Step]:
    """Return a step with ``optax.apply_if_finite``.

    Non-finite steps are skipped. The loss is not scaled.
    """
    return no_scaling(loss_fn, optax.apply_if_finite(tx, max_consecutive_errors=25), init)
