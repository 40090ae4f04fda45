"""What rematerialisation buys: the time of a train step against the memory that it needs, and the largest batch.

python -m experiments.benchmarks.remat --run-dir experiments/results/remat

python -m experiments.benchmarks.remat --target h200 --run-dir experiments/results/remat_h200_compiled

GPT-2 (16×1024) and BERT-Base (64×512), the whole train step (forward, backward, clipping, AdamW, loss scaling, its
state donated), once for each kind of remat: none; attention, which computes everything but attention again; dots, which
keeps matrix products; full. Memory is what the compiled step needs and, on a GPU, the device's peak, each in a process
of its own; then all kinds take turns, and a ratio is one round's time over the same round's without remat. The largest
batch is found by compiling, in at most five tries and those that had no room, without running anything; near the limit
XLA computes some of a step again by itself, at its own cost. Goal: attention adds at most 8 % of time.

--target compiles for a GPU that is not there: memory and the largest batch on any machine, no times. What was measured
stays in the run folder; --minutes 8 starts nothing new after eight minutes, and the same command goes on from there,
with the same device, versions, lengths and --memory-limit; what failed is tried again. --smoke runs little models on
any device. The run folder holds remat.md, remat.json and remat.png.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import sys
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import tyro

from experiments.benchmarks.remat import report as remat_report
from experiments.benchmarks.shared import kept, targets
from experiments.benchmarks.shared.workloads import FULL, SMOKE, Workload, workload
from experiments.benchmarks.train_step import jax_steps, measure
from experiments.benchmarks.train_step.rows import Row
from experiments.measure import memory
from experiments.measure.environment import environment, require_gpu
from experiments.models import attention
from experiments.models.transformer import Remat
from experiments.report.progress import Progress
from experiments.training import cli
from experiments.training.batch_size import SHARE, free_bytes, largest_batch, read_bytes
from experiments.training.runs import run_folder

Policy = Literal["mixed_bfloat16", "mixed_float16", "tensorfloat32", "float32"]
_PRECISIONS = {policy: precision for precision, policy in jax_steps.POLICIES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the benchmark."""

    models: tuple[Literal["gpt2", "bert"], ...] = ("gpt2", "bert")
    """Models to measure."""
    policies: tuple[Policy, ...] = ("mixed_bfloat16", "mixed_float16")
    """Policies of the models; mixed_float16 has dynamic loss scaling."""
    remats: tuple[Remat, ...] = get_args(Remat)
    """What the blocks compute again."""
    rounds: int = 20
    """Rounds of timing."""
    block_ms: float = 200.0
    """How long a turn should take, in milliseconds."""
    batch_size: int = 0
    """Sequences a step; 0 for 16 (gpt2) and 64 (bert)."""
    layers: int = 0
    """Blocks; 0 for 12, with --smoke 1."""
    no_largest: tyro.conf.FlagCreatePairsOff[bool] = False
    """Do not look for the largest batch."""
    memory_limit: str = ""
    """Memory that the largest batch may take, as in 20GB; without it --smoke looks for none. (default: nine tenths of
    what is free of the 95 % of a GPU's memory that JAX takes)"""
    target: Literal["", "h200", "h100", "a100"] = ""
    """Compile for this GPU in place of measuring: needs the extra compile-only, and no GPU."""
    minutes: float = 0.0
    """Start nothing new after so many minutes; the same command goes on from there. 0 is no limit."""
    smoke: tyro.conf.FlagCreatePairsOff[bool] = False
    """Little models and two rounds, on any device: to see that everything runs. Its figures mean nothing."""
    alone: str = ""
    """Measure one step alone, as in gpt2/mixed_bfloat16/full, and print JSON: what the run starts for each."""
    run_dir: cli.Folder = None
    """Folder to write to, and to go on from. (default: runs/remat-TIME)"""


@dataclasses.dataclass(frozen=True)
class Step:
    """A train step: a model under a policy, and what it computes again."""

    model: Literal["gpt2", "bert"]
    policy: Policy
    remat: Remat
    config: Config

    @property
    def name(self) -> str:
        """What ``--alone`` takes."""
        return f"{self.model}/{self.policy}/{self.remat}"

    @property
    def row(self) -> Row:
        """As a row of ``benchmarks.train_step``."""
        precision: Any = _PRECISIONS[self.policy]
        return Row(self.remat, "jaxmp", precision, scaled=precision == "fp16", remat=self.remat)

    def case(self, batch_size: int = 0) -> Workload:
        """The model in the sizes of the flags, or with another batch."""
        config = self.config
        sizes = (SMOKE if config.smoke else FULL)[self.model]
        given = {"batch_size": batch_size or config.batch_size, "layers": config.layers or int(config.smoke)}
        sizes = dataclasses.replace(sizes, **{name: value for name, value in given.items() if value})
        return workload(self.model, sizes)


def steps_of(config: Config) -> list[Step]:
    """Every step that the flags ask for, those that take turns one after the other."""
    return [
        Step(model, policy, remat, config)
        for model in dict.fromkeys(config.models)
        for policy in dict.fromkeys(config.policies)
        for remat in dict.fromkeys(config.remats)
    ]


def step_bytes(step: Step, device: Any, batch_size: int = 0) -> int:
    """Bytes that a step needs by the compiler's account, or ``NO_ROOM`` if it had none.

    Args:
      step: the train step.
      device: a GPU that is not there to compile for; None for the device that is.
      batch_size: sequences a step; 0 for what the flags say.

    Raises:
      ValueError: the compiler does not tell.
    """
    case = step.case(batch_size)
    if device is None:
        return jax_steps.compiled_bytes(case, step.row)
    start, fun = jax_steps.train_step(case, step.row)
    with attention.implementation("cudnn"):
        state, batch = (targets.on(device, tree) for tree in (jax.eval_shape(start), case.batch))
        lowered = jax.jit(fun, donate_argnums=0).trace(state, batch).lower(lowering_platforms=("cuda",))
    return memory.of_lowered(lowered, targets.COMPILER_OPTIONS)


def limit_of(config: Config) -> int:
    """Bytes that the largest batch may take.

    Raises:
      ValueError: ``--memory-limit`` is no number of bytes.
    """
    if config.memory_limit:
        return read_bytes(config.memory_limit)
    if config.target:  # as that GPU's own scripts would have it
        return int(SHARE * cli.GPU_SHARE * targets.TARGETS[config.target].memory_bytes)
    return free_bytes()


def looks_for_largest(config: Config) -> bool:
    """Whether the flags ask for the largest batch."""
    return not config.no_largest and bool(config.memory_limit or not config.smoke)


def measure_alone(step: Step, device: Any) -> dict[str, Any]:
    """Memory of a step, and the largest batch: ``step_bytes``, ``peak``, ``largest`` or why there is none."""
    config = step.config
    found: dict[str, Any] = {"step_bytes": None, "peak": None, "largest": None}
    try:
        if config.target:
            needed = step_bytes(step, device)
            found |= {"error": measure.OUT_OF_MEMORY} if needed == memory.NO_ROOM else {"step_bytes": needed}
        else:
            prepared = measure.prepare(step.case(), step.row, "train")
            found["step_bytes"] = prepared.compiled_bytes
            for _ in range(3):
                jax.block_until_ready(prepared.turn())
            found["peak"] = memory.device_peak()
            del prepared
    except RuntimeError as error:  # XLA's: out of memory
        found["error"] = measure.reason(error)
    gc.collect()
    if looks_for_largest(config):
        try:
            largest = largest_batch(lambda batch: step_bytes(step, device, batch), limit_of(config))
            found["largest"] = {"batch": largest.batch, "bytes": largest.bytes, "limit": largest.limit}
        except ValueError as error:
            found["largest"] = {"error": str(error)}
        except RuntimeError as error:
            found["largest"] = {"error": measure.reason(error)}
    return found


class Measurement:
    """One command's part of a run: what its folder has is not measured again.

    Args:
      config: its flags.
      folder: the run's.
      device: the GPU to compile for, or None.
      where: what it is measured on.

    Attributes:
      clock: what it leaves to the next command.
    """

    def __init__(self, config: Config, folder: Path, device: Any, where: dict[str, str]) -> None:
        self.config, self.folder, self.device, self.where = config, folder, device, where
        self.clock = kept.Clock(config.minutes)
        place = ("target" if "target" in where else "device", "versions")
        self._setting = {name: where[name] for name in place} | {"memory_limit": config.memory_limit or "the device's"}
        self._setting |= {name: getattr(config, name) for name in ("rounds", "block_ms", "smoke")}

    def require_alike(self) -> None:
        """Checks that what the flags ask for can be held against what the folder has.

        Raises:
          ValueError: it has other sizes, another device, other versions, lengths or another limit.
        """
        for step in {step.model: step for step in steps_of(self.config)}.values():
            for file in self.folder.glob(f"{step.model}-*.json"):
                kept.require_alike(file, self._setting_of(step.case()))

    def run(self, progress: Progress) -> None:
        """Measures what the flags ask for and the folder lacks."""
        steps = steps_of(self.config)
        todo = [step for step in steps if not self._has(step)]
        todo.sort(key=lambda step: bool(self._read(step)))  # new first
        progress.advance(len(steps) - len(todo), "measured before")
        by_name = {step.name: step for step in todo}
        for name, found in self._alone(by_name):
            if self.clock.late():
                return
            progress.advance(0, "memory and the largest batch", name)
            known = {key: value for key, value in self._read(by_name[name]).items() if key in remat_report.FIGURES}
            new = {key: value for key, value in found().items() if value is not None}
            self._write(by_name[name], self._file(by_name[name]), {**known, **new})
            progress.advance(1, "memory and the largest batch", name)
        groups = [list(own) for _, own in itertools.groupby(steps, lambda step: (step.model, step.policy))]
        for group in sorted(groups, key=lambda group: self._turns(group)[1].exists()):  # second tries last
            if not self.config.target:
                self._in_turn(group, progress)

    def _alone(self, steps: dict[str, Step]) -> Any:
        """Each step's name and the function that measures it, on a GPU in a process of its own."""
        if self.config.target or self.config.smoke:
            return [(name, lambda step=step: measure_alone(step, self.device)) for name, step in steps.items()]
        flags = ["--batch-size", str(self.config.batch_size), "--layers", str(self.config.layers)]
        flags += ["--memory-limit", self.config.memory_limit] if self.config.memory_limit else []
        flags += ["--no-largest"] if self.config.no_largest else []
        program = [sys.executable, "-m", "experiments.benchmarks.remat", "--run-dir", str(self.folder), *flags]
        return measure.in_processes({name: [*program, "--alone", name] for name in steps})

    def _turns(self, steps: list[Step]) -> tuple[dict[str, Row], Path]:
        """The steps that can take turns, and the file of their times."""
        able = {step.remat: step.row for step in steps if "error" not in self._read(step)}
        return able, self.folder / f"{steps[0].model}-{steps[0].policy}-{'-'.join(able)}-times.json"

    def _in_turn(self, steps: list[Step], progress: Progress) -> None:
        first, config = steps[0], self.config
        able, file = self._turns(steps)
        if not able or (file.exists() and not _to_try_again(file)) or self.clock.late():
            return
        title = f"{first.model}, {first.policy}"
        prepared, errors = measure.prepare_all(
            first.case(), able, "train", lambda remat: progress.advance(0, f"{remat}: getting ready", title)
        )
        rounds, block_ms = (2, 1.0) if config.smoke else (config.rounds, config.block_ms)
        found = measure.together(
            prepared,
            rounds,
            block_ms,
            lambda i: progress.advance(0, f"in turn: round {max(i, 0) + 1} of {rounds}", title),
        )
        prepared.clear()
        gc.collect()
        errors |= {remat: each["error"] for remat, each in found.items() if "error" in each}
        times = {remat: each for remat, each in found.items() if remat not in errors}
        self._write(first, kept.again(file), {"times": times, "errors": errors})

    def _file(self, step: Step) -> Path:
        return self.folder / f"{step.name.replace('/', '-')}.json"

    def _read(self, step: Step) -> dict[str, Any]:
        """What the folder has of a step alone, perhaps nothing."""
        file = self._file(step)
        return kept.read(file) if file.exists() else {}

    def _has(self, step: Step) -> bool:
        """Whether the folder has all that the flags ask for of a step alone; what failed is tried again."""
        found = self._read(step)
        largest = not looks_for_largest(self.config) or "batch" in (found.get("largest") or {})
        return bool(found) and "error" not in found and largest

    def _setting_of(self, case: Workload) -> dict[str, Any]:
        """What all figures of a model in one folder have in common."""
        return {"sizes": dataclasses.asdict(case.sizes), **self._setting}

    def _write(self, step: Step, file: Path, found: dict[str, Any]) -> None:
        case, about = step.case(), {"policy": step.policy, "remat": step.remat}
        kept.save(file, case, self._setting_of(case), self.where, {**about, **found})


def _to_try_again(file: Path) -> bool:
    """Whether steps failed in turn, but for want of memory beside the others: nothing has changed about that."""
    tries = [kept.read(each) for each in (file, kept.again(file)) if each.exists()]
    timed = {remat for each in tries for remat in each["times"]}
    failed = {remat: why for remat, why in tries[-1]["errors"].items() if remat not in timed}
    return any(why != measure.OUT_OF_MEMORY for why in failed.values())


def check(config: Config) -> Any:
    """Checks the flags; returns the GPU to compile for, None to measure.

    Raises:
      ValueError: one has a value that cannot be, or there is no GPU.
    """
    cli.require("--rounds", config.rounds, 1)
    cli.require("--block-ms", config.block_ms, 0.1)
    for flag in ("batch_size", "layers", "minutes"):
        cli.require(f"--{flag.replace('_', '-')}", getattr(config, flag), 0)
    for what in ("models", "policies", "remats"):
        cli.require(f"the number of --{what}", len(getattr(config, what)), 1)
    if config.memory_limit:
        read_bytes(config.memory_limit)
    if config.target:
        try:
            return targets.device_of(targets.TARGETS[config.target].text())
        except ModuleNotFoundError as error:
            raise ValueError(str(error)) from None
    require_gpu(config.smoke)
    return None


def main(config: Config) -> dict[str, Any]:
    # Before JAX meets the GPU: it shares it with the processes that measure one step each.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with cli.bad_values_end_it():
        device = check(config)
        if config.alone:
            every = {"models": Config.models, "policies": get_args(Policy), "remats": get_args(Remat)}
            steps = {step.name: step for step in steps_of(dataclasses.replace(config, **every))}
            if config.alone not in steps:
                raise ValueError(f"--alone is one of {', '.join(steps)}; got {config.alone}")
            with measure.caches_in((config.run_dir or Path("runs")) / "cache"):
                measure.answer(lambda: measure_alone(steps[config.alone], None))
            return {}
        folder = run_folder("remat", config.run_dir).absolute()
        where = {**({"target": device.device_kind} if config.target else {}), **environment()}
        measurement = Measurement(config, folder, device, where)
        measurement.require_alike()
        ready = targets.with_cudnn(targets.TARGETS[config.target].cudnn) if config.target else contextlib.nullcontext()
        cache = measure.caches_in(folder / "cache")  # what was measured alone is not compiled again to take its turn
        with ready, cache, Progress("remat", len(steps_of(config))) as progress:
            measurement.run(progress)
        result = remat_report.write(folder) if any(folder.glob("*-*.json")) else {}
    if result:
        remat_report.show(result, folder)
    if measurement.clock.unfinished:
        print(kept.UNFINISHED)
    return result
