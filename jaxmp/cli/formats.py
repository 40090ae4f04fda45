"""``jaxmp formats``."""

from __future__ import annotations

import argparse
import dataclasses

from jaxmp.cli.printing import console, print_json, print_rich

_COLUMNS = (
    "format",
    "bits",
    "exponent\nbits",
    "mantissa\nbits",
    "largest",
    "smallest\nnormal",
    "smallest\nsubnormal",
    "spacing\nat 1",
    "inf",
)
"""The headings of the columns, short enough for a table of 80 characters."""


def run(options: argparse.Namespace) -> int:
    """Show the bits, range and precision of floating-point formats.

    The numbers come from the finfo of each dtype. tensorfloat32 is not a dtype, but the form in which tensor cores
    read float32 operands. Its row is computed from its layout: 1 sign, 8 exponent and 10 mantissa bits. --json also
    prints the bias, the exponents and the decimal digits.
    """
    from jaxmp.base import tables
    from jaxmp.base.formats import formats

    if options.json:
        print_json([dataclasses.asdict(row) for row in formats()])
        return 0
    rows = [
        (
            row.name,
            row.bits,
            row.exponent_bits,
            row.mantissa_bits,
            _number(row.largest),
            _number(row.smallest_normal),
            _number(row.smallest_subnormal),
            _number(row.eps),
            "yes" if row.has_infinity else "no",
        )
        for row in formats()
    ]
    print_rich(console(), tables.table("Floating-point formats", _COLUMNS, rows))
    print("\ntensorfloat32 is not a dtype: its row is computed from its layout.")
    return 0


def _number(value: float) -> str:
    """Return ``value`` in full if that is short, else with three significant digits."""
    text = f"{value:.0f}" if value.is_integer() and value < 1e6 else repr(value)
    return text if len(text) <= 9 else f"{value:.2e}"
