"""A progress bar on a terminal. Without a terminal, a line every ten seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

import rich.console
import rich.progress

_SECONDS_BETWEEN_LINES = 10.0
UNFINISHED = "not everything is measured: the same command continues from here"
"""The last line of a command that leaves measurements to the next one."""


class Progress:
    """A context manager that shows the progress of a run on stderr.

    Args:
      title: the name of the run.
      total: the number of steps.
      done: the number of steps that an earlier process has done.
    """

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        self._title, self._total = title, total
        self._console = rich.console.Console(stderr=True)
        self._done, self._last_line = done, time.monotonic()
        self._bar: rich.progress.Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = rich.progress.Progress(
                "[bold]{task.description}",
                rich.progress.BarColumn(bar_width=24),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeRemainingColumn(compact=True),
                "{task.fields[text]}",
                console=self._console,
            )
            self._task = self._bar.add_task(title, total=total, completed=done, text="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, steps: int, text: str, title: str | None = None) -> None:
        """Add ``steps`` to the steps done, and show the bar with ``text``.

        Args:
          steps: the number of steps done since the last call.
          text: fields with two spaces between them.
          title: the title from now on; None keeps the last one.
        """
        self._done += steps
        self._title = title or self._title
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, text=text, description=self._title)
            return
        now = time.monotonic()
        if self._done == self._total or now - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"{self._title}  {self._done}/{self._total}  {text}", file=sys.stderr, flush=True)
