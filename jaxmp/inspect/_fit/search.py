"""Search for the fastest combination of remat and microbatches that fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

REMATS = ("none", "dots", "dots_no_batch", "layers")
"""The rematerialisations to try, from the one that stores most to the one that stores least."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A combination of rematerialisation and microbatches, and what it costs.

    Attributes:
      remat: the option ``remat`` of ``make_train_step``.
      accumulate_steps: the number of microbatches.
      peak: the peak memory in bytes; infinite if the compilation itself ran out of memory.
      milliseconds: the predicted time of the step.
      fits: whether the peak is within the limit.
      state_bytes: the part of the peak that is the train state. No number of microbatches makes it smaller.
    """

    remat: str
    accumulate_steps: int
    peak: float
    milliseconds: float
    fits: bool
    state_bytes: int = 0


Measure = Callable[[str, int], Trial | None]
"""A function of a rematerialisation and a number of microbatches. It returns None if the step does not allow them."""


def search(measure: Measure, counts: Sequence[int], limit: float) -> list[Trial]:
    """Return all combinations that were measured.

    1. If the whole batch fits without rematerialisation, nothing else is measured.
    2. Every rematerialisation is measured with the whole batch.
    3. For each one that does not fit, the search looks for the smallest number of microbatches that fits. It stops if
       the step is not faster than the best combination so far, because more microbatches are slower.

    Args:
      measure: measures a combination.
      counts: the possible numbers of microbatches, in ascending order, beginning with 1.
      limit: the limit of the peak in bytes.
    """
    whole_batches = []
    for remat in REMATS:
        trial = measure(remat, 1)
        if trial is not None:
            whole_batches.append(trial)
            if remat == "none" and trial.fits:
                return [trial]
    trials = list(whole_batches)
    for trial in sorted(whole_batches, key=lambda trial: trial.peak):  # the first is likely to need few microbatches
        if not trial.fits and trial.state_bytes < limit:
            trials += _smallest_count_that_fits(measure, trial, counts, limit, _best_time(trials))
    return trials


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """Return the fastest combination that fits, or None if none fits."""
    return min((trial for trial in trials if trial.fits), key=lambda trial: trial.milliseconds, default=None)


def _best_time(trials: Sequence[Trial]) -> float:
    best = fastest(trials)
    return math.inf if best is None else best.milliseconds


def _smallest_count_that_fits(
    measure: Measure, whole_batch: Trial, counts: Sequence[int], limit: float, best_time: float
) -> Iterator[Trial]:
    """Yield the combinations that are measured to find the smallest number of microbatches that fits.

    The memory besides the state is about proportional to the size of a microbatch. This predicts the first number to
    try. The search then goes up until a number fits, or down until a number does not fit.
    """
    state_bytes = whole_batch.state_bytes
    needed = (whole_batch.peak - state_bytes) / (limit - state_bytes)
    number = next((n for n, count in enumerate(counts) if count >= needed), len(counts) - 1)
    trial, tried = whole_batch, {0}
    while number < len(counts) and number not in tried:
        if not trial.fits and trial.milliseconds >= best_time:
            return
        measured = measure(whole_batch.remat, counts[number])
        if measured is None:
            return
        yield (trial := measured)
        tried.add(number)
        number += -1 if trial.fits else 1
