"""Find the largest batch that fits into memory."""

from __future__ import annotations

from collections.abc import Callable

_GROWTH = 64
"""The most by which one guess multiplies the batch size."""


def largest_multiple_that_fits(
    peak_of: Callable[[int], int], limit: int, step: int, start: int, at_most: int | None = None
) -> int:
    """Return the largest batch that fits, a multiple of ``step``; 0 if nothing fits.

    The memory of most programs is linear in the batch size. So the search continues the line through the last two
    sizes until a size does not fit. It then narrows the interval, by linear interpolation and by bisection in turns.

    Args:
      peak_of: a function from batch size to peak in bytes. Each call needs a compilation.
      limit: the limit in bytes.
      step: all batch sizes are multiples of this number.
      start: the batch size to try after ``step``.
      at_most: the largest batch size to try; None for no limit.

    Raises:
      ValueError: the peak does not depend on the batch size.
    """
    if at_most is not None and step > at_most:
        return 0
    low, high = step, max(2, -(-start // step)) * step
    low_peak = first_peak = peak_of(low)
    if low_peak > limit:
        return 0
    while True:
        if at_most is not None:
            high = min(high, at_most // step * step)
        if high == low:
            return low
        high_peak = peak_of(high)
        if high_peak > limit:
            break
        if high_peak == first_peak:
            raise ValueError(
                f"largest_batch needs memory that depends on the batch, got the same peak for {step} and {high} "
                "examples; pass the batch after the params"
            )
        slope = (high_peak - low_peak) / (high - low)
        expected = high + (limit - high_peak) / slope if slope > 0 else 2 * high
        low, low_peak = high, high_peak
        high = max(int(min(expected, _GROWTH * low)) // step * step, low + step)
    is_on_line = True
    while high - low > step:
        share = (limit - low_peak) / (high_peak - low_peak) if is_on_line else 0.5
        is_on_line = not is_on_line
        steps = (high - low) // step
        middle = low + min(max(int(share * steps), 1), steps - 1) * step
        peak = peak_of(middle)
        if peak <= limit:
            low, low_peak = middle, peak
        else:
            high, high_peak = middle, peak
    return low
