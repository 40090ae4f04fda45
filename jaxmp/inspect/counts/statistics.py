"""Statistics of the values of tensors, for any format and loss scale."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base import dtypes
from jaxmp.inspect.counts.counting import (
    BINS,
    CLASSES,
    EXPONENTS,
    LOWEST,
    MANTISSA,
    NOT_FINITE,
    STARTS,
    ZERO,
    Counts,
    counts_of,
    layout_of,
    number_of_values,
    start_of_ones,
)

_NAMES = dtypes.NAMES[1:]
"""The dtypes for which values are counted."""


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Exact counts of the values of a tensor, and their magnitudes.

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
    _fine: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((0, CLASSES), np.int64), repr=False, compare=False
    )  # counts by exponent and mantissa
    _first: int = dataclasses.field(default=LOWEST, repr=False, compare=False)  # the exponent of the first row of _fine
    _lost: Mapping[str, int] | None = dataclasses.field(default=None, repr=False, compare=False)

    def under(self, dtype: Any, loss_scale: float = 1.0) -> Statistics:
        """Return the statistics of the values times ``loss_scale``, in another dtype.

        Values are rounded to nearest, ties to even, and the counts are exact. ``zeros`` counts values that were
        already 0. ``vanished`` counts values that become 0. ``overflow`` counts values that are not finite after
        rounding. ``amax``, ``amin``, ``mean_abs`` and ``histogram`` describe the scaled values before rounding.

        Args:
          dtype: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2, or an alias of these.
          loss_scale: a power of two.

        Raises:
          ValueError: the dtype is unknown, or the loss scale is not a power of two.

        >>> from jaxmp.inspect.counts.statistics import statistics_of
        >>> gradients = statistics_of(jnp.float32([1e-8, 2.0**-25, 1e-3, 0]))
        >>> gradients.under("float16").vanished, gradients.under("float16", 8).vanished
        (2, 0)
        """
        name, shift = dtypes.dtype_among("dtype", dtype, _NAMES), exponent_of(loss_scale)
        first = self._first + shift
        fates = _fates(name, first, len(self._fine))
        not_finite = self.count - self.zeros - int(self._fine.sum())
        return dataclasses.replace(
            self,
            below_normal=int(self._fine[fates.subnormal].sum()),
            vanished=int(self._fine[fates.vanished].sum()),
            overflow=not_finite + int(self._fine[fates.overflow].sum()),
            amax=math.ldexp(self.amax, shift),
            amin=math.ldexp(self.amin, shift),
            mean_abs=math.ldexp(self.mean_abs, shift),
            histogram={exponent + shift: count for exponent, count in self.histogram.items()},
            dtype=name,
            by_turn=self.by_turn and tuple(turn.under(dtype, loss_scale) for turn in self.by_turn),
            _first=first,
        )

    def lost(self, dtype: Any) -> int:
        """Return how many updates are less than 0.5 ulp of their weight in ``dtype``.

        If the new weight is computed in ``dtype``, such an update does not change the weight. To compute an ulp, the
        weight is rounded to ``dtype``. The ulp is the distance from the rounded weight to the next larger number in
        ``dtype``. Updates of 0 are included.

        Raises:
          ValueError: the values are not updates, or :meth:`under` does not accept ``dtype``.
        """
        if self._lost is None:
            raise ValueError(
                "lost() is for updates, and these are not updates; use the updates of numerics(loss_fn, tx=optimizer)"
            )
        return self._lost[dtypes.dtype_among("dtype", dtype, _NAMES)]


class _Fates(NamedTuple):
    """The values that vanish, become subnormal, or overflow in a format.

    The rows of each boolean array are exponents. The columns are the ranges of mantissas that start at ``STARTS``.
    """

    vanished: np.ndarray
    subnormal: np.ndarray
    overflow: np.ndarray


@functools.lru_cache(4096)
def _fates(name: str, first: int, rows: int) -> _Fates:
    """Return the fates of values at ``rows`` exponents, from ``first`` on."""
    layout = layout_of(name)
    smallest = layout.min_exponent - layout.mantissa_bits
    exponents, starts = np.arange(first, first + rows)[:, None], np.array(STARTS)
    vanished = (exponents < smallest - 1) | ((exponents == smallest - 1) & (starts == 0))
    up = start_of_ones(layout.mantissa_bits)
    rounds_up = (exponents == layout.min_exponent - 1) & (starts >= (1 << MANTISSA if up is None else up))
    normal = (exponents >= layout.min_exponent) | rounds_up
    beyond = (exponents > layout.max_exponent) | ((exponents == layout.max_exponent) & (starts >= layout.overflow))
    return _Fates(vanished, ~vanished & ~normal, beyond)


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
    fine = counters[:BINS].reshape(EXPONENTS, CLASSES)
    sums = fine.sum(1)
    finite = int(sums.sum()) + int(counters[ZERO])
    rows = np.flatnonzero(sums)
    first, stop = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    largest, inverted = (int(limit) for limit in counts.limits)
    smallest = _float(~inverted & 0xFFFFFFFF) if inverted else 0.0
    mean = float(counts.mean) * size / finite if finite else 0.0
    name = np.dtype(dtype).name
    name = name if name in _NAMES else "float32"
    return Statistics(
        count=int(counters.sum()),
        zeros=int(counters[ZERO]),
        below_normal=int(fine[first:stop][_fates(name, first + LOWEST, stop - first).subnormal].sum()),
        vanished=0,
        overflow=int(counters[NOT_FINITE]),
        amax=math.ldexp(_float(largest), -scale_exponent),
        amin=math.ldexp(smallest, -scale_exponent),
        mean_abs=math.ldexp(mean, -scale_exponent),
        histogram={int(row) + LOWEST - scale_exponent: int(sums[row]) for row in rows},
        dtype=name,
        _fine=fine[first:stop],
        _first=first + LOWEST - scale_exponent,
    )


def _float(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def merged_statistics(parts: Sequence[Statistics]) -> Statistics:
    """Merge the statistics of several tensors.

    If all parts have the same number of iterations, they are also merged iteration by iteration.
    """
    if len(parts) == 1:
        return parts[0]
    first = min(part._first for part in parts)
    fine = np.zeros((max(part._first + len(part._fine) for part in parts) - first, CLASSES), np.int64)
    histogram: dict[int, int] = {}
    for part in parts:
        fine[part._first - first :][: len(part._fine)] += part._fine
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
        _fine=fine,
        _first=first,
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
