"""The folder of a run: a new one, the one to resume, and a lock that keeps other processes out."""

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
    """``folder``, or a new one below ``runs/`` with the name and the time; made if need be.

    Raises:
      ValueError: no file can be written there.
    """
    if folder is not None:
        with _told_of_folder(folder, "--run-dir must name", "take another --run-dir"):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # it was there, perhaps, and another's
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
    """Add to an error of the operating system the folder, and what is in its way."""
    try:
        yield
    except OSError as error:
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
        reason = f"{file} is a file" if file else f"nothing can be written to {folder} ({error.strerror})"
        raise ValueError(f"{rule} a folder to write to, but {reason}; {remedy}") from error


def folder_to_resume(name: str, folder: Path | None) -> Path:
    """The folder of the run that the flags mean.

    Raises:
      ValueError: there is none.
    """
    folder = folder or newest_run(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"--resume goes on with a run, but {folder} has no config.json of one; start it without --resume"
        )
    return folder


def newest_run(name: str) -> Path:
    """The newest folder below ``runs/`` that is named after the experiment."""
    folders = [folder for folder in Path("runs").glob(f"{name}-*") if (folder / "config.json").is_file()]
    if not folders:
        raise ValueError(
            f"--resume goes on with a run, but runs/ has none of {name}; give its folder with --run-dir, or start "
            "without --resume"
        )
    return max(folders, key=lambda folder: [int(part) for part in re.findall(r"\d+", folder.name.removeprefix(name))])


@contextmanager
def alone_in(folder: Path) -> Iterator[Path]:
    """The folder, with every other process kept from training there.

    The kernel lets go when this process ends, however it does.

    Raises:
      ValueError: another process trains there.
    """
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"one process trains in a folder, but another process trains in {folder}; wait until it ends, or take "
                "another --run-dir"
            ) from None
        yield folder


def checkpoints_folder(folder: Path) -> Path:
    """Where a run's checkpoints are."""
    return folder / "checkpoints"


def checkpoints_can_be() -> bool:
    """Return whether Orbax, which writes and reads checkpoints, is installed."""
    return importlib.util.find_spec("orbax") is not None
