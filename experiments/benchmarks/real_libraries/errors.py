"""Errors of values and gradients, compared with float32, over several draws of the params."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DRAWS = 5
# XLA may not leave out a rounding. LLVM's optimizations would take longer than they save, because a program runs only
# five times.
_AS_WRITTEN = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
Results = tuple[np.ndarray, np.ndarray]
"""The value, and the gradient as one vector."""


def exact_results(loss: Callable[..., Any], draws: Sequence[Any]) -> list[Results]:
    """Return the float32 value and gradient of a loss for each draw.

    Raises:
      ValueError: one of them is not finite.
    """
    exact = compute_results(jax.value_and_grad(loss), draws)
    if not all(np.isfinite(result).all() for results in exact for result in results):
        raise ValueError("value or gradient is not finite in float32")
    return exact


def draw_params(params: Any, seed: int) -> Any:
    """Add noise to the params, of 1/20 of each array's root mean square.

    With seed 0, the params are returned unchanged.
    """
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [
        leaf + 0.05 * jnp.sqrt(jnp.mean(leaf**2)) * jax.random.normal(key, leaf.shape, leaf.dtype) if seed else leaf
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


def median_errors(fun: Callable[..., Any], draws: Sequence[Any], exact: Sequence[Results]) -> list[float]:
    """Return the errors of the value and of the gradient.

    Each error is the median over all draws of the params.
    """
    try:
        results = compute_results(fun, draws)
    except jax.errors.JaxRuntimeError:  # the program itself raised an error, as a solver may
        return [math.inf, math.inf]
    errors = [[_error(*pair) for pair in zip(*both, strict=True)] for both in zip(results, exact, strict=True)]
    return [float(np.median(column)) for column in zip(*errors, strict=True)]


def compute_results(fun: Callable[..., Any], draws: Sequence[Any]) -> list[Results]:
    """Return the value and the gradient of ``fun`` for each draw of the params."""
    compiled = jax.jit(fun, compiler_options=_AS_WRITTEN)
    results = []
    for params in draws:
        value, gradient = compiled(params)
        leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(gradient)]
        results.append((np.asarray(value, np.float64), np.concatenate(leaves)))
    return results


def _error(result: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(result - exact) / np.linalg.norm(exact))
