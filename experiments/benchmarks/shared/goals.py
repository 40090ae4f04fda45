"""Compare a figure with its goal, as a sentence or as a table cell."""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    """A figure and the limit that it should reach.

    Attributes:
      key: the name of the figure in code. The figure has the same key whether it was measured or found by compiling.
      name: the name of the figure in words.
      value: the figure; None if it was not measured.
      limit: the limit; None if the figure is only shown and has no goal.
      least: whether the figure must be at least the limit. If False, it must be at most the limit.
      form: the format specification of the figure.
    """

    key: str
    name: str
    value: float | None
    limit: float | None
    least: bool = False
    form: str = ".3f"

    @property
    def met(self) -> bool:
        """Return whether the figure reaches the limit. Both must be numbers."""
        return self.value >= self.limit if self.least else self.value <= self.limit

    def sentence(self) -> str:
        """Return a sentence with the figure, the limit and the verdict.

        The verdict is "met", "NOT MET" or "not measured".
        """
        figure = self.name if self.value is None else f"{self.name} is {self.value:{self.form}}"
        if self.limit is None:
            return figure
        verdict = "not measured" if self.value is None else "met" if self.met else "NOT MET"
        return f"{verdict}: {figure}, the goal at {'least' if self.least else 'most'} {self._limit(self.form)}"

    def cell(self, form: str = "", mark: str = "") -> str:
        """Return the table cell of the figure.

        The cell is empty if the figure was not measured.
        """
        if self.value is None:
            return ""
        form = form or self.form
        bound = f"{'≥' if self.least else '≤'} {self._limit(form)}"
        return f"{'✓' if self.met else '✗'} {self.value:{form}}{mark} ({bound})"

    def _limit(self, form: str) -> str:
        return f"{self.limit:{'.0%' if '%' in form else 'g'}}"


def share(part: float | None, whole: float | None) -> float | None:
    """Return ``part / whole``, or None if either is unknown."""
    return None if part is None or not whole else part / whole


def saved(needed: float | None) -> float | None:
    """Return the share that is saved if the share ``needed`` is still needed."""
    return None if needed is None else 1 - needed
