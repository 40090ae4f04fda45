"""Run all benchmarks that need a GPU, in pieces of a few minutes each.

The most valuable pieces come first.

python -m experiments.benchmarks.gpu --minutes 9 --run-dir runs/gpu

The pieces are runs of the other benchmarks; --list prints them. The first pieces check that every row compiles and
takes two steps at small size. When the minutes are up, no piece starts. A piece that is still running is stopped, and
keeps what it has measured. The same command continues on the same kind of device with the same versions, and tries
failed pieces again at the end. The results of each piece are copied to experiments/results/NAME-DATE, and the README's
tables are updated. The run folder has the logs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import tyro

from experiments.benchmarks.shared import records
from experiments.report.tables import Table, terminal
from experiments.training import cli, kept
from experiments.training.run_folders import alone_in, run_folder

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
LEAST = 1.0
"""The minutes that must be left for a piece to start, because compiling takes about a minute."""
TO_REPORT = 0.1
"""The share of a piece's minutes that is left for writing its results."""
CUT = 124
"""The exit code of `timeout` when it has ended a command."""

STEP_ROWS = (
    "jaxmp-bf16", "hand-bf16", "compile-bf16", "jaxmp-fp16", "jaxmp-fp16-constant", "compile-fp16", "jaxmp-bf16-remat",
    "autocast-bf16", "unprepared-bf16", "jaxmp-tf32", "jaxmp-fp32", "hand-fp32")  # fmt: skip
"""The rows of jaxmp, by hand and torch.compile that the goals in the README's table need."""
FORWARD_ROWS = ("jaxmp-bf16", "hand-bf16", "autocast-bf16", "compile-bf16", "jaxmp-tf32", "jaxmp-fp32")
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
MODELS = {"gpt2": "GPT-2", "bert": "BERT", "resnet50": "ResNet-50"}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A command to run.

    Attributes:
      name: the name of the piece.
      title: what the piece measures.
      benchmark: the benchmark that the piece runs.
      flags: the flags of the benchmark at full size.
      smoke: the flags that make the benchmark small, added to ``flags``.
      folder: the piece's folder inside the run folder. Pieces with the same folder are reported together.
      result: the name of the result's files NAME.md, NAME.json and NAME.png; empty if there are none.
      wants: packages that the piece needs to measure everything.
      limited: whether the benchmark takes ``--minutes``.
    """

    name: str
    title: str
    benchmark: str
    flags: tuple[str, ...]
    smoke: tuple[str, ...] = ("--smoke",)
    folder: str = ""
    result: str = ""
    wants: tuple[str, ...] = ("matplotlib",)
    limited: bool = True

    def command(self, run_dir: Path, small: bool, minutes: float) -> list[str]:
        """Return the command line of the piece."""
        flags = [*self.flags, *(self.smoke if small else ())]
        flags += ["--minutes", f"{minutes:.2f}"] if self.limited and minutes else []
        folder = run_dir / (self.folder or self.name)
        if folder.is_relative_to(ROOT):
            folder = folder.relative_to(ROOT)  # results record the command, and should not name this machine's folders
        return [sys.executable, "-m", f"experiments.benchmarks.{self.benchmark}", *flags, "--run-dir", str(folder)]

    @property
    def missing(self) -> list[str]:
        """Return the packages in ``wants`` that are not installed."""
        return [package for package in self.wants if importlib.util.find_spec(package) is None]

    @property
    def done(self) -> str:
        """Return the state of a successful piece: done, and the packages that it lacked."""
        return f"done, without {', '.join(self.missing)}" if self.missing else "done"


def _steps(name: str, title: str, *flags: str, result: str = "train_step", folder: str = "train_step") -> Piece:
    small = ("--smoke", "--rows", "jaxmp-bf16", "jaxmp-tf32")  # the check pieces cover the train steps of all rows
    return Piece(name, title, "train_step", flags, small, folder, result, ("torch", "matplotlib"))


def _look(name: str, title: str, *wants: str) -> Piece:
    piece = _steps(name, title, "--look", name, "--models", "gpt2", result=f"train_step_{name}", folder="sweeps")
    return dataclasses.replace(piece, wants=(*wants, "matplotlib"))


def _accuracy(task: str, title: str) -> Piece:
    wants = ("tensorflow_datasets", "array_record", "matplotlib")
    flags, folder = ("--tasks", task, "--policies", *POLICIES), "accuracy"
    return Piece(f"accuracy-{task}", title, folder, flags, folder=folder, result=folder, wants=wants)


_TINY = ("--layers", "1", "--width", "64", "--vocabulary", "64", "--rounds", "2", "--block-ms", "1")
_BRIEF = ("--smoke", "--rounds", "2", "--block-ms", "1")
PIECES = (
    *(Piece(f"check-{model}", f"every row of {title} compiles and takes two steps, in one block", "train_step",
            ("--look", "run", "--models", model, "--rows", *STEP_ROWS, "--smoke"), (), wants=("torch",))
      for model, title in MODELS.items()),
    *(_steps(f"step-{model}", f"the train step of {title}, with its energy", "--models", model, "--rows", *STEP_ROWS,
             "--passes", "train")
      for model, title in MODELS.items()),
    Piece("float8", "the speed-up of float8 in products, blocks and steps", "float8", ("--routes", "jaxmp", "autocast"),
          _BRIEF, result="float8"),
    Piece("loss_scaling", "the time that loss scaling adds to a step", "loss_scaling", ("--models", "gpt2", "mlp"),
          (*_TINY, "--batch-size", "2", "--sequence", "8"), result="loss_scaling", wants=("jmp", "matplotlib")),
    Piece("remat", "the memory that recomputation saves, and the largest batch", "remat",
          ("--policies", "mixed_bfloat16", "--remats", "none", "attention"), result="remat"),
    Piece("float8-peers", "the speed-up of float8 in torchao and Transformer Engine", "float8", ("--routes", "torch"),
          _BRIEF, "float8", result="float8", wants=("torch", "torchao", "transformer_engine", "matplotlib")),
    *(_steps(f"forward-{model}", f"the forward pass alone of {title}", "--models", model, "--rows", *FORWARD_ROWS,
             "--passes", "forward")
      for model, title in MODELS.items()),
    _accuracy("gpt2", "GPT-2's loss in half precision and in float32, over seeds"),
    _accuracy("bert", "BERT's loss in half precision and in float32, over seeds"),
    _accuracy("images", "ResNet-50's accuracy in half precision and in float32, over seeds"),
    _look("width", "the width from which half precision is faster"),
    _look("depth", "the depth from which half precision is faster"),
    _look("busy", "the train step while the host is busy", "torch"),
    Piece("low_precision", "an update's bytes and time by the storage of params and moments", "low_precision", (),
          (*_BRIEF, "--rows", "8"), result="low_precision", wants=(), limited=False),
    Piece("numerics", "the cost of a watched step of GPT-2", "numerics",
          ("--policy", "mixed_bfloat16", "--batch", "16", "--context", "1024", "--rounds", "10"),
          ("--layers", "1", "--width", "64", "--vocabulary", "64", "--batch", "1", "--context", "8", "--rounds", "1"),
          result="numerics", wants=(), limited=False),
    Piece("input_pipeline", "the images per second that are prepared", "input_pipeline", (),
          ("--image-size", "32", "--batch-size", "8", "--examples", "64", "--rounds", "2", "--block-ms", "1"),
          result="input_pipeline", wants=(), limited=False))  # fmt: skip


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
    """Folder to write to and to continue from. (default: runs/gpu; with --smoke runs/gpu-smoke)"""


def place() -> dict[str, Any]:
    """Return the device, versions, backend and free memory.

    Another process reads them and exits, so that this process does not use the GPU.
    """
    done = _captured([sys.executable, "-m", "experiments.measure.environment"])
    if done.returncode:
        raise ValueError(
            f"JAX must find a device, but the process that looked for it failed with: {_last_word(done.stderr)}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _captured(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def foreseen(pieces: list[Piece], here: dict[str, Any], small: bool) -> list[str]:
    """Return warnings about missing packages, data and memory."""
    problems = [
        f"{package} is not installed: wanted by {', '.join(piece.name for piece in pieces if package in piece.wants)}"
        for package in dict.fromkeys(package for piece in pieces for package in piece.missing)
    ]
    if small:
        return problems
    if any(piece.name == "accuracy-images" for piece in pieces):
        from experiments.data.source import default_data_dir

        if not any(default_data_dir().glob("*cifar*")) and not any(default_data_dir().glob("downloads/**/*cifar*")):
            problems.append(f"CIFAR-10 is not in {default_data_dir()}: accuracy-images must download it")
    if here["bytes"] and here["bytes"] < 60 * 2**30:
        gib = here["bytes"] / 2**30
        problems.append(f"the device gives JAX {gib:.0f} GiB: the steps in float32 need up to 50 at full size")
    return problems


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
        self.has = kept.Kept(folder, config.minutes, here, smoke=config.smoke)
        self._ends = time.monotonic() + 60 * config.minutes
        self.has.require_alike("gpu.json")
        self._about = self.has.read("gpu") or {"pieces": {}, "results": {}}

    def of(self, piece: Piece) -> dict[str, Any]:
        """Return the state of a piece, its seconds, and the reason for the state.

        The state is "done", "failed", "begun" or "to do".
        """
        return self._about["pieces"].get(piece.name, {"state": "to do", "seconds": 0.0, "reason": ""})

    def left(self, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces to run, in order; pieces that failed earlier come last.

        A piece that was done without a package is run again once the package is installed.
        """
        todo = [piece for piece in pieces if self.of(piece)["state"] not in ("done", piece.done)]
        return sorted(todo, key=lambda piece: self.of(piece)["state"] == "failed")

    def run(self, piece: Piece) -> None:
        """Run a piece until it ends or the minutes are up, and save its state."""
        minutes = (self._ends - time.monotonic()) / 60 if self.config.minutes else 0.0
        command = piece.command(self.folder, self.config.smoke, (1 - TO_REPORT) * minutes)
        most = f"at most {minutes:.1f} minutes" if minutes else "no limit"
        print(f"\n== {piece.name}: {piece.title} ({most})\n$ {shlex.join(['python', *command[1:]])}", flush=True)
        log, started = self.folder / f"{piece.name}.log", time.monotonic()
        self._keep(piece, "begun", 0.0)
        state, reason = "begun", "stopped"
        try:
            code, unfinished = _follow(command, log, 60 * minutes)
            # The other benchmarks write their report even if they fail.
            if code and piece.benchmark == "train_step" and piece.result == "train_step":
                _captured([*command[:3], "--report-only", *command[-2:]])
            state, reason = piece.done, "it runs again once that is installed" if piece.missing else ""
            if unfinished or code == CUT or (code and 0 < 60 * minutes <= time.monotonic() - started):
                state, reason = "begun", "cut: the minutes were up"
            elif code:
                state, reason = "failed", f"{_last_word(log.read_text(errors='replace'))} (exit code {code}; {log})"
        finally:  # also after Ctrl-C
            self._keep(piece, state, time.monotonic() - started, reason)
        print(f"== {piece.name}: {state}{f', {reason}' if reason else ''}", flush=True)
        if piece.result and not self.config.smoke:
            self._publish(piece)

    def _keep(self, piece: Piece, state: str, seconds: float, reason: str = "") -> None:
        seconds += self.of(piece)["seconds"]
        self._about["pieces"][piece.name] = {"state": state, "seconds": seconds, "reason": reason}
        self.has.save("gpu", {name: self._about[name] for name in ("pieces", "results")})

    def _publish(self, piece: Piece) -> None:
        """Copy a result, complete or not, and update the README's tables."""
        files = list((self.folder / (piece.folder or piece.name)).glob(f"{piece.result}.*"))
        if not files:
            return
        target = RESULTS / self._about["results"].setdefault(piece.result, _new_folder(piece.result))
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(file, target / file.name)
        print(f"== the result is in {target}", flush=True)
        done = _captured([sys.executable, "-m", "experiments.report.readme"])
        state, why = (self.of(piece)[name] for name in ("state", "reason"))
        if done.returncode:
            state, why = "failed", f"the README's tables were not written: {_last_word(done.stderr)}"
        self._keep(piece, state, 0.0, why)

    def table(self, pieces: list[Piece]) -> Table:
        """Return a table with a row for each piece.

        A row has the state, the minutes, and why the piece failed or is not done.
        """
        states = {piece.name: self.of(piece) for piece in pieces}
        rows = [(name, of["state"], f"{of['seconds'] / 60:.1f}", of["reason"]) for name, of in states.items()]
        return Table("What needs a GPU", ("piece", "state", "minutes", "why"), rows, left=2)


def _new_folder(result: str) -> str:
    """Return the name of a dated folder of results that does not exist yet."""
    name = f"{result}-{datetime.date.today():%Y%m%d}"
    return next(folder for folder in (name, *(f"{name}-{i}" for i in range(2, 100))) if not (RESULTS / folder).exists())


def _follow(command: list[str], log: Path, seconds: float) -> tuple[int, bool]:
    """Run a command, print its standard output, and write all its output to ``log``.

    Args:
      command: the command line.
      log: the file to write to.
      seconds: the time limit; 0 for no limit. The command is then interrupted, and killed 15 seconds later.

    Returns:
      The exit code, and whether the command printed that something is not measured yet.
    """
    limit = ["timeout", "--signal=INT", "--kill-after=15", f"{seconds:.3f}"] if seconds else []
    unfinished = False
    with log.open("w") as file, subprocess.Popen(
        [*limit, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True,
        start_new_session=True,  # so that the processes that the command starts can be killed with it
    ) as process:  # fmt: skip
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(line)
                file.flush()
                unfinished |= line.strip() == kept.UNFINISHED
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
            folder = run_folder("gpu", folder).absolute()
            stack.enter_context(alone_in(folder))
            run = Run(config, folder, here)
        _run(run, pieces, here)


def _run(run: Run, pieces: list[Piece], here: dict[str, Any]) -> None:
    config = run.config
    memory = f", {here['bytes'] / 2**30:.0f} GiB for JAX" if here["bytes"] else ""
    print(f"{here['device']}{memory}; {here['versions']}", flush=True)
    for line in foreseen(pieces, here, config.smoke):
        print(f"note: {line}", flush=True)
    for piece in run.left(pieces):
        if run.has.clock.late(60 * min(LEAST, config.minutes / 2)):
            break
        run.run(piece)
    print()
    run.table(pieces).show(terminal())
    if left := [piece.name for piece in run.left(pieces)]:
        command = shlex.join(["python", "-m", "experiments.benchmarks.gpu", *sys.argv[1:]])
        print(f"to do: {', '.join(left)}; continue with: {os.environ.get('MAKE_GPU', command).strip()}")
    print(f"written to {run.folder}")
    if failed := [piece.name for piece in pieces if run.of(piece)["state"] == "failed"]:
        cli.fail(f"{', '.join(failed)} failed: the reasons and the logs are in the table", 1)


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
