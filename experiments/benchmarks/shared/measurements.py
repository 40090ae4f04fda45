"""The files of a benchmark's run folder, from which the next command continues."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.report.json_files import strict_json, write_json
from experiments.report.progress import UNFINISHED, Progress


def read(file: Path) -> dict[str, Any]:
    """Read a result from a file of a run folder.

    Raises:
      ValueError: the file is damaged, or is not a result of a run.
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


def require_alike(file: Path, now: dict[str, Any]) -> None:
    """Check that new measurements have the setting of an earlier result.

    Only measurements with equal settings can be compared.

    Args:
      file: the earlier result.
      now: the setting of the new measurements.

    Raises:
      ValueError: the settings differ, or the file is not a result of a run.
    """
    before, now = read(file)["setting"], strict_json(now)
    different = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    if "smoke" in different:  # then everything else differs too
        different = ["smoke"]
    if different:
        what = ", ".join(f"{name} is {before.get(name)} there and {now.get(name)} here" for name in different)
        raise ValueError(
            f"results in a run folder must be comparable, but in {file} {what}; use the device, the versions and the "
            "flags of that run, or another --run-dir"
        )


def joined(environments: list[dict[str, str]]) -> dict[str, str]:
    """Return the devices, versions, commands and newest date of measurements.

    Different texts are joined with semicolons.
    """
    texts = {
        name: [text for environment in environments for text in environment.get(name, "").split("; ") if text]
        for name in {name: None for environment in environments for name in environment}
    }
    where = {name: "; ".join(dict.fromkeys(values)) for name, values in texts.items()}
    return {**where, "date": max(environment["date"] for environment in environments)}


class Clock:
    """The time limit of a command.

    Measurements that do not fit are left to the next command.

    Attributes:
      unfinished: whether a measurement was left to the next command.
    """

    def __init__(self, minutes: float) -> None:
        """Start a limit of ``minutes``; 0 for no limit."""
        self._minutes, self._started = minutes, time.monotonic()
        self.unfinished = False

    def late(self, seconds: float = 0.0) -> bool:
        """Return whether a measurement of this length must be left to the next command."""
        self.unfinished |= 0 < 60 * self._minutes < time.monotonic() - self._started + seconds
        return self.unfinished


class Measurements:
    """The measurements in a run folder.

    Each measurement is in a file, and is not made again if the file exists.

    Args:
      folder: the run folder.
      minutes: the time limit of the command; 0 for no limit.
      where: the device, versions, date and command.
      **setting: the setting that all figures in the folder share, besides device and versions.

    Attributes:
      clock: the time limit of the command.
      environments: the environments of all measurements read or made.
    """

    def __init__(self, folder: Path, minutes: float, where: dict[str, str], **setting: Any) -> None:
        self.folder, self.where, self.clock = folder, where, Clock(minutes)
        place = ("target" if "target" in where else "device", "versions")
        self.setting = {**{name: where[name] for name in place}, **setting}
        self.environments: list[dict[str, str]] = []

    def require_alike(self, pattern: str, **setting: Any) -> None:
        """Check that the files that match ``pattern`` have the same setting.

        Raises:
          ValueError: a file has another setting, or is not a result of a run.
        """
        for file in self.folder.glob(pattern):
            require_alike(file, {**setting, **self.setting})

    def read(self, name: str) -> dict[str, Any]:
        """Read the record of a name. The result is empty if there is no such record."""
        file = self.folder / f"{name}.json"
        return read(file) if file.exists() else {}

    def save(self, name: str, record: dict[str, Any], **setting: Any) -> None:
        """Write a record with the folder's setting, ``setting`` and the environment."""
        about = {"setting": {**setting, **self.setting}, "environment": self.where}
        write_json(self.folder / f"{name}.json", {**about, **record})

    def get(
        self, name: str, find: Callable[[], dict[str, Any] | None], progress: Progress | None = None, **setting: Any
    ) -> dict[str, Any] | None:
        """Return the record of a name, or measure it now; None if there is no time left.

        A record with an ``error`` is measured again. ``progress`` shows the name, and advances by one.

        Args:
          name: the name of the record.
          find: measures the record; returns None if there is no time left.
          progress: the progress bar.
          **setting: the setting of this record, besides the folder's.

        Raises:
          ValueError: an earlier record has another setting or is damaged.
        """
        self.require_alike(f"{name}.json", **setting)
        if progress:
            progress.advance(0, name)
        record = self.read(name)
        if (not record or "error" in record) and not self.clock.late() and (figures := find()):
            self.save(name, figures, **setting)
            record = self.read(name)
        self.environments += [record["environment"]] if record else []
        if progress:
            progress.advance(1, name)
        return {key: record[key] for key in record if key not in ("setting", "environment")} or None

    def end(self) -> None:
        """Print a line if measurements were left to the next command."""
        if self.clock.unfinished:
            print(UNFINISHED)
