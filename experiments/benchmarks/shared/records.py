"""Common flags of benchmarks, and the record of a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from experiments.models.workloads import Sizes
from experiments.report import plots
from experiments.report.json_files import write_json
from experiments.report.tables import Table, terminal
from experiments.training import cli
from experiments.training.run_folders import run_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The flag of every benchmark."""

    run_dir: cli.Folder = None
    """Folder to write to, and to go on from. (default: runs/NAME-TIME)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed(Config):
    """Flags of benchmarks that take turns."""

    rounds: int = 20
    """Rounds of timing."""
    block_ms: float = 200.0
    """How long a turn should take, in milliseconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sized(Timed):
    """Flags of benchmarks that take turns, in any size; 0 suits the model and the device."""

    batch_size: int = 0
    """Examples a step; 0 suits the model and the device."""
    sequence: int = 0
    """Tokens a sequence; 0 suits the model and the device."""
    layers: int = 0
    """Layers; 0 suits the model and the device."""
    width: int = 0
    """Width of the layers; 0 suits the model and the device."""
    vocabulary: int = 0
    """Tokens there are; 0 suits the model and the device."""

    def sizes(self, on_gpu: Sizes, elsewhere: Sizes) -> Sizes:
        """Those of the device, but for what the flags give."""
        defaults = on_gpu if jax.default_backend() == "gpu" else elsewhere
        changes = {"batch_size": self.batch_size, "length": self.sequence, "layers": self.layers, "width": self.width}
        changes["vocabulary"] = self.vocabulary
        return dataclasses.replace(defaults, **{name: value for name, value in changes.items() if value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small(Config):
    """The flag of benchmarks that can be made small."""

    smoke: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small sizes, on any device: to see that everything runs. Its figures mean nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Absent(Config):
    """The flag of benchmarks that compile for an absent GPU."""

    device: Annotated[str | None, tyro.conf.arg(metavar="GPU", help_behavior_hint="(default: run on this one)")] = None
    """A GPU that is not there, h200 say, to compile for; nothing is run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces(Config):
    """The flag of benchmarks that run in pieces."""

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


def folder_of(name: str, config: Config, **least: float) -> Path:
    """The run folder, made once :func:`check` has found no fault with the flags."""
    check(config, **least)
    return run_folder(name, config.run_dir)


def record(
    folder: Path,
    name: str,
    title: str,
    where: dict[str, str],
    tables: Sequence[Table],
    data: dict[str, Any],
    text: Iterable[str] = (),
    picture: str = "",
    panels: Sequence[Sequence[plots.Panel]] = (),
    caption: str = "",
) -> None:
    """Writes a result, NAME.md, NAME.json and perhaps NAME.png, and shows it.

    Args:
      folder, name, title: of the run, of the files, and of the page.
      where: device, versions, date and command.
      tables, data: of the page, and all figures, to which ``where`` is added.
      text: paragraphs before the tables.
      picture, panels, caption: what NAME.png shows, if there is one, and what stands below it before device and date.
    """
    shown = [f"![{picture}]({name}.png)"] if picture else []
    facts = [f"- {what}: {value}" for what, value in where.items()]
    lines = [f"# {title}", "", *facts, ""]
    lines += [line for paragraph in (*text, *shown) for line in (paragraph, "")]
    (folder / f"{name}.md").write_text("\n".join([*lines, *(table.markdown() for table in tables)]))
    write_json(folder / f"{name}.json", {"environment": where, **data})
    if panels:
        device = f"compiled for {where['target']}" if "target" in where else where["device"]
        plots.panels(panels, folder / f"{name}.png", f"{caption}{device}, {where['date'][:10]}")
    console = terminal()
    for table in tables:
        table.show(console)
    console.print(*facts, f"written to {folder}", sep="\n", markup=False, highlight=False, soft_wrap=True)
