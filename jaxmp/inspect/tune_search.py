"""Search for the fewest candidates that need float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxmp.inspect.tune_measure import Candidate


class Evaluator(Protocol):
    """The parts of :class:`jaxmp.inspect.tune_measure.Measurement` that the search needs."""

    def error(self, overrides: Any) -> float:
        """Return the error under overrides."""

    def overrides(self, candidates: Sequence[Candidate], chosen: Any) -> dict[str, str]:
        """Return the overrides that give float32 to the chosen candidates."""

    def one_in_half(self, candidates: Sequence[Candidate], candidate: Candidate) -> dict[str, str]:
        """Return the overrides under which one candidate alone is half."""


@dataclass
class Result:
    """The state of a search: the best choice so far, and each candidate's effect.

    Attributes:
      candidates: all of them.
      chosen: those in float32.
      error: with this choice.
      error_before: with nothing in float32.
      errors: the error with one candidate in float32, beside those that overflow; empty if nothing needs float32.
      interrupted: whether the keyboard ended the search.
    """

    candidates: Sequence[Candidate]
    chosen: frozenset[Candidate] = frozenset()
    error: float = math.inf
    error_before: float = math.inf
    errors: dict[Candidate, float] = field(default_factory=dict)
    interrupted: bool = False


def search(candidates: Sequence[Candidate], evaluator: Evaluator, tolerance: float) -> Result:
    """Return few candidates in float32 that keep the error within the tolerance.

    If the error is infinite, the candidates that overflow alone are chosen first. Then each other candidate is tried in
    float32. The shortest list of the most helpful ones that meets the tolerance is found by bisection. At last each of
    these is taken back if the tolerance holds without it, those with the most FLOPs first. An interrupt from the
    keyboard ends the search with the best choice so far.
    """
    result = Result(candidates)
    try:
        _search(result, evaluator, tolerance)
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def _search(result: Result, evaluator: Evaluator, tolerance: float) -> None:
    candidates = result.candidates

    def error_of(chosen: frozenset[Candidate]) -> float:
        """Measure a choice, and keep it if it is better."""
        error = evaluator.error(evaluator.overrides(candidates, chosen))
        is_smaller = len(chosen) <= len(result.chosen) or result.error > tolerance
        if (error <= tolerance and is_smaller) or error < result.error > tolerance:
            result.chosen, result.error = chosen, error
        return error

    result.error_before = error_of(frozenset())
    if result.error_before <= tolerance:
        return
    overflowing: list[Candidate] = []
    progress = _progress(len(candidates))
    with progress:
        if math.isinf(result.error_before):
            for candidate in progress.track(candidates, description="looking for overflows"):
                if math.isinf(evaluator.error(evaluator.one_in_half(candidates, candidate))):
                    overflowing.append(candidate)
        remaining = [candidate for candidate in candidates if candidate not in overflowing]
        for candidate in progress.track(remaining, description="measuring modules"):
            result.errors[candidate] = error_of(frozenset([*overflowing, candidate]))
    most_helpful_first = [
        *overflowing,
        *sorted(remaining, key=lambda candidate: _usefulness(candidate, result.errors, tolerance)),
    ]
    if error_of(frozenset(most_helpful_first)) > tolerance:
        return
    too_few, enough = 0, len(most_helpful_first)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if error_of(frozenset(most_helpful_first[:middle])) <= tolerance:
            enough = middle
        else:
            too_few = middle
    chosen = frozenset(most_helpful_first[:enough])
    for candidate in sorted(chosen, key=lambda candidate: (-candidate.flops, candidate.path)):
        if candidate != most_helpful_first[enough - 1] and error_of(chosen - {candidate}) <= tolerance:
            chosen -= {candidate}


def _usefulness(candidate: Candidate, errors: dict[Candidate, float], tolerance: float) -> tuple[float, int, str]:
    """Return the key for sorting: the smallest error first.

    Errors within the tolerance count as equal, as do errors within about a tenth of each other; then fewer FLOPs win.
    """
    error = max(errors[candidate], tolerance)
    size = round(math.log(error, 1.1)) if 0 < error < math.inf else error
    return size, candidate.flops, candidate.path


def _progress(total: int) -> Any:
    """Return a progress bar on the terminal's standard error."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal or total < 2)
