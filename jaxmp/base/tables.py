"""Show results as text, as a table of the package rich, and as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class Shown:
    """A result that is shown as a title, a table, and lines after the table."""

    def _shown(self) -> tuple[str, Sequence[str], Sequence[Sequence[Any]], Sequence[str]]:
        raise NotImplementedError

    def __str__(self) -> str:
        return text(*self._shown())

    @property
    def headline(self) -> str:
        """Return the first line of the text, which says the main result."""
        return self._shown()[0].partition("\n")[0]

    def table(self) -> Any:
        """Return the result as a ``rich.table.Table``."""
        return table(*self._shown())

    def __rich__(self) -> Any:
        return self.table()

    def to_json(self) -> str:
        """Return the fields by name as JSON; non-finite numbers are null."""
        return json.dumps(plain(self), indent=2, allow_nan=False)


def text(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], after: Sequence[str] = ()) -> str:
    """Return a table as text, with numbers aligned to the right.

    The lines ``after`` follow the table.
    """
    cells = [[str(cell) for cell in row] for row in ([name.replace("\n", " ") for name in columns], *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = _are_numbers(columns, rows)
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([title, *(lines if rows else ["(nothing)"]), *after])


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], after: Sequence[str] = ()) -> Any:
    """Return a table as a ``rich.table.Table``.

    A narrow console wraps long cells, but not numbers.
    """
    from rich.table import Column, Table
    from rich.text import Text

    lengths = [max((len(str(row[n])) for row in rows), default=0) for n in range(len(columns))]
    headers = [
        Column(name, justify="right" if is_number else "left", overflow="fold", no_wrap=length <= _SHORT)
        for name, is_number, length in zip(columns, _are_numbers(columns, rows), lengths, strict=True)
    ]
    gap = 2 if len(columns) <= 8 else 1
    grid = Table(*headers, title=Text(title), box=None, padding=(0, gap, 0, 0), pad_edge=False)
    grid.caption, grid.caption_style = Text("\n".join(after)) if after else None, ""
    grid.title_justify = grid.caption_justify = "left"
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))
    return grid


_SHORT = 13
"""The maximum length of the cells in a column that is never wrapped. It is the length of ``"float8_e4m3fn"``."""


def _are_numbers(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[bool]:
    """Return for each column whether all its entries are numbers."""
    return [bool(rows) and all(isinstance(row[n], (int, float)) for row in rows) for n in range(len(columns))]


def plain(value: Any) -> Any:
    """Return a value with JSON's types only.

    A dataclass becomes a dict of the fields that its repr shows. Non-finite numbers become None.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (np.generic, np.ndarray)) or hasattr(value, "addressable_shards"):
        return plain(np.asarray(value).tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def short(number: float) -> str:
    """Return a number with three digits and a metric prefix, such as 1.05M.

    >>> short(1_048_576), short(3)
    ('1.05M', '3')
    """
    power = next((n for n in range(5, 0, -1) if number >= 0.9995 * 1000**n), 0)
    return f"{number / 1000**power:.3g}{' kMGTP'[power]}".strip()


def byte_text(size: float) -> str:
    """Return a number of bytes with three digits and a unit that is a power of 1,024.

    >>> byte_text(1000), byte_text(1536), byte_text(7.5e9)
    ('1000 B', '1.5 KiB', '6.98 GiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = next((n for n in range(len(units) - 1, 0, -1) if size >= 0.9995 * 1024**n), 0)
    return f"{_three_digits(size / 1024**power)} {units[power]}"


def byte_unit(largest: float) -> tuple[str, int]:
    """Return the unit of a column or an axis of byte sizes, and its number of bytes.

    >>> byte_unit(7.5e9), byte_unit(1536)
    (('MiB', 1048576), ('KiB', 1024))
    """
    return ("MiB", 2**20) if largest >= 10 * 2**20 else ("KiB", 2**10)


def time_text(milliseconds: float) -> str:
    """Return a time with three digits and a unit.

    >>> time_text(0.0125), time_text(12.5), time_text(12_500)
    ('12.5 µs', '12.5 ms', '12.5 s')
    """
    if milliseconds < 0.9995:
        return f"{1e3 * milliseconds:.3g} µs"
    if milliseconds < 999.5:
        return f"{milliseconds:.3g} ms"
    return f"{_three_digits(milliseconds / 1e3)} s"


def _three_digits(number: float) -> str:
    """Return a number with three digits, or with more digits before the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Return groups of items with equal keys, in the order of their first items.

    >>> grouped(["a1", "b1", "a2"], lambda name: name[0])
    [['a1', 'a2'], ['b1']]
    """
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def without_numbers(path: str) -> str:
    """Return a path with ``*`` in place of each number.

    The result is the same for all layers of a stack.

    >>> without_numbers("Net/Block_11/Dense_0")
    'Net/Block_*/Dense_*'
    """
    return re.sub(r"\d+", "*", path)


def common_path(paths: Sequence[str]) -> str:
    """Return one path for paths that differ only in numbers.

    A ``*`` stands for numbers that differ.

    >>> common_path(["Net/Block_0/Dense_1", "Net/Block_11/Dense_1"])
    'Net/Block_*/Dense_1'
    """
    parts = zip(*(re.split(r"(\d+)", path) for path in paths), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def not_counted(names: Sequence[str]) -> list[str]:
    """Return the line that names what a result does not count; no line if it counts everything.

    >>> not_counted(["loop a", "loop b", "loop c", "loop d"]), not_counted([])
    (['not counted: loop a; loop b; loop c; loop d'], [])
    """
    shown = [*names[:5], *([f"{len(names) - 5} more"] if len(names) > 5 else [])]
    return [f"not counted: {'; '.join(shown)}"] if names else []


def counts(numbers: Mapping[str, int]) -> str:
    """Return the numbers with their names as text, or ``"none"``.

    >>> counts({"softmax": 12, "variance": 2})
    '12 softmax, 2 variance'
    """
    return ", ".join(f"{number} {name}" for name, number in numbers.items()) or "none"


def runs(names: Sequence[str]) -> str:
    """Return names as text, with consecutive repetitions as a count: ``"3×norm"``."""
    groups = ((name, len(list(group))) for name, group in itertools.groupby(names))
    return ", ".join(name if count == 1 else f"{count}×{name}" for name, count in groups)
