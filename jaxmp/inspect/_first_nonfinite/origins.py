"""Find the origin of infinities and NaNs in the results of one operation.

The origin tells whether the operation computes an infinity or NaN from finite operands, or which operands already have
one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxmp.inspect.program.calls import is_inexact
from jaxmp.program.primitives import SINGULAR, Class, Trait, of_class, with_trait

_ELEMENTWISE = with_trait(Trait.ELEMENTWISE)
_OVERFLOWS_TO_NAN = of_class(Class.HALF, Class.ACCUMULATION) | with_trait(Trait.CASTS) | {"fft"}
"""Operations whose overflow may give NaN: they add inf and -inf, or return a dtype without infinities."""


@dataclass(frozen=True)
class Range:
    """The dtype, shape and values of an operand.

    Attributes:
      dtype: the name of the dtype.
      shape: the shape.
      low: the smallest value, or the smallest magnitude of a complex operand. NaN elements are ignored. If all elements
        are NaN, it is NaN.
      high: the largest value or magnitude.
      nans: the number of NaN elements.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    nans: int

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if np.isnan(self.low):
            return f"{text} of NaN"
        text += f" in [{self.low:.4g}, {self.high:.4g}]"
        return f"{text} and {self.nans:,} NaN" if self.nans else text


class Origin(NamedTuple):
    """The origin of the infinities and NaNs in an operation's results.

    The operands and results of an elementwise operation are compared element by element. For any other operation, one
    infinite or NaN element counts for the whole array.

    Attributes:
      through: for each operand, whether the operand and a result are both infinite or NaN at the same element. If the
        operation is not elementwise, the elements may be different.
      is_born: whether finite operands gave an infinity or NaN.
      is_nan: whether finite operands gave NaN.
      is_pole: whether finite operands at a pole of the function gave an infinity or NaN.
      makes_nan: whether finite or infinite operands without NaN gave NaN.
      ranges: the ranges of the operands.
    """

    through: list[bool]
    is_born: bool
    is_nan: bool
    is_pole: bool
    makes_nan: bool
    ranges: tuple[Range, ...]


def origin_of(name: str, operands: Sequence[Any], results: Sequence[Any]) -> Origin:
    """Return the origin of the infinities and NaNs in an operation's results.

    NumPy computes the origin, because compiling with XLA would take longer.

    Args:
      name: the name of the operation's primitive.
      operands: JAX or NumPy arrays.
      results: JAX or NumPy arrays.
    """
    operands = [on_host(operand) for operand in operands]
    results = [on_host(result) for result in results]
    bad_operands = [where_not_finite(operand) for operand in operands]
    nan_operands = [where_nan(operand) for operand in operands]
    if name in _ELEMENTWISE:
        bad, nan = where_not_finite(results[0]), where_nan(results[0])
    else:
        bad = np.any([where_not_finite(result).any() for result in results])
        nan = np.any([where_nan(result).any() for result in results])
        bad_operands = [mask.any() for mask in bad_operands]
        nan_operands = [mask.any() for mask in nan_operands]
    if name == "select_n":
        for case in range(len(operands) - 1):
            is_chosen = operands[0] == case
            bad_operands[case + 1] &= is_chosen
            nan_operands[case + 1] &= is_chosen
    born = bad & ~_union(bad_operands)
    return Origin(
        through=[bool(np.any(bad & operand)) for operand in bad_operands],
        is_born=bool(np.any(born)),
        is_nan=bool(np.any(born & nan)),
        is_pole=bool(np.any(born & _is_at_pole(name, operands))),
        makes_nan=bool(np.any(nan & ~_union(nan_operands))),
        ranges=ranges_of(operands),
    )


def _is_at_pole(name: str, operands: Sequence[Any]) -> Any:
    """Return where the operands of a function are at one of its poles."""
    if name == "log1p":
        return operands[0] == -1
    return operands[SINGULAR[name]] == 0 if name in SINGULAR else np.False_


def failure_kind(name: str, origin: Origin) -> str:
    """Return the kind of a failure: "overflow", "division by zero" or "invalid"."""
    if not origin.is_born or (origin.is_nan and name not in _OVERFLOWS_TO_NAN):
        return "invalid"
    return "division by zero" if origin.is_pole else "overflow"


def on_host(value: Any) -> Any:
    """Return a value as a NumPy array; return a random key unchanged."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = process_allgather(value, tiled=True)
    return np.asarray(value)


def where_not_finite(value: Any) -> Any:
    """Return a mask of the infinite and NaN elements of a NumPy array."""
    return ~np.isfinite(value) if is_inexact(value) else np.False_


def where_nan(value: Any) -> Any:
    """Return a mask of the NaN elements of a NumPy array."""
    return np.isnan(value) if is_inexact(value) else np.False_


def ranges_of(operands: Sequence[Any]) -> tuple[Range, ...]:
    """Return the ranges of NumPy arrays, without empty and non-numeric arrays."""
    ranges = []
    for operand in operands:
        if not jnp.issubdtype(operand.dtype, jnp.number) or not operand.size:
            continue
        numbers = np.abs(operand) if np.iscomplexobj(operand) else np.asarray(operand, np.float64)
        is_known = ~np.isnan(numbers)
        nans = int(numbers.size - is_known.sum())
        low = numbers.min(where=is_known, initial=np.inf) if is_known.any() else np.nan
        high = numbers.max(where=is_known, initial=-np.inf) if is_known.any() else np.nan
        ranges.append(Range(str(operand.dtype), operand.shape, float(low), float(high), nans))
    return tuple(ranges)


def _union(masks: Sequence[Any]) -> Any:
    return functools.reduce(np.logical_or, masks, np.False_)
