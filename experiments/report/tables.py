"""Tables for the terminal and in Markdown."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import rich.console
import rich.table


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text. The first ``left`` columns are aligned left, the others right.

    A row may have fewer cells than columns, for example if it has an error message in place of figures.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    left: int = 1
    notes: tuple[str, ...] = ()

    def show(self, console: rich.console.Console) -> None:
        """Print the table."""
        table = rich.table.Table(title=self.title, title_justify="left", title_style="bold", header_style="bold")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i < self.left else "right")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(note, style="dim", markup=False, highlight=False)

    def markdown(self) -> str:
        """Return the table as Markdown, under a heading."""
        lines = [f"## {self.title}", "", markdown(self.columns, self.rows, self.left)]
        return "\n".join([*lines, "", *(f"{note}\n" for note in self.notes)])


def markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]], left: int = 1) -> str:
    """Return a table in Markdown, with the first ``left`` columns aligned left and the others right."""
    lines = [_row(columns), _row(tuple("---" if i < left else "---:" for i in range(len(columns))))]
    lines += [_row((*row, *[""] * (len(columns) - len(row)))) for row in rows]
    return "\n".join(lines)


def percent(error: float | str) -> str:
    """Return a relative error in percent, or ``"fails"`` if it is not finite."""
    return f"{100 * float(error):.2g} %" if math.isfinite(float(error)) else "fails"


def terminal() -> rich.console.Console:
    """Return the console that tables are printed on.

    Without a terminal, the console is wide, so that no cell is cut.
    """
    console = rich.console.Console()
    return console if console.is_terminal else rich.console.Console(width=240)


def titled(text: str, smoke: bool) -> str:
    """Return a table's title.

    In a smoke test the title says that the figures mean nothing.
    """
    return f"SMOKE TEST, no result: {text}" if smoke else text


def cell(value: float | None, form: str) -> str:
    """Format a figure. Return an empty string if it is None or nan."""
    return "" if value is None or math.isnan(value) else format(value, form)


def deviating(values: list[float], form: str) -> str:
    """Format the mean ± the standard deviation of ``values``.

    A single value has no deviation. No values give an empty string.

    >>> deviating([1.0, 2.0], "+.2f")
    '+1.50 ± 0.71'
    """
    deviation = f" ± {np.std(values, ddof=1):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{deviation}" if values else ""


def spread(quartiles: tuple[float, float, float], form: str) -> str:
    """Format the first and the last quartile.

    >>> spread((1.0, 2.0, 2.5), ".1f")
    '1.0 to 2.5'
    """
    return f"{quartiles[0]:{form}} to {quartiles[2]:{form}}"


def times(row: dict[str, Any], form: str = ".4g", of: str = ".4f") -> tuple[str, str, str, str]:
    """Format the median and the quartiles of a row's milliseconds and of its ratio.

    The row comes from :func:`experiments.measure.timing.against`.
    """
    return f"{row['ms'][1]:{form}}", spread(row["ms"], form), f"{row['ratio'][1]:{of}}", spread(row["ratio"], of)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
