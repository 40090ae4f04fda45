"""Print the results of commands: as JSON, as tables on a terminal, or as text.

Text for a pipe or a file is not wrapped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxmp.cli.errors import UsageError

_PICTURES = (".png", ".pdf", ".svg")


def print_json(value: Any) -> None:
    """Print ``value`` as JSON, with null for infinities and NaN."""
    print(json.dumps(value, indent=2, allow_nan=False))


def show(options: argparse.Namespace, result: Any, draw: Callable[[Any], Any] | None = None) -> None:
    """Print a result as JSON, as a table or as text, and write its picture.

    ``draw`` is the function that :func:`plot` takes; None for a result without a picture.
    """
    if options.json:
        print(result.to_json())
    elif sys.stdout.isatty():
        print_rich(console(), result.table())
    else:
        print(result)
    if draw is not None:
        plot(options, draw)


def check_plot(name: str) -> None:
    """Check before a long command that its picture can be written to ``name``.

    Raises:
      UsageError: the folder does not exist, or the file has another ending than .png, .pdf or .svg.
    """
    file = Path(name)
    if not file.parent.is_dir():
        raise UsageError(f"--plot needs a file in an existing folder, got {name!r}; create the folder {file.parent}")
    if file.suffix.lower() not in _PICTURES:
        raise UsageError(f"--plot needs a file that ends in .png, .pdf or .svg, got {name!r}")


def plot(options: argparse.Namespace, draw: Callable[[Any], Any]) -> None:
    """Write the figure that ``draw`` returns, if ``--plot`` is set.

    ``draw`` is called with the module :mod:`jaxmp.inspect.plots`.

    Raises:
      UsageError: matplotlib is not installed, or there is nothing to draw.
    """
    if options.plot is not None:
        from jaxmp.cli.loading import usage_errors
        from jaxmp.inspect import plots

        with usage_errors(ValueError, ModuleNotFoundError):
            figure = draw(plots)
        figure.savefig(options.plot, dpi=110)


def console() -> Any:
    """Return a console of the package rich, which prints to the standard output.

    Lines for a pipe or a file are not wrapped, unless the environment variable COLUMNS is set.
    """
    from rich.console import Console

    # rich uses COLUMNS or the terminal's width.
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 10_000
    return Console(width=width, markup=False, emoji=False, highlight=False)


def print_rich(terminal: Any, renderable: Any) -> None:
    """Print an object of the package rich, without spaces at the ends of lines."""
    with terminal.capture() as capture:
        terminal.print(renderable)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()), flush=True)


def print_pairs(rows: Sequence[tuple[str, str]]) -> None:
    """Print rows of a name and a text, in two columns."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_rich(console(), table)
