"""The errors of choices in a search: predicted, and measured for the result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxmp.inspect._tune.candidates import Candidate, overrides_of
from jaxmp.inspect._tune.measurement import Measurement
from jaxmp.inspect._tune.search import Chosen, Result, search, search_and_measure, with_errors_of_operations

_MOST_COMPILATIONS = 6
"""The number of compilations after which no predicted choice is measured."""
_TRUSTED = 1.5
"""The factor between the measured and the predicted error without overrides, from which errors are not predicted."""


class Trials:
    """The errors of the choices that a search tries.

    The errors are predicted for the batch with the largest error. If the prediction is wrong without overrides, all
    errors are measured, and each choice is compiled.

    Args:
      measurement: the measurement of errors.
      candidates: the modules and scopes with half operations.
      errors: the error of each batch without overrides.
    """

    def __init__(self, measurement: Measurement, candidates: Sequence[Candidate], errors: Sequence[float]) -> None:
        self._measurement, self._candidates = measurement, candidates
        self._batch, self._error_before = int(np.argmax(errors)), max(errors)
        self._prediction = measurement.prediction(self._batch)
        self._ratio = self._ratio_without_overrides()
        self._is_predicted = 1 / _TRUSTED < self._ratio < _TRUSTED

    def _ratio_without_overrides(self) -> float:
        """Return the measured error divided by the predicted error; NaN if there is no prediction."""
        predicted = self._predicted(frozenset()) if self._prediction.is_possible else 0.0
        if predicted == self._error_before:  # both may be infinite
            return 1.0
        return self._error_before / predicted if predicted else math.nan

    def _overrides(self, chosen: Chosen) -> dict[str, str]:
        return overrides_of(self._candidates, chosen, self._measurement.half)

    def _predicted(self, chosen: Chosen) -> float:
        result = self._prediction.results(self._overrides(chosen))
        return self._measurement.error_of_result(self._batch, result)

    def predict(self, chosen: Chosen) -> float:
        """Return the predicted error of a choice."""
        return self._ratio * self._predicted(chosen)

    def measure(self, chosen: Chosen) -> float:
        """Return the measured error of a choice."""
        if not chosen:
            return self._error_before
        return self._measurement.error(self._overrides(chosen))

    def error_of_half_products(self) -> float:
        """Return the error if all half operations except products are float32.

        Products that autocast keeps in float32 stay float32.
        """
        chosen = frozenset().union(*(candidate.operations_except_products for candidate in self._candidates))
        return self.predict(chosen) if self._is_predicted else self.measure(chosen)

    def search(self, tolerance: float, *, operations: bool) -> Result:
        """Search for a small choice whose measured error is within the tolerance."""
        if not self._is_predicted:
            result = search(self._candidates, self.measure, tolerance, operations=operations)
            return with_errors_of_operations(result, self.measure)
        result = search_and_measure(
            self._candidates,
            self.predict,
            self.measure,
            tolerance,
            operations=operations,
            measurements=_MOST_COMPILATIONS - self._measurement.compilations,
        )
        result = dataclasses.replace(result, error_before=self._error_before)
        return with_errors_of_operations(result, self.predict)
