"""A model of what float8 products gain in a transformer, fitted to an H200.

python -m experiments.measure.float8_speedup h200
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import jaxmp
from jaxmp.base.hardware import Hardware, detect

FLOAT8 = "float8_e4m3fn"
WIDTHS = (768, 1024, 2048, 4096, 8192)
_TOKENS, _LENGTH = 16_384, 2048


def speedup(width: int, device: str | Hardware, accumulate: str = "fast_forward") -> float:
    """Return the time of a transformer's layer in bfloat16 over that in float8, by the model.

    The layer is one of GPT-2 with its backward pass, on 8 sequences of 2,048 tokens; optimizer, head and loss take as
    long in either. The model has two measured rates of float8 products on an H200 (685 TFLOP/s at an inner dimension of
    768, 1,380 at 8,192), bytes of layers compiled for it, 4.3 of its 4.8 TB/s, 2 µs a launch, and assumes that precise
    sums cost 15 %. Other GPUs are scaled by their nominal rates.

    Args:
      width: of the residual stream.
      device: the name of a GPU, or a ``Hardware``.
      accumulate: as in :class:`jaxmp.Float8`.

    Raises:
      ValueError: jaxmp has no rates of float8 products or of memory of the device.
    """
    found = device if isinstance(device, Hardware) else detect(device)
    if FLOAT8 not in found.peak_tflops or found.peak_bandwidth is None:
        raise ValueError(f"jaxmp has no rates of float8 products and of memory of {found.name}; try 'h200'")
    h200 = detect("h200")
    bandwidth = found.peak_bandwidth * 4.3 / 4.8
    in_bfloat16 = found.peak_tflops["bfloat16"] / h200.peak_tflops["bfloat16"] * 1e12
    in_float8 = found.peak_tflops[FLOAT8] / h200.peak_tflops[FLOAT8] * 1e12
    # Products by their inner dimension, in multiples of 2 · tokens · width²: forward, and both gradients.
    forward, backward = {width: 8, 4 * width: 4}, {width: 5, 3 * width: 3, 4 * width: 4, _TOKENS: 12}

    def seconds(products: dict[int, int], rate: Callable[[int], float]) -> float:
        return sum(2 * _TOKENS * width**2 * share / rate(inner) for inner, share in products.items())

    def half_rate(inner: int) -> float:
        return (687 if inner < 1024 else 770) * in_bfloat16

    def float8_rate(inner: int) -> float:
        return min(1400, 1542 / (1 + 963 / inner)) * in_float8

    others = 7 * _TOKENS * _LENGTH * width / (450 * in_bfloat16)  # causal attention
    others += _TOKENS * width * (140 + 0.012 * width) / bandwidth  # what XLA moves for all that is no product
    before = seconds(forward, half_rate) + seconds(backward, half_rate) + others
    slower = {"fast": (1, 1), "precise": (1.15, 1.15), "fast_forward": (1, 1.15)}[accumulate]
    after = seconds(forward, float8_rate) * slower[0] + seconds(backward, float8_rate) * slower[1] + others
    after += _TOKENS * width * (75 + 0.0035 * width) / bandwidth + 45 * 2e-6  # of quantising, and its launches
    return before / after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=jaxmp.hardware.GPUS, help="a GPU, which need not be there")
    device = parser.parse_args().device
    for width in WIDTHS:
        print(f"{width:5} wide: {speedup(width, device):.2f} times bfloat16's speed")


if __name__ == "__main__":
    main()
