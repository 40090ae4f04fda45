"""How benchmarks begin and end: the flags that several have, and the folder of a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tyro

from experiments.report.tables import Table, terminal
from experiments.training import cli
from experiments.training.runs import write_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The flag of every benchmark."""

    run_dir: cli.Folder = None
    """Folder to write to, and to go on from. (default: runs/NAME-TIME)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed(Config):
    """Flags of what takes turns."""

    rounds: int = 20
    """Rounds of timing."""
    block_ms: float = 200.0
    """How long a turn should take, in milliseconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small(Config):
    """The flag of what can be made small."""

    smoke: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small sizes, on any device: to see that everything runs. Its figures mean nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces(Config):
    """The flag of what can be had in pieces."""

    minutes: float = 0.0
    """Start nothing new after so many minutes; the same command goes on from there. 0 is no limit."""


def check(config: Config, **least: float) -> None:
    """Checks that no number is too small, and that no list which has a default is empty.

    Args:
      config: the flags.
      **least: what a number must be at least, where it is not 0, or 1 for rounds and a tenth of a millisecond.

    Raises:
      ValueError: one is.
    """
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), f"--{field.name.replace('_', '-')}"
        if isinstance(value, (int, float)):
            cli.require(flag, value, {"rounds": 1, "block_ms": 0.1, **least}.get(field.name, 0))
        elif isinstance(value, tuple) and field.default:
            cli.require(f"the number of {flag}", len(value), 1)


def facts(where: dict[str, str]) -> list[str]:
    """Device, versions, date and command, a line each."""
    return [f"- {name}: {value}" for name, value in where.items()]


def show(folder: Path, where: dict[str, str], tables: Iterable[Table]) -> None:
    """Prints tables, where they were measured, and where they are."""
    console = terminal()
    for table in tables:
        table.show(console)
    console.print(*facts(where), f"written to {folder}", sep="\n", markup=False, highlight=False, soft_wrap=True)


def record(
    folder: Path,
    name: str,
    title: str,
    where: dict[str, str],
    tables: Sequence[Table],
    data: dict[str, Any],
    text: Iterable[str] = (),
    picture: str = "",
) -> None:
    """Writes a result, NAME.md and NAME.json, and shows it.

    Args:
      folder, name, title: of the run, of the files, and of the page.
      where: device, versions, date and command.
      tables, data: of the page, and all figures, to which ``where`` is added.
      text: paragraphs before the tables.
      picture: what NAME.png shows, if there is one.
    """
    shown = [f"![{picture}]({name}.png)"] if picture else []
    lines = [f"# {title}", "", *facts(where), ""]
    lines += [line for paragraph in (*text, *shown) for line in (paragraph, "")]
    (folder / f"{name}.md").write_text("\n".join([*lines, *(table.markdown() for table in tables)]))
    write_json(folder / f"{name}.json", {"environment": where, **data})
    show(folder, where, tables)
