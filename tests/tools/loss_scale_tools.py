"""Loss scales of each class, recorded runs of torch, and many steps at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.optim.loss_scale import DynamicLossScale, HeadroomLossScale, NoOpLossScale, StaticLossScale

HUGE = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)
TRACES = json.loads(Path(__file__).with_name("gradscaler_traces.json").read_text())["runs"]
ALL = [
    NoOpLossScale(),
    StaticLossScale(8.0),
    DynamicLossScale(2.0**10, 3, 7, 4, 0.5, backoff=0.25, max_loss_scale=2.0**20),
    DynamicLossScale(2.0**10, hysteresis=3, countdown=2),
    HeadroomLossScale(3, loss_scale=2.0**12, running_max=0.5, period=9, dtype="float8_e5m2"),
]


@jax.jit
def follow(scale: Any, flags: jax.Array, grad_max: jax.Array) -> tuple[Any, Any]:
    """Return the last loss scale, and the loss scales after each step, stacked.

    JAX compiles this function once for each structure of the scale and each number of steps.
    """

    def body(scale: Any, step: Any) -> tuple[Any, Any]:
        scale = scale.adjust(*step)
        return scale, scale

    return jax.lax.scan(body, scale, (flags, grad_max))


def run(scale: Any, flags: Any, grad_max: Any = 1.0) -> Any:
    """Return the loss scales after each step, stacked, with NumPy leaves."""
    flags = jnp.asarray(flags)
    grad_max = jnp.broadcast_to(jnp.asarray(grad_max, jnp.float32), flags.shape)
    return jax.tree.map(np.asarray, follow(scale, flags, grad_max)[1])


def assert_same(a: Any, b: Any) -> None:
    """Assert that two trees have equal structure, static fields, leaves and dtypes."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
