"""What commands print: JSON for programs, tables on a terminal, and nothing cut where a reader wraps lines."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxmp.cli.errors import UsageError


def print_json(value: Any) -> None:
    """``value`` as JSON, which has no numbers that are not finite."""
    print(json.dumps(value, indent=2, allow_nan=False))


def show(options: argparse.Namespace, result: Any, draw: Callable[[Any], Any] | None = None) -> None:
    """A result: JSON if asked for, a table on a terminal, else its text; and the picture that is drawn of it."""
    if options.json:
        print(result.to_json())
    elif sys.stdout.isatty():
        print_rich(console(), result.table() if hasattr(result, "table") else result)
    else:
        print(result)
    if draw is not None:
        plot(options, draw)


def check_plot(name: str) -> None:
    """Checks before a long command that the picture can be written after it.

    Raises:
      UsageError: the file has another ending, or no folder.
    """
    file = Path(name)
    fault = None if file.suffix.lower() in (".png", ".pdf", ".svg") else "ends otherwise"
    fault = fault if file.parent.is_dir() else f"has no folder {file.parent}"
    if fault:
        raise UsageError(
            f"--plot names a file that ends in .png, .pdf or .svg, in a folder that is there, but {name!r} {fault}; "
            "name another file, or make the folder"
        )


def plot(options: argparse.Namespace, draw: Callable[[Any], Any]) -> None:
    """Writes the picture that ``draw`` makes with :mod:`jaxmp.inspect.plots`, if it is asked for.

    Raises:
      UsageError: matplotlib is not installed, or the file cannot be written.
    """
    if options.plot is not None:
        from jaxmp.cli.loading import usage_errors
        from jaxmp.inspect import plots

        with usage_errors(ValueError, ModuleNotFoundError):
            figure = draw(plots)
        try:
            figure.savefig(options.plot, dpi=110)
        except OSError as error:
            raise UsageError(
                f"--plot names a file that can be written, got {options.plot!r}, where the system says: "
                f"{error.strerror}; name another file"
            ) from error


def console() -> Any:
    """The terminal; a pipe or a file has no width, for whoever reads it wraps it."""
    from rich.console import Console

    # COLUMNS and a terminal's own width are obeyed.
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 10_000
    return Console(width=width, markup=False, emoji=False, highlight=False)


def print_rich(terminal: Any, renderable: Any) -> None:
    """Prints without the blanks that pad a table's lines."""
    with terminal.capture() as capture:
        terminal.print(renderable)
    text = "\n".join(line.rstrip() for line in capture.get().splitlines())
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)


def print_pairs(rows: Sequence[tuple[str, str]]) -> None:
    """Names and texts side by side, the texts wrapped; one under the other where the width is too small for that."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    terminal = console()
    label = max(len(name) for name, _ in rows)
    if terminal.width < 2 * label + 20:
        for name, text in rows:
            print_rich(terminal, Text(name, style="bold"))
            print_rich(terminal, Padding(Text(text, overflow="fold"), (0, 0, 0, 2)))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_rich(terminal, table)


def print_columns(columns: Sequence[dict[str, str]]) -> None:
    """A table with one column per entry, in as many blocks as the width asks for: no value is ever cut."""
    from rich.table import Table

    terminal = console()
    label = max(len(name) for name in columns[0]) + 2
    widths = [max(map(len, column.values())) + 2 for column in columns]
    terminal.width = max(terminal.width, label + max(widths))
    while columns:
        fitting = 1
        while fitting < len(columns) and label + sum(widths[: fitting + 1]) <= terminal.width:
            fitting += 1
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("", style="bold", no_wrap=True)
        for column in columns[:fitting]:
            table.add_column(column[""], no_wrap=True)
        for name in list(columns[0])[1:]:
            table.add_row(name, *(column[name] for column in columns[:fitting]))
        print_rich(terminal, table)
        columns, widths = columns[fitting:], widths[fitting:]
        if columns:
            print()
