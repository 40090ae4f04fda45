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
    """The state of a search: the best choice so far, and each candidate's error alone.

    Attributes:
      candidates: all of them.
      chosen: those in float32.
      error: with this choice.
      error_before: with nothing in float32.
      alone: the error of each candidate alone in half; empty if nothing needs float32.
      interrupted: whether the keyboard ended the search.
    """

    candidates: Sequence[Candidate]
    chosen: frozenset[Candidate] = frozenset()
    error: float = math.inf
    error_before: float = math.inf
    alone: dict[Candidate, float] = field(default_factory=dict)
    interrupted: bool = False


def search(candidates: Sequence[Candidate], errors: Evaluator, tolerance: float) -> Result:
    """Return the fewest candidates in float32 that keep the error within the tolerance.

    First each candidate is measured alone. Then the shortest prefix of the worst ones that meets the tolerance is found
    by bisection. At last each of these is taken back if the tolerance holds without it, those with the most FLOPs
    first. An interrupt from the keyboard ends the search with the best choice so far.
    """
    result = Result(candidates)
    try:
        _search(result, errors, tolerance)
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def _search(result: Result, errors: Evaluator, tolerance: float) -> None:
    def measure(chosen: frozenset[Candidate]) -> bool:
        """Measure a choice, keep it if it is better, and return whether it meets the tolerance."""
        error = errors.error(errors.overrides(result.candidates, chosen))
        is_met = error <= tolerance
        if is_met or error < result.error:
            result.chosen, result.error = chosen, error
        return is_met

    is_met = measure(frozenset())
    result.error_before = result.error
    if is_met:
        return
    progress = _progress(len(result.candidates))
    with progress:
        for candidate in progress.track(result.candidates, description="measuring modules"):
            result.alone[candidate] = errors.error(errors.one_in_half(result.candidates, candidate))
    worst_first = sorted(result.candidates, key=lambda candidate: -result.alone[candidate])
    if not measure(frozenset(worst_first)):
        return
    too_few, enough = 0, len(worst_first)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if measure(frozenset(worst_first[:middle])):
            enough = middle
        else:
            too_few = middle
    chosen = frozenset(worst_first[:enough])
    for candidate in sorted(chosen, key=lambda candidate: (-candidate.flops, candidate.path)):
        if candidate != worst_first[enough - 1] and measure(chosen - {candidate}):
            chosen -= {candidate}


def _progress(total: int) -> Any:
    """Return a progress bar on the terminal's standard error."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal or total < 2)
