"""A figure held against what it is to reach, as a sentence and as a cell of a table."""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    """A figure and what it is to reach.

    Attributes:
      key: what is judged, whether it was run or only compiled.
      name: the same in words.
      value: the figure; None if it was not measured.
      limit: None for a figure that only belongs to a goal.
      least: whether it is to be at least the limit; otherwise at most.
      form: the figure's format.
    """

    key: str
    name: str
    value: float | None
    limit: float | None
    least: bool = False
    form: str = ".3f"

    @property
    def met(self) -> bool:
        """Return whether the figure reaches the limit; both must be there."""
        return self.value >= self.limit if self.least else self.value <= self.limit

    def sentence(self) -> str:
        """Met, NOT MET or not measured, with the figure and the limit."""
        figure = self.name if self.value is None else f"{self.name} is {self.value:{self.form}}"
        if self.limit is None:
            return figure
        verdict = "not measured" if self.value is None else "met" if self.met else "NOT MET"
        return f"{verdict}: {figure}, the goal at {'least' if self.least else 'most'} {self._limit(self.form)}"

    def cell(self, form: str = "", mark: str = "") -> str:
        """Return the cell of a table; empty if it was not measured."""
        if self.value is None:
            return ""
        form = form or self.form
        bound = f"{'≥' if self.least else '≤'} {self._limit(form)}"
        return f"{'✓' if self.met else '✗'} {self.value:{form}}{mark} ({bound})"

    def _limit(self, form: str) -> str:
        return f"{self.limit:{'.0%' if '%' in form else 'g'}}"


def share(part: float | None, whole: float | None) -> float | None:
    """The one over the other, if both are known."""
    return None if part is None or not whole else part / whole


def saved(needed: float | None) -> float | None:
    """Return the share that is saved."""
    return None if needed is None else 1 - needed
