"""The flags of benchmarks.train_step."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from experiments.benchmarks.models.workloads import FULL, NAMES, SMOKE, Name, Workload, workload
from experiments.benchmarks.shared import records


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Timed, records.Pieces, records.Small):
    """Flags of the benchmark."""

    models: tuple[Name, ...] = NAMES
    """Models to measure."""
    rows: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ROW [ROW ...]", help_behavior_hint="")] = ()
    """Rows to measure; --list prints them. A ratio needs both of its rows in one command. (default: all)"""
    energy_s: float = 1.5
    """Seconds for which a row runs to measure its energy; 0 to measure no energy."""
    batch_size: int = 0
    """Examples per step; 0 for 256 (resnet50), 64 (bert) and 16 (gpt2)."""
    report_only: tyro.conf.FlagCreatePairsOff[bool] = False
    """Measure nothing. Write the report of the results in --run-dir."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the rows and exit."""
    alone: Annotated[str, tyro.conf.arg(metavar="ROW", help_behavior_hint="")] = ""
    """Measure one row of one model and print JSON. The benchmark calls itself with this flag for each row."""

    @property
    def length(self) -> tuple[int, float]:
        """Return the number of rounds, and the milliseconds of a turn."""
        return (2, 1.0) if self.smoke else (self.rounds, self.block_ms)


def case_of(name: Name, config: Config) -> Workload:
    """Return a model with the sizes of the flags."""
    return workload(name, (SMOKE if config.smoke else FULL)[name], batch_size=config.batch_size)
