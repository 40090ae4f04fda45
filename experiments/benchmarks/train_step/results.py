"""Read the measurements of a run folder, row by row."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

from experiments.benchmarks.measure.turns import broken, not_judged
from experiments.benchmarks.models.workloads import NAMES
from experiments.benchmarks.shared import measurements
from experiments.benchmarks.train_step.rows import ROWS, Pass
from experiments.measure import timing

REFERENCES = tuple(key for key, row in ROWS.items() if row.library == "compile" and row.precision in ("bf16", "fp16"))
"""The half-precision rows of torch.compile. The goals are relative to the fastest of them."""


@dataclasses.dataclass(frozen=True)
class Results:
    """The measurements of one model in a run.

    Attributes:
      about: the model, the environment, and the setting of the run.
      alone: the figures of each row from its separate process, by row.
      turns: for each pass, the sets of rounds in which rows took turns, the newest last. Each set maps rows to their
        figures.
      ceiling: the speed of the device's fastest products.
      rounds: for each set of rounds, its pass, its rows, its seconds, and the readings of the GPU.
    """

    about: dict[str, Any]
    alone: dict[str, dict[str, Any]]
    turns: dict[Pass, list[dict[str, dict[str, Any]]]]
    ceiling: dict[str, Any]
    rounds: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def passes(self) -> list[Pass]:
        """Return the passes that have figures."""
        passes = {*self.turns, *(which for row in self.alone.values() for which in row)}
        return [which for which in get_args(Pass) if which in passes]

    def figures(self, which: Pass, row: str) -> dict[str, Any]:
        """Return the figures of a row's pass.

        The figures come from the row's separate process and from the newest rounds.
        """
        alone = self.alone.get(row, {})
        figures = {**alone.get(which, {}), **({"error": alone["error"]} if "error" in alone else {})}
        for turns in self.turns.get(which, []):
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
        return [row for row in self.alone if any("error" in self.figures(which, row) for which in self.passes())]

    def memory(self, which: Pass, row: str) -> int | None:
        """Return a row's peak in bytes; None for a broken step.

        If the device does not count its memory, the memory of the compiled program takes the place of the peak.
        """
        figures = self.figures(which, row)
        if broken(figures):
            return None
        return figures.get("compiled_bytes") if figures.get("peak") is None else figures["peak"]

    def ratio(self, which: Pass, row: str, other: str) -> tuple[float, float, float] | None:
        """Return the quartiles of the ratio of two rows' times in the same round.

        The times are those of the newest rounds with both rows.
        """
        for turns in reversed(self.turns.get(which, [])):
            a, b = (turns.get(name, {}).get("milliseconds") for name in (row, other))
            if a and b and not not_judged(turns).keys() & {row, other}:
                return timing.ratio(a, b)
        return None

    def fastest(self, which: Pass, *rows: str) -> str | None:
        """Return the fastest of ``rows``; None if none of them has a time."""
        times = {row: self.figures(which, row)["ms"][1] for row in rows if "ms" in self.figures(which, row)}
        return min(times, key=times.__getitem__) if times else None

    def reference(self, which: Pass, row: str | None = None) -> str | None:
        """Return the fastest half-precision row of torch.compile.

        With ``row``, only rows that took turns with it count. The result is None if there is no such row with a time.
        """
        if row is None:
            return self.fastest(which, *REFERENCES)
        ratios = {name: ratio[1] for name in REFERENCES if (ratio := self.ratio(which, row, name))}
        return max(ratios, key=ratios.__getitem__) if ratios else None

    def utilisation(self, which: Pass, row: str) -> float | None:
        """Return the model's FLOPs per second as a share of the ceiling.

        The ceiling is the fastest product of the row's dtype.
        """
        best = self.ceiling.get("best", {}).get(ROWS[row].precision)
        figures = self.figures(which, row)
        if best is None or "ms" not in figures:
            return None
        flops = self.about["model_flops"] / (1 if which == "train" else 3)
        return flops / figures["ms"][1] / 1e9 / best


def read(folder: Path) -> dict[str, Results]:
    """Return all measurements in a run folder, by model."""
    ceiling = measurements.read(file) if (file := folder / "ceiling.json").exists() else {}
    results: dict[str, Results] = {}
    for name in NAMES:
        alone = [measurements.read(file) for file in folder.glob(f"alone-{name}-*.json")]
        turns = [measurements.read(file) for file in folder.glob(f"together-{name}-*.json")]
        if records := sorted(alone + turns, key=lambda record: record["measured"]):
            by_pass: dict[Pass, list[Any]] = {}
            rounds = []
            for record in sorted(turns, key=lambda record: record["measured"]):
                by_pass.setdefault(record["pass"], []).append(record["rows"])
                about_rounds = {field: record.get(field) for field in ("pass", "seconds", "power")}
                rounds.append({**about_rounds, "rows": list(record["rows"])})
            about = {**records[-1], "environment": measurements.joined([record["environment"] for record in records])}
            results[name] = Results(about, {record["row"]: record for record in alone}, by_pass, ceiling, rounds)
    return results
