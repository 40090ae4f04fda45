"""Search for the fewest candidates that need float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxmp.inspect.tune_measure import Candidate

Chosen = frozenset[Candidate]


class Evaluator(Protocol):
    """The part of a measurement that the search needs.

    It is implemented by :class:`jaxmp.inspect.tune_measure.Measurement`.
    """

    def error(self, overrides: Any) -> float:
        """Return the error under overrides."""

    def overrides(self, candidates: Sequence[Candidate], chosen: Any) -> dict[str, str]:
        """Return the overrides that give float32 to the chosen candidates."""


@dataclass
class Result:
    """The state of a search: the best choice so far, and each candidate's effect.

    Attributes:
      candidates: the modules and scopes.
      chosen: the candidates and operations in float32.
      error: the error with this choice.
      error_before: the error with nothing in float32.
      errors: the error with each candidate in float32, beside those that overflow; empty if it was not needed.
      operations: the operations of chosen candidates that were tried.
      interrupted: whether the keyboard ended the search.
    """

    candidates: Sequence[Candidate]
    chosen: Chosen = frozenset()
    error: float = math.inf
    error_before: float = math.inf
    errors: dict[Candidate, float] = field(default_factory=dict)
    operations: list[Candidate] = field(default_factory=list)
    interrupted: bool = False


def search(
    candidates: Sequence[Candidate], evaluator: Evaluator, tolerance: float, *, operations: bool = True, spent: int = 0
) -> Result:
    """Return few candidates in float32 that keep the error within the tolerance.

    1. If the error is infinite, bisection over the candidates finds those that overflow. They are chosen.
    2. Each other candidate is tried in float32 beside them, and ranked by the error that is left.
    3. The shortest beginning of this list that meets the tolerance is found by bisection.
    4. Each of these is taken back if the tolerance holds without it, those with the most FLOPs first.
    5. Within each that is left, only its operations get float32. Each is taken back in the same way.

    There are at most ``2 * (candidates + operations tried) + 10`` evaluations. At that number, or at an interrupt from
    the keyboard, the search ends with the best choice so far.

    Args:
      candidates: children before parents.
      evaluator: measures errors.
      tolerance: the largest error allowed.
      operations: whether to try single operations.
      spent: evaluations before the search, which count.
    """
    progress = _progress(len(candidates))
    run = _Search(candidates, evaluator, tolerance, spent, progress)
    try:
        with progress:
            run.modules()
            if operations:
                run.operations()
    except _BudgetSpent:
        pass
    except KeyboardInterrupt:
        run.result.interrupted = True
    return run.result


class _BudgetSpent(Exception):
    """No evaluation is left."""


class _Search:
    def __init__(
        self, candidates: Sequence[Candidate], evaluator: Evaluator, tolerance: float, spent: int, progress: Any
    ) -> None:
        self.candidates, self.evaluator, self.tolerance = candidates, evaluator, tolerance
        self.result = Result(candidates)
        self.errors: dict[Chosen, float] = {}
        self.left = 2 * len(candidates) + 10 - spent
        self.progress = progress
        self.task = progress.add_task("tuning", total=self.left)

    def error_of(self, chosen: Chosen) -> float:
        """Measure a choice once, and keep it if it is better."""
        if chosen not in self.errors:
            if self.left < 1:
                raise _BudgetSpent
            self.left -= 1
            self.errors[chosen] = self.evaluator.error(self.evaluator.overrides(self.candidates, chosen))
            self.progress.advance(self.task)
            is_smaller = len(chosen) < len(self.result.chosen) and self.errors[chosen] <= self.tolerance
            if is_smaller or self.errors[chosen] < self.result.error > self.tolerance:
                self.accept(chosen)
        return self.errors[chosen]

    def meets(self, chosen: Chosen) -> bool:
        return self.error_of(chosen) <= self.tolerance

    def accept(self, chosen: Chosen) -> None:
        self.result.chosen, self.result.error = chosen, self.errors[chosen]

    def modules(self) -> None:
        """Choose modules: steps 1 to 4 of :func:`search`."""
        self.result.error_before = self.error_of(frozenset())
        if self.meets(frozenset()):
            return
        overflowing = self.overflowing()
        order = [*overflowing, *self.most_helpful(overflowing)]
        too_few, enough = max(len(overflowing) - 1, 0), max(len(overflowing), 1)
        while not self.meets(frozenset(order[:enough])):
            if enough == len(order):
                return
            too_few, enough = enough, min(2 * enough, len(order))
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self.meets(frozenset(order[:middle])):
                enough = middle
            else:
                too_few = middle
        chosen = frozenset(order[:enough])
        self.accept(chosen)
        self.take_back(chosen, order[len(overflowing) : enough - 1])  # the last one is needed

    def overflowing(self) -> list[Candidate]:
        """Return candidates without which the error is infinite.

        If there are many, the search for them ends before all are found.
        """
        overflowing: list[Candidate] = []
        most = max(len(self.candidates) // 2, 1)
        while math.isinf(self.error_of(frozenset(overflowing))) and len(self.errors) <= most:
            finite, infinite = 0, len(self.candidates)  # with so many of the candidates in half
            if math.isinf(self.error_of(frozenset(self.candidates))):
                break
            while infinite - finite > 1:
                middle = (finite + infinite) // 2
                if math.isinf(self.error_of(frozenset([*overflowing, *self.candidates[middle:]]))):
                    infinite = middle
                else:
                    finite = middle
            overflowing.append(self.candidates[infinite - 1])
        return overflowing

    def most_helpful(self, overflowing: Sequence[Candidate]) -> list[Candidate]:
        """Return the other candidates, the most helpful first.

        They are not sorted if none of them is needed, or if the error is still infinite.
        """
        others = [candidate for candidate in self.candidates if candidate not in overflowing]
        if not self.tolerance < self.error_of(frozenset(overflowing)) < math.inf:
            return others
        for candidate in others:
            self.result.errors[candidate] = self.error_of(frozenset([*overflowing, candidate]))
        return sorted(others, key=lambda other: _usefulness(other, self.result.errors, self.tolerance))

    def take_back(self, chosen: Chosen, some: Sequence[Candidate]) -> None:
        """Take back the candidates that are not needed, those with most FLOPs first."""
        for candidate in sorted(some, key=lambda candidate: (-candidate.flops, candidate.path)):
            if self.meets(chosen - {candidate}):
                chosen -= {candidate}
                self.accept(chosen)

    def operations(self) -> None:
        """Choose single operations of the chosen modules: step 5 of :func:`search`."""
        modules = sorted(self.result.chosen, key=lambda candidate: (-candidate.flops, candidate.path))
        if self.result.error > self.tolerance:
            return
        for module in modules:
            if len(module.operations) < 2:
                continue
            self.left += 2 * len(module.operations)
            self.result.operations += module.operations
            with_all = self.result.chosen - {module} | {*module.operations}
            if self.meets(with_all):
                self.take_back(with_all, module.operations)


def _usefulness(candidate: Candidate, errors: dict[Candidate, float], tolerance: float) -> tuple[Any, ...]:
    """Return the key for sorting: the smallest error first.

    Errors within the tolerance count as equal, as do errors within about a tenth of each other. Then modules with half
    operations beside products win, for products alone add no more than the floor. Then fewer FLOPs win.
    """
    error = max(errors[candidate], tolerance)
    size = round(math.log(error, 1.1)) if 0 < error < math.inf else error
    has_only_products = all(operation.flops for operation in candidate.operations)
    return error > tolerance, size, has_only_products, candidate.flops, candidate.path


def _progress(total: int) -> Any:
    """Return a progress bar on the terminal's standard error."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal or total < 2)
