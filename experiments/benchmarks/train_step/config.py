"""The flags of benchmarks.train_step."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import tyro

from experiments.benchmarks.shared import records
from experiments.benchmarks.train_step.rows import Pass
from experiments.models.workloads import FULL, NAMES, SMOKE, Name, Workload, workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Timed, records.Pieces, records.Small):
    """Flags of the benchmark."""

    models: tuple[Name, ...] = NAMES
    """Models to measure."""
    rows: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ROW [ROW ...]", help_behavior_hint="")] = ()
    """Rows to measure, among those that --list prints; a ratio needs both its rows in one command. (default: all)"""
    passes: tuple[Pass, ...] = ("train", "forward")
    """The train step, the forward pass alone, or both."""
    energy_s: float = 2.0
    """How long a row runs for its energy, in seconds; 0 measures none."""
    batch_size: int = 0
    """Examples a step; 0 for 256 (resnet50), 64 (bert) and 16 (gpt2)."""
    look: Annotated[Literal["", "width", "depth", "busy", "run"], tyro.conf.arg(metavar="{width,depth,busy,run}")] = ""
    """In place of the table: the transformers' train step at widths, or depths, down to where half stops paying; with
    the host's cores idle, and with a process at work on every one; or (run) whether each row runs, in small models."""
    report_only: tyro.conf.FlagCreatePairsOff[bool] = False
    """Measure nothing: write the report of what lies in --run-dir."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the rows and end."""
    alone: Annotated[str, tyro.conf.arg(metavar="ROW", help_behavior_hint="")] = ""
    """Measure one row of one model alone and print JSON: what the run starts for each row."""

    @property
    def length(self) -> tuple[int, float]:
        """Rounds, and milliseconds of a turn."""
        return (2, 1.0) if self.smoke else (self.rounds, self.block_ms)


def case_of(name: Name, config: Config, **sizes: Any) -> Workload:
    """A model in the sizes of the flags, or in others."""
    return workload(name, (SMOKE if config.smoke else FULL)[name], **{"batch_size": config.batch_size, **sizes})
