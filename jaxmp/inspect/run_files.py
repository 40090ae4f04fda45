"""Read the files of a run's folder: ``watch.jsonl`` and ``metrics.csv``."""

from __future__ import annotations

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

WATCH_FILE = "watch.jsonl"
"""The name of the file that has a :func:`jaxmp.inspect._watch.watch.line` for each watched step."""
_COLUMNS = ("step", "split", "loss", "grad_norm", "loss_scale", "skipped")


def read_metrics(folder: Path, split: str = "train") -> list[dict[str, str]]:
    """Return the rows of a split, ``"train"`` or ``"test"``, from ``metrics.csv``.

    A training step that is still being written is left out.

    Raises:
      FileNotFoundError: the folder has no ``metrics.csv``.
      ValueError: the file was written by another program.
    """
    file = folder / "metrics.csv"
    if not file.is_file():
        raise FileNotFoundError(
            f"a run's folder has metrics.csv, but {folder} has none; pass the folder of jaxmp.inspect.record or of "
            "--run-dir"
        )
    with file.open() as opened:
        rows = csv.DictReader(opened)
        missing = [name for name in _COLUMNS if name not in (rows.fieldnames or _COLUMNS)]
        if missing:
            raise ValueError(
                f"the metrics.csv of a run has the columns {', '.join(_COLUMNS)}, but {file} has no "
                f"{', '.join(missing)}; pass the folder of jaxmp.inspect.record or of --run-dir"
            )
        return [row for row in rows if row["split"] == split and (row["skipped"] or split == "test")]


def read_watched_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the watched steps of a run's folder.

    A line that is still being written is left out.

    Raises:
      FileNotFoundError: the run is not watched, or no watched step is written yet.
    """
    file = folder / WATCH_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} has no {WATCH_FILE}: watch the steps with jaxmp.inspect.Watch (or --watch N), "
            "or wait for the first watched step"
        )
    rows = []
    for text in file.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the run was killed while it wrote the line, or is writing it now
            rows.append(json.loads(text))
    return rows
