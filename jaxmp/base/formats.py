"""The table of floating-point formats."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp.base import dtypes


@dataclasses.dataclass(frozen=True)
class Format:
    """A floating-point format, and the numbers that it can represent.

    Attributes:
      name: the dtype's name.
      bits: width of a number, including the sign bit.
      exponent_bits: width of the exponent field.
      mantissa_bits: stored bits of the significand; a normal number has one more, which is always 1.
      bias: the number that is subtracted from the exponent field.
      min_exponent: binary exponent of the smallest normal number.
      max_exponent: binary exponent of the largest finite number.
      digits: decimal digits of a normal number, ``(mantissa_bits + 1) * log10(2)``.
      largest: the largest finite number.
      smallest_normal: the smallest positive number of full precision.
      smallest_subnormal: the smallest positive number.
      eps: the distance from 1 to the next larger number.
      has_infinity: whether overflow can give an infinity.
      has_nan: whether there is a NaN.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    min_exponent: int
    max_exponent: int
    digits: float
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float
    has_infinity: bool
    has_nan: bool


def formats() -> tuple[Format, ...]:
    """Return every number format that jaxmp knows, the widest first.

    TensorFloat-32 is included, although it is not a dtype.

    >>> {row.name: row.largest for row in jaxmp.base.formats.formats()}["float16"]
    65504.0
    """
    rows = [format_of(getattr(jnp, name)) for name in dtypes.NAMES]
    # NVIDIA A100 architecture whitepaper (2020): the range of float32, the precision of float16
    rows.append(ieee_format("tensorfloat32", exponent_bits=8, mantissa_bits=10))
    return tuple(sorted(rows, key=lambda row: (-row.bits, -row.exponent_bits, -row.mantissa_bits)))


def format_of(dtype: np.typing.DTypeLike) -> Format:
    """Return the format of a floating dtype, from its ``finfo``.

    Raises:
      ValueError: not a floating dtype, or one without a sign bit on top (float8_e8m0fnu, float4_e2m1fn).

    >>> jaxmp.base.formats.format_of("float16").smallest_subnormal
    5.960464477539063e-08
    """
    dtype = dtypes.canonical_dtype(dtype)
    info = jnp.finfo(dtype)
    if info.bits != 8 * dtype.itemsize or float(info.min) != -float(info.max):
        raise ValueError(
            f"format_of needs a format of whole bytes with a sign bit on top, got {dtype.name}; formats() has "
            f"{', '.join(dtypes.NAMES)}"
        )
    return _format(
        dtype.name,
        info.nexp,
        info.nmant,
        bias=1 - int(info.minexp),
        largest=float(info.max),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        eps=float(info.eps),
        has_infinity=math.isinf(np.array(math.inf, dtype)),
        has_nan=math.isnan(np.array(math.nan, dtype)),
    )


def ieee_format(name: str, exponent_bits: int, mantissa_bits: int) -> Format:
    """Return the format of a layout under IEEE 754.

    IEEE 754 reserves the top exponent for infinity and NaN.

    >>> jaxmp.base.formats.ieee_format("binary16", 5, 10).largest
    65504.0
    """
    bias = 2 ** (exponent_bits - 1) - 1
    return _format(
        name,
        exponent_bits,
        mantissa_bits,
        bias=bias,
        largest=math.ldexp(2.0 - 2.0**-mantissa_bits, bias),
        smallest_normal=math.ldexp(1.0, 1 - bias),
        smallest_subnormal=math.ldexp(1.0, 1 - bias - mantissa_bits),
        eps=math.ldexp(1.0, -mantissa_bits),
        has_infinity=True,
        has_nan=True,
    )


def _format(name: str, exponent_bits: int, mantissa_bits: int, **measured: Any) -> Format:
    """Return a format, with the fields that follow from the others filled in."""
    return Format(
        name=name,
        bits=1 + exponent_bits + mantissa_bits,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        min_exponent=round(math.log2(measured["smallest_normal"])),
        max_exponent=math.frexp(measured["largest"])[1] - 1,
        digits=(mantissa_bits + 1) * math.log10(2.0),
        **measured,
    )
