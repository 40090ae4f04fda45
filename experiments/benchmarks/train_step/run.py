"""A whole train step in mixed precision: jaxmp, JAX by hand, jmp, flax and torch, on one GPU, in one run.

python -m experiments.benchmarks.train_step --run-dir runs/train_step

ResNet-50 (256×224×224), BERT-Base (64×512) and GPT-2 (16×1024): forward, backward, clipping, AdamW, loss scaling; and
the forward pass alone. First each row is measured alone, in a process of its own: compile time, peak memory, energy,
and a profile. Then all rows of a model take turns in one process, warm, each turn waited for, every state donated; a
ratio is one round's time over the same round's of another row, and the median over the rounds counts. Utilisation is
against what one matrix product reaches on this device (benchmarks.ceiling), measured in the same folder.

torch is optional: rows of what is not installed say so. What was measured stays in the run folder, so that a long run
can be cut: --minutes 8 starts nothing new after eight, and the same command goes on from there, with the same device,
versions and lengths; rows that failed are tried again. The run folder holds train_step.md, .json and .png. --sweep
shows from which width or depth on half precision pays, --busy what a step takes while every core of the host is at
work.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import jax
import rich.console

from experiments.benchmarks import ceiling
from experiments.benchmarks.shared import kept
from experiments.benchmarks.shared.workloads import Workload
from experiments.benchmarks.train_step import jax_steps, measure, report
from experiments.benchmarks.train_step import sweeps as train_step_sweeps
from experiments.benchmarks.train_step.config import Config, case_of
from experiments.benchmarks.train_step.rows import ROWS, Pass, Prepared, Row, peers, rows_of
from experiments.measure.environment import environment, require_gpu
from experiments.report.progress import Progress
from experiments.training import cli
from experiments.training.runs import run_folder, write_json

READY_SECONDS = 10.0
"""What it takes to make a row ready for its turns that was compiled before."""


class Measurement:
    """One command's part of a run: what is there already is not measured again.

    Args:
      config: its flags.
      folder: the run's.

    Attributes:
      clock: what it leaves to the next command.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.clock = kept.Clock(config.minutes)
        self.where = environment(peers())
        self._flops: dict[str, int] = {}
        held = {name: self.where[name] for name in ("device", "versions")}
        self._place = {**held, "smoke": config.smoke}
        self._lengths = {name: getattr(config, name) for name in ("rounds", "block_ms", "energy_s")}

    def run(self, progress: Progress) -> None:
        """Measures what the flags ask for and the folder lacks.

        Every row of every model alone first: once rows have taken turns here, this process keeps memory.
        """
        cases = [case_of(name, self.config) for name in self.config.models]
        self._ceilings(progress)
        rows = {
            case.name: {key: row for key, row in rows_of(case.name, self.config.rows).items() if row.missing is None}
            for case in cases
        }
        for case in cases:
            (self._in_one_process if self.config.smoke else self._alone)(case, rows[case.name], progress)
        turns = [] if self.config.smoke else list(itertools.product(cases, self.config.passes))
        turns.sort(key=lambda turn: self._turns(*turn, rows[turn[0].name])[1].exists())  # second tries last
        for case, which in turns:
            self._together(case, which, rows[case.name], progress)

    def require_alike(self) -> None:
        """Checks that what the flags ask for can be held against what the folder has.

        Raises:
          ValueError: it has other sizes, another device, other versions or lengths.
        """
        if (file := self.folder / "ceiling.json").exists():
            kept.require_alike(file, self._place)
        for case in (case_of(name, self.config) for name in self.config.models):
            for file in self.folder.glob(f"*-{case.name}-*.json"):
                kept.require_alike(file, self._setting(case))

    def _setting(self, case: Workload) -> dict[str, Any]:
        """What all figures of a model in one folder have in common."""
        return {"sizes": dataclasses.asdict(case.sizes), **self._lengths, **self._place}

    def _ceilings(self, progress: Progress) -> None:
        if (file := self.folder / "ceiling.json").exists():
            return
        progress.advance(0, "matrix products", "ceilings")
        small = self.config.smoke
        found = ceiling.ceilings(
            ceiling.SMOKE_SHAPES[:1] if small else ceiling.SHAPES,
            ceiling.SMOKE_COPY_BYTES if small else ceiling.COPY_BYTES,
            rounds=1 if small else 5,
            block_ms=1 if small else 50,
            kinds=("float32", "tensorfloat32", "bfloat16", "float16"),
        )
        write_json(file, {"setting": self._place, "environment": self.where, **found})

    def _alone(self, case: Workload, rows: dict[str, Row], progress: Progress) -> None:
        passes = {key: self._not_yet(case, key, row) for key, row in rows.items()}
        todo = sorted((key for key in rows if passes[key]), key=lambda key: bool(self._known(case, key)))  # new first
        progress.advance(len(rows) - len(todo), "measured before", case.name)
        flags = ["--models", case.name, "--batch-size", str(case.sizes.batch_size), "--run-dir", str(self.folder)]
        flags += ["--energy-s", str(self.config.energy_s)]
        program = [sys.executable, "-m", "experiments.benchmarks.train_step", *flags]
        commands = {key: [*program, "--alone", key, "--passes", *passes[key]] for key in todo}
        for key, measured in measure.in_processes(commands):
            if self.clock.late():
                break
            progress.advance(0, f"{rows[key].label}, alone", case.name)
            known = self._known(case, key)
            known.pop("error", None)
            found = {**known, **measured()}
            self._save(self._alone_file(case, key), case, {"row": key, **found})
            progress.advance(1, f"{rows[key].label}, alone", case.name)

    def _turns(self, case: Workload, which: Pass, rows: dict[str, Row]) -> tuple[dict[str, Row], Path]:
        """The rows that can take turns, and the file of their times."""
        chosen = {
            key: row for key, row in rows.items() if "error" not in self._known(case, key).get(which, {"error": ""})
        }
        digest = hashlib.sha1(" ".join(chosen).encode()).hexdigest()[:8]  # the same rows are not timed again
        return chosen, self.folder / f"together-{case.name}-{which}-{digest}.json"

    def _together(self, case: Workload, which: Pass, rows: dict[str, Row], progress: Progress) -> None:
        chosen, file = self._turns(case, which, rows)
        if not chosen or (file.exists() and not _to_try_again(file)):
            return
        if self.clock.late(len(chosen) * (READY_SECONDS + self.config.rounds * self.config.block_ms / 1000)):
            return
        prepared, errors = measure.prepare_all(
            case,
            chosen,
            which,
            lambda key: progress.advance(0, f"{ROWS[key].label}: getting ready", case.name),
        )
        self._time(case, which, prepared, errors, kept.again(file), progress)
        prepared.clear()
        measure.start_anew(chosen.values())

    def _in_one_process(self, case: Workload, rows: dict[str, Row], progress: Progress) -> None:
        alone: dict[str, dict[str, Any]] = {key: {"row": key} for key in rows}
        for which in self.config.passes:
            prepared: dict[str, Prepared] = {}
            measure.start_anew(rows.values())
            for key, row in rows.items():
                progress.advance(0, f"{row.label}, {which}", case.name)
                if which == "train" or row.forward:
                    try:
                        prepared[key] = measure.prepare(case, row, which)
                        alone[key][which] = measure.describe(case, row, which, prepared[key], seconds=0.1)
                    except Exception as error:  # whatever a library raises: the other rows go on
                        prepared.pop(key, None)
                        alone[key][which] = {"error": measure.failed(error)}
                progress.advance(int(which == self.config.passes[-1]), f"{row.label}, {which}", case.name)
            self._time(case, which, prepared, {}, self.folder / f"together-{case.name}-{which}-smoke.json", progress)
        for key, found in alone.items():
            self._save(self._alone_file(case, key), case, found)

    def _time(
        self,
        case: Workload,
        which: Pass,
        prepared: dict[str, Prepared],
        errors: dict[str, str],
        file: Path,
        progress: Progress,
    ) -> None:
        rounds = 2 if self.config.smoke else self.config.rounds
        found = measure.together(
            prepared,
            rounds,
            1.0 if self.config.smoke else self.config.block_ms,
            lambda round_: progress.advance(0, f"timing, in turn: round {max(round_, 0) + 1} of {rounds}", case.name),
        )
        for key, why in errors.items():
            found[key] = {"error": f"{why} beside the other rows"}
        self._save(file, case, {"pass": which, "rows": found})

    def _save(self, file: Path, case: Workload, found: dict[str, Any]) -> None:
        if case.name not in self._flops:
            self._flops[case.name] = jax_steps.model_flops(case)
        about = {
            "sizes": dataclasses.asdict(case.sizes),
            "model_flops": self._flops[case.name],
            "measured": datetime.datetime.now().isoformat(timespec="seconds"),
        }
        kept.save(file, case, self._setting(case), self.where, {**about, **found})

    def _alone_file(self, case: Workload, key: str) -> Path:
        return self.folder / f"alone-{case.name}-{key}.json"

    def _known(self, case: Workload, key: str) -> dict[str, Any]:
        """What was measured of a row alone: by pass its figures, or an error of all."""
        file = self._alone_file(case, key)
        found = kept.read(file) if file.exists() else {}
        return {name: found[name] for name in ("train", "forward", "error") if name in found}

    def _not_yet(self, case: Workload, key: str, row: Row) -> list[Pass]:
        """The passes that the flags ask for and of which a row alone has no figures: those that failed, too."""
        known = self._known(case, key)
        asked: list[Pass] = [which for which in self.config.passes if which == "train" or row.forward]
        return [which for which in asked if "error" in known.get(which, {"error": ""})]


def _to_try_again(file: Path) -> bool:
    """Whether rows failed in turn, but for want of memory beside the others: nothing has changed about that."""
    tries = [kept.read(each)["rows"] for each in (file, kept.again(file)) if each.exists()]
    timed = {key for rows in tries for key, row in rows.items() if "milliseconds" in row}
    failed = {key: row["error"] for key, row in tries[-1].items() if "error" in row and key not in timed}
    return any(not why.startswith(measure.OUT_OF_MEMORY) for why in failed.values())


def measure_alone(config: Config) -> None:
    """What each row's process does."""
    (name,), row = config.models, ROWS[config.alone]
    if row.torch:
        jax.config.update("jax_platforms", "cpu")  # only torch is to use the GPU

    def found() -> dict[str, Any]:
        return measure.alone(case_of(name, config), row, config.passes, config.energy_s)

    if row.torch:
        pass  # its imports while another row measures
    with measure.caches_in((config.run_dir or Path("runs")) / "cache"):
        measure.answer(found)


def main(config: Config) -> dict[str, Any]:
    # Before JAX meets the GPU: it shares it with torch and with the processes of the rows.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if config.list:
        print("\n".join(f"{name:20} {row.label}" for name, row in ROWS.items()))
        return {}
    with cli.bad_values_end_it():
        cli.require("--rounds", config.rounds, 1)
        cli.require("--batch-size", config.batch_size, 0)
        cli.require("--minutes", config.minutes, 0)
        cli.require("--energy-s", config.energy_s, 0)
        cli.require("--block-ms", config.block_ms, 0.1)
        cli.require("the number of --models", len(config.models), 1)
        cli.require("the number of --passes", len(config.passes), 1)
        rows_of("gpt2", (*config.rows, *([config.alone] if config.alone else [])))
        if config.alone:
            if len(config.models) != 1:
                raise ValueError(f"--alone is of one model, got --models {' '.join(config.models)}; name one of them")
            measure_alone(config)
            return {}
        if config.sweep or config.busy:
            train_step_sweeps.check(config)
        if not config.report_only:
            require_gpu(config.smoke)
        elif config.run_dir is None or not config.run_dir.is_dir():
            raise ValueError(f"--report-only reads what lies in --run-dir, an existing folder, got {config.run_dir}")
        folder = run_folder("train_step", config.run_dir).absolute()
    if config.sweep or config.busy:
        return train_step_sweeps.run(config, folder)
    unfinished = False
    if not config.report_only:
        total = sum(sum(row.missing is None for row in rows_of(name, config.rows).values()) for name in config.models)
        cache = measure.caches_in(folder / "cache")
        with cli.bad_values_end_it():
            measurement = Measurement(config, folder)
            measurement.require_alike()
        with cache, Progress("train step", total) as progress:
            measurement.run(progress)
        unfinished = measurement.clock.unfinished
    with cli.bad_values_end_it():
        results = report.write(folder)
        if not results and not unfinished:
            raise ValueError(_why_nothing(config, folder))
    console = rich.console.Console()
    report.show(results, console if console.is_terminal else rich.console.Console(width=240))
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)
    if unfinished:
        print(kept.UNFINISHED)
    wrong = [row for each in results.values() for row in each.failed()] if config.smoke else []
    if wrong:
        cli.fail(f"a smoke test is to see that everything runs, but {', '.join(wrong)} did not; see above", 1)
    return results


def _why_nothing(config: Config, folder: Path) -> str:
    if config.report_only:
        return f"a report is of what was measured, but in {folder} is nothing"
    rows = [row for name in config.models for row in rows_of(name, config.rows).values()]
    missing = dict.fromkeys(f"{row.label} (not installed: {row.missing})" for row in rows if row.missing)
    asked = (
        f"--rows {' '.join(config.rows)} of --models {' '.join(config.models)} in --passes {' '.join(config.passes)}"
    )
    return f"{asked}: there is nothing to measure{': ' + ', '.join(missing) if missing else ''}; see --list"
