"""Search for a small set of modules and operations that need float32.

A choice is a set of candidates in float32. Its error is that of the switched program with the mask of the program under
its overrides. The error of the result is measured in half precision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmp.inspect._switched.switched import smallest_prefix
from jaxmp.inspect._tune.candidates import Candidate, Module, candidates_in, module_at, overrides_of
from jaxmp.inspect._tune.measurement import Measurement
from jaxmp.program.scopes import named_scopes

_CORRECTIONS = 1
"""The number of times that a choice is enlarged because its measured error is above the tolerance."""


@dataclasses.dataclass
class Found:
    """The state of a search.

    Attributes:
      candidates: the candidates, in the order in which they are chosen.
      chosen: the candidates in float32.
      error: the error of the choice.
      error_before: the measured error without overrides.
      errors: the error of each candidate without its roundings.
      is_measured: whether ``error`` is measured, not predicted.
      interrupted: whether Ctrl-C ended the search.
    """

    candidates: Sequence[Candidate]
    chosen: Sequence[Candidate] = ()
    error: float = math.inf
    error_before: float = math.inf
    errors: dict[Candidate, float] = dataclasses.field(default_factory=dict)
    is_measured: bool = True
    interrupted: bool = False


class Search:
    """A search for the candidates that need float32, on the batch with the largest error.

    1. A run without the roundings of each candidate gives its gain. Candidates that overflow come first, and then those
       with the largest gain.
    2. If the tolerance is met with all products in half that do not overflow, these products stay half.
    3. Bisection finds how many candidates are enough.
    4. The error of this choice is measured in half precision. If it is above the tolerance, the predictions are
       corrected by the ratio of both errors, and step 3 is repeated once.

    Args:
      measurement: the measurement.
      modules: the modules with half operations, children before parents.
      tolerance: the largest allowed error.
      operations: whether to choose single operations.
    """

    def __init__(
        self, measurement: Measurement, modules: Sequence[Module], tolerance: float, *, operations: bool
    ) -> None:
        self._measurement, self._modules, self._tolerance = measurement, modules, tolerance
        errors = measurement.errors({})
        self._batch = int(np.argmax(errors))
        self._program = measurement.program(self._batch)
        self._sites = _sites_by_candidate(self._program.sites, modules, operations=operations)
        candidates = [
            candidate for candidate in candidates_in(modules, operations=operations) if candidate in self._sites
        ]
        self.found = Found(candidates, error=max(errors), error_before=max(errors))
        self._predictions: dict[frozenset[Candidate], float] = {}

    def run(self) -> Found:
        """Return the result; at Ctrl-C, the best choice so far."""
        try:
            self._search()
        except KeyboardInterrupt:
            self.found.interrupted = True
        return self.found

    def _search(self) -> None:
        found, measurement = self.found, self._measurement
        everything = measurement.predicted(self._batch, ~self._program.no_rounding)
        ratio = found.error_before / everything if 0 < everything < math.inf > found.error_before else 1.0
        self._rank()
        order = self._order(ratio)
        for _ in range(_CORRECTIONS + 1):
            least = len(found.chosen) + 1
            count = smallest_prefix(order, self._predicted, self._tolerance / ratio, least)
            found.chosen, found.is_measured = order[:count], False
            predicted = self._predicted(found.chosen)
            found.error = ratio * predicted
            found.error, found.is_measured = measurement.error(self.overrides(found.chosen)), True
            if found.error <= self._tolerance or count == len(order):
                break
            ratio = found.error / predicted if predicted else ratio
        if found.error > self._tolerance and len(found.chosen) < len(found.candidates):
            found.chosen = list(found.candidates)
            found.error = measurement.error(self.overrides(found.chosen))

    def overrides(self, chosen: Sequence[Candidate]) -> dict[str, str]:
        """Return the overrides of a choice."""
        return overrides_of(self._modules, chosen, self._measurement.half)

    def _rank(self) -> None:
        """Sort the candidates by what float32 gains there."""
        program, found = self._program, self.found
        overflows = program.counts()[1] if math.isinf(found.error_before) else np.zeros(len(program.sites))
        keys = {}
        for candidate in found.candidates:
            numbers = self._sites[candidate]
            found.errors[candidate] = self._measurement.predicted(self._batch, program.without(numbers))
            keys[candidate] = (-overflows[numbers].sum(), found.errors[candidate])
        self._overflowing = [candidate for candidate in found.candidates if keys[candidate][0]]
        found.candidates = sorted(found.candidates, key=keys.__getitem__)

    def _order(self, ratio: float) -> list[Candidate]:
        """Return the candidates to choose from, without the products that may stay half."""
        candidates = list(self.found.candidates)
        without_products = [
            candidate for candidate in candidates if candidate in self._overflowing or not candidate.has_products
        ]
        is_enough = ratio * self._predicted(without_products) <= self._tolerance
        return without_products if without_products and is_enough else candidates

    def _predicted(self, chosen: Sequence[Candidate]) -> float:
        key = frozenset(chosen)
        if key not in self._predictions:
            mask = self._measurement.mask_of(self._batch, self.overrides(chosen))
            self._predictions[key] = self._measurement.predicted(self._batch, mask)
        return self._predictions[key]


def _sites_by_candidate(sites: Any, modules: Sequence[Module], *, operations: bool) -> dict[Candidate, list[int]]:
    """Return the sites of each candidate."""
    by_candidate: dict[Candidate, list[int]] = {}
    for number, site in enumerate(sites):
        module = module_at(modules, named_scopes(site.equation.names))
        if module is not None:
            primitive = site.equation.name if operations and site.equation.name in module.flops else ""
            if not operations or primitive:
                by_candidate.setdefault(Candidate(module, primitive), []).append(number)
    return by_candidate
