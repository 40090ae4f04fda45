"""Draw docs/formats.png: the bits of each format, and the range of its numbers.

python docs/draw_formats.py
"""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from jaxmp.inspect import formats

NAMES = ("float32", "tensorfloat32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")
SIGN, EXPONENT, MANTISSA = "#999999", "#0072b2", "#e69f00"


def main() -> None:
    """Draw the picture."""
    by_name = {row.name: row for row in formats()}
    rows = [by_name[name] for name in NAMES]
    figure, (bits, ranges) = plt.subplots(1, 2, figsize=(11, 3.2), layout="constrained", sharey=True)
    heights = range(len(rows))[::-1]
    for height, row in zip(heights, rows, strict=True):
        bits.barh(height, 1, color=SIGN, edgecolor="white")
        bits.barh(height, row.exponent_bits, left=1, color=EXPONENT, edgecolor="white")
        bits.barh(height, row.mantissa_bits, left=1 + row.exponent_bits, color=MANTISSA, edgecolor="white")
        bits.text(2, height, str(row.exponent_bits), va="center", color="white")
        bits.text(1.3 + row.exponent_bits, height, str(row.mantissa_bits), va="center")
        low, normal, high = (math.log10(x) for x in (row.smallest_subnormal, row.smallest_normal, row.largest))
        ranges.barh(height, normal - low, left=low, color=MANTISSA)
        ranges.barh(height, high - normal, left=normal, color=EXPONENT)
    bits.set_yticks(list(heights), [row.name for row in rows])
    bits.set_title("bits: sign, exponent (range), mantissa (digits)", loc="left")
    ranges.set_title("range: all digits (blue), fewer digits (orange)", loc="left")
    ranges.set_xlabel("power of ten")
    for axes in (bits, ranges):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("formats.png"), dpi=110)


if __name__ == "__main__":
    main()
