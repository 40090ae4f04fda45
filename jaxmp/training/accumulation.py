"""Gradients of microbatches, summed in float32.

The results of a batch are means over its microbatches. If the loss of a microbatch is a mean over tokens, for example,
the weight of the microbatch is its number of tokens. Results of a microbatch with the weight 0 do not count, also if
they are NaN.
"""

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
    differentiate: Callable[..., Gradients],
    params: Any,
    model_state: Any,
    inputs: tuple[Any, Any],
    count: int,
    mean_over: str | None = None,
) -> Gradients:
    """Differentiate the loss of each microbatch, and sum the gradients in float32.

    Args:
      differentiate: a function of ``(model_state, batch, rng)`` that returns the :class:`Gradients` of a microbatch.
      params: a tree with the structure of the gradients.
      model_state: the model state of the first microbatch.
      inputs: the microbatches and their keys, stacked along axis 0.
      count: the number of microbatches.
      mean_over: the name of the metric that is the weight of a microbatch; None for equal weights.

    Returns:
      The mean of the losses, the sum of the gradients times the weights, the model state after the last microbatch, and
      the stacked metrics. :func:`mean_gradients` divides the sum.
    """

    def add(carry: Any, batch_and_rng: Any) -> Any:
        total, model_state = carry
        new = differentiate(model_state, *batch_and_rng)
        grads = widen(new.grads)
        if mean_over is not None:
            grads = jax.tree.map(_times(new.metrics[mean_over]), grads)
        total = jax.tree.map(jnp.add, total, grads)
        in_old_dtypes = select_tree(True, new.model_state, model_state)
        return (total, in_old_dtypes), (new.loss, new.metrics)

    zeros = jax.tree.map(jnp.zeros_like, widen(params))
    # The scan needs the length if neither the batch nor the keys have arrays.
    (total, model_state), (losses, metrics) = jax.lax.scan(add, (zeros, model_state), inputs, length=count)
    weights = None if mean_over is None else widen(metrics[mean_over])
    return Gradients(_mean(losses, weights), total, model_state, metrics)


def mean_gradients(result: Gradients, count: int, mean_over: str | None) -> Any:
    """Return the mean of the gradients that :func:`accumulate` summed; 0 if all weights are 0."""
    if mean_over is None:
        return jax.tree.map(lambda leaf: leaf / count, result.grads)
    total = widen(result.metrics[mean_over]).sum()
    divisor = jnp.where(total == 0, 1, total)
    return jax.tree.map(lambda leaf: leaf / divisor.astype(leaf.dtype), result.grads)


def average(metrics: dict[str, Any], count: int, mean_over: str | None = None) -> dict[str, Any]:
    """Return the mean of the metrics over microbatches, and the sum of the weights.

    With one microbatch, return ``metrics``, which then have no axis of microbatches.
    """
    if count == 1:
        return metrics
    if mean_over is None:
        return {name: _mean(metric, None) for name, metric in metrics.items()}
    weights = widen(metrics[mean_over])
    return {name: weights.sum() if name == mean_over else _mean(metric, weights) for name, metric in metrics.items()}


def _mean(stacked: Any, weights: Any) -> Any:
    """Return the mean of each leaf over axis 0, with the weights of a vector, or equal weights."""
    if weights is None:
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0, dtype=jnp.float32), stacked)
    total = weights.sum()
    shares = jax.lax.stop_gradient(jnp.where(total == 0, 1 / len(weights), weights / total))

    def mean(leaf: jax.Array) -> jax.Array:
        return jax.vmap(lambda share, row: _times(share)(row))(shares, leaf.astype(jnp.float32)).sum(0)

    return jax.tree.map(mean, stacked)


def _times(weight: Any) -> Callable[[jax.Array], jax.Array]:
    """Return the function that multiplies an array by a weight; with the weight 0, NaN becomes 0 too."""
    weight = jnp.asarray(weight)
    return lambda array: jnp.where(weight == 0, 0, array * weight.astype(array.dtype))
