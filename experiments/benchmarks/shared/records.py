"""Common flags of benchmarks, and the record of a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from experiments.benchmarks.models.workloads import Sizes
from experiments.report import plots
from experiments.report.json_files import write_json
from experiments.report.tables import Table, terminal
from experiments.training import cli


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The flag of every benchmark."""

    run_dir: cli.Folder = None
    """Folder to write to and to continue from. (default: runs/NAME-TIME)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed(Config):
    """Flags of benchmarks in which variants take turns."""

    rounds: int = 20
    """Rounds of timing."""
    block_ms: float = 200.0
    """Target duration of a turn in milliseconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sized(Timed):
    """Flags of benchmarks in which variants of any size take turns."""

    batch_size: int = 0
    """Examples per step; 0 for a number that suits the model and the device."""
    sequence: int = 0
    """Tokens per sequence; 0 for a number that suits the model and the device."""
    layers: int = 0
    """Layers; 0 for a number that suits the model and the device."""
    width: int = 0
    """Width of the layers; 0 for a width that suits the model and the device."""
    vocabulary: int = 0
    """Tokens in the vocabulary; 0 for a number that suits the model and the device."""

    def sizes(self, on_gpu: Sizes, elsewhere: Sizes) -> Sizes:
        """Return the default sizes of the device, changed by the flags that are not 0."""
        defaults = on_gpu if jax.default_backend() == "gpu" else elsewhere
        changes = {"batch_size": self.batch_size, "length": self.sequence, "layers": self.layers, "width": self.width}
        changes["vocabulary"] = self.vocabulary
        return dataclasses.replace(defaults, **{name: value for name, value in changes.items() if value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small(Config):
    """The flag of benchmarks that can run at small size."""

    smoke: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run at small size on any device, to check that everything runs. The figures mean nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Absent(Config):
    """The flag of benchmarks that can compile for a GPU that is not attached."""

    device: Annotated[str | None, tyro.conf.arg(metavar="GPU", help_behavior_hint="(default: this device)")] = None
    """Compile for a GPU that is not attached, for example h200, and run nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces(Config):
    """The flag of benchmarks that run in pieces."""

    minutes: float = 0.0
    """Start no new measurement after so many minutes; 0 for no limit. Run the same command again to continue."""


def check(config: Config, **least: float) -> None:
    """Check that no number is too small, and that no list with a default is empty.

    Args:
      config: the flags.
      **least: the least value of a flag, by its name. The default is 0, but 1 for ``rounds`` and 0.1 for ``block_ms``.

    Raises:
      ValueError: a number is too small, or a list is empty.
    """
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), f"--{field.name.replace('_', '-')}"
        if isinstance(value, (int, float)):
            cli.require(flag, value, {"rounds": 1, "block_ms": 0.1, **least}.get(field.name, 0))
        elif isinstance(value, tuple) and field.default:
            cli.require(f"the number of {flag}", len(value), 1)


def folder_of(name: str, config: Config, **least: float) -> Path:
    """Check the flags, and return the run folder, which is made if necessary."""
    check(config, **least)
    return cli.run_folder(name, config.run_dir)


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
    """Write a result to NAME.md and NAME.json, and print its tables.

    If there are panels, draw NAME.png too.

    Args:
      folder: the run folder.
      name: the name of the files.
      title: the title of the page.
      where: device, versions, date and command.
      tables: the tables of the page.
      data: all figures, for NAME.json. ``where`` is added to the figures.
      text: paragraphs before the tables.
      picture: a description of NAME.png; empty if there is no picture.
      panels: the panels of NAME.png.
      caption: text below the picture, before the device and the date.
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
