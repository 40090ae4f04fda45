"""Count gradients that are zero in half precision but not in float32.

The gradients of params and of activations are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxmp


def zero_share(reference: Any, grads: Any) -> float:
    """Return the share of ``reference``'s nonzero entries that are zero in ``grads``.

    The result is nan if the trees have no arrays.

    Args:
      reference: a tree of gradients in float32.
      grads: the same gradients in another format, scaled or not.

    Raises:
      ValueError: the trees do not match, or ``reference`` is zero everywhere.
    """
    pairs = jax.tree.leaves(jax.tree.map(lambda r, g: ((r != 0).sum(), ((r != 0) & (g == 0)).sum()), reference, grads))
    counts = [int(count) for count in jax.device_get(pairs)]
    if not counts:
        return math.nan
    nonzero, lost = sum(counts[::2]), sum(counts[1::2])
    if not nonzero:
        raise ValueError("the reference gradients must not all be zero, because a share of zero entries is undefined")
    return lost / nonzero


def gradients(loss_fn: Callable[..., Any], state: jaxmp.TrainState, batch: Any) -> tuple[Any, list[jax.Array]]:
    """Return the gradients of the scaled loss for params and layer outputs.

    A layer is a Linen module that calls no other module. The gradients of outputs between half layers have gone through
    half precision. If such a gradient is zero, it is zero for all earlier layers too.

    Args:
      loss_fn: ``loss_fn(params, model_state, batch, rng) -> (loss, ...)`` of a Linen model. For an NNX model the list
        of layer gradients is empty.
      state: the state with the params and the loss scale.
      batch: a batch.
    """
    outputs: list[jax.ShapeDtypeStruct] = []

    def run(params: Any, probes: list[jax.Array] | None) -> jax.Array:
        calls = 0

        def add_probe(method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            nonlocal calls
            before = calls
            output = method(*args, **kwargs)
            if calls > before or not isinstance(output, jax.Array) or not jnp.issubdtype(output.dtype, jnp.floating):
                return output
            calls += 1
            if probes is None:
                outputs.append(jax.ShapeDtypeStruct(output.shape, output.dtype))
                return output
            return output + probes[calls - 1]

        with nn.intercept_methods(add_probe):
            return loss_fn(params, state.model_state, batch, state.rng)[0]

    jax.eval_shape(lambda params: run(params, None), state.params)
    probes = [jnp.zeros(output.shape, output.dtype) for output in outputs]

    def scaled_loss(params: Any, probes: list[jax.Array]) -> jax.Array:
        return jaxmp.get_loss_scale(state.opt_state).scale(run(params, probes).astype(jnp.float32))

    return jax.jit(jax.grad(scaled_loss, argnums=(0, 1)))(state.params, probes)
