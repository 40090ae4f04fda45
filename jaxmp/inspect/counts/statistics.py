"""Statistics of the values of tensors, for any format and loss scale."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base import dtypes, formats
from jaxmp.inspect.counts.counting import EXPONENTS, LOWEST, NOT_FINITE, ZERO, Counts, counts_of, number_of_values

_NAMES = dtypes.NAMES[1:]
"""The dtypes for which values are counted."""


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts of the values of a tensor by magnitude.

    The counts come from one counter for each binary exponent. They leave out what rounding does at the borders of a
    format, so a count may be wrong by 0.1 to 0.8 % of the values next to a border in float16 and bfloat16.
    float8_e4m3fn overflows above 464, but only values from 512 on are counted. If the largest value overflows, the
    count is at least 1.

    A complex tensor has two values for each element: the real and the imaginary part.

    Attributes:
      count: the number of values.
      zeros: the number of zeros.
      below_normal: the number of values that are subnormal in ``dtype``, and so have fewer digits.
      vanished: the number of nonzero values that become 0 in ``dtype``. The number is always 0 in the dtype of the
        computation, because such values are already zeros.
      overflow: the number of infinite and NaN values.
      amax: the largest finite magnitude; 0 if there is none.
      amin: the smallest nonzero magnitude; 0 if there is none.
      mean_abs: the mean of the finite magnitudes, in float32; 0 if there is none.
      histogram: the number of finite nonzero values by ``floor(log2|x|)``.
      ratio: for updates, the norm of the update divided by the norm of its weight; else None.
      dtype: the dtype for which the values are counted.
      by_turn: in loops, the statistics of each iteration, in execution order; else None.
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
    _lost: Mapping[str, int] | None = dataclasses.field(default=None, repr=False, compare=False)

    def under(self, dtype: Any, loss_scale: float = 1.0) -> Statistics:
        """Return the statistics of the values times ``loss_scale``, in another dtype.

        ``zeros`` counts values that were already 0. ``vanished`` counts values that become 0. ``overflow`` counts
        values that are not finite in the dtype. ``amax``, ``amin``, ``mean_abs`` and ``histogram`` describe the scaled
        values before rounding.

        Args:
          dtype: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2, or an alias of these.
          loss_scale: a power of two.

        Raises:
          ValueError: the dtype is unknown, or the loss scale is not a power of two.

        >>> from jaxmp.inspect.counts.statistics import statistics_of
        >>> gradients = statistics_of(jnp.float32([1e-8, 2.0**-26, 1e-3, 0]))
        >>> gradients.under("float16").vanished, gradients.under("float16", 8).vanished
        (2, 0)
        """
        name, shift = dtypes.dtype_among("dtype", dtype, _NAMES), exponent_of(loss_scale)
        histogram = {exponent + shift: count for exponent, count in self.histogram.items()}
        amax = math.ldexp(self.amax, shift)
        vanished, below_normal, overflow = _lost_in(name, histogram, amax)
        return dataclasses.replace(
            self,
            below_normal=below_normal,
            vanished=vanished,
            overflow=self.count - self.zeros - sum(histogram.values()) + overflow,
            amax=amax,
            amin=math.ldexp(self.amin, shift),
            mean_abs=math.ldexp(self.mean_abs, shift),
            histogram=histogram,
            dtype=name,
            by_turn=self.by_turn and tuple(turn.under(dtype, loss_scale) for turn in self.by_turn),
        )

    def lost(self, dtype: Any) -> int:
        """Return how many updates are less than 0.5 ulp of their weight in ``dtype``.

        If the new weight is computed in ``dtype``, such an update does not change the weight. The ulp is the distance
        from the weight to the next larger number in ``dtype``. Updates of 0 are included.

        Raises:
          ValueError: the values are not updates, or :meth:`under` does not accept ``dtype``.
        """
        if self._lost is None:
            raise ValueError(
                "lost() is for updates, and these are not updates; use the updates of numerics(loss_fn, tx=optimizer)"
            )
        return self._lost[dtypes.dtype_among("dtype", dtype, _NAMES)]


_format_of = functools.cache(formats.format_of)


def _lost_in(name: str, histogram: Mapping[int, int], amax: float) -> tuple[int, int, int]:
    """Return how many finite nonzero values vanish, become subnormal, and overflow in a format."""
    form = _format_of(name)
    smallest = form.min_exponent - form.mantissa_bits
    # Numbers above half of the smallest number are rounded up to it.
    vanished = sum(count for exponent, count in histogram.items() if exponent < smallest - 1)
    tiny = sum(count for exponent, count in histogram.items() if exponent < form.min_exponent)
    beyond = sum(count for exponent, count in histogram.items() if exponent > form.max_exponent)
    return vanished, tiny - vanished, max(beyond, int(amax > form.largest))


def exponent_of(loss_scale: Any) -> int:
    """Return the binary logarithm of a loss scale.

    Raises:
      ValueError: the loss scale is not a power of two.
    """
    scale = float(loss_scale)
    fraction, exponent = math.frexp(scale)
    if fraction != 0.5:
        raise ValueError(
            f"loss_scale must be a power of two here, so that scaling is exact, got {scale:g}; use "
            f"{2.0 ** round(math.log2(scale)) if 0 < scale < math.inf else 1.0:g}"
        )
    return exponent - 1


def statistics_of(x: Any) -> Statistics:
    """Return the statistics of one floating or complex array."""
    x = jnp.asarray(x)
    return from_record(jax.device_get(counts_of(x)), x.dtype, number_of_values(x), 0)


def from_record(counts: Counts, dtype: Any, size: int, scale_exponent: int, turns: Sequence[int] = ()) -> Statistics:
    """Return the statistics of values from the record of the scaled values.

    The scaled values are the values times a power of two.

    Args:
      counts: the record of the scaled values, on the host, with a leading axis for each loop.
      dtype: the dtype of the values.
      size: the number of values in each record.
      scale_exponent: the binary logarithm of the scale.
      turns: the number of iterations of each loop around the values, outermost first.
    """
    if turns:
        flat = [np.reshape(part, (-1, *np.shape(part)[len(turns) :])) for part in counts]
        by_turn = tuple(from_record(Counts(*parts), dtype, size, scale_exponent) for parts in zip(*flat, strict=True))
        return dataclasses.replace(merged_statistics(by_turn), by_turn=by_turn)
    counters = np.asarray(counts.counters).astype(np.int64)
    (exponents,) = np.nonzero(counters[:EXPONENTS])
    scaled = {int(row) + LOWEST: int(counters[row]) for row in exponents}
    finite = sum(scaled.values()) + int(counters[ZERO])
    largest, inverted = (int(limit) for limit in counts.limits)
    smallest = _float(~inverted & 0xFFFFFFFF) if inverted else 0.0
    mean = float(counts.mean) * size / finite if finite else 0.0
    name = np.dtype(dtype).name
    name = name if name in _NAMES else "float32"
    return Statistics(
        count=int(counters.sum()),
        zeros=int(counters[ZERO]),
        below_normal=_lost_in(name, scaled, 0.0)[1],
        vanished=0,
        overflow=int(counters[NOT_FINITE]),
        amax=math.ldexp(_float(largest), -scale_exponent),
        amin=math.ldexp(smallest, -scale_exponent),
        mean_abs=math.ldexp(mean, -scale_exponent),
        histogram={exponent - scale_exponent: count for exponent, count in scaled.items()},
        dtype=name,
    )


def _float(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def merged_statistics(parts: Sequence[Statistics]) -> Statistics:
    """Merge the statistics of several tensors.

    If all parts have the same number of iterations, they are also merged iteration by iteration.
    """
    if len(parts) == 1:
        return parts[0]
    histogram: dict[int, int] = {}
    for part in parts:
        for exponent, count in part.histogram.items():
            histogram[exponent] = histogram.get(exponent, 0) + count
    return dataclasses.replace(
        parts[0],
        count=sum(part.count for part in parts),
        zeros=sum(part.zeros for part in parts),
        below_normal=sum(part.below_normal for part in parts),
        vanished=sum(part.vanished for part in parts),
        overflow=sum(part.overflow for part in parts),
        amax=max(part.amax for part in parts),
        amin=min((part.amin for part in parts if part.amin), default=0.0),
        mean_abs=_mean_abs(parts),
        histogram=dict(sorted(histogram.items())),
        by_turn=_merged_turns(parts),
    )


def _mean_abs(parts: Sequence[Statistics]) -> float:
    finite = [sum(part.histogram.values()) + part.zeros for part in parts]
    total = max(sum(finite), 1)
    return sum(part.mean_abs * (count / total) for part, count in zip(parts, finite, strict=True))


def _merged_turns(parts: Sequence[Statistics]) -> tuple[Statistics, ...] | None:
    turns = [part.by_turn for part in parts if part.by_turn is not None]
    if len(turns) != len(parts) or len({len(by_turn) for by_turn in turns}) != 1:
        return None
    return tuple(merged_statistics(turn) for turn in zip(*turns, strict=True))
