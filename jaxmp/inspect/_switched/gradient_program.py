"""Trace the program whose roundings are counted: a function, or a loss with its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.trees import widen
from jaxmp.engine.autocast import autocast
from jaxmp.engine.constant_casts import casting_constants_in_program
from jaxmp.inspect.program.calls import StepCall, is_inexact, named
from jaxmp.inspect.program.loss_calls import with_gradients
from jaxmp.inspect.program.tracing import program_of
from jaxmp.program.walk import computing_only


@dataclass(frozen=True, eq=False)
class GradientProgram:
    """A traced program with floating results.

    Attributes:
      jaxpr: the open jaxpr. It computes the results and nothing else.
      consts: its constants.
      inputs: its arguments.
      has_loss: whether the first result is a loss. All other results are gradients, or results of any function.
      context: returns the context in which the program runs.
    """

    jaxpr: Any
    consts: Sequence[Any]
    inputs: Sequence[Any]
    has_loss: bool
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def program_of_function(
    fun: Callable[..., Any],
    args: Sequence[Any],
    policy: Any,
    overrides: Mapping[str, str] | None,
    loss_scale: float | None = None,
) -> GradientProgram:
    """Return the program of a function under a policy.

    If the first result is a floating scalar, it is a loss. It is then differentiated with respect to the first argument
    that has floating arrays. With a ``loss_scale``, the program has another argument, the last one. The gradients are
    those of the loss times this argument.
    """
    cast = fun if policy is None else autocast(fun, policy, overrides)
    leaves, structure = jax.tree.flatten(tuple(args))

    def of_leaves(*leaves: Any) -> Any:
        return cast(*named(jax.tree.unflatten(structure, leaves)))

    has_loss = any(map(is_inexact, leaves)) and _returns_loss(jax.eval_shape(of_leaves, *leaves))
    if not has_loss:
        return _traced(lambda *leaves: (None, of_leaves(*leaves)), leaves)

    count, program = len(leaves), with_gradients(cast, args)

    def loss_and_gradients(*leaves: Any) -> Any:
        scale = leaves[count] if len(leaves) > count else None
        (loss, _), _, gradients = program(scale, *jax.tree.unflatten(structure, leaves[:count]))
        return loss, gradients

    return _traced(loss_and_gradients, [*leaves, *([] if loss_scale is None else [np.float32(loss_scale)])])


def program_of_step(call: StepCall) -> GradientProgram:
    """Return the program of a train step that computes the loss and its true gradients."""
    step, state, batch = call
    loss_scale = call.loss_scale
    leaves, structure = jax.tree.flatten((state.params, state.model_state, batch, call.rng))

    def loss_and_gradients(*leaves: Any) -> Any:
        params, model_state, batch, rng = jax.tree.unflatten(structure, leaves)
        result = step.update.gradients(state.replace(params=params, model_state=model_state), batch, rng)
        return result.loss, jax.tree.map(lambda grad: grad / loss_scale, widen(result.grads))

    return _traced(loss_and_gradients, leaves, step.update.devices.set)


def _traced(
    fun: Callable[..., Any],
    leaves: Sequence[Any],
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> GradientProgram:
    """Trace a function that returns a loss or None, and other results. Results that are no floats are left out."""
    with context(), casting_constants_in_program():
        jaxpr, consts, structure = program_of(fun, *leaves)
    loss, _ = jax.tree.unflatten(structure, range(len(jaxpr.outvars)))
    are_floats = [bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact)) for atom in jaxpr.outvars]
    if not any(are_floats):
        raise ValueError("error_budget needs a function with floating results, got none; return floating arrays")
    return GradientProgram(computing_only(jaxpr, are_floats), consts, leaves, loss is not None, context)


def _returns_loss(result: Any) -> bool:
    """Return whether a result, or its first element, is a floating scalar."""
    if isinstance(result, (tuple, list)) and result:
        result = result[0]
    return hasattr(result, "shape") and result.shape == () and bool(jnp.issubdtype(result.dtype, jnp.floating))
