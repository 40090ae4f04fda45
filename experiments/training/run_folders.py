"""The folder of a run: make one, find the one to resume, and lock it."""

from __future__ import annotations

import datetime
import fcntl
import importlib.util
import itertools
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def run_folder(name: str, folder: Path | None) -> Path:
    """Return ``folder``, or a new folder ``runs/NAME-TIME``; make it if necessary.

    Raises:
      ValueError: no file can be written to the folder.
    """
    if folder is not None:
        with _told_of_folder(folder, "--run-dir must name", "take another --run-dir"):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # an existing folder may not be writable
        return folder
    stem = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for suffix in itertools.count(1):
        folder = Path("runs") / (stem if suffix == 1 else f"{stem}-{suffix}")
        with _told_of_folder(folder, "a run needs", "name another folder with --run-dir"):
            folder.parent.mkdir(exist_ok=True)
            try:
                folder.mkdir()
            except FileExistsError:
                continue
        return folder
    raise AssertionError("itertools.count ends")


@contextmanager
def _told_of_folder(folder: Path, rule: str, remedy: str) -> Iterator[None]:
    """Turn an error of the operating system into one that names the folder."""
    try:
        yield
    except OSError as error:
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
        reason = f"{file} is a file" if file else f"nothing can be written to {folder} ({error.strerror})"
        raise ValueError(f"{rule} a folder to write to, but {reason}; {remedy}") from error


def folder_to_resume(name: str, folder: Path | None) -> Path:
    """Return the folder of the run to resume.

    The result is ``folder``, or the folder of the newest run of the experiment.

    Raises:
      ValueError: there is no such run.
    """
    folder = folder or newest_run(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"--resume continues a run, but {folder} has no config.json of a run; start without --resume")
    return folder


def newest_run(name: str) -> Path:
    """Return the newest folder below ``runs/`` that is named after the experiment.

    Raises:
      ValueError: there is no such folder.
    """
    folders = [folder for folder in Path("runs").glob(f"{name}-*") if (folder / "config.json").is_file()]
    if not folders:
        raise ValueError(
            f"--resume continues a run, but runs/ has no run of {name}; give its folder with --run-dir, or start "
            "without --resume"
        )
    return max(folders, key=lambda folder: [int(part) for part in re.findall(r"\d+", folder.name.removeprefix(name))])


@contextmanager
def alone_in(folder: Path) -> Iterator[Path]:
    """Lock a folder against other processes, and yield it.

    The operating system releases the lock when this process ends, even if it is killed.

    Raises:
      ValueError: another process trains in the folder.
    """
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"only one process may train in a folder, but another process trains in {folder}; wait until it ends, "
                "or take another --run-dir"
            ) from None
        yield folder


def checkpoints_folder(folder: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return folder / "checkpoints"


def checkpoints_can_be() -> bool:
    """Return whether Orbax, which writes and reads checkpoints, is installed."""
    return importlib.util.find_spec("orbax") is not None
