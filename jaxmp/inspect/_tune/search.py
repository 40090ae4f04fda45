"""Search for a small set of modules, scopes and operations that need float32.

A candidate is a module or scope with half operations, or one such operation. Half operations compute in half precision
(float16 or bfloat16). A choice is a set of candidates that compute in float32. The error of a choice is the error of
the gradients, relative to float32. It is predicted (``prediction.py``) or measured (``measurement.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmp.inspect._tune.candidates import Candidate

Chosen = frozenset[Candidate]
_FEW_LAYERS = 0.5
"""The largest share of equal layers for which each layer gets its own override."""


@dataclasses.dataclass
class Result:
    """The state of a search: the best choice so far, and the errors of candidates.

    Attributes:
      candidates: the modules and scopes that have half operations.
      chosen: the best choice: the modules, scopes and operations in float32.
      error: the error of the best choice.
      error_before: the error with no candidate in float32.
      errors: the errors of candidates. The candidate and all overflowing candidates are in float32, but if
        ``products_stay_half``, the candidate's products are half. Empty if the search did not need these errors.
      operations: the operations of modules and scopes from which the search tried to choose single operations.
      overflowing: the candidates that must be float32 for a finite error.
      products_stay_half: whether the tolerance is met with half products in all candidates that do not overflow.
      interrupted: whether Ctrl-C ended the search.
      is_measured: whether ``error`` is measured, not predicted.
    """

    candidates: Sequence[Candidate]
    chosen: Chosen = frozenset()
    error: float = math.inf
    error_before: float = math.inf
    errors: dict[Candidate, float] = dataclasses.field(default_factory=dict)
    operations: list[Candidate] = dataclasses.field(default_factory=list)
    overflowing: Chosen = frozenset()
    products_stay_half: bool = False
    interrupted: bool = False
    is_measured: bool = True


def search(
    candidates: Sequence[Candidate],
    error_of: Callable[[Chosen], float],
    tolerance: float,
    *,
    operations: bool = True,
) -> Result:
    """Search for a small choice of candidates whose error is within the tolerance.

    1. If the tolerance is not met with all candidates in float32, the search ends.
    2. If the error without overrides is infinite, the search finds the candidates that overflow, by bisection, and
       chooses them.
    3. It tries half products in all other candidates, and all their other operations in float32. If the tolerance is
       met, these products stay half: where a module has products, the next steps choose its other operations, and not
       the module.
    4. For each other candidate, it takes the error with this candidate and the overflowing candidates in float32. It
       sorts the other candidates by this error.
    5. It adds candidates to the choice in this order until the tolerance is met. Bisection finds the smallest number
       that is enough. It then removes each added candidate from the choice if the tolerance is met without this
       candidate. The candidates with the most FLOPs are tried first.
    6. It replaces each module in the choice by the module's operations if the tolerance is still met. It then removes
       operations from the choice as in step 5.
    7. It replaces equal layers in the choice by single layers, if at most 50 % of the layers are enough.

    At Ctrl-C, the search ends with the best choice so far.

    Args:
      candidates: the modules and scopes with half operations, children before parents.
      error_of: a function that measures or predicts the error of a choice.
      tolerance: the largest allowed error.
      operations: whether to try single operations.
    """
    progress = _progress(len(candidates))
    run = _Search(candidates, error_of, tolerance, progress)
    try:
        with progress:
            run.modules(operations=operations)
            if operations:
                run.operations()
            run.layers()
    except KeyboardInterrupt:
        run.result.interrupted = True
    return run.result


def search_and_measure(
    candidates: Sequence[Candidate],
    predict: Callable[[Chosen], float],
    measure: Callable[[Chosen], float],
    tolerance: float,
    *,
    operations: bool = True,
    measurements: int = 3,
) -> Result:
    """Search by predicted errors, and measure the error of the choice.

    The next search corrects the predictions by the ratio of the measured and the predicted error. It chooses more
    candidates if the measured error is above the tolerance. Otherwise it may choose fewer. If no choice has a measured
    error within the tolerance, the search is repeated with measured errors.

    At Ctrl-C, the search ends with the best measured choice, or with the best predicted choice if there is none.

    Args:
      candidates, tolerance, operations: as for :func:`search`.
      predict: a function that predicts the error of a choice.
      measure: a function that measures the error of a choice.
      measurements: the largest number of choices that are measured after a search with predicted errors.
    """
    predict, measure = functools.cache(predict), functools.cache(measure)
    best, measured, allowed = None, set[Chosen](), tolerance
    for _ in range(measurements):
        result = search(candidates, predict, allowed, operations=operations)
        result.is_measured = False
        if result.interrupted:
            return _interrupted(best or dataclasses.replace(result, error=result.error * tolerance / allowed))
        if result.chosen in measured:
            break
        measured.add(result.chosen)
        try:
            error = measure(result.chosen)
        except KeyboardInterrupt:
            return _interrupted(best or result)
        if error <= tolerance and (best is None or _cost(result.chosen) < _cost(best.chosen)):
            best = dataclasses.replace(result, error=error, is_measured=True)
        if not (0 < error < math.inf and 0 < result.error < math.inf):
            break
        allowed = tolerance * result.error / error
    return best or search(candidates, measure, tolerance, operations=operations)


def _interrupted(result: Result) -> Result:
    return dataclasses.replace(result, interrupted=True)


def _cost(chosen: Chosen) -> tuple[int, int]:
    """Return the FLOPs of a choice, and the number of its candidates."""
    return _flops(chosen), len(chosen)


def _flops(chosen: Chosen) -> int:
    return sum(candidate.flops for candidate in chosen)


class _Search:
    def __init__(
        self, candidates: Sequence[Candidate], find_error: Callable[[Chosen], float], tolerance: float, progress: Any
    ) -> None:
        self.candidates, self.find_error, self.tolerance = candidates, find_error, tolerance
        self.result = Result(candidates)
        self.errors: dict[Chosen, float] = {}
        self.progress = progress
        self.task = progress.add_task("tuning", total=None)

    def error_of(self, chosen: Chosen) -> float:
        """Return the error of a choice; accept the choice if its error is the smallest.

        Once an accepted choice meets the tolerance, only :meth:`accept` replaces it. The error of each choice is
        taken only once.
        """
        if chosen not in self.errors:
            self.errors[chosen] = self.find_error(chosen)
            self.progress.advance(self.task)
            if self.errors[chosen] < self.result.error > self.tolerance:
                self.accept(chosen)
        return self.errors[chosen]

    def meets(self, chosen: Chosen) -> bool:
        return self.error_of(chosen) <= self.tolerance

    def accept(self, chosen: Chosen) -> None:
        self.result.chosen, self.result.error = chosen, self.errors[chosen]

    def modules(self, *, operations: bool) -> None:
        """Choose modules, or all their operations except products: steps 1 to 5 of :func:`search`."""
        self.result.error_before = self.error_of(frozenset())
        if self.meets(frozenset()) or not self.meets(frozenset(self.candidates)):
            return
        overflowing = self.result.overflowing = frozenset(self.find_overflowing())
        if self.meets(overflowing):
            self.accept(overflowing)
            return
        finite = [candidate for candidate in self.candidates if candidate not in overflowing]
        parts = {candidate: frozenset([candidate]) for candidate in finite}
        if operations:
            without_products = {candidate: _without_products(candidate) for candidate in finite}
            all_of_them = overflowing.union(*without_products.values())
            if self.meets(all_of_them):
                self.accept(all_of_them)
                self.result.products_stay_half = True
                parts = {candidate: part for candidate, part in without_products.items() if part}
        order = self.most_helpful(parts)
        too_few, enough = 0, len(order)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self.meets(overflowing.union(*order[:middle])):
                enough = middle
            else:
                too_few = middle
        chosen = overflowing.union(*order[:enough])
        self.accept(chosen)
        self.take_back(chosen, order[: enough - 1])  # the last part is needed

    def find_overflowing(self) -> list[Candidate]:
        """Return the candidates that must be float32 for a finite error."""
        overflowing: list[Candidate] = []
        while math.isinf(self.error_of(frozenset(overflowing))):
            # With the first `finite` candidates in half precision, the error is finite. With the first `infinite`
            # candidates in half precision, the error is infinite.
            finite, infinite = 0, len(self.candidates)
            while infinite - finite > 1:
                middle = (finite + infinite) // 2
                if math.isinf(self.error_of(frozenset([*overflowing, *self.candidates[middle:]]))):
                    infinite = middle
                else:
                    finite = middle
            overflowing.append(self.candidates[infinite - 1])
        return overflowing

    def most_helpful(self, parts: Mapping[Candidate, Chosen]) -> list[Chosen]:
        """Return the parts of candidates that do not overflow, the most helpful first."""
        for candidate, part in parts.items():
            self.result.errors[candidate] = self.error_of(self.result.overflowing | part)

        def usefulness(candidate: Candidate) -> tuple[Any, ...]:
            return _usefulness(candidate, parts[candidate], self.result.errors[candidate], self.tolerance)

        return [parts[candidate] for candidate in sorted(parts, key=usefulness)]

    def take_back(self, chosen: Chosen, parts: Sequence[Chosen]) -> None:
        """Remove each of ``parts`` from the choice if the tolerance is still met.

        The parts with the most FLOPs are tried first. Parts with equal FLOPs are tried from last to first.
        """
        for part in sorted(reversed(parts), key=lambda part: -_flops(part)):
            if self.meets(chosen - part):
                chosen -= part
                self.accept(chosen)

    def operations(self) -> None:
        """Choose single operations of the chosen modules: step 6 of :func:`search`."""
        if self.result.error > self.tolerance:
            return
        for module in sorted(self.candidates, key=lambda candidate: (-candidate.flops, candidate.path)):
            is_whole = module in self.result.chosen
            operations = [operation for operation in module.operations if is_whole or operation in self.result.chosen]
            if not operations or (is_whole and len(operations) < 2):
                continue
            self.result.operations += module.operations
            with_operations = self.result.chosen - {module} | {*operations}
            if self.meets(with_operations):
                self.take_back(with_operations, _alone(operations))

    def layers(self) -> None:
        """Choose single layers in place of equal layers: step 7 of :func:`search`."""
        if self.result.error > self.tolerance:
            return
        for candidate in sorted(self.result.chosen, key=lambda candidate: (-candidate.flops, candidate.path)):
            with_pattern = self.result.chosen
            with_layers = with_pattern - {candidate} | {*candidate.layers}
            if not candidate.layers or not self.meets(with_layers):
                continue
            self.take_back(with_layers, _alone(candidate.layers))
            if len(self.result.chosen.intersection(candidate.layers)) > _FEW_LAYERS * len(candidate.layers):
                self.accept(with_pattern)


def with_errors_of_operations(result: Result, error_of: Callable[[Chosen], float]) -> Result:
    """Return a result with the errors of all chosen operations and layers, if it has those of modules."""
    errors = dict(result.errors)
    if not errors:
        return result
    with contextlib.suppress(KeyboardInterrupt):
        for candidate in result.chosen - result.overflowing - errors.keys():
            errors[candidate] = error_of(result.overflowing | {candidate})
    return dataclasses.replace(result, errors=errors)


def _without_products(candidate: Candidate) -> Chosen:
    """Return a candidate's operations except products, or the candidate if it has no product."""
    has_products = any(operation.is_product for operation in candidate.operations)
    return frozenset(candidate.operations_except_products if has_products else [candidate])


def _alone(candidates: Sequence[Candidate]) -> list[Chosen]:
    return [frozenset([candidate]) for candidate in candidates]


def _usefulness(candidate: Candidate, part: Chosen, error: float, tolerance: float) -> tuple[Any, ...]:
    """Return a key that sorts candidates by the error with a part of each in float32, the smallest first.

    Errors within the tolerance count as equal, and so do errors that differ by less than about 10 %. If errors are
    equal, modules with half operations other than products come first, because products alone cause at most the error
    ``Measurement.floor``. After that, parts with fewer FLOPs come first, and then smaller parts.
    """
    error = max(error, tolerance)
    size = round(math.log(error, 1.1)) if 0 < error < math.inf else error
    has_only_products = all(operation.flops for operation in candidate.operations)
    return error > tolerance, size, has_only_products, *_cost(part), candidate.path


def _progress(total: int) -> Any:
    """Return a progress bar on the terminal's standard error."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal or total < 2)
