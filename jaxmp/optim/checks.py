"""Checks of optimizers, losses, states and updates."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp.base.arguments import printed
from jaxmp.base.trees import path_name
from jaxmp.optim.remembered import remembered
from jaxmp.optim.scaling_state import LossScalingState


def as_optimizer(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` as an optimizer that ignores unknown extra arguments.

    The result is the same object for the same ``tx``.

    Raises:
      TypeError: ``tx`` is not an optimizer.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"an optimizer must be an optax transform, got {printed(tx)}; write optax.adam(1e-3), for example, or "
            "jaxmp.loss_scaling(optax.adam(1e-3), jaxmp.DynamicLossScale()) for one with a loss scale"
        )
    return _with_extra_args(tx)


@remembered
def _with_extra_args(tx: Any) -> optax.GradientTransformationExtraArgs:
    tx = optax.with_extra_args_support(tx)
    parameters = inspect.signature(tx.update).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return tx

    # optax.contrib.sam accepts only the extra argument grad_fn=. Other arguments, such as the loss, are dropped.
    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        known_args = {name: value for name, value in extra_args.items() if name in parameters}
        return tx.update(updates, state, params, **known_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def require_loss(loss: Any, otherwise: str, alternative: str = "") -> Any:
    """Return ``loss`` if it is a floating scalar.

    Args:
      loss: the value that should be a loss.
      otherwise: the remedy in the error message if ``loss`` is not a number.
      alternative: another remedy, which the message adds to the first.

    Raises:
      TypeError: the loss is not a floating scalar.
    """
    if not is_number(loss) or np.ndim(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        remedy = otherwise
        if is_number(loss):
            remedy = "take its mean: jnp.mean(loss)" if np.ndim(loss) else "compute it from floating values"
        raise TypeError(f"a loss must be a floating scalar, got {described(loss)}; {remedy}{alternative}")
    return loss


def require_no_functions(params: Any, call: str) -> None:
    """Raise a TypeError if a function is among the leaves of a tree of params.

    ``call`` is the name of the called function, for the error message. Models of Equinox may have such leaves.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        if path and callable(leaf) and not is_number(leaf):
            raise TypeError(
                f"{call} takes params that are arrays, got the function {getattr(leaf, '__name__', leaf)!r} at "
                f"{path_name(path)!r};\nfor a model of Equinox, write params, static = eqx.partition(model, "
                "eqx.is_inexact_array),\nand call eqx.combine(params, static) in the loss function"
            )


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a number or an array.

    Arrays of JAX and NumPy, Python numbers and NNX Variables count as numbers.
    """
    number = isinstance(value, (jax.Array, np.ndarray, np.generic, int, float, complex))
    return number or hasattr(value, "__jax_array__")


def as_float(value: Any) -> float:
    """Return a concrete real number as a float, and NaN for anything else."""
    is_real = is_number(value) and not isinstance(value, (bool, jax.core.Tracer)) and np.ndim(value) == 0
    dtype = jnp.result_type(value) if is_real else np.dtype(bool)
    is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return float(value) if is_real else np.nan


def described(value: Any) -> str:
    """Return the dtype and shape of a value, or its type, for an error."""
    if is_number(value):
        return f"{jnp.result_type(value).name} of shape {np.shape(value)}"
    return f"{type(value).__name__}{f' of {len(value)}' if isinstance(value, (tuple, list)) else ''}"


def check_state(state: Any) -> None:
    """Raise a TypeError if ``state`` is not a state of :func:`jaxmp.loss_scaling`."""
    if not isinstance(state, LossScalingState):
        raise TypeError(
            f"loss_scaling updates only its own state, got {type(state).__name__}; call tx.init again, or wrap a "
            "running state with jaxmp.wrap_opt_state"
        )


def check_same_shapes(updates: Any, params: Any) -> None:
    """Raise a ValueError if an update and its param differ in shape.

    If the trees differ in structure, nothing is checked.
    """
    structure: Any = jax.tree.structure(updates)
    if structure != jax.tree.structure(params):
        return
    for (path, update), param in zip(jax.tree.leaves_with_path(updates), jax.tree.leaves(params), strict=True):
        if jnp.shape(update) != jnp.shape(param):
            raise ValueError(
                f"the update of {path_name(path)!r} has the shape {jnp.shape(update)}, but its param has "
                f"{jnp.shape(param)}; pass the params of these gradients, or call tx.init again"
            )
