"""Find the largest batch that fits into memory, with few compilations."""

from __future__ import annotations

from collections.abc import Callable

_PROBES_ON_A_LINE = 8
"""The number of known peaks up to which the next size is guessed from a line. Later, the search halves the interval."""


class _Search:
    """A search for the largest batch whose peak memory is at most ``limit``.

    A ``number`` is the batch size divided by the ``step`` of :func:`largest_multiple_that_fits`.

    The search guesses a number from the line through two known peaks, because the memory of most programs is linear in
    the batch size. Each guess needs a compilation.
    """

    def __init__(self, peak_of: Callable[[int], int], limit: int) -> None:
        self._peak_of = peak_of
        self._limit = limit
        self.peaks = {0: 0}

    def fits(self, number: int) -> bool:
        if number not in self.peaks:
            self.peaks[number] = self._peak_of(number)
        return self.peaks[number] <= self._limit

    def guess(self, low: int, first: int, second: int) -> int | None:
        """Return the number at which the line through two peaks reaches the limit.

        Return None if the line does not rise.
        """
        slope = (self.peaks[second] - self.peaks[first]) / (second - first)
        return low + int((self._limit - self.peaks[low]) / slope) if slope > 0 else None


def largest_multiple_that_fits(peak_of: Callable[[int], int], limit: int, step: int, start: int) -> int:
    """Return the largest batch that fits, a multiple of ``step``; 0 if nothing fits.

    Args:
      peak_of: a function from batch size to peak in bytes.
      limit: the limit in bytes.
      step: all batch sizes are multiples of this number.
      start: the batch size to try after ``step``.

    Raises:
      ValueError: the peak does not depend on the batch size.
    """
    search = _Search(lambda number: peak_of(number * step), limit)
    if not search.fits(1):
        return 0
    low, high = _bracket(search, step, max(2, -(-start // step)))
    while high - low > 1:
        middle = (low + high) // 2
        if len(search.peaks) <= _PROBES_ON_A_LINE:
            guess = search.guess(low, low, high) or middle
            middle = min(max(low + 1, guess + (guess == low)), high - 1)
        if search.fits(middle):
            low = middle
        else:
            high = middle
    return low * step


def _bracket(search: _Search, step: int, number: int) -> tuple[int, int]:
    """Return a number that fits and a larger number that does not fit."""
    low = 1
    while search.fits(number):
        low = number
        if search.peaks[1] == search.peaks[low] or low * step > 2**40:
            raise ValueError(
                f"largest_batch needs memory that depends on the batch, got the same peak for {step} and {low * step} "
                "examples; pass the batch after the params"
            )
        first, second = sorted(size for size in search.peaks if size)[-2:]
        guess = search.guess(low, first, second) or 2 * low
        number = min(max(low + 1, guess), 256 * low)  # a line through two almost equal peaks may lead too far
    return low, number
