"""Round float32 values to bfloat16 or float8 at random, without bias."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LARGEST, NORMAL, SMALLEST = 448.0, 2.0**-6, 2.0**-9  # largest, smallest normal, smallest positive float8_e4m3fn


def stochastic_bfloat16(values: jax.Array, bits: jax.Array) -> jax.Array:
    """Round float32 values to bfloat16 stochastically.

    ``bits`` are random uint32 numbers below 2^16.
    """
    words = jax.lax.bitcast_convert_type(values, jnp.uint32) + bits
    rounded = jax.lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
    # Adding the random bits could turn a NaN into a finite number. Then the step would not be skipped.
    return jnp.where(jnp.isfinite(values), rounded, values).astype(jnp.bfloat16)


def stochastic_float8(values: jax.Array, bits: jax.Array) -> jax.Array:
    """Round float32 values stochastically to float8_e4m3fn; return float32.

    The magnitudes are at most 448, and ``bits`` are random uint32 numbers below 2^16.
    """
    sizes = jnp.abs(values)
    # The mask keeps the exponent and 3 bits of the mantissa.
    words = (jax.lax.bitcast_convert_type(sizes, jnp.uint32) + (bits << 4)) & jnp.uint32(0xFFF00000)
    normal = jnp.minimum(jax.lax.bitcast_convert_type(words, jnp.float32), LARGEST)
    subnormal = jnp.floor(sizes / SMALLEST + bits.astype(jnp.float32) / 2**16) * SMALLEST
    rounded = jnp.copysign(jnp.where(sizes < NORMAL, subnormal, normal), values)
    return jnp.where(jnp.isfinite(values), rounded, jnp.float32(np.nan))


class Draw(NamedTuple):
    """The random bits of one array in one update.

    Attributes:
      seed: the seed of the optimizer.
      step: the number of updates so far.
      name: the path of the array.
      device: in a ``shard_map``, the index of the device's part of the array; None for a whole array.
    """

    seed: int
    step: jax.Array
    name: str
    device: jax.Array | None = None

    def bits(self, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Return two arrays of uint32 below 2^16, from a hash of each number's position.

        The bits do not depend on how the array is split over devices. The hash is the last step of MurmurHash3, applied
        twice. The key of the hash is two words, computed from the seed, the step and the name.
        """
        path = jnp.uint32(zlib.crc32(self.name.encode()))
        # The step is hashed first. With step ^ seed, step 0 of seed 1 would draw the same bits as step 1 of seed 0.
        first = _mixed(_mixed(self.step.astype(jnp.uint32)) ^ jnp.uint32(self.seed & 0xFFFFFFFF))
        second = _mixed(first ^ path ^ jnp.uint32(self.seed >> 32 & 0xFFFFFFFF))
        if self.device is not None:
            second = _mixed(second ^ _mixed(self.device.astype(jnp.uint32) + 1))
        index = jnp.zeros(shape, jnp.uint32)
        stride = 1
        for axis in reversed(range(len(shape))):
            index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride & 0xFFFFFFFF)
            stride *= shape[axis]
        word = _mixed(_mixed(index ^ first) ^ second)
        return word & jnp.uint32(0xFFFF), word >> 16


def _mixed(word: jax.Array) -> jax.Array:
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
