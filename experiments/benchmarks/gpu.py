"""Run all benchmarks that need a GPU, in pieces of at most four minutes each.

The most valuable pieces come first.

python -m experiments.benchmarks.gpu --minutes 9

The pieces are runs of the other benchmarks; --list prints them with the seconds that they take. When the minutes are
up, no piece starts. A piece that is still running after its time is stopped, and keeps what it has measured. The same
command continues on the same kind of device with the same versions, and tries failed pieces again at the end. In the
last command on a machine, --whole prefers pieces that fit in the time left. Each kind of device has its own run folder.
The results of each piece are copied to experiments/results/NAME-DATE-DEVICE, and the README's tables are updated. The
run folder has the logs, and the compiled programs in cache/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import tyro

from experiments.benchmarks.accuracy.report import SEEDS
from experiments.benchmarks.accuracy.run import BRIEF_STEPS
from experiments.benchmarks.measure import caches
from experiments.benchmarks.shared import foreseen, kept, records
from experiments.benchmarks.shared.foreseen import Seconds
from experiments.benchmarks.train_step.rows import CHUNKS, ROWS
from experiments.report.tables import Table, terminal
from experiments.training import cli
from experiments.training.run_folders import alone_in, run_folder

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
LEAST = 1.0
"""The minutes that must be left for a piece to start, because compiling takes about a minute."""
MOST = 4.0
"""The minutes after which a piece leaves the rest to a later turn, so that the other pieces have turns too."""
SLOWER = 1.5
"""How much longer than ``MOST`` a piece may take that was foreseen to take less."""
TO_REPORT = 0.1
"""The share of a piece's minutes that is left for writing its results."""
CUT = 124
"""The exit code of `timeout` when it has ended a command."""

MODELS = {"bert": "BERT", "gpt2": "GPT-2", "resnet50": "ResNet-50"}
STEP_TITLE = "bf16 at three settings, by hand and torch.compile"
STEP_ROWS = ("jaxmp-bf16", "jaxmp-bf16-2chunks", "jaxmp-bf16-remat", "hand-bf16", "compile-bf16")
"""The rows of the main goals. With two chunks, the steps of BERT and GPT-2 need a little less memory than those of
torch.compile. With remat, they need the least."""
CUBLAS_ROWS = (
    *("jaxmp-bf16-cublas", "jaxmp-bf16-2chunks-cublas", "jaxmp-bf16-remat-cublas"),
    *("hand-bf16", "hand-bf16-cublas", "compile-bf16"),
)
"""The same settings without products in Triton, with which BERT's step is faster."""
FP16_ROWS = ("jaxmp-fp16", "jaxmp-fp16-constant", "compile-bf16")
AUTOCAST_ROWS = ("jaxmp-bf16", "autocast-bf16", "unprepared-bf16", "hand-bf16")
TF32_ROWS = ("jaxmp-bf16", "jaxmp-tf32")
FP32_ROWS, HAND_FP32_ROWS = ("jaxmp-bf16", "jaxmp-fp32"), ("jaxmp-bf16", "hand-fp32")
SCALING_ROWS = ("jaxmp-fp16", "hand-fp16", "jmp-fp16", "flax-fp16")
TORCH_ROWS = ("compile-bf16", "compile-fp16", "torch-bf16", "torch-fp16")
FLOAT32_PEER_ROWS = ("jaxmp-tf32", "hand-tf32", "torch-tf32", "compile-tf32", "torch-fp32", "compile-fp32")
CHUNKS_ROWS = (*CHUNKS, "compile-bf16")
PACKED_ROWS = ("jaxmp-bf16", "jaxmp-bf16-packed", "jaxmp-fp16", "jaxmp-fp16-packed")
FORWARD_ROWS = ("jaxmp-bf16", "hand-bf16", "autocast-bf16", "compile-bf16", "jaxmp-tf32", "jaxmp-fp32")
ROUNDS, SLOW_ROUNDS = 12, 5
"""Rounds of timing, and rounds of the slow rows in float32."""
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


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
      model: the model of a piece with train steps; empty for other pieces.
      rows: the rows whose train steps the piece runs.
      rounds: the rounds of timing of the rows.
      steps: the number of steps that the piece trains with each row.
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
    model: str = ""
    rows: tuple[str, ...] = ()
    rounds: int = 0
    steps: int = 0

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


def _steps(
    kind: str, title: str, rows: tuple[str, ...], model: str, rounds: int = ROUNDS, ceilings: bool = True
) -> Piece:
    flags: tuple[str, ...] = ("--models", model, "--rows", *rows, "--passes", "train", "--rounds", str(rounds))
    flags += () if ceilings else ("--no-ceilings",)  # so that the most valuable pieces are short
    piece = _of_train_step(f"{kind}-{model}", f"{MODELS[model]}'s train step: {title}", flags)
    wants = (*(["torch"] if any(ROWS[row].torch for row in rows) else []), "pynvml", "matplotlib")
    return dataclasses.replace(piece, model=model, rows=rows, rounds=rounds, wants=wants)


def _of_train_step(
    name: str, title: str, flags: tuple[str, ...], result: str = "train_step", folder: str = "train_step"
) -> Piece:
    return Piece(name, title, "train_step", flags, folder=folder, result=result, wants=("torch", "matplotlib"))


def _look(name: str, title: str, *wants: str) -> Piece:
    flags = ("--look", name, "--models", "gpt2")
    piece = _of_train_step(name, title, flags, f"train_step_{name}", "sweeps")
    return dataclasses.replace(piece, wants=(*wants, "matplotlib"))


def _accuracy(name: str, title: str, flags: tuple[str, ...], model: str, rows: tuple[str, ...], steps: int) -> Piece:
    wants = ("tensorflow_datasets", "array_record", "matplotlib")
    piece = Piece(name, title, "accuracy", flags, folder="accuracy", result="accuracy", wants=wants)
    return dataclasses.replace(piece, model=model, rows=rows, steps=steps)


def _images(name: str, title: str, flag: str, policy: str, steps: int = 11 * (50_000 // 256)) -> Piece:
    flags = ("--tasks", "images", flag, policy, "--seeds", "0")
    title = f"ResNet-50 on CIFAR-10 at 224×224: {title}"
    return _accuracy(f"images-{name}", title, flags, "resnet50", (f"jaxmp-{name}",), steps)


def _text(model: str, steps: int) -> Piece:
    flags = ("--tasks", model, "--policies", *POLICIES)
    title = f"{MODELS[model]}'s loss in half precision and in float32, over seeds"
    return _accuracy(
        f"accuracy-{model}", title, flags, model, ("jaxmp-fp32", "jaxmp-bf16", "jaxmp-fp16"), SEEDS * steps
    )


_TINY = ("--layers", "1", "--width", "64", "--vocabulary", "64", "--rounds", "2", "--block-ms", "1")
_BRIEF = ("--smoke", "--rounds", "2", "--block-ms", "1")
# A piece that compares variants of a model's step, such as chunks-gpt2, has rows that differ in an option of `Row`.
PIECES = (
    *(_steps("cublas", "bf16 at three settings without products in Triton", CUBLAS_ROWS, model, ceilings=False)
      for model in ("bert", "gpt2")),
    *(_steps("step", STEP_TITLE, STEP_ROWS, model, ceilings=False) for model in MODELS),
    *(_steps("fp16", "fp16 with a dynamic and a constant scale", FP16_ROWS, model, ceilings=False) for model in MODELS),
    *(_steps("autocast", "autocast, a policy and code by hand", AUTOCAST_ROWS, model) for model in MODELS),
    *(_steps("tf32", "bf16 and TF32", TF32_ROWS, model, SLOW_ROUNDS) for model in MODELS),
    *(_steps("fp32", "bf16 and fp32", FP32_ROWS, model, SLOW_ROUNDS) for model in MODELS),
    *(_steps("hand-fp32", "bf16, and fp32 by hand", HAND_FP32_ROWS, model, SLOW_ROUNDS) for model in MODELS),
    _images("bf16", "bf16", "--policies", "mixed_bfloat16"),
    _images("fp16", "fp16", "--policies", "mixed_float16"),
    _images("fp32", "some steps of fp32, for its time and memory", "--brief", "float32", BRIEF_STEPS),
    _images("tf32", "TF32, which accuracies are compared with", "--policies", "tensorfloat32"),
    *(_steps("chunks", "time and memory by the chunks of the cross-entropy", CHUNKS_ROWS, model)
      for model in ("bert", "gpt2")),
    *(_steps("packed", "small params updated one by one and as one vector", PACKED_ROWS, model) for model in MODELS),
    Piece("float8", "the speed-up of float8 in products, blocks and steps", "float8", ("--routes", "jaxmp", "autocast"),
          _BRIEF, result="float8"),
    Piece("low_precision", "an update's bytes and time by the storage of params and moments", "low_precision", (),
          (*_BRIEF, "--rows", "8"), result="low_precision", wants=(), limited=False),
    Piece("remat", "the memory that recomputation saves, and the largest batch", "remat",
          ("--policies", "mixed_bfloat16", "--remats", "none", "attention"), result="remat"),
    *(_steps("scaling", "fp16 with the loss scaling of jaxmp, jmp and Flax", SCALING_ROWS, model) for model in MODELS),
    *(_steps("torch", "half precision in torch", TORCH_ROWS, model) for model in MODELS),
    *(_steps("float32-peers", "TF32 and fp32 by hand and in torch", FLOAT32_PEER_ROWS, model, SLOW_ROUNDS)
      for model in MODELS),
    Piece("loss_scaling", "the time that loss scaling adds to a step", "loss_scaling", ("--models", "gpt2", "mlp"),
          (*_TINY, "--batch-size", "2", "--sequence", "8"), result="loss_scaling", wants=("jmp", "matplotlib")),
    _text("gpt2", 1000),
    _text("bert", 750),
    Piece("float8-peers", "the speed-up of float8 in torchao and Transformer Engine", "float8", ("--routes", "torch"),
          _BRIEF, "float8", result="float8", wants=("torch", "torchao", "transformer_engine", "matplotlib")),
    *(dataclasses.replace(
        _of_train_step(f"forward-{model}", f"{title}'s forward pass alone",
                       ("--models", model, "--rows", *FORWARD_ROWS, "--passes", "forward")),
        model=model, rows=FORWARD_ROWS, rounds=records.Timed.rounds)
      for model, title in MODELS.items()),
    _look("width", "the width from which half precision is faster"),
    _look("depth", "the depth from which half precision is faster"),
    _look("busy", "the train step while the host is busy", "torch"),
    Piece("numerics", "the cost of a watched step of GPT-2", "numerics",
          ("--policy", "mixed_bfloat16", "--batch", "16", "--context", "1024", "--rounds", "10"),
          ("--layers", "1", "--width", "64", "--vocabulary", "64", "--batch", "1", "--context", "8", "--rounds", "1"),
          result="numerics", wants=(), limited=False),
    Piece("matmul_precision", "the errors and times of float32 products by precision", "matmul_precision", (), _BRIEF,
          result="matmul_precision", wants=(), limited=False),
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
    whole: tyro.conf.FlagCreatePairsOff[bool] = False
    """Prefer pieces that are foreseen to fit in the time left, also if they are less valuable. Use it in the last
    command on a machine."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the pieces, their seconds and their commands, and exit."""
    run_dir: cli.Folder = None
    """Folder to write to and to continue from. (default: runs/gpu/DEVICE; with --smoke runs/gpu-smoke)"""


def place() -> dict[str, Any]:
    """Return the device, versions, backend and free memory.

    Another process reads them and exits, so that this process does not use the GPU.
    """
    done = _captured([sys.executable, "-m", "experiments.training.environment"])
    if done.returncode:
        raise ValueError(
            f"JAX must find a device, but the process that looked for it failed with: {_last_word(done.stderr)}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _captured(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def device_name(here: dict[str, Any]) -> str:
    """Return a short name of the device for folders.

    >>> device_name({"device": "1 × NVIDIA H100 80GB HBM3 (gpu)"})
    'h100-80gb-hbm3'
    """
    name = re.sub(r"^\d+ × |\(.*|NVIDIA", "", here["device"])
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def foreseen_seconds(pieces: Iterable[Piece], device: str | None = None) -> dict[str, Seconds]:
    """Return the seconds of each piece on a device; pieces without a record or an estimate are left out.

    The seconds are those that an earlier run recorded, or an estimate from recorded train steps. If ``device`` is None,
    the newest records count.
    """
    rows, known, result = foreseen.Rows(RESULTS), dict[str, set[str]](), dict[str, Seconds]()
    for piece in pieces:
        seconds = foreseen.recorded(RESULTS, device, piece.name)
        if piece.model:
            measured = known.setdefault(piece.model, set())
            block_ms = records.Timed.block_ms
            seconds = seconds or rows.estimate(piece.model, piece.rows, measured, piece.rounds, block_ms, piece.steps)
            measured |= set(piece.rows) if piece.rounds else set()
        if seconds:
            result[piece.name] = seconds
    return result


def warnings_of(pieces: list[Piece], here: dict[str, Any], small: bool) -> list[str]:
    """Return warnings about missing packages, data and memory."""
    problems = [
        f"{package} is not installed: wanted by {', '.join(piece.name for piece in pieces if package in piece.wants)}"
        for package in dict.fromkeys(package for piece in pieces for package in piece.missing)
    ]
    if small:
        return problems
    images = [piece.name for piece in pieces if piece.name.startswith("images")]
    if images:
        from experiments.data.source import default_data_dir

        if not any(default_data_dir().glob("*cifar*")) and not any(default_data_dir().glob("downloads/**/*cifar*")):
            problems.append(f"CIFAR-10 is not in {default_data_dir()}: {', '.join(images)} must download it")
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
        self._here = here
        self.has_results = False
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

    @property
    def minutes_left(self) -> float:
        """Return the minutes that are left for this command; 0 if there is no limit."""
        return (self._ends - time.monotonic()) / 60 if self.config.minutes else 0.0

    def pick(self, pieces: list[Piece]) -> Piece:
        """Return the next piece.

        With ``--whole``, it is the first piece that is foreseen to fit in the time left, if any does.
        """
        if not (self.config.whole and self.config.minutes):
            return pieces[0]
        seconds = foreseen_seconds(PIECES, self._here["device"])
        room = (1 - TO_REPORT) * 60 * self.minutes_left
        fitting = (piece for piece in pieces if piece.name in seconds and seconds[piece.name].seconds <= room)
        return next(fitting, pieces[0])

    def most(self, piece: Piece) -> float:
        """Return the minutes that a piece may take in a turn."""
        seconds = foreseen_seconds(PIECES, self._here["device"]).get(piece.name)
        return MOST * SLOWER if seconds and seconds.seconds <= 60 * MOST else MOST

    def run(self, piece: Piece) -> None:
        """Run a piece until it ends or its minutes are up, and save its state."""
        minutes = min(self.most(piece), self.minutes_left)
        command = piece.command(self.folder, self.config.smoke, (1 - TO_REPORT) * minutes)
        most = f"at most {minutes:.1f} minutes" if minutes else "no limit"
        print(f"\n== {piece.name}: {piece.title} ({most})\n$ {shlex.join(['python', *command[1:]])}", flush=True)
        log, started = self.folder / f"{piece.name}.log", time.monotonic()
        self._keep(piece, "begun", 0.0)
        state, reason = "begun", "stopped"
        try:
            code, unfinished = _follow(command, log, 60 * minutes, caches.variables(self.folder / "cache"))
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
        seconds = self.of(piece)["seconds"]
        print(f"== {piece.name}: {state}{f', {reason}' if reason else ''}, after {seconds:.0f} s", flush=True)
        if not self.config.smoke:
            self._record_seconds()
        if piece.result and not self.config.smoke:
            self._publish(piece)

    def _keep(self, piece: Piece, state: str, seconds: float, reason: str = "") -> None:
        seconds += self.of(piece)["seconds"]
        self._about["pieces"][piece.name] = {"state": state, "seconds": seconds, "reason": reason}
        self.has.save("gpu", {name: self._about[name] for name in ("pieces", "results")})

    def _record_seconds(self) -> None:
        """Record the seconds of all pieces that are done, because the run folder may be from another checkout."""
        for name, piece in self._about["pieces"].items():
            if piece["state"] == "done":
                foreseen.save(RESULTS, self._here["device"], name, piece["seconds"])

    def _publish(self, piece: Piece) -> None:
        """Copy a result, complete or not."""
        files = list((self.folder / (piece.folder or piece.name)).glob(f"{piece.result}.*"))
        if not files:
            return
        new = _new_folder(piece.result, device_name(self._here))
        target = RESULTS / self._about["results"].setdefault(piece.result, new)
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(file, target / file.name)
        self._keep(piece, self.of(piece)["state"], 0.0, self.of(piece)["reason"])
        self.has_results = True
        print(f"== the result is in {target}", flush=True)

    def write_readme(self) -> str:
        """Update the README's tables if results were copied.

        Return why they were not written, or an empty text.
        """
        if not self.has_results:
            return ""
        done = _captured([sys.executable, "-m", "experiments.benchmarks.report.pages"])
        return f"the README's tables were not written: {_last_word(done.stderr)}" if done.returncode else ""

    def table(self, pieces: list[Piece]) -> Table:
        """Return a table with a row for each piece.

        A row has the state, the minutes, and why the piece failed or is not done.
        """
        states = {piece.name: self.of(piece) for piece in pieces}
        rows = [(name, of["state"], f"{of['seconds'] / 60:.1f}", of["reason"]) for name, of in states.items()]
        return Table("What needs a GPU", ("piece", "state", "minutes", "why"), rows, left=2)


def _new_folder(result: str, device: str) -> str:
    """Return the name of a dated folder of results that does not exist yet."""
    name = f"{result}-{datetime.date.today():%Y%m%d}-{device}"
    return next(folder for folder in (name, *(f"{name}-{i}" for i in range(2, 100))) if not (RESULTS / folder).exists())


def _follow(command: list[str], log: Path, seconds: float, variables: dict[str, str]) -> tuple[int, bool]:
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
            smoke = Path("runs") / "gpu-smoke" if config.smoke else None
            if config.list:
                _list(pieces, config.run_dir or smoke or Path("runs") / "gpu", config.smoke)
                return
            here = place()
            if here["backend"] != "gpu" and not config.smoke:
                raise ValueError(
                    f"this benchmark needs a GPU, but JAX finds only {here['device']}; install jax[cuda13] on a "
                    "machine with a GPU, or run every piece at small size with --smoke (make gpu SMOKE=1)"
                )
            folder = config.run_dir or smoke or Path("runs") / "gpu" / device_name(here)
            folder = run_folder("gpu", folder).absolute()
            stack.enter_context(alone_in(folder))
            run = Run(config, folder, here)
        _run(run, pieces, here)


def _list(pieces: list[Piece], folder: Path, small: bool) -> None:
    seconds = foreseen_seconds(PIECES)
    for piece in pieces:
        command = piece.command(folder, small, 0)
        told = seconds.get(piece.name, "not recorded yet")
        print(f"{piece.name}: {piece.title}: {told}\n  {shlex.join(['python', *command[1:]])}")


def _run(run: Run, pieces: list[Piece], here: dict[str, Any]) -> None:
    config = run.config
    memory = f", {here['bytes'] / 2**30:.0f} GiB for JAX" if here["bytes"] else ""
    print(f"{here['device']}{memory}; {here['versions']}", flush=True)
    for line in warnings_of(pieces, here, config.smoke):
        print(f"note: {line}", flush=True)
    waiting = run.left(pieces)
    while waiting and not run.has.clock.late(60 * min(LEAST, config.minutes / 2)):
        piece = run.pick(waiting)
        run.run(piece)
        waiting.remove(piece)
        if not waiting and config.minutes:  # pieces that were cut have another turn
            waiting = [piece for piece in run.left(pieces) if run.of(piece)["state"] == "begun"]
    readme_error = run.write_readme()  # once, because it takes seconds
    print()
    run.table(pieces).show(terminal())
    if left := [piece.name for piece in run.left(pieces)]:
        command = shlex.join(["python", "-m", "experiments.benchmarks.gpu", *sys.argv[1:]])
        print(f"to do: {', '.join(left)}; continue with: {os.environ.get('MAKE_GPU', command).strip()}")
    cache = run.folder / "cache"
    print(f"written to {run.folder}; compiled programs: {caches.size(cache) / 2**20:.0f} MiB in {cache}")
    if failed := [piece.name for piece in pieces if run.of(piece)["state"] == "failed"]:
        cli.fail(f"{', '.join(failed)} failed: the reasons and the logs are in the table", 1)
    if readme_error:
        cli.fail(readme_error, 1)


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
