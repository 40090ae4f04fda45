"""The compensation of a bfloat16 param, stored in 16 or 8 bits.

The compensation is the float32 master weight minus the param. Kahan's compensation is a bfloat16 number. A split master
weight stores the next 8 bits of its mantissa as int8. The master weight then has 24 bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

COMPENSATION_DTYPES: dict[str, Any] = {"kahan": jnp.bfloat16, "split": jnp.int8}
"""The dtype of the compensation for each rounding of ``low_precision`` that has one."""


def compensation_of(master: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """Return the compensation of a param in a dtype of :data:`COMPENSATION_DTYPES`.

    Args:
      master: the float32 master weight.
      weight: the master weight rounded to the nearest bfloat16 number, in float32.
      dtype: the dtype of the result.
    """
    if dtype != jnp.int8:
        return (master - weight).astype(dtype)
    difference = _word(master) - _word(weight)  # in units in the last place of float32
    return jnp.clip((difference + 128) >> 8, -128, 127).astype(jnp.int8)


def read_compensation(weight: Any, compensation: Any) -> Any:
    """Return the compensation in float32; ``weight`` is the param in float32."""
    if compensation.dtype != jnp.int8:
        return compensation.astype(jnp.float32)
    word = _word(weight) + (compensation.astype(jnp.int32) << 8)
    return jax.lax.bitcast_convert_type(word, jnp.float32) - weight


def _word(values: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)
