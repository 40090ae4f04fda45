"""Gradients of microbatches, summed in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmp.base.trees import select_tree, widen


class Gradients(NamedTuple):
    """The results of a loss function, with its gradients.

    Attributes:
      loss: the true loss.
      grads: the gradients of the scaled loss, or their sum over microbatches.
      model_state: the new model state.
      metrics: the metrics of the loss function; those of several microbatches are stacked.
    """

    loss: Any
    grads: Any
    model_state: Any
    metrics: Any


def accumulate(
    differentiate: Callable[..., Gradients], params: Any, model_state: Any, inputs: tuple[Any, Any], count: int
) -> Gradients:
    """Differentiate the loss of each microbatch, and sum the gradients in float32.

    Args:
      differentiate: a function of ``(model_state, batch, rng)`` that returns the :class:`Gradients` of a microbatch.
      params: a tree with the structure of the gradients.
      model_state: the model state of the first microbatch.
      inputs: the microbatches and their keys, stacked along axis 0.
      count: the number of microbatches.

    Returns:
      The mean of the losses, the sum of the gradients, the model state after the last microbatch, and the stacked
      metrics.
    """

    def add(carry: Any, batch_and_rng: Any) -> Any:
        total, model_state = carry
        new = differentiate(model_state, *batch_and_rng)
        total = jax.tree.map(jnp.add, total, widen(new.grads))
        in_old_dtypes = select_tree(True, new.model_state, model_state)
        return (total, in_old_dtypes), (new.loss, new.metrics)

    zeros = jax.tree.map(jnp.zeros_like, widen(params))
    # The scan needs the length if neither the batch nor the keys have arrays.
    (total, model_state), (losses, metrics) = jax.lax.scan(add, (zeros, model_state), inputs, length=count)
    return Gradients(average(losses, count), total, model_state, metrics)


def average(stacked: Any, count: int) -> Any:
    """Return the mean over microbatches.

    With one microbatch, return ``stacked``, which then has no axis of microbatches.
    """
    if count == 1:
        return stacked
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0, dtype=jnp.float32), stacked)
