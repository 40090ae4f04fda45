"""Measure a whole train step in mixed precision on one GPU.

The table compares jaxmp, JAX by hand and torch.compile.

python -m experiments.benchmarks.train_step --run-dir runs/train_step

The models are ResNet-50 (256×224×224), BERT-Base (64×512) and GPT-2 (16×1024). A step is forward, backward, clipping,
AdamW and loss scaling. First, a separate process measures the compile time, the peak memory and the energy of each row.
Then all rows of a model take turns in one process. They are warmed up, each turn ends by waiting for the last call, and
every state is donated. A ratio is the time of a row divided by the time of another row in the same round. The median
over the rounds is shown.

torch is optional. Rows whose library is not installed are left out. The run folder keeps the results, and the same
command continues from there with the same device, versions, rounds and turn lengths. Rows that failed are tried again.
The run folder holds train_step.md, .json and .png.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from experiments.benchmarks.measure import processes, turns
from experiments.benchmarks.measure.caches import caches_in
from experiments.benchmarks.models.workloads import FULL, NAMES, SMOKE, Name, Workload, workload
from experiments.benchmarks.shared import measurements, records
from experiments.benchmarks.shared.devices import require_gpu
from experiments.benchmarks.train_step import measure, report
from experiments.benchmarks.train_step.rows import ROWS, Row, rows_of
from experiments.report.progress import Progress
from experiments.training import cli
from experiments.training.environment import environment

READY_SECONDS = 10.0
"""The seconds to prepare a row whose programs are in the compilation cache."""


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


class Measurement:
    """The measurements of a command.

    Results that are in the folder already are not measured again.

    Args:
      config: the flags.
      folder: the run folder.

    Raises:
      ValueError: the folder has results of other sizes, another device, other versions or other lengths.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        setting = {"smoke": config.smoke, "energy_s": config.energy_s}
        self.saved = measurements.Measurements(folder, config.minutes, environment(("torch",)), **setting)
        self.lengths = {"rounds": config.rounds, "block_ms": config.block_ms}
        self.cases = [case_of(name, config) for name in config.models]
        self.rows = {
            case: {key: row for key, row in rows_of(case.name, config.rows).items() if row.missing is None}
            for case in self.cases
        }
        for case in self.cases:
            sizes = dataclasses.asdict(case.sizes)
            self.saved.require_alike(f"alone-{case.name}-*.json", sizes=sizes)
            self.saved.require_alike(f"{self._turns(case)[1]}.json", sizes=sizes, **self.lengths)

    def run(self, progress: Progress) -> None:
        """Measure what the flags ask for and the folder lacks.

        Every row of every model is first measured alone, because this process keeps GPU memory once rows have taken
        turns in it.
        """
        for case in self.cases:
            self._alone(case, progress)
        for case in self.cases:
            self._together(case, progress)

    def _alone(self, case: Workload, progress: Progress) -> None:
        rows = self.rows[case]
        todo = [key for key in rows if "error" in self._known(case, key)]
        progress.advance(len(rows) - len(todo), "measured before", case.name)
        flags = ["--models", case.name, "--batch-size", str(case.sizes.batch_size), "--run-dir", str(self.folder)]
        flags += ["--energy-s", str(self.config.energy_s)]
        program = [sys.executable, "-m", "experiments.benchmarks.train_step", *flags]
        here = ((key, functools.partial(measure.alone, case, rows[key], 0.1)) for key in todo)
        apart = processes.in_processes({key: [*program, "--alone", key] for key in todo})
        for key, find in here if self.config.smoke else apart:
            if self.saved.clock.late():
                break
            progress.advance(0, f"{rows[key].label}, alone", case.name)
            self._save(f"alone-{case.name}-{key}", case, {"row": key, "figures": find()})
            progress.advance(1, f"{rows[key].label}, alone", case.name)

    def _turns(self, case: Workload) -> tuple[dict[str, Row], str]:
        """Return the rows that can take turns, and the name of the file with their times."""
        able = {key: row for key, row in self.rows[case].items() if "error" not in self._known(case, key)}
        digest = hashlib.sha1(" ".join(able).encode()).hexdigest()[:8]  # the same set of rows is not timed again
        return able, f"together-{case.name}-{digest}"

    def _together(self, case: Workload, progress: Progress) -> None:
        able, name = self._turns(case)
        record = self.saved.read(name)
        is_done = bool(record) and all("milliseconds" in row for row in record["rows"].values())
        rounds, block_ms = self.config.length
        seconds = len(able) * (READY_SECONDS + 2 * rounds * block_ms / 1000)
        if not able or is_done or self.saved.clock.late(seconds):
            return
        prepared, errors = measure.prepare_all(case, able, progress)

        def tell(i: int) -> None:
            progress.advance(0, f"timing, in turn: round {max(i, 0) + 1} of {rounds}", case.name)

        figures = turns.together(prepared, rounds, block_ms, tell)
        prepared.clear()
        measure.start_anew(able.values())
        figures |= {key: {"error": f"{why} beside the other rows"} for key, why in errors.items()}
        self._save(name, case, {"rows": figures}, **self.lengths)

    def _save(self, name: str, case: Workload, figures: dict[str, Any], **setting: Any) -> None:
        sizes = dataclasses.asdict(case.sizes)
        about = {**case.facts, "sizes": sizes}
        about["measured"] = datetime.datetime.now().isoformat(timespec="seconds")
        self.saved.save(name, {**about, **figures}, sizes=sizes, **setting)

    def _known(self, case: Workload, key: str) -> dict[str, Any]:
        """Return the figures of a row from its separate process; an ``error`` if there are none."""
        record = self.saved.read(f"alone-{case.name}-{key}")
        return record["figures"] if record else {"error": "not measured"}


def check(config: Config) -> None:
    """Check the flags.

    Raises:
      ValueError: the value of a flag is invalid, or there is no GPU.
    """
    records.check(config)
    rows_of("gpt2", (*config.rows, *([config.alone] if config.alone else [])))
    if config.alone:
        if len(config.models) != 1:
            raise ValueError(f"--alone needs a single model, got --models {' '.join(config.models)}; name one of them")
    elif not config.report_only:
        require_gpu(config.smoke)
    elif config.run_dir is None or not config.run_dir.is_dir():
        raise ValueError(f"--report-only reads results from --run-dir, an existing folder, got {config.run_dir}")


def measure_alone(config: Config) -> None:
    """Measure a row in this process, and print its figures as JSON."""
    (name,), row = config.models, ROWS[config.alone]
    if row.torch:
        jax.config.update("jax_platforms", "cpu")  # so that only torch uses the GPU
    with caches_in((config.run_dir or Path("runs")) / "cache"):
        processes.answer(lambda: measure.alone(case_of(name, config), row, config.energy_s))


def main(config: Config) -> Any:
    # This must be set before JAX uses the GPU, which it shares with torch and with the processes of the rows.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if config.list:
        print("\n".join(f"{name:20} {row.label}" for name, row in ROWS.items()))
        return {}
    with cli.bad_values_end_it():
        check(config)
        if config.alone:
            measure_alone(config)
            return {}
        folder = cli.run_folder("train_step", config.run_dir).absolute()
        measurement = None if config.report_only else Measurement(config, folder)
    if measurement:
        total = sum(map(len, measurement.rows.values()))
        with caches_in(folder / "cache"), Progress("train step", total) as progress:
            measurement.run(progress)
    with cli.bad_values_end_it():
        results = report.write(folder)
        if not results and not (measurement and measurement.saved.clock.unfinished):
            raise ValueError(f"there is nothing to measure or to report in {folder}; see --list")
    if measurement:
        measurement.saved.end()
    wrong = [row for of_model in results.values() for row in of_model.failed()] if config.smoke else []
    if wrong:
        cli.fail(f"in a smoke test every row must run, but {', '.join(wrong)} did not; see above", 1)
    return results
