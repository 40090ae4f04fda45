"""Warn if an optimizer does not fit the dtypes of its params."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmp.base.dtypes import is_narrow
from jaxmp.base.trees import path_name, require_no_raw_bytes, widen
from jaxmp.base.user_warnings import warn_user
from jaxmp.optim.checked_params import are_params_checked, params_are_checked
from jaxmp.optim.low_precision import LowPrecision, rounds_params
from jaxmp.program.invariants import SAME_FOR_EXAMPLES

_reported: Any = weakref.WeakKeyDictionary()
"""The params of earlier warnings, by the ``init`` of their optimizer, because no weak reference to a tuple exists."""


def warn_about_params(inner: optax.GradientTransformationExtraArgs, params: Any) -> None:
    """Warn if an optimizer does not fit the dtypes of its params.

    Args:
      inner: the optimizer inside of ``loss_scaling``, or an optimizer without it.
      params: the params, or their shapes.
    """
    warn_if_updates_vanish(inner, params)
    if isinstance(inner, LowPrecision):
        inner.transform.warn_if_nothing_is_rounded(params)


def warn_if_updates_vanish(inner: optax.GradientTransformationExtraArgs, params: Any, *, in_step: bool = False) -> None:
    """Warn if an optimizer updates half-precision params and is not ``low_precision``.

    Frozen params, such as those of ``optax.set_to_zero``, are ignored.

    Args:
      inner, params: as for :func:`warn_about_params`.
      in_step: whether a step checks params that the user may have cast since the state was created. It does not repeat
        the warning of the creation.
    """
    if are_params_checked():
        return
    with params_are_checked():
        param = _first_half_param(inner, params)
    if param is None:
        return
    reported = set[Any]()
    with contextlib.suppress(TypeError):  # an init that is no function may have no hash or no weak reference
        reported = _reported.setdefault(inner.init, reported)
    if not (in_step and param in reported):
        if not in_step:
            reported.add(param)
        path, dtype = param
        smallest = round(4 / float(jnp.finfo(dtype).eps))
        warn_user(
            f"updates below 1/{smallest} of a weight are lost, because params such as {path!r} are {dtype.name}; write "
            "tx = jaxmp.low_precision(tx) for bfloat16 params, or keep the params in float32 with a policy such as "
            "'mixed_bfloat16'"
        )


def _first_half_param(inner: optax.GradientTransformationExtraArgs, params: Any) -> tuple[str, Any] | None:
    """Return the path and the dtype of the first half-precision param that a plain optimizer updates."""
    require_no_raw_bytes(params)
    on_devices = jax.eval_shape(lambda params: params, params)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), on_devices)  # without shardings
    leaves = jax.tree.leaves_with_path(shapes)
    if not any(is_narrow(leaf.dtype) for _, leaf in leaves) or rounds_params(jax.eval_shape(inner.init, shapes)):
        return None
    for (path, leaf), is_updated in zip(leaves, _are_updated(inner, shapes), strict=True):
        if is_updated and is_narrow(leaf.dtype):
            return path_name(path), leaf.dtype
    return None


def _are_updated(inner: optax.GradientTransformationExtraArgs, shapes: Any) -> list[bool]:
    """Return for each param whether its update depends on gradients.

    ``shapes`` are those of the params.
    """

    def updates_of(grads: Any, params: Any) -> Any:
        weights = widen(params)
        state = inner.init(weights)
        return inner.update(grads, state, weights, value=jnp.zeros(()))[0]

    count = len(jax.tree.leaves(shapes))
    try:
        program = jax.make_jaxpr(updates_of)(jax.eval_shape(widen, shapes), shapes)
    except Exception:  # the update needs other arguments
        return [True] * count
    # Let the gradients differ between examples. An update that is then the same does not depend on them.
    are_same = SAME_FOR_EXAMPLES.solve(program, [False] * count + [True] * count).results
    return [not is_same for is_same in are_same]
