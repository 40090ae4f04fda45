"""Search for the fastest combination of remat, chunks of the loss and microbatches that fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

REMATS = ("none", "dots", "dots_no_batch", "layers")
"""The rematerialisations to try, usually from the one that stores most to the one that stores least."""
LOSS_CHUNKS = (1, 4, 16)
"""The numbers of chunks of the loss to try."""
SMALLEST_GAIN = 0.02
"""The smallest share of the peak that more chunks must save. Otherwise still more chunks are not tried."""
SMALL_COST = 0.1
"""The share of the time that chunks may cost without a look at the other rematerialisations."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A combination of options of ``make_train_step``, and what it costs.

    Attributes:
      remat: the option ``remat``.
      accumulate_steps: the number of microbatches.
      peak: the peak memory in bytes; infinite if the compilation itself ran out of memory.
      milliseconds: the predicted time of the step; infinite if it is unknown.
      fits: whether the peak is within the limit.
      state_bytes: the bytes of the train state in the peak. Microbatches do not reduce them.
      loss_chunks: the option ``loss_chunks``; None if the loss does not use it.
    """

    remat: Any
    accumulate_steps: int
    peak: float
    milliseconds: float
    fits: bool
    state_bytes: int = 0
    loss_chunks: int | None = None


Measure = Callable[[Any, int | None, int], Trial | None]
"""A function of ``remat``, ``loss_chunks`` and ``accumulate_steps``. It returns None if they are not possible."""


def measure_combinations(
    measure: Measure, remats: Sequence[Any], chunks: Sequence[int | None], counts: Sequence[int], limit: float
) -> list[Trial]:
    """Return all combinations that were measured.

    1. Every rematerialisation is measured with the largest microbatch, with more and more chunks until it fits.
    2. If the first rematerialisation fits and its chunks cost little time, nothing else is measured, because
       recomputation usually costs more.
    3. For each rematerialisation that does not fit, the search looks for the smallest number of microbatches that fits,
       with the fewest chunks and with those that have the lowest peak. It stops if the step is not faster than the best
       combination so far, because more microbatches are slower.

    Args:
      measure: measures a combination.
      remats: the rematerialisations. The first one recomputes nothing.
      chunks: the numbers of chunks of the loss, in ascending order; ``[None]`` for a loss without such chunks.
      counts: the possible numbers of microbatches, in ascending order.
      limit: the limit of the peak in bytes.
    """
    trials = list[Trial]()
    too_large = list[Trial]()
    for remat in remats:
        of_remat = list(_trials_of_chunks(measure, remat, chunks, counts[0], _best_time(trials)))
        trials += of_remat
        if not of_remat:
            continue
        fewest, most = of_remat[0], of_remat[-1]
        if most.fits and remat == remats[0] and most.milliseconds <= (1 + SMALL_COST) * fewest.milliseconds:
            return trials
        if not most.fits:
            lowest = min(of_remat, key=lambda trial: trial.peak)
            saves_memory = lowest.peak < (1 - SMALLEST_GAIN) * fewest.peak
            too_large += [fewest, lowest] if saves_memory else [fewest]
    state_bytes = max((trial.state_bytes for trial in trials), default=0)
    # The remat with the lowest peak needs the fewest microbatches. Its time bounds the others early.
    for trial in sorted(too_large, key=lambda trial: trial.peak):
        if state_bytes < limit:
            room = limit - state_bytes
            trials += _trials_of_microbatches(measure, trial, counts, room, state_bytes, _best_time(trials))
    return trials


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """Return the fastest combination that fits, or None if none fits."""
    return min((trial for trial in trials if trial.fits), key=lambda trial: trial.milliseconds, default=None)


def _best_time(trials: Sequence[Trial]) -> float:
    best = fastest(trials)
    return math.inf if best is None else best.milliseconds


def _trials_of_chunks(
    measure: Measure, remat: Any, chunks: Sequence[int | None], count: int, best_time: float
) -> Iterator[Trial]:
    """Yield the trials of a rematerialisation with more and more chunks, until one fits.

    The search stops earlier if more chunks save no memory, or if the step is not faster than the best combination so
    far, because more chunks are slower.
    """
    last_peak = math.inf
    for number in chunks:
        trial = measure(remat, number, count)
        if trial is None:
            return
        yield trial
        saves_memory = trial.peak < (1 - SMALLEST_GAIN) * last_peak or trial.peak == math.inf
        is_slow = math.isfinite(trial.milliseconds) and trial.milliseconds >= best_time
        if trial.fits or is_slow or not saves_memory:
            return
        last_peak = trial.peak


def _trials_of_microbatches(
    measure: Measure, first: Trial, counts: Sequence[int], room: float, state_bytes: int, best_time: float
) -> Iterator[Trial]:
    """Yield the combinations that are measured to find the smallest number of microbatches that fits.

    The memory besides the state is about proportional to the size of a microbatch. This predicts the next number to
    try, until a number fits. Then the search bisects.

    Args:
      measure: as in :func:`measure_combinations`.
      first: the trial with the largest microbatch.
      counts: as in :func:`measure_combinations`.
      room: the limit of the memory besides the state, in bytes.
      state_bytes: the bytes of the state.
      best_time: the time of the best combination so far, in milliseconds.
    """
    too_few, enough = 0, len(counts)  # indices in `counts`
    trial = first
    while too_few + 1 < enough:
        if not trial.fits and math.isfinite(trial.milliseconds) and trial.milliseconds >= best_time:
            return
        if enough < len(counts):
            index = (too_few + enough) // 2
        elif math.isfinite(trial.peak):
            needed = trial.accumulate_steps * (trial.peak - state_bytes) / room
            index = next((n for n, count in enumerate(counts) if count >= needed), len(counts) - 1)
        else:
            index = 2 * too_few + 1
        count = counts[min(max(index, too_few + 1), enough - 1)]
        measured = measure(first.remat, first.loss_chunks, count)
        if measured is None:
            return
        yield (trial := measured)
        if trial.fits:
            enough = counts.index(trial.accumulate_steps)
        else:
            too_few = counts.index(trial.accumulate_steps)
