"""Warn if an optimizer rounds small updates of half-precision params to zero."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmp.base.dtypes import is_half
from jaxmp.base.trees import path_name, widen
from jaxmp.base.user_warnings import warn_user
from jaxmp.optim.loss_scaling import LossScaling
from jaxmp.optim.low_precision import rounds_params
from jaxmp.optim.pack_small import packed_as
from jaxmp.program.invariants import SAME_FOR_EXAMPLES


def warn_if_updates_vanish(tx: optax.GradientTransformationExtraArgs, params: Any) -> None:
    """Warn if ``tx`` updates half-precision params and is not ``low_precision``.

    Frozen params, such as those of ``optax.set_to_zero``, are ignored. ``params`` may be shapes.
    """
    on_devices = jax.eval_shape(lambda params: params, params)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), on_devices)  # without shardings
    leaves = jax.tree.leaves_with_path(shapes)
    if not any(is_half(leaf.dtype) for _, leaf in leaves) or rounds_params(jax.eval_shape(tx.init, shapes)):
        return
    for (path, leaf), is_updated in zip(leaves, _are_updated(tx, shapes), strict=True):
        if is_updated and is_half(leaf.dtype):
            smallest = round(4 / float(jnp.finfo(leaf.dtype).eps))
            warn_user(
                f"updates below 1/{smallest} of a weight are lost, because params such as {path_name(path)!r} are "
                f"{leaf.dtype.name}; write tx = jaxmp.low_precision(tx) for bfloat16 params, or keep the params in "
                "float32 with a policy such as 'mixed_bfloat16'",
            )
            return


def _are_updated(tx: optax.GradientTransformationExtraArgs, shapes: Any) -> list[bool]:
    """Return for each param whether its update depends on gradients.

    ``shapes`` are those of the params.
    """
    inner = tx.inner if isinstance(tx, LossScaling) else tx  # loss_scaling's own updates all depend on the gradients

    def updates_of(grads: Any, params: Any) -> Any:
        weights = widen(params)
        state = inner.init(weights)
        return inner.update(packed_as(state, grads), state, weights, value=jnp.zeros(()))[0]

    count = len(jax.tree.leaves(shapes))
    try:
        program = jax.make_jaxpr(updates_of)(jax.eval_shape(widen, shapes), shapes)
    except Exception:  # the update needs other arguments
        return [True] * count
    # Let the gradients differ between examples. An update that is then the same does not depend on them.
    are_same = SAME_FOR_EXAMPLES.solve(program, [False] * count + [True] * count).results
    return [not is_same for is_same in are_same]
