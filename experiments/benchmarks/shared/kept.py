"""What a benchmark keeps in its run folder, so that a long run can be cut: what goes together there, and until when."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from experiments.benchmarks.shared.workloads import Workload
from experiments.training.runs import strict_json, write_json

UNFINISHED = "not all is measured: the same command goes on from here"
"""What a command says last that left something to the next one."""


def read(file: Path) -> dict[str, Any]:
    """What a run has left in a file.

    Raises:
      ValueError: it is damaged, or no run's.
    """
    try:
        found = json.loads(file.read_text())
        missing = [name for name in ("setting", "environment") if name not in found]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is no result of a run ({error}); remove it, and it is measured anew") from error
    if missing:
        raise ValueError(f"{file} is no result of a run (it has no {missing[0]}); remove it, and it is measured anew")
    return found


def require_alike(file: Path, now: dict[str, Any], before: dict[str, Any] | None = None) -> None:
    """Checks that what is to be measured can be held against what the run folder has.

    Args:
      file: what it has, a file or a folder.
      now: the setting here.
      before: the setting there; None for the ``"setting"`` of the file.

    Raises:
      ValueError: they differ, or the file is no result of a run.
    """
    before = read(file)["setting"] if before is None else before
    now = strict_json(now)
    different = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    if "smoke" in different:  # then everything else does, too
        different = ["smoke"]
    if different:
        what = ", ".join(f"{name} is {before.get(name)} there and {now.get(name)} here" for name in different)
        raise ValueError(
            f"what lies in one run folder is held against each other, but in {file} {what}; take the device, the "
            "versions and the flags of that run, or another --run-dir"
        )


def save(file: Path, case: Workload, setting: dict[str, Any], where: dict[str, str], found: dict[str, Any]) -> None:
    """Writes what was found of a model, in which setting, and where."""
    about = {"model": case.name, "text": case.text, "items": case.items, "unit": case.unit}
    write_json(file, {**about, "setting": setting, "environment": where, **found})


def again(file: Path) -> Path:
    """Where a second try goes, beside the first: each may have times that the other has not."""
    return file.with_stem(f"{file.stem}-again") if file.exists() else file


def joined(environments: list[dict[str, str]]) -> dict[str, str]:
    """Device, versions and commands of all that was measured, what differs side by side, and the newest date."""
    texts = {
        name: [text for each in environments for text in each.get(name, "").split("; ") if text]
        for name in {name: None for each in environments for name in each}
    }
    where = {name: "; ".join(dict.fromkeys(own)) for name, own in texts.items()}
    return {**where, "date": max(each["date"] for each in environments)}


class Clock:
    """The time that a command may take: what comes after it is left to the next command.

    Attributes:
      unfinished: whether something was.
    """

    def __init__(self, minutes: float) -> None:
        """So many minutes from now on, 0 for no limit."""
        self._minutes, self._started = minutes, time.monotonic()
        self.unfinished = False

    def late(self, seconds: float = 0.0) -> bool:
        """Whether something that takes so long must wait for the next command."""
        self.unfinished |= 0 < 60 * self._minutes < time.monotonic() - self._started + seconds
        return self.unfinished
