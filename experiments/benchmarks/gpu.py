"""Run the benchmarks that need a GPU, in pieces.

The most valuable pieces come first.

python -m experiments.benchmarks.gpu --minutes 9

A piece is a run of another benchmark; --list prints all pieces with their commands. When the minutes are up, the piece
that is running is stopped, and keeps what it has measured. The same command continues on the same kind of device with
the same versions. Pieces that failed run again at the end. Each kind of device has its own run folder, which has the
logs, and the compiled programs in cache/. The results of each piece are copied to experiments/results/NAME-DATE-DEVICE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from experiments.benchmarks.measure import caches
from experiments.benchmarks.shared import measurements, records
from experiments.benchmarks.train_step.rows import CHUNKS
from experiments.report.tables import Table, terminal
from experiments.training import cli
from experiments.training.run_folders import alone_in, run_folder

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
LEAST = 1.0
"""The minutes that must be left for a piece to start, because compiling takes about a minute."""
TO_REPORT = 0.1
"""The share of a piece's minutes that is left for writing its results."""
CUT = 124
"""The exit code of `timeout` when it has ended a command."""


class Piece(NamedTuple):
    """A run of a benchmark.

    Attributes:
      name: the name of the piece.
      title: what the piece measures.
      benchmark: the benchmark that the piece runs.
      flags: the flags of the benchmark at full size.
      smoke: the flags that make the benchmark small, added to ``flags``.
      result: the name of the result's files, such as NAME.md.
      folder: the folder inside the run folder; empty for ``result``. Pieces with the same folder are reported together.
      limited: whether the benchmark takes ``--minutes``.
    """

    name: str
    title: str
    benchmark: str
    flags: tuple[str, ...]
    smoke: tuple[str, ...]
    result: str
    folder: str = ""
    limited: bool = True

    def folder_in(self, run_dir: Path) -> Path:
        """Return the folder that the piece writes to."""
        return run_dir / (self.folder or self.result)

    def command(self, run_dir: Path, small: bool, minutes: float) -> list[str]:
        """Return the command line of the piece."""
        flags = [*self.flags, *(self.smoke if small else ())]
        flags += ["--minutes", f"{minutes:.2f}"] if self.limited and minutes else []
        folder = self.folder_in(run_dir)
        if folder.is_relative_to(ROOT):
            folder = folder.relative_to(ROOT)  # results record the command, and should not name this machine's folders
        return [sys.executable, "-m", f"experiments.benchmarks.{self.benchmark}", *flags, "--run-dir", str(folder)]


MODELS = {"bert": "BERT", "gpt2": "GPT-2", "resnet50": "ResNet-50"}
TRANSFORMERS = ("bert", "gpt2")
SMOKE = ("--smoke",)
SHORT = "--no-ceilings"
"""The flag that makes the most valuable pieces short."""
_TINY = ("--layers", "1", "--width", "64", "--vocabulary", "64", "--rounds", "2", "--block-ms", "1")
_BRIEF = (*SMOKE, "--rounds", "2", "--block-ms", "1")


def steps(
    kind: str, title: str, rows: tuple[str, ...], *more: str, rounds: int = 12, models: tuple[str, ...] = tuple(MODELS)
) -> list[Piece]:
    """Return a piece for each model that compares rows of the benchmark `train_step`, which take turns.

    ``more`` are further flags of the benchmark.
    """
    pieces = []
    for model in models:
        flags = ("--models", model, "--rows", *rows, "--passes", "train", "--rounds", str(rounds), *more)
        text = f"{MODELS[model]}'s train step: {title}"
        pieces.append(Piece(f"{kind}-{model}", text, "train_step", flags, SMOKE, "train_step"))
    return pieces


def look(name: str, title: str) -> Piece:
    """Return a piece with the flag ``--look`` of the benchmark `train_step`."""
    return Piece(name, title, "train_step", ("--look", name, "--models", "gpt2"), SMOKE, f"train_step_{name}", "sweeps")


def accuracy(name: str, title: str, *flags: str) -> Piece:
    """Return a piece of the benchmark `accuracy`."""
    return Piece(name, title, "accuracy", flags, SMOKE, "accuracy")


def alone(name: str, title: str, *flags: str, smoke: tuple[str, ...] = _BRIEF, limited: bool = True) -> Piece:
    """Return a piece that runs the benchmark of its name."""
    return Piece(name, title, name, flags, smoke, name, limited=limited)


_IMAGES = ("--tasks", "images", "--seeds", "0")
_POLICIES = ("--policies", "float32", "mixed_bfloat16", "mixed_float16")
PIECES = (
    *steps("cublas", "bf16 at three settings without products in Triton",
           ("jaxmp-bf16-cublas", "jaxmp-bf16-2chunks-cublas", "jaxmp-bf16-remat-cublas", "hand-bf16",
            "hand-bf16-cublas", "compile-bf16"), SHORT, models=TRANSFORMERS),
    *steps("step", "bf16 at three settings, by hand and torch.compile",
           ("jaxmp-bf16", "jaxmp-bf16-2chunks", "jaxmp-bf16-remat", "hand-bf16", "compile-bf16"), SHORT),
    *steps("fp16", "fp16 with a dynamic and a constant scale", ("jaxmp-fp16", "jaxmp-fp16-constant", "compile-bf16"),
           SHORT),
    *steps("autocast", "autocast, a policy and code by hand",
           ("jaxmp-bf16", "autocast-bf16", "unprepared-bf16", "hand-bf16")),
    *steps("tf32", "bf16 and TF32", ("jaxmp-bf16", "jaxmp-tf32"), rounds=5),
    *steps("fp32", "bf16 and fp32", ("jaxmp-bf16", "jaxmp-fp32"), rounds=5),
    *steps("hand-fp32", "bf16, and fp32 by hand", ("jaxmp-bf16", "hand-fp32"), rounds=5),
    accuracy("images-bf16", "ResNet-50 on CIFAR-10 at 224×224: bf16", *_IMAGES, "--policies", "mixed_bfloat16"),
    accuracy("images-fp16", "ResNet-50 on CIFAR-10 at 224×224: fp16", *_IMAGES, "--policies", "mixed_float16"),
    accuracy("images-fp32", "ResNet-50 on CIFAR-10 at 224×224: some steps of fp32, for its time and memory", *_IMAGES,
             "--brief", "float32"),
    accuracy("images-tf32", "ResNet-50 on CIFAR-10 at 224×224: TF32, which accuracies are compared with", *_IMAGES,
             "--policies", "tensorfloat32"),
    *steps("chunks", "time and memory by the chunks of the cross-entropy", (*CHUNKS, "compile-bf16"),
           models=TRANSFORMERS),
    alone("float8", "the speed-up of float8 in products, blocks and steps", "--routes", "jaxmp", "autocast"),
    alone("low_precision", "an update's bytes and time by the storage of params and moments",
          smoke=(*_BRIEF, "--rows", "8"), limited=False),
    *steps("scaling", "fp16 with the loss scaling of jaxmp, jmp and Flax",
           ("jaxmp-fp16", "hand-fp16", "jmp-fp16", "flax-fp16")),
    *steps("torch", "half precision in torch", ("compile-bf16", "compile-fp16", "torch-bf16", "torch-fp16")),
    *steps("float32-peers", "TF32 and fp32 by hand and in torch",
           ("jaxmp-tf32", "hand-tf32", "torch-tf32", "compile-tf32", "torch-fp32", "compile-fp32"), rounds=5),
    alone("loss_scaling", "the time that loss scaling adds to a step", "--models", "gpt2", "mlp",
          smoke=(*_TINY, "--batch-size", "2", "--sequence", "8")),
    accuracy("accuracy-gpt2", "GPT-2's loss in half precision and in float32, over seeds", "--tasks", "gpt2",
             *_POLICIES),
    accuracy("accuracy-bert", "BERT's loss in half precision and in float32, over seeds", "--tasks", "bert",
             *_POLICIES),
    Piece("float8-peers", "the speed-up of float8 in torchao and Transformer Engine", "float8", ("--routes", "torch"),
          _BRIEF, "float8"),
    look("width", "the width from which half precision is faster"),
    look("depth", "the depth from which half precision is faster"),
    look("busy", "the train step while the host is busy"),
)  # fmt: skip
"""All pieces, the most valuable first. Variants of a step are rows that differ in an option of `Row`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Small):
    """Flags of the run. With --smoke nothing is copied."""

    minutes: float = 9.0
    """Minutes for this command; 0 for no limit. Run the command again to continue."""
    pieces: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PIECE [PIECE ...]", help_behavior_hint="")] = ()
    """Pieces to run, in the order in which --list prints them. (default: all)"""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the pieces and their commands, and exit."""
    run_dir: cli.Folder = None
    """Folder to write to and to continue from. (default: runs/gpu/DEVICE; with --smoke runs/gpu-smoke)"""


def place() -> dict[str, Any]:
    """Return the device, versions and backend.

    Another process reads them and exits, so that this process does not use the GPU.
    """
    command = [sys.executable, "-m", "experiments.training.environment"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(
            f"JAX must find a device, but the process that looked for it failed with: {_last_word(done.stderr)}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def device_name(here: dict[str, Any]) -> str:
    """Return a short name of the device for folders.

    >>> device_name({"device": "1 × NVIDIA H100 80GB HBM3 (gpu)"})
    'h100-80gb-hbm3'
    """
    name = re.sub(r"^\d+ × |\(.*|NVIDIA", "", here["device"])
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class Run:
    """The state of each piece, saved in the run folder.

    The next command continues from there.

    Args:
      config: the flags.
      folder: the run folder.
      here: the result of :func:`place`.

    Raises:
      ValueError: the folder has pieces from another device, with other versions or of another size.
    """

    def __init__(self, config: Config, folder: Path, here: dict[str, Any]) -> None:
        self.config, self.folder = config, folder
        self._device = device_name(here)
        self._saved = measurements.Measurements(folder, config.minutes, here, smoke=config.smoke)
        self._ends = time.monotonic() + 60 * config.minutes
        self._saved.require_alike("gpu.json")
        self._about = self._saved.read("gpu") or {"pieces": {}, "results": {}}

    def of(self, piece: Piece) -> dict[str, Any]:
        """Return the state of a piece, its seconds, and the reason for the state.

        The state is "done", "failed", "begun" or "to do".
        """
        return self._about["pieces"].get(piece.name, {"state": "to do", "seconds": 0.0, "reason": ""})

    def left(self, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces to run, in order; pieces that failed earlier come last."""
        todo = [piece for piece in pieces if self.of(piece)["state"] != "done"]
        return sorted(todo, key=lambda piece: self.of(piece)["state"] == "failed")

    @property
    def minutes_left(self) -> float:
        """Return the minutes that are left for this command; 0 if there is no limit."""
        return (self._ends - time.monotonic()) / 60 if self.config.minutes else 0.0

    def is_late(self) -> bool:
        """Return whether too little time is left for another piece."""
        least = min(LEAST, self.config.minutes / 2)
        return self.config.minutes > 0 and self.minutes_left < least

    def run(self, piece: Piece) -> None:
        """Run a piece until it ends or the minutes are up, and save its state."""
        minutes = self.minutes_left
        command = piece.command(self.folder, self.config.smoke, (1 - TO_REPORT) * minutes)
        most = f"at most {minutes:.1f} minutes" if minutes else "no limit"
        print(f"\n== {piece.name}: {piece.title} ({most})\n$ {shlex.join(['python', *command[1:]])}", flush=True)
        log, started = self.folder / f"{piece.name}.log", time.monotonic()
        self._keep(piece, "begun", 0.0)
        state, reason = "begun", "stopped"
        try:
            code, unfinished = follow(command, log, 60 * minutes, caches.variables(self.folder / "cache"))
            if code and piece.result == "train_step":  # the other benchmarks write their report even if they fail
                subprocess.run([*command[:3], "--report-only", *command[-2:]], cwd=ROOT, capture_output=True)
            state, reason = "done", ""
            if unfinished or code == CUT or (code and 0 < 60 * minutes <= time.monotonic() - started):
                state, reason = "begun", "cut: the minutes were up"
            elif code:
                state, reason = "failed", f"{_last_word(log.read_text(errors='replace'))} (exit code {code}; {log})"
        finally:  # also after Ctrl-C
            self._keep(piece, state, time.monotonic() - started, reason)
        seconds = self.of(piece)["seconds"]
        print(f"== {piece.name}: {state}{f', {reason}' if reason else ''}, after {seconds:.0f} s", flush=True)
        if not self.config.smoke:
            self._publish(piece)

    def _keep(self, piece: Piece, state: str, seconds: float, reason: str = "") -> None:
        seconds += self.of(piece)["seconds"]
        self._about["pieces"][piece.name] = {"state": state, "seconds": seconds, "reason": reason}
        self._saved.save("gpu", {name: self._about[name] for name in ("pieces", "results")})

    def _publish(self, piece: Piece) -> None:
        """Copy a result, complete or not."""
        files = list(piece.folder_in(self.folder).glob(f"{piece.result}.*"))
        if not files:
            return
        today = f"{piece.result}-{datetime.date.today():%Y%m%d}-{self._device}"
        names = (today, *(f"{today}-{i}" for i in range(2, 100)))
        new = next(name for name in names if not (RESULTS / name).exists())
        target = RESULTS / self._about["results"].setdefault(piece.result, new)
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(file, target / file.name)
        self._keep(piece, self.of(piece)["state"], 0.0, self.of(piece)["reason"])
        print(f"== the result is in {target}", flush=True)

    def table(self, pieces: list[Piece]) -> Table:
        """Return a table with the state and the minutes of each piece, and why it failed or is not done."""
        states = {piece.name: self.of(piece) for piece in pieces}
        rows = [(name, of["state"], f"{of['seconds'] / 60:.1f}", of["reason"]) for name, of in states.items()]
        return Table("What needs a GPU", ("piece", "state", "minutes", "why"), rows, left=2)


def follow(command: list[str], log: Path, seconds: float, variables: dict[str, str]) -> tuple[int, bool]:
    """Run a command, print its standard output, and write all its output to ``log``.

    Args:
      command: the command line.
      log: the file to write to.
      seconds: the time limit; 0 for no limit. The command is then interrupted, and killed 15 seconds later.
      variables: environment variables of the command.

    Returns:
      The exit code, and whether the command printed that something is not measured yet.
    """
    limit = ["timeout", "--signal=INT", "--kill-after=15", f"{seconds:.3f}"] if seconds else []
    unfinished = False
    with log.open("w") as file, subprocess.Popen(
        [*limit, *command], cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=file, text=True,
        start_new_session=True,  # so that the processes that the command starts can be killed with it
    ) as process:  # fmt: skip
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(line)
                file.flush()
                unfinished |= line.strip() == measurements.UNFINISHED
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also if this process is interrupted
    return code, unfinished


def _last_word(said: str) -> str:
    """Return the line of a command's output that says why it failed."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1][:300]


def main(config: Config) -> None:
    with contextlib.ExitStack() as stack:
        with cli.bad_values_end_it():
            records.check(config, minutes=1 if config.minutes else 0)
            pieces = [*cli.chosen("--pieces", config.pieces, {piece.name: piece for piece in PIECES}).values()]
            folder = config.run_dir or Path("runs") / ("gpu-smoke" if config.smoke else "gpu")
            if config.list:
                for piece in pieces:
                    command = piece.command(folder, config.smoke, 0)
                    print(f"{piece.name}: {piece.title}\n  {shlex.join(['python', *command[1:]])}")
                return
            here = place()
            if here["backend"] != "gpu" and not config.smoke:
                raise ValueError(
                    f"this benchmark needs a GPU, but JAX finds only {here['device']}; install jax[cuda13] on a "
                    "machine with a GPU, or run every piece at small size with --smoke (make gpu SMOKE=1)"
                )
            if config.run_dir is None and not config.smoke:
                folder /= device_name(here)
            folder = run_folder("gpu", folder).absolute()
            stack.enter_context(alone_in(folder))
            run = Run(config, folder, here)
        print(f"{here['device']}; {here['versions']}", flush=True)
        for piece in run.left(pieces):
            if not run.is_late():
                run.run(piece)
        print()
        run.table(pieces).show(terminal())
        print(f"written to {folder}, with compiled programs in cache/")
        if left := [piece.name for piece in run.left(pieces)]:
            print(f"to do: {', '.join(left)}; the same command continues")
        if failed := [piece.name for piece in pieces if run.of(piece)["state"] == "failed"]:
            cli.fail(f"{', '.join(failed)} failed: the reasons and the logs are in the table", 1)


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
