"""``jaxmp formats``."""

from __future__ import annotations

import argparse
import dataclasses

from jaxmp.cli.flags import Arguments
from jaxmp.cli.printing import print_columns, print_json

ARGUMENTS: Arguments = {}


def run(options: argparse.Namespace) -> int:
    """Show the bits, range, precision and special values of floating-point formats.

    The numbers are those of the dtype's finfo. tensorfloat32 is not a dtype, but the form in which tensor
    cores read float32 operands. Its column is computed from its layout: 1 sign, 8 exponent and 10 mantissa bits.
    """
    from jaxmp.base.formats import formats as rows

    if options.json:
        print_json([dataclasses.asdict(row) for row in rows()])
        return 0
    columns = [
        {
            "": row.name,
            "bits": str(row.bits),
            "exponent bits": str(row.exponent_bits),
            "mantissa bits": str(row.mantissa_bits),
            "bias": str(row.bias),
            "exponents": f"{row.min_exponent} to {row.max_exponent}",
            "decimal digits": f"{row.digits:.1f}",
            "largest": _number(row.largest),
            "smallest normal": _number(row.smallest_normal),
            "smallest subnormal": _number(row.smallest_subnormal),
            "spacing at 1": _number(row.eps),
            "infinities": "yes" if row.has_infinity else "no",
            "NaN": "yes" if row.has_nan else "no",
        }
        for row in rows()
    ]
    print_columns(columns)
    print("\ntensorfloat32 is not a dtype: its column is computed from its layout.")
    return 0


def _number(value: float) -> str:
    """Return ``value`` in full if that is short, else with three significant digits."""
    text = f"{value:.0f}" if value.is_integer() and value < 1e6 else repr(value)
    return text if len(text) <= 9 else f"{value:.2e}"
