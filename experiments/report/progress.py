"""A progress bar on a terminal. Without a terminal, a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import rich.console
import rich.progress
import rich.text

_SECONDS_BETWEEN_LINES = 10.0
UNFINISHED = "not everything is measured: the same command continues from here"
"""The last line of a command that leaves measurements to the next one."""


class _Bar(rich.progress.Progress):
    """A progress bar with its text on a separate line.

    On a narrow terminal the last fields of the text are dropped.
    """

    def get_renderables(self) -> Iterable[rich.console.RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield rich.text.Text(_fitting(task.fields["text"], self.console.width))


def _fitting(text: str, width: int) -> str:
    """Drop the last fields of ``text`` that do not fit into ``width``.

    Two spaces separate the fields.
    """
    fields = text.split("  ")
    while len(fields) > 1 and len("  ".join(fields)) > width:
        fields.pop()
    return "  ".join(fields)


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
            self._bar = _Bar(
                "[bold]{task.description}",
                rich.progress.BarColumn(bar_width=24),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeRemainingColumn(compact=True),
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
          text: fields with two spaces between them. A narrow terminal shows only those that fit.
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
            line = f"{self._title}  {self._done}/{self._total}  {text}"
            if self._console.is_terminal:
                line = _fitting(line, self._console.width)
            print(line, file=sys.stderr, flush=True)
