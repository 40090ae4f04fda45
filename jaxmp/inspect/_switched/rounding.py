"""Rounding of values to a narrower dtype, behind a switch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def has_small_range(dtype: np.dtype) -> bool:
    """Return whether a dtype has a smaller range than float32, such as float16."""
    return bool(jnp.finfo(dtype).minexp > jnp.finfo(jnp.float32).minexp)


def rounded(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return a value rounded to a narrower floating dtype, without a change of its own dtype.

    XLA may remove a cast to half precision and back. It does not remove ``reduce_precision``, which rounds subnormal
    numbers to 0, so they are rounded by hand.
    """
    info = jnp.finfo(dtype)
    normal = jax.lax.reduce_precision(value, info.nexp, info.nmant)
    if not has_small_range(dtype):
        return normal
    spacing = float(info.smallest_subnormal)
    subnormal = jax.lax.round(value / spacing, jax.lax.RoundingMethod.TO_NEAREST_EVEN) * spacing
    return jax.lax.select(jax.lax.abs(value) < float(info.smallest_normal), subnormal, normal)


def round_if(is_rounded: Any, dtype: np.dtype, value: jax.Array) -> jax.Array:
    """Return ``value``, rounded to ``dtype`` if ``is_rounded``."""
    return jax.lax.select(jnp.broadcast_to(is_rounded, value.shape), rounded(value, dtype), value)


def count_underflows_and_overflows(value: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return how many elements become 0, and how many finite elements become infinite, if a value is rounded."""
    after = rounded(value, dtype)
    is_underflow = (after == 0) & (value != 0)
    is_overflow = jnp.isfinite(value) & ~jnp.isfinite(after)
    return jnp.stack([is_underflow.sum(dtype=jnp.float32), is_overflow.sum(dtype=jnp.float32)])
