"""The flags of benchmarks.train_step."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import tyro

from experiments.benchmarks.shared.workloads import FULL, NAMES, SMOKE, Name, Workload, workload
from experiments.benchmarks.train_step.rows import Pass
from experiments.training import cli


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the benchmark."""

    models: tuple[Name, ...] = NAMES
    """Models to measure."""
    rows: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ROW [ROW ...]", help_behavior_hint="")] = ()
    """Rows to measure, among those that --list prints; a ratio needs both its rows in one command. (default: all)"""
    passes: tuple[Pass, ...] = ("train", "forward")
    """The train step, the forward pass alone, or both."""
    rounds: int = 20
    """Rounds of timing."""
    block_ms: float = 200.0
    """How long a turn should take, in milliseconds."""
    energy_s: float = 2.0
    """How long a row runs for its energy, in seconds; 0 measures none."""
    batch_size: int = 0
    """Examples a step; 0 for 256 (resnet50), 64 (bert) and 16 (gpt2)."""
    sweep: Annotated[Literal["", "width", "depth"], tyro.conf.arg(metavar="{width,depth}", help_behavior_hint="")] = ""
    """In place of the table: the transformers' train step at widths, or depths, down to where half stops paying."""
    busy: tyro.conf.FlagCreatePairsOff[bool] = False
    """In place of the table: the train step with the host's cores idle, and with a process at work on every one."""
    minutes: float = 0.0
    """Start nothing new after so many minutes; the same command goes on from there. 0 is no limit."""
    report_only: tyro.conf.FlagCreatePairsOff[bool] = False
    """Measure nothing: write the report of what lies in --run-dir."""
    smoke: tyro.conf.FlagCreatePairsOff[bool] = False
    """Tiny models, two rounds, any device, one process: to see that everything runs. Its figures mean nothing."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the rows and end."""
    alone: Annotated[str, tyro.conf.arg(metavar="ROW", help_behavior_hint="")] = ""
    """Measure one row of one model alone and print JSON: what the run starts for each row."""
    run_dir: cli.Folder = None
    """Folder to write to, and to go on from. (default: runs/train_step-TIME)"""


def case_of(name: Name, config: Config) -> Workload:
    """A model in the sizes of the flags."""
    sizes = (SMOKE if config.smoke else FULL)[name]
    return workload(name, dataclasses.replace(sizes, batch_size=config.batch_size or sizes.batch_size))
