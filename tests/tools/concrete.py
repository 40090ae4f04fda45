"""Small JAX arrays that NumPy fills, so that JAX compiles nothing.

``jnp.ones`` and ``jnp.asarray`` compile a program for each shape and dtype. These functions return the same arrays.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def array(values: Any, dtype: Any = None) -> jax.Array:
    return jax.device_put(np.array(values, dtype))


def zeros(shape: Any, dtype: Any = float) -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype))


def ones(shape: Any, dtype: Any = float) -> jax.Array:
    return jax.device_put(np.ones(shape, dtype))


def full(shape: Any, value: Any, dtype: Any = None) -> jax.Array:
    return jax.device_put(np.full(shape, value, dtype))


def arange(*limits: Any, dtype: Any = None) -> jax.Array:
    return jax.device_put(np.arange(*limits, dtype=dtype))


def eye(size: int, dtype: Any = float) -> jax.Array:
    return jax.device_put(np.eye(size, dtype=dtype))
