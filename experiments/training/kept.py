"""Files of a benchmark's run folder, with which the next command continues."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.measure.turns import LACKS
from experiments.report.json_files import strict_json, write_json
from experiments.report.progress import Progress

UNFINISHED = "not everything is measured: the same command continues from here"
"""The last line of a command that leaves measurements to the next one."""


def read(file: Path) -> dict[str, Any]:
    """Read the result that a run has left in a file.

    Raises:
      ValueError: it is damaged, or no run's.
    """
    try:
        content = json.loads(file.read_text())
        missing = [name for name in ("setting", "environment") if name not in content]
        why = f"it has no {missing[0]}" if missing else ""
    except (ValueError, TypeError) as error:
        why = str(error)
    if why:
        raise ValueError(f"{file} is not a result of a run ({why}); remove it, and it is measured again")
    return content


def _is_part(versions: str | None, others: str | None) -> bool:
    """Return whether one list of versions contains the other: a further package changes no figure."""
    here, other = (set(text.split(", ")) if text else set() for text in (versions, others))
    return bool(here and other) and (here <= other or other <= here)


def _may_be_had_now(record: dict[str, Any]) -> bool:
    """Return whether a row of the record lacked a package that is installed now."""
    return any(map(importlib.util.find_spec, re.findall(rf"{LACKS}(\w+)", json.dumps(record))))


def require_alike(file: Path, now: dict[str, Any]) -> None:
    """Check that new measurements can stand beside those of the run folder.

    A file there has the settings of the earlier ones.

    Of versions one side may have packages that the other lacks: one was installed since.

    Raises:
      ValueError: their settings differ, or the file is not a result of a run.
    """
    before, now = read(file)["setting"], strict_json(now)
    different = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    if {"versions"} == {*different} and _is_part(before.get("versions"), now.get("versions")):
        return
    if "smoke" in different:  # then everything else does, too
        different = ["smoke"]
    if different:
        what = ", ".join(f"{name} is {before.get(name)} there and {now.get(name)} here" for name in different)
        raise ValueError(
            f"what lies in one run folder is held against each other, but in {file} {what}; take the device, the "
            "versions and the flags of that run, or another --run-dir"
        )


def joined(environments: list[dict[str, str]]) -> dict[str, str]:
    """Return device, versions, commands and the newest date of all measurements.

    Texts that differ stand side by side.
    """
    texts = {
        name: [text for environment in environments for text in environment.get(name, "").split("; ") if text]
        for name in {name: None for environment in environments for name in environment}
    }
    where = {name: "; ".join(dict.fromkeys(values)) for name, values in texts.items()}
    return {**where, "date": max(environment["date"] for environment in environments)}


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
        """Return whether a measurement of that length must wait for the next command."""
        self.unfinished |= 0 < 60 * self._minutes < time.monotonic() - self._started + seconds
        return self.unfinished


class Kept:
    """The measurements in a run folder, each in a file and made once.

    Args:
      folder: the run's.
      minutes: what the command may take; 0 is no limit.
      where: what it measures on.
      **setting: what all figures in the folder have in common, beside device and versions.

    Attributes:
      clock: what it leaves to the next command.
      environments: of all that was found or measured.
    """

    def __init__(self, folder: Path, minutes: float, where: dict[str, str], **setting: Any) -> None:
        self.folder, self.where, self.clock = folder, where, Clock(minutes)
        place = ("target" if "target" in where else "device", "versions")
        self.setting = {**{name: where[name] for name in place}, **setting}
        self.environments: list[dict[str, str]] = []

    def require_alike(self, pattern: str, **setting: Any) -> None:
        """Checks that files in the folder are of the same setting.

        Raises:
          ValueError: one is not, or is not a result of a run.
        """
        for file in self.folder.glob(pattern):
            require_alike(file, {**setting, **self.setting})

    def read(self, name: str) -> dict[str, Any]:
        """Read the record of that name; empty if there is none."""
        file = self.folder / f"{name}.json"
        return read(file) if file.exists() else {}

    def save(self, name: str, record: dict[str, Any], **setting: Any) -> None:
        """Writes what was found in the folder's setting and in ``setting``."""
        about = {"setting": {**setting, **self.setting}, "environment": self.where}
        write_json(self.folder / f"{name}.json", {**about, **record})

    def get(
        self, name: str, find: Callable[[], dict[str, Any] | None], progress: Progress | None = None, **setting: Any
    ) -> dict[str, Any] | None:
        """Return the record of that name, or measure it now; None if there was no time.

        What was found with an ``error``, or lacks a package that is installed now, is looked for again. ``progress``
        shows the name, and goes on by one.

        Raises:
          ValueError: what was found before is of another setting, or damaged.
        """
        self.require_alike(f"{name}.json", **setting)
        if progress:
            progress.advance(0, name)
        record = self.read(name)
        again = "error" in record or _may_be_had_now(record)
        if (not record or again) and not self.clock.late() and (figures := find()):
            self.save(name, figures, **setting)
            record = self.read(name)
        self.environments += [record["environment"]] if record else []
        if progress:
            progress.advance(1, name)
        return {key: record[key] for key in record if key not in ("setting", "environment")} or None

    def end(self) -> None:
        """Says that something was left to the next command, if it was."""
        if self.clock.unfinished:
            print(UNFINISHED)
