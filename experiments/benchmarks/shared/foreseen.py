"""Foresee the seconds of each piece of `make gpu`.

The seconds are those that earlier runs recorded, or an estimate from the rows of earlier runs.
"""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from experiments.benchmarks.report.predictions import TIMES
from experiments.benchmarks.train_step.rows import ROWS, rows_of
from experiments.report.json_files import write_json

FILE = "gpu_seconds.json"
"""The file in experiments/results with the seconds of each piece, by device. Runs write it."""
WARM_UP = 2
"""The rounds before those that are timed."""
PIECE, START, AGAIN = 10.0, 10.0, 6.0
"""The seconds of a piece besides its rows; of a row besides its compilation; and to prepare a row again for the turns.
They are used where no run recorded the seconds."""


class Seconds(NamedTuple):
    """The seconds that a piece takes, and where the number comes from."""

    seconds: float
    source: str

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s ({self.source})"


def save(results: Path, device: str, piece: str, seconds: float) -> None:
    """Record the seconds of a piece that was measured completely."""
    file = results / FILE
    recorded = json.loads(file.read_text()) if file.exists() else {}
    date = f"{datetime.date.today():%Y-%m-%d}"
    recorded.setdefault(device, {})[piece] = {"seconds": round(seconds, 1), "date": date}
    results.mkdir(parents=True, exist_ok=True)
    write_json(file, recorded)


def recorded(results: Path, device: str | None, piece: str) -> Seconds | None:
    """Return the recorded seconds of a piece; None if there is no record.

    Args:
      results: the folder of results.
      device: the device, as in the record; None for the device with the newest record.
      piece: the name of the piece.
    """
    file = results / FILE
    devices = json.loads(file.read_text()) if file.exists() else {}
    records = [
        (record["date"], record["seconds"], name)
        for name, pieces in devices.items()
        if device in (None, name) and (record := pieces.get(piece))
    ]
    if not records:
        return None
    date, seconds, name = max(records)
    return Seconds(seconds, f"recorded on {name}, {date}")


class Rows:
    """The train steps that earlier runs recorded.

    Args:
      results: the folder of results.
    """

    def __init__(self, results: Path) -> None:
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}
        files = sorted(results.glob("train_step*/train_step.json"), key=_date)
        for file in files:
            for model, figures in json.loads(file.read_text())["models"].items():
                train = figures.get("train", {})
                self._rows |= {(model, key): row for key, row in train.items() if row and key in ROWS}

    def compile_seconds(self, model: str, key: str) -> float | None:
        """Return the seconds to compile a row; None if no row like it was recorded.

        They are those of the nearest recorded row: the same row, the same row of another model, or the median of the
        rows in the same precision. XLA searches for kernels in the first of these rows, which takes longest.
        """
        same = [(model, key), *(name for name in self._rows if name[1] == key)]
        for name in same:
            if seconds := self._rows.get(name, {}).get("compile_seconds"):
                return float(seconds)
        row = ROWS[key]
        of_library = {
            name: float(figures["compile_seconds"])
            for name, figures in self._rows.items()
            if ROWS[name[1]].torch == row.torch and figures.get("compile_seconds")
        }
        alike = [seconds for (_, name), seconds in of_library.items() if ROWS[name].precision == row.precision]
        if row.torch:  # torch does not search for kernels, so its precision matters little
            alike = alike or list(of_library.values())
        return statistics.median(alike) if alike else None

    def milliseconds(self, model: str, key: str) -> float:
        """Return the milliseconds of a step, of this row or of code by hand in the same precision."""
        if ms := self._rows.get((model, key), {}).get("ms"):
            return float(ms[1])
        by_hand = (f"{name}-hand-{ROWS[key].precision}" for name in (model, "gpt2"))
        return next((TIMES[name] for name in by_hand if name in TIMES), 0.0)

    def overhead(self, model: str, key: str) -> float:
        """Return the seconds of a row in its process besides compilation."""
        row = self._rows.get((model, key), {})
        return float(row["wall_seconds"] - row["compile_seconds"]) if row.get("wall_seconds") else START

    def estimate(
        self, model: str, keys: Iterable[str], known: set[str], rounds: int, block_ms: float, steps: int
    ) -> Seconds | None:
        """Estimate the seconds of a piece; None if too little was recorded.

        Args:
          model: the name of the model.
          keys: the rows.
          known: the rows that an earlier piece has measured alone.
          rounds: the rounds of timing; 0 if the rows do not take turns.
          block_ms: the target duration of a turn in milliseconds.
          steps: the steps that the piece trains with each row.
        """
        seconds = PIECE
        for key in rows_of(model, tuple(keys)):
            if key not in known or not rounds:
                compiling = self.compile_seconds(model, key)
                if compiling is None:
                    return None
                seconds += compiling + self.overhead(model, key)
            milliseconds = self.milliseconds(model, key)
            seconds += steps * milliseconds / 1000
            if rounds:
                turn = max(block_ms, milliseconds) + 2 * milliseconds  # see experiments.measure.timing
                seconds += AGAIN + (rounds + WARM_UP) * turn / 1000
        return Seconds(seconds, "not recorded yet; an estimate from recorded rows")


def _date(file: Path) -> str:
    return str(json.loads(file.read_text())["environment"]["date"])
