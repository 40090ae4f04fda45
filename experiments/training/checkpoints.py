"""Checkpoints of a run, which :mod:`jaxmp.checkpoint` writes and reads."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import jaxmp
from jaxmp.checkpoint.orbax_folders import require_usable

_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a folder while Orbax writes it


class Checkpoint(NamedTuple):
    """A complete checkpoint.

    Attributes:
      folder: the folder of the checkpoint.
      step: the number of steps trained before it.
      about: the argument ``about`` of :meth:`Checkpoints.save`.
    """

    folder: Path
    step: int
    about: dict[str, Any]

    def restore(self, state: jaxmp.TrainState) -> jaxmp.TrainState:
        """Return the saved state in the form of the fresh ``state``."""
        return jaxmp.checkpoint.restore(self.folder.parent, state, step=self.step)


class Checkpoints:
    """A context manager that writes the checkpoints of a run in the background.

    The context ends when the last checkpoint is written. All processes must create the manager with the same arguments
    and call its methods in the same order.

    Args:
      folder: the folder of the checkpoints, which is created if it does not exist.
      keep: the number of checkpoints to keep. The oldest are removed.

    Raises:
      ValueError: Orbax cannot write to a folder with this path.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        require_usable(folder)
        self._folder, self._keep = folder, keep
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(_errors_not_logged())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *args: Any) -> None:
        try:
            with self._quiet:
                self.wait()
        except OSError:
            if kind is None:  # otherwise Python raises the error that ended the run
                raise

    def save(self, step: int, state: jaxmp.TrainState, about: dict[str, Any]) -> None:
        """Copy the state to the host, and write it in the background.

        Args:
          step: the number of steps trained so far.
          state: the state after these steps. It may be donated after this call.
          about: everything else that the run needs, as JSON values.

        Raises:
          OSError: this checkpoint, or the one before, cannot be written.
        """
        with self._failures_as_one_line():
            jaxmp.checkpoint.save(self._folder, state, step=step, metadata=about, keep=self._keep)

    def wait(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
          OSError: a checkpoint cannot be written.
        """
        with self._failures_as_one_line():
            jaxmp.checkpoint.wait()

    @contextlib.contextmanager
    def _failures_as_one_line(self) -> Iterator[None]:
        """Turn any failure of Orbax, such as a full disk, into a short OSError."""
        try:
            yield
        except Exception as error:
            reason = " ".join(str(error).split()).rsplit('": ', 1)[-1]  # without tensorstore's list of files
            raise OSError(f"a checkpoint cannot be written to {self._folder} ({reason[:300]})") from error


def unfinished(folder: Path) -> list[Path]:
    """Return the unfinished checkpoints of a process that was killed while saving."""
    return [path for path in folder.iterdir() if _UNFINISHED in path.name] if folder.is_dir() else []


def read_last(folder: Path) -> Checkpoint:
    """Read what the last checkpoint in a folder says about its run.

    Raises:
      ValueError: there is no checkpoint.
    """
    steps = jaxmp.checkpoint.list_steps(folder)
    if not steps:
        raise ValueError(f"{folder} has no finished checkpoint to resume from; start again without --resume")
    return Checkpoint(folder / str(steps[-1]), steps[-1], jaxmp.checkpoint.read_metadata(folder))


@contextlib.contextmanager
def _errors_not_logged() -> Iterator[None]:
    """Silence the logs of Orbax and asyncio.

    In each thread, Orbax logs an error that it also raises. If one write fails, asyncio logs the failures of the
    others when they are garbage collected.
    """
    orbax, pool = logging.getLogger("absl"), logging.getLogger("asyncio")
    level = orbax.level
    orbax.setLevel(logging.CRITICAL)
    pool.addFilter(_was_retrieved)  # it stays, because the garbage may be collected later
    try:
        yield
    finally:
        orbax.setLevel(level)


def _was_retrieved(record: logging.LogRecord) -> bool:
    """Return False for asyncio's logs of exceptions that were never retrieved."""
    return "exception was never retrieved" not in record.getMessage()
