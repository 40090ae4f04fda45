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
      bits: the width of a number in bits, including the sign bit.
      exponent_bits: the width of the exponent field.
      mantissa_bits: the number of stored bits of the significand. The significand of a normal number has one more bit,
        which is always 1 and is not stored.
      bias: the number that is subtracted from the exponent field.
      min_exponent: the binary exponent of the smallest normal number.
      max_exponent: the binary exponent of the largest finite number.
      digits: the number of decimal digits of a normal number, ``(mantissa_bits + 1) * log10(2)``.
      largest: the largest finite number.
      smallest_normal: the smallest positive number that has full precision.
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
    # TensorFloat-32 has the range of float32 and the precision of float16 (NVIDIA A100 architecture whitepaper, 2020).
    rows.append(ieee_format("tensorfloat32", exponent_bits=8, mantissa_bits=10))
    return tuple(sorted(rows, key=lambda row: (-row.bits, -row.exponent_bits, -row.mantissa_bits)))


def format_of(dtype: np.typing.DTypeLike) -> Format:
    """Return the format of a floating dtype, from its ``finfo``.

    Raises:
      ValueError: the dtype is not floating, has no sign bit (float8_e8m0fnu), or does not fill whole bytes
        (float4_e2m1fn).

    >>> jaxmp.base.formats.format_of("float16").smallest_subnormal
    5.960464477539063e-08
    """
    dtype = dtypes.canonical_dtype(dtype)
    info = jnp.finfo(dtype)
    if info.bits != 8 * dtype.itemsize or float(info.min) != -float(info.max):
        raise ValueError(
            f"format_of needs a dtype of whole bytes with a sign bit, got {dtype.name}; formats() has "
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
    """Return the format that IEEE 754 defines for these numbers of bits.

    In an IEEE 754 format, the largest exponent field means infinity or NaN.

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
    """Return a format; compute the remaining fields from the arguments."""
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
