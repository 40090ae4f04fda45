"""Count the values of an array by binary exponent, on the device.

From these counts, ``statistics.py`` computes how many values another format, or another loss scale, would lose.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp.base import dtypes, formats

LOWEST = -149
"""The binary exponent of the smallest positive float32, which is subnormal."""
EXPONENTS = 277
MANTISSA = 23
_INFINITE = 0x7F800000
ZERO, NOT_FINITE = EXPONENTS, EXPONENTS + 1
COUNTERS = EXPONENTS + 2
_COPIES = 256  # the number of copies of the counters on a GPU, so that threads wait less for each other
SIZE = 2 * (COUNTERS + 2) + 1
"""The number of float32 values in a vector of :func:`packed`, without ``movement``."""
_SPLIT = 12  # the number of low bits that `packed` splits from a count, because float32 holds integers only to 2^24


class Counts(NamedTuple):
    """A record of the values of an array, on the device.

    The record of an empty array is zeros. The record of an array in a loop has a leading axis with an entry for each
    iteration. In nested loops, the record has such an axis for each loop.

    Attributes:
      counters: uint32 (…, n), the number of values for each exponent, then the number of zeros, then the number of
        values that are not finite.
      limits: uint32 (…, 2), the bits of the largest magnitude, and the inverted bits of the smallest nonzero magnitude.
        Because of the inversion, both limits are computed by a maximum.
      mean: float32 (…), the mean of the magnitudes; values that are not finite count as 0.
    """

    counters: jax.Array
    limits: jax.Array
    mean: jax.Array


def counts_of(x: jax.Array) -> Counts:
    """Return the record of a floating array, or of the parts of a complex array.

    float64 values are first rounded to float32. Values in other formats are counted exactly.
    """
    return _record(parts_of(lax.stop_gradient(x)))


def parts_of(x: jax.Array) -> jax.Array:
    """Return an array, with the parts of complex numbers along a new axis."""
    return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x


def number_of_values(x: Any) -> int:
    """Return the number of values that are counted in an array or a shape: two for each complex element."""
    return int(x.size) * (2 if jnp.issubdtype(x.dtype, jnp.complexfloating) else 1)


@jax.jit  # tensors of the same shape are traced once
def _record(x: jax.Array) -> Counts:
    magnitude = _magnitude(x).reshape(-1)
    is_finite, is_zero = magnitude < _INFINITE, magnitude == 0
    index = jnp.where(is_finite, jnp.where(is_zero, ZERO, _exponents(magnitude) - LOWEST), NOT_FINITE)
    copies = 1 << min((x.size >> 12).bit_length(), _COPIES.bit_length() - 1)
    counters = lax.platform_dependent(
        index, cpu=functools.partial(_counted, 1), default=functools.partial(_counted, copies)
    )
    # Magnitudes below 1 are summed separately, so that neither sum overflows and small values are not lost.
    finite = jnp.where(magnitude < _INFINITE, magnitude, 0)
    value = lax.bitcast_convert_type(finite, jnp.float32)
    limits = [finite.max(initial=0), jnp.where(finite > 0, ~finite, 0).max(initial=0)]
    small, large = jnp.where(value < 1, value * 2.0**64, 0).sum(), jnp.where(value < 1, 0, value * 2.0**-64).sum()
    size = max(x.size, 1)
    mean = small / size * jnp.float32(2.0**-64) + large / size * jnp.float32(2.0**64)
    return Counts(counters, jnp.stack(limits), mean)


def _counted(copies: int, index: jax.Array) -> jax.Array:
    """Return how often each number below ``COUNTERS`` occurs in ``index``.

    A counter has ``copies`` copies, which are summed at the end. The copies are adjacent in memory, so that one memory
    transaction reads them.
    """
    spread = index if copies == 1 else index * copies + jnp.arange(index.size) % copies
    counters = jnp.zeros(copies * COUNTERS, jnp.uint32).at[spread].add(jnp.uint32(1), mode="promise_in_bounds")
    return counters.reshape(COUNTERS, copies).sum(1, dtype=jnp.uint32)


def _magnitude(x: jax.Array) -> jax.Array:
    """Return the bits of ``|x|`` as a float32.

    The bits are read without arithmetic, because arithmetic may flush subnormals or keep excess precision.
    """
    if x.dtype == jnp.float32:
        bits = lax.bitcast_convert_type(x, jnp.uint32)
    elif x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    elif x.dtype == jnp.float16:
        half = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) & 0x7FFF
        below = lax.bitcast_convert_type(half.astype(jnp.float32), jnp.uint32) - (24 << MANTISSA)
        normal = (half << 13) + jnp.where(half >= 0x7C00, 224 << MANTISSA, 112 << MANTISSA).astype(jnp.uint32)
        bits = jnp.where(half >= 0x400, normal, jnp.where(half == 0, 0, below))
    else:
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return bits & 0x7FFFFFFF


def _exponents(magnitude: jax.Array) -> jax.Array:
    """Return binary exponents (int32). A magnitude of 0 has the exponent -150."""
    subnormal = -118 - lax.clz(magnitude).astype(jnp.int32)
    return jnp.where(magnitude < 1 << MANTISSA, subnormal, (magnitude >> MANTISSA).astype(jnp.int32) - 127)


def packed(counts: Counts, *movement: jax.Array) -> jax.Array:
    """Return a record as one float32 vector.

    A tap (see ``program/taps.py``) returns this vector as a gradient. The vector holds every number exactly.
    ``movement`` has the results of :func:`distance_moved`, or is empty.
    """
    integers, floats = [counts.counters, counts.limits, *movement[:1]], [counts.mean[..., None], *movement[1:]]
    numbers = jnp.concatenate(integers, -1)
    parts = (numbers & ((1 << _SPLIT) - 1), numbers >> _SPLIT)
    return jnp.concatenate([*(part.astype(jnp.float32) for part in parts), *floats], -1)


def unpacked(vector: np.ndarray) -> tuple[Any, ...]:
    """Invert :func:`packed`: return the arguments that gave ``vector``.

    The last axis of ``vector`` is a result of :func:`packed`. Leading axes are kept.
    """
    size = (vector.shape[-1] - (1 if vector.shape[-1] == SIZE else 3)) // 2
    low, high, floats = np.split(vector, [size, 2 * size], axis=-1)
    integers = low.astype(np.uint32) + (high.astype(np.uint32) << _SPLIT)
    counters, limits, lost = np.split(integers, [COUNTERS, COUNTERS + 2], axis=-1)
    return Counts(counters, limits, floats[..., 0]), lost, floats[..., 1:]  # type: ignore[arg-type]


@jax.jit
def distance_moved(update: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return how far updates move their weights.

    Returns:
      Two arrays. The first array (uint32) has a number for each format in ``dtypes.NAMES``: how many updates are too
      small to change their weight, because they are less than 0.5 ulp. An ulp is the distance from the weight to the
      next larger number of the format. Weights that overflow in the format are not counted. The second array (float32)
      has the norm of all updates and the norm of all weights.
    """
    update, weight = parts_of(update).reshape(-1), parts_of(weight).reshape(-1)
    step, size = _magnitude(update), _exponents(_magnitude(weight))
    exponent = jnp.where(step == 0, -1000, _exponents(step))
    lost = []
    for name in dtypes.NAMES:
        form = formats.format_of(name)
        ulp = jnp.maximum(size, form.min_exponent) - form.mantissa_bits
        is_lost = (step < _INFINITE) & (size <= min(form.max_exponent, 127)) & (exponent < ulp - 1)
        lost.append(is_lost.sum(dtype=jnp.uint32))
    norms = [jnp.linalg.norm(x.astype(jnp.float32)) for x in (update, weight)]
    return jnp.stack(lost), jnp.stack(norms)
