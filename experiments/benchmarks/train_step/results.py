"""Read the measurements of a run folder, row by row."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from experiments.benchmarks.measure.turns import broken, not_judged
from experiments.benchmarks.models.workloads import NAMES
from experiments.benchmarks.shared import measurements
from experiments.measure import timing


@dataclasses.dataclass(frozen=True)
class Results:
    """The measurements of one model in a run.

    Attributes:
      about: the model, the environment, and the setting of the run.
      alone: the figures of each row from its separate process, by row.
      turns: the sets of rounds in which rows took turns, the newest last. Each set maps rows to their figures.
    """

    about: dict[str, Any]
    alone: dict[str, dict[str, Any]]
    turns: list[dict[str, dict[str, Any]]]

    def figures(self, row: str) -> dict[str, Any]:
        """Return the figures of a row, from its separate process and from the newest rounds."""
        figures = dict(self.alone.get(row, {}))
        for turns in self.turns:
            turn = turns.get(row, {})
            if "milliseconds" in turn:
                figures.pop("error", None)
            # A later set of rounds without times must not replace times.
            if "milliseconds" in turn or "milliseconds" not in figures:
                figures |= turn
                if why := not_judged(turns).get(row):
                    figures["error"] = why
        if "milliseconds" in figures and "error" not in figures:
            figures["ms"] = timing.quartiles(figures["milliseconds"])
        return figures

    def failed(self) -> list[str]:
        """Return the rows that have an error in place of figures."""
        return [row for row in self.alone if "error" in self.figures(row)]

    def memory(self, row: str) -> int | None:
        """Return a row's peak in bytes; None for a broken step.

        If the device does not count its memory, the memory of the compiled program takes the place of the peak.
        """
        figures = self.figures(row)
        if broken(figures):
            return None
        return figures.get("compiled_bytes") if figures.get("peak") is None else figures["peak"]

    def ratio(self, row: str, other: str) -> tuple[float, float, float] | None:
        """Return the quartiles of the ratio of two rows' times in the same round.

        The times are those of the newest rounds with both rows.
        """
        for turns in reversed(self.turns):
            a, b = (turns.get(name, {}).get("milliseconds") for name in (row, other))
            if a and b and not not_judged(turns).keys() & {row, other}:
                return timing.ratio(a, b)
        return None


def read(folder: Path) -> dict[str, Results]:
    """Return all measurements in a run folder, by model."""
    results: dict[str, Results] = {}
    for name in NAMES:
        alone = [measurements.read(file) for file in folder.glob(f"alone-{name}-*.json")]
        turns = [measurements.read(file) for file in folder.glob(f"together-{name}-*.json")]
        if records := sorted(alone + turns, key=lambda record: record["measured"]):
            about = {**records[-1], "environment": measurements.joined([record["environment"] for record in records])}
            rounds = [record["rows"] for record in sorted(turns, key=lambda record: record["measured"])]
            results[name] = Results(about, {record["row"]: record["figures"] for record in alone}, rounds)
    return results
