"""Counts of values by their bits: from them follows exactly what another format or loss scale makes of the values."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp.base import dtypes, formats

_LOWEST = -149
"""The binary exponent of the smallest float32."""
_EXPONENTS = 277
_MANTISSA = 23
_INFINITE = 0x7F800000
# Where a mantissa's fraction passes a border at which some format rounds to another binade: to a power of two from
# 1 - 2^-k on, k its mantissa bits where it is subnormal below, one more at its largest number. float8_e4m3fn, whose
# last mantissa is NaN, overflows above 0.8125. A tie goes to the even neighbour: all borders but that are inclusive.
_BORDERS = (1, *(round((1 - 2.0**-k) * 2**_MANTISSA) for k in (2, 3, 7, 8, 10, 11, 23)))
_ABOVE_E4M3 = round(0.8125 * 2**_MANTISSA) + 1
_STARTS = tuple(sorted({0, *_BORDERS, _ABOVE_E4M3}))
_CLASSES = len(_STARTS)
_BINS = _EXPONENTS * _CLASSES
_ZERO, _NOT_FINITE = _BINS, _BINS + 1
_COUNTERS = _BINS + 2
_COPIES = 256  # of the counters on a GPU, where threads that add to one at once wait for each other
SIZE = 2 * (_COUNTERS + 2) + 1
"""How many float32 numbers a record is as a cotangent."""
_SPLIT = 12  # bits: each part of a count is a float32 integer below 2^24


class Record(NamedTuple):
    """What is read off an array on the device; zeros are the record of nothing, and the axes before are of loops.

    Attributes:
      counters: uint32 (…, n), by exponent and range of the mantissa, then zeros, then what is not finite.
      limits: uint32 (…, 2), the bits of the largest magnitude, and of the smallest that is not 0 inverted.
      mean: float32 (…), of the finite magnitudes, what is not finite counted as 0.
    """

    counters: jax.Array
    limits: jax.Array
    mean: jax.Array

    def added(self, other: Record) -> Record:
        """The record of two arrays; the mean is the sum of theirs."""
        limits = jnp.maximum(self.limits, other.limits)
        return Record(self.counters + other.counters, limits, self.mean + other.mean)


def record(x: jax.Array) -> Record:
    """The record of a floating array; float64 is rounded to float32 before, all narrower formats are exact."""
    return _record(lax.stop_gradient(x))


@jax.jit  # tensors of one shape are traced once
def _record(x: jax.Array) -> Record:
    """Two passes, one that counts and one that reduces: of each kernel the compiler makes machine code of its own."""
    magnitude = _magnitude(x).reshape(-1)
    exponent, fraction = _parts(magnitude)
    finite, zero = magnitude < _INFINITE, magnitude == 0
    index = (exponent - _LOWEST) * _CLASSES + sum((fraction >= start).astype(jnp.int32) for start in _STARTS[1:])
    index = jnp.where(finite, jnp.where(zero, _ZERO, index), _NOT_FINITE)
    copies = 1 << min((x.size >> 12).bit_length(), _COPIES.bit_length() - 1)
    counters = lax.platform_dependent(
        index, cpu=functools.partial(_counted, 1), default=functools.partial(_counted, copies)
    )
    # One sum of what is below 1 and one of the others: neither overflows, nor loses what is small.
    shown = jnp.where(magnitude < _INFINITE, magnitude, 0)
    value = lax.bitcast_convert_type(shown, jnp.float32)
    limits = shown, jnp.where(shown > 0, ~shown, 0)
    parts = jnp.where(value < 1, value * 2.0**64, 0), jnp.where(value < 1, 0, value * 2.0**-64)
    limits, _, (small, large) = _reduced(limits, (), parts)
    size = max(x.size, 1)
    mean = small / size * jnp.float32(2.0**-64) + large / size * jnp.float32(2.0**64)
    return Record(counters, jnp.stack(limits), mean)


def _counted(copies: int, index: jax.Array) -> jax.Array:
    """How often each of ``_COUNTERS`` numbers is there. Copies of one counter lie side by side, in one transaction."""
    spread = index if copies == 1 else index * copies + jnp.arange(index.size) % copies
    counters = jnp.zeros(copies * _COUNTERS, jnp.uint32).at[spread].add(jnp.uint32(1), mode="promise_in_bounds")
    return counters.reshape(_COUNTERS, copies).sum(1, dtype=jnp.uint32)


def _reduced(maxima: Sequence[jax.Array], counts: Sequence[jax.Array], sums: Sequence[jax.Array]) -> Any:
    """The largest, the counts and the sums of vectors, in one pass.

    What each addition of a float rounds away is summed, too (Knuth's TwoSum): one that a million numbers are added to
    would lose the last of them.
    """
    first, then = len(maxima), len(maxima) + len(counts)

    def added(one: Any, low: Any, other: Any, other_low: Any) -> tuple[Any, Any]:
        total = one + other
        part = total - one
        return total, low + other_low + ((one - (total - part)) + (other - part))

    def combined(one: Any, other: Any) -> tuple[Any, ...]:
        large = (jnp.maximum(*pair) for pair in zip(one[:first], other[:first], strict=True))
        count = (a + b for a, b in zip(one[first:then], other[first:then], strict=True))
        pairs = (added(*one[n : n + 2], *other[n : n + 2]) for n in range(then, len(one), 2))
        return *large, *count, *itertools.chain.from_iterable(pairs)

    operands = (*maxima, *counts, *(each for x in sums for each in (x, jnp.zeros_like(x))))
    out = lax.reduce(operands, tuple(jnp.zeros((), x.dtype) for x in operands), combined, (0,))
    return out[:first], out[first:then], [out[n] + out[n + 1] for n in range(then, len(out), 2)]


def _magnitude(x: jax.Array) -> jax.Array:
    """The bits of ``|x|`` as a float32: read, not computed, for devices flush subnormals and keep excess precision."""
    if x.dtype == jnp.float32:
        bits = lax.bitcast_convert_type(x, jnp.uint32)
    elif x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    elif x.dtype == jnp.float16:
        half = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) & 0x7FFF
        below = lax.bitcast_convert_type(half.astype(jnp.float32), jnp.uint32) - (24 << _MANTISSA)
        normal = (half << 13) + jnp.where(half >= 0x7C00, 224 << _MANTISSA, 112 << _MANTISSA).astype(jnp.uint32)
        bits = jnp.where(half >= 0x400, normal, jnp.where(half == 0, 0, below))
    else:
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return bits & 0x7FFFFFFF


def _parts(magnitude: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Binary exponents, int32, and the 23 bits of the mantissas behind the leading one; of 0 those of 2^-150."""
    leading = lax.clz(magnitude)
    below = magnitude < 1 << _MANTISSA
    fraction = jnp.where(below, magnitude << (leading - 8), magnitude) & ((1 << _MANTISSA) - 1)
    exponent = jnp.where(below, -118 - leading.astype(jnp.int32), (magnitude >> _MANTISSA).astype(jnp.int32) - 127)
    return exponent, fraction


def packed(it: Record, *more: jax.Array) -> jax.Array:
    """A record, and what :func:`moved` says, as a float32 vector, which a cotangent can be; each number is exact."""
    counts, floats = [it.counters, it.limits, *more[:1]], [it.mean[..., None], *more[1:]]
    whole = jnp.concatenate(counts, -1)
    parts = (whole & ((1 << _SPLIT) - 1), whole >> _SPLIT)
    return jnp.concatenate([*(part.astype(jnp.float32) for part in parts), *floats], -1)


def unpacked(vector: np.ndarray) -> tuple[Any, ...]:
    """The arguments of :func:`packed`, of such vectors on the host, with the axes before the last."""
    size = (vector.shape[-1] - (1 if vector.shape[-1] == SIZE else 3)) // 2
    low, high, floats = np.split(vector, [size, 2 * size], axis=-1)
    whole = low.astype(np.uint32) + (high.astype(np.uint32) << _SPLIT)
    counters, limits, more = np.split(whole, [_COUNTERS, _COUNTERS + 2], axis=-1)
    return Record(counters, limits, floats[..., 0]), more, floats[..., 1:]  # type: ignore[arg-type]


@jax.jit
def moved(update: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How far updates move their weights.

    Returns:
      How many are below half the distance of their weight to the next number, uint32, by the order of ``NAMES``: the
      weight is rounded to each format first; where it overflows nothing is lost. The norms of update and weight.
    """
    update, weight = update.reshape(-1), weight.reshape(-1)
    step, (size, fraction) = _magnitude(update), _parts(_magnitude(weight))
    exponent = jnp.where(step == 0, -1000, _parts(step)[0])
    finite = (step < _INFINITE) & (size < 128)
    lost = []
    for name in dtypes.NAMES:
        layout = _layout(name)
        border = _start_of_ones(layout.mantissa_bits + 1)
        rounded = size + (fraction >= border).astype(jnp.int32) if border is not None else size
        ulp = jnp.maximum(rounded, layout.min_exponent) - layout.mantissa_bits
        fits = (size < layout.max_exponent) | ((size == layout.max_exponent) & (fraction < layout.overflow))
        lost.append((finite & fits & (exponent < ulp - 1)).astype(jnp.uint32))
    squares = [jnp.square(each.astype(jnp.float32)) for each in (update, weight)]
    _, counts, sums = _reduced((), lost, squares)
    return jnp.stack(counts), jnp.sqrt(jnp.stack(sums))


class _Layout(NamedTuple):
    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    overflow: int  # the fraction from which on a number of the largest exponent overflows


@functools.cache
def _layout(name: str) -> _Layout:
    form = formats.format_of(name)
    top = _start_of_ones(form.mantissa_bits + 1) or 1 << _MANTISSA
    overflow = top if form.has_infinity else _ABOVE_E4M3
    return _Layout(form.mantissa_bits, form.min_exponent, form.max_exponent, overflow)


def _start_of_ones(count: int) -> int | None:
    """The smallest mantissa that begins with so many ones; None if a float32 has not so many."""
    return round((1 - 2.0**-count) * 2**_MANTISSA) if count <= _MANTISSA else None


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What the values of a tensor are; counts are exact.

    Attributes:
      count: how many values.
      zeros: how many are 0.
      below_normal: how many are subnormal in the dtype, with fewer digits therefore.
      vanished: how many were not 0 and are 0 in the dtype; none in the dtype that they were computed in, whose zeros
        all look alike.
      overflow: how many are infinite or NaN.
      amax: the largest finite magnitude; 0 if there is none.
      amin: the smallest magnitude that is not 0; 0 if there is none.
      mean_abs: of the finite magnitudes, float32; 0 if there is none.
      histogram: how many finite values have ``floor(log2|x|)``, by it; what is 0 is in none.
      ratio: of updates, their norm over that of their weight; else None.
      dtype: the dtype of the counts.
      by_turn: inside of loops, the statistics of each turn, those of nested loops in the order in which they run;
        else None.
    """

    count: int
    zeros: int
    below_normal: int
    vanished: int
    overflow: int
    amax: float
    amin: float
    mean_abs: float
    histogram: Mapping[int, int]
    ratio: float | None = None
    dtype: str = "float32"
    by_turn: tuple[Statistics, ...] | None = None
    _fine: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((0, _CLASSES), np.int64), repr=False, compare=False
    )  # by exponent and mantissa
    _first: int = dataclasses.field(default=_LOWEST, repr=False, compare=False)  # the exponent of its first row
    _lost: Mapping[str, int] | None = dataclasses.field(default=None, repr=False, compare=False)

    def under(self, dtype: Any, loss_scale: float = 1.0) -> Statistics:
        """What becomes of the values times ``loss_scale`` in another dtype, rounded to nearest, ties to even.

        The counts are those of the rounded values, exactly: ``zeros`` were 0 before, ``vanished`` became 0, and
        ``overflow`` were not finite or are not any more. ``amax``, ``amin``, ``mean_abs`` and ``histogram`` are those
        of the products before they are rounded.

        Args:
          dtype: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2, or another name of these.
          loss_scale: a power of two.

        Raises:
          ValueError: another dtype, or no power of two.

        >>> from jaxmp.inspect.program.statistics import statistics_of
        >>> gradients = statistics_of(jnp.float32([1e-8, 2.0**-25, 1e-3, 0]))
        >>> gradients.under("float16").vanished, gradients.under("float16", 8).vanished
        (2, 0)
        """
        own, shift = _name(dtype), exponent_of(loss_scale)
        first = self._first + shift
        vanished, below, beyond = _fates(own, first, len(self._fine))
        sizes: dict[str, Any] = {name: math.ldexp(getattr(self, name), shift) for name in ("amax", "amin", "mean_abs")}
        not_finite = self.count - self.zeros - int(self._fine.sum())
        return dataclasses.replace(
            self,
            below_normal=int(self._fine[below].sum()),
            vanished=int(self._fine[vanished].sum()),
            overflow=not_finite + int(self._fine[beyond].sum()),
            **sizes,
            histogram={exponent + shift: count for exponent, count in self.histogram.items()},
            dtype=own,
            by_turn=self.by_turn and tuple(each.under(dtype, loss_scale) for each in self.by_turn),
            _first=first,
        )

    def lost(self, dtype: Any) -> int:
        """How many updates are below half an ulp of their weight in ``dtype``: added there, they change nothing.

        The ulp is the distance from the weight, rounded to the dtype, to the next larger number. An update of 0 is
        below it, too.

        Raises:
          ValueError: these are no updates, or another dtype than those of :meth:`under`.
        """
        if self._lost is None:
            raise ValueError("only updates can be lost on their weights: ask Numerics.updates, with tx given")
        return self._lost[_name(dtype)]


@functools.lru_cache(4096)
def _fates(name: str, first: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which counts of so many exponents from ``first`` on vanish, become subnormal, and overflow in a format."""
    layout = _layout(name)
    smallest = layout.min_exponent - layout.mantissa_bits
    exponents, starts = np.arange(first, first + rows)[:, None], np.array(_STARTS)
    vanished = (exponents < smallest - 1) | ((exponents == smallest - 1) & (starts == 0))
    up = _start_of_ones(layout.mantissa_bits)
    normal = (exponents >= layout.min_exponent) | (
        (exponents == layout.min_exponent - 1) & (starts >= (1 << _MANTISSA if up is None else up))
    )
    beyond = (exponents > layout.max_exponent) | ((exponents == layout.max_exponent) & (starts >= layout.overflow))
    return vanished, ~vanished & ~normal, beyond


def _name(dtype: Any) -> str:
    try:
        name = dtypes.canonical_dtype(dtype).name
    except dtypes.UnknownDtypeError:
        raise
    except ValueError:  # integers; its text is of policies
        name = np.dtype(dtype).name
    if name not in dtypes.NAMES[1:]:
        raise ValueError(f"values are counted for {', '.join(dtypes.NAMES[1:])}, got {name}; take one of these")
    return name


def exponent_of(loss_scale: Any) -> int:
    """The binary logarithm of a loss scale.

    Raises:
      ValueError: it is no power of two.
    """
    scale = float(loss_scale)
    fraction, exponent = math.frexp(scale)
    if fraction != 0.5:
        raise ValueError(
            f"a loss scale is a power of two here, so that it moves exponents and rounds nothing, got {scale:g}; take "
            f"{2.0 ** round(math.log2(scale)) if 0 < scale < math.inf else 1.0:g}"
        )
    return exponent - 1


def statistics_of(x: Any) -> Statistics:
    """The statistics of one floating array."""
    x = jnp.asarray(x)
    return from_record(jax.device_get(record(x)), x.dtype, x.size, 0)


def from_record(it: Record, dtype: Any, size: int, scale_exponent: int, turns: Sequence[int] = ()) -> Statistics:
    """The statistics of values that have been multiplied by a power of two, without it.

    Args:
      it: of the values as they were, on the host; of loops with an axis for each before its own.
      dtype: the values'.
      size: how many values each record is of.
      scale_exponent: the binary logarithm of what the values were multiplied by.
      turns: of the loops around.
    """
    if turns:
        flat = (np.reshape(part, (-1, *np.shape(part)[len(turns) :])) for part in it)
        each = tuple(from_record(Record(*one), dtype, size, scale_exponent) for one in zip(*flat, strict=True))
        return dataclasses.replace(merged(each), by_turn=each)
    counters = np.asarray(it.counters).astype(np.int64)
    fine = counters[:_BINS].reshape(_EXPONENTS, _CLASSES)
    sums = fine.sum(1)
    finite = int(sums.sum()) + int(counters[_ZERO])
    rows = np.flatnonzero(sums)
    first, stop = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    largest, inverted = (int(limit) for limit in it.limits)
    amax, amin = (_float(largest), _float(~inverted & 0xFFFFFFFF) if inverted else 0.0)
    mean = float(it.mean) * size / finite if finite else 0.0
    name = np.dtype(dtype).name
    name = name if name in dtypes.NAMES[1:] else "float32"
    return Statistics(
        count=int(counters.sum()),
        zeros=int(counters[_ZERO]),
        below_normal=int(fine[first:stop][_fates(name, first + _LOWEST, stop - first)[1]].sum()),
        vanished=0,
        overflow=int(counters[_NOT_FINITE]),
        amax=math.ldexp(amax, -scale_exponent),
        amin=math.ldexp(amin, -scale_exponent),
        mean_abs=math.ldexp(mean, -scale_exponent),
        histogram={
            row + _LOWEST - scale_exponent: count for row, count in zip(rows.tolist(), sums[rows].tolist(), strict=True)
        },
        dtype=name,
        _fine=fine[first:stop],
        _first=first + _LOWEST - scale_exponent,
    )


def _float(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def merged(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of several tensors together; by turn if all have the same turns."""
    if len(parts) == 1:
        return parts[0]
    first = min(part._first for part in parts)
    fine = np.zeros((max(part._first + len(part._fine) for part in parts) - first, _CLASSES), np.int64)
    histogram: dict[int, int] = {}
    for part in parts:
        fine[part._first - first :][: len(part._fine)] += part._fine
        for exponent, count in part.histogram.items():
            histogram[exponent] = histogram.get(exponent, 0) + count
    finite = [sum(part.histogram.values()) + part.zeros for part in parts]
    weights = [count / max(sum(finite), 1) for count in finite]
    turns = [part.by_turn for part in parts if part.by_turn is not None]
    alike = len(turns) == len(parts) and len({len(each) for each in turns}) == 1
    return dataclasses.replace(
        parts[0],
        **{
            name: sum(getattr(part, name) for part in parts)
            for name in ("count", "zeros", "below_normal", "vanished", "overflow")
        },
        amax=max(part.amax for part in parts),
        amin=min((part.amin for part in parts if part.amin), default=0.0),
        mean_abs=sum(part.mean_abs * weight for part, weight in zip(parts, weights, strict=True)),
        histogram=dict(sorted(histogram.items())),
        by_turn=tuple(merged(each) for each in zip(*turns, strict=True)) if alike else None,
        _fine=fine,
        _first=first,
    )
