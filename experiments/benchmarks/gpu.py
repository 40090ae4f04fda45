"""All that needs a GPU, in order of value, in pieces that fit into a few minutes each.

python -m experiments.benchmarks.gpu --minutes 9 --run-dir runs/gpu

The pieces are the other benchmarks: train steps of GPT-2, BERT and ResNet-50 (with the energy of each), the cost of
loss scaling at full size, remat, the forward pass alone, accuracy over seeds, sweeps, a busy host, the input pipeline;
--list prints them. A check of about a minute comes first: every row compiles and takes two steps at small size, and
what is not installed or not there is named with the pieces that want it. Nothing new starts when the minutes are up;
what runs over them is stopped, and keeps what it has measured. The same command goes on from there, on the same kind
of device with the same versions; what failed is tried again after the rest. After each piece its tables are printed,
its results are copied to experiments/results/NAME-DATE, and the tables of the README are written again.

--smoke runs every piece at small size on any machine, to see that it runs; nothing is copied. The run folder holds
gpu.json (what became of each piece), a log of each piece, and the run folders of the benchmarks.
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
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import rich.console
import tyro

from experiments.benchmarks.shared import kept
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.runs import alone_in, run_folder, write_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
LEAST = 1.0
"""Minutes that must be left for a piece to start: compiling takes the first of them."""
TO_REPORT = 0.1
"""Of a piece's minutes, those in which it starts nothing new and writes what it has."""

STEP_ROWS = (
    "jaxmp-bf16", "hand-bf16", "compile-bf16", "jaxmp-fp16", "jaxmp-fp16-unscaled", "compile-fp16", "jaxmp-bf16-remat",
    "autocast-bf16", "unprepared-bf16", "jaxmp-tf32", "jaxmp-fp32", "hand-fp32",
)  # fmt: skip
"""jaxmp, by hand and torch.compile: those that a goal of the README's table needs."""
FORWARD_ROWS = ("jaxmp-bf16", "hand-bf16", "autocast-bf16", "compile-bf16", "jaxmp-tf32", "jaxmp-fp32")
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A command to run.

    Attributes:
      name: what ``--pieces`` takes.
      title: what it does, in words.
      benchmark: whose command.
      flags: at full size.
      smoke: the flags that make it small.
      folder: its run folder below this one's; pieces that share one are reported together.
      result: the files that are its result, as in NAME.md, NAME.json and NAME.png; empty for none.
      wants: packages without which it fails, or lacks something.
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
        """Its command line."""
        flags = [*self.flags, *(self.smoke if small else ())]
        flags += ["--minutes", f"{minutes:.2f}"] if self.limited and minutes else []
        folder = run_dir / (self.folder or self.name)
        return [sys.executable, "-m", f"experiments.benchmarks.{self.benchmark}", *flags, "--run-dir", str(folder)]


def _steps(name: str, title: str, *flags: str, result: str = "train_step", folder: str = "train_step") -> Piece:
    small = ("--smoke", "--rows", "jaxmp-bf16", "jaxmp-tf32")  # the check has had the others
    return Piece(name, title, "train_step", flags, small, folder, result, ("torch", "matplotlib"))


def _accuracy(task: str, title: str, *small: str) -> Piece:
    return Piece(
        f"accuracy-{task}", title, "accuracy", ("--tasks", task, "--policies", *POLICIES, "--resume"),
        ("--smoke", *small), "accuracy", "accuracy", ("tensorflow_datasets", "array_record", "orbax", "matplotlib"),
    )  # fmt: skip


_TINY = ("--layers", "1", "--width", "64", "--vocabulary", "64", "--rounds", "2", "--block-ms", "1")
PIECES = (
    Piece("check", "every row compiles and takes two steps, GPT-2 at small size", "train_step",
          ("--models", "gpt2", "--rows", *STEP_ROWS, "--passes", "train", "--smoke"), (), limited=False,
          wants=("torch",)),
    _steps("step-gpt2", "the train step of GPT-2, with its energy", "--models", "gpt2", "--rows", *STEP_ROWS,
           "--passes", "train"),
    _steps("step-bert", "the train step of BERT, with its energy", "--models", "bert", "--rows", *STEP_ROWS,
           "--passes", "train"),
    _steps("step-resnet50", "the train step of ResNet-50, with its energy", "--models", "resnet50", "--rows",
           *STEP_ROWS, "--passes", "train"),
    Piece("loss_scaling", "what loss scaling adds to a step", "loss_scaling", ("--models", "gpt2", "mlp"),
          (*_TINY, "--batch-size", "2", "--sequence", "8"), result="loss_scaling", wants=("jmp", "matplotlib")),
    Piece("remat", "what recomputing costs and saves, and the largest batch", "remat",
          ("--policies", "mixed_bfloat16", "--remats", "none", "attention"), result="remat"),
    *(_steps(f"forward-{model}", f"the forward pass alone of {title}", "--models", model, "--rows", *FORWARD_ROWS,
             "--passes", "forward")
      for model, title in (("gpt2", "GPT-2"), ("bert", "BERT"), ("resnet50", "ResNet-50"))),
    _accuracy("gpt2", "GPT-2's loss in half precision and in float32, over seeds"),
    _accuracy("bert", "BERT's loss in half precision and in float32, over seeds"),
    _accuracy("images", "ResNet-50's accuracy in half precision and in float32, over seeds"),
    _steps("width", "from which width on half precision pays", "--sweep", "width", "--models", "gpt2",
           result="train_step_width", folder="sweeps"),
    _steps("depth", "from which depth on half precision pays", "--sweep", "depth", "--models", "gpt2",
           result="train_step_depth", folder="sweeps"),
    _steps("busy", "the train step while the host is busy", "--busy", "--models", "gpt2",
           result="train_step_busy", folder="sweeps"),
    Piece("input_pipeline", "how many images a second are prepared", "input_pipeline", (),
          ("--image-size", "32", "--batch-size", "8", "--examples", "64", "--rounds", "2", "--block-ms", "1"),
          result="input_pipeline", wants=(), limited=False),
)  # fmt: skip
NAMES = tuple(piece.name for piece in PIECES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the run."""

    minutes: float = 9.0
    """What this command may take; the same command goes on from there. 0 is no limit."""
    pieces: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PIECE [PIECE ...]", help_behavior_hint="")] = ()
    """Pieces to run, among those that --list prints, in that order. (default: all)"""
    smoke: tyro.conf.FlagCreatePairsOff[bool] = False
    """Every piece at small size, on any device, to see that it runs. Its figures mean nothing, and are not copied."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the pieces and their commands, and end."""
    run_dir: cli.Folder = None
    """Folder to write to, and to go on from. (default: runs/gpu, with --smoke runs/gpu-smoke)"""


def place() -> dict[str, Any]:
    """Device, versions, backend and free memory, from a process that has ended: this one leaves the GPU alone."""
    code = (
        "import json, jax; from experiments.measure.environment import environment; where = environment(); "
        "stats = jax.devices()[0].memory_stats() or {}; "
        "print(json.dumps({'device': where['device'], 'versions': where['versions'], "
        "'backend': jax.default_backend(), 'bytes': stats.get('bytes_limit')}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word on stderr"])[-1]
        raise ValueError(f"JAX must find its device, but the process that asked for it ended with: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def foreseen(pieces: tuple[Piece, ...], here: dict[str, Any], small: bool) -> list[str]:
    """What will fail or be missing, by what is not here: packages, data, memory."""
    wanted: dict[str, list[str]] = {}
    for piece in pieces:
        for package in piece.wants:
            if importlib.util.find_spec(package) is None:
                wanted.setdefault(package, []).append(piece.name)
    found = [f"{package} is not installed: wanted by {', '.join(names)}" for package, names in wanted.items()]
    if small:
        return found
    if any(piece.name == "accuracy-images" for piece in pieces):
        from experiments.data.source import default_data_dir

        if not any(default_data_dir().glob("*cifar*")) and not any(default_data_dir().glob("downloads/**/*cifar*")):
            found.append(f"CIFAR-10 is not in {default_data_dir()}: accuracy-images must download it")
    if here["bytes"] and here["bytes"] < 60 * 2**30:
        gib = here["bytes"] / 2**30
        found.append(f"the device gives JAX {gib:.0f} GiB: the steps in float32 need up to 50 at full size")
    return found


class Run:
    """What became of each piece, in a folder that the next command goes on from.

    Args:
      config: the flags.
      folder: the run's.
      here: what :func:`place` told.

    Raises:
      ValueError: the folder has pieces of another device, other versions or another size.
    """

    def __init__(self, config: Config, folder: Path, here: dict[str, Any]) -> None:
        self.config, self.folder = config, folder
        self.clock = kept.Clock(config.minutes)
        self._ends = time.monotonic() + 60 * config.minutes
        self._file = folder / "gpu.json"
        setting = {**{name: here[name] for name in ("device", "versions")}, "smoke": config.smoke}
        self._about: dict[str, Any] = {"setting": setting, "environment": here, "pieces": {}, "results": {}}
        if self._file.exists():
            kept.require_alike(self._file, setting)
            self._about = kept.read(self._file)

    def of(self, piece: Piece) -> dict[str, Any]:
        """What is known of a piece: its ``state`` (done, failed, begun or to do), ``seconds``, ``reason``."""
        return self._about["pieces"].get(piece.name, {"state": "to do", "seconds": 0.0, "reason": ""})

    def left(self, pieces: tuple[Piece, ...]) -> list[Piece]:
        """Those that are not done, in order, the ones that failed before last."""
        todo = [piece for piece in pieces if self.of(piece)["state"] != "done"]
        return sorted(todo, key=lambda piece: self.of(piece)["state"] == "failed")

    def run(self, piece: Piece) -> None:
        """Runs a piece, until it ends or the minutes do; keeps what became of it."""
        minutes = (self._ends - time.monotonic()) / 60 if self.config.minutes else 0.0
        command = piece.command(self.folder, self.config.smoke, (1 - TO_REPORT) * minutes)
        most = f"at most {minutes:.1f} minutes" if minutes else "no limit"
        print(f"\n== {piece.name}: {piece.title} ({most})\n$ {shlex.join(['python', *command[1:]])}", flush=True)
        log, started = self.folder / f"{piece.name}.log", time.monotonic()
        self._keep(piece, "begun", 0.0, "")
        code, cut, unfinished = _follow(command, log, 60 * minutes)
        if cut and piece.benchmark == "train_step" and piece.result == "train_step":  # the others report at their end
            report = [*command[:3], "--report-only", *command[-2:]]
            subprocess.run(report, cwd=ROOT, env=_environment(), capture_output=True)
        if cut or unfinished:
            state, reason = "begun", "cut: the minutes were up"
        elif code:
            state, reason = "failed", f"{_last_word(log)} (exit code {code}; {log})"
        else:
            state, reason = "done", ""
        self._keep(piece, state, time.monotonic() - started, reason)
        print(f"== {piece.name}: {state}{f', {reason}' if reason else ''}", flush=True)
        if not self.config.smoke and piece.result:
            self._publish(piece, state)

    def _keep(self, piece: Piece, state: str, seconds: float, reason: str) -> None:
        seconds += self.of(piece)["seconds"]
        self._about["pieces"][piece.name] = {"state": state, "seconds": seconds, "reason": reason}
        write_json(self._file, self._about)

    def _publish(self, piece: Piece, state: str) -> None:
        """Copies a result that is whole, and writes the README's tables from what there is."""
        files = sorted((self.folder / (piece.folder or piece.name)).glob(f"{piece.result}.*"))
        if state != "done" or not files:
            return
        dated = self._about["results"]
        if piece.result not in dated:
            dated[piece.result] = _new_folder(f"{piece.result}-{datetime.date.today():%Y%m%d}")
            write_json(self._file, self._about)
        target = RESULTS / dated[piece.result]
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(file, target / file.name)
        command = [sys.executable, "-m", "experiments.report.readme"]
        done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
        print(f"== its result is in {target}", flush=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word on stderr"])[-1]
            self._keep(piece, "failed", 0.0, f"it was measured, but the README's tables were not written: {last}")

    def table(self, pieces: tuple[Piece, ...]) -> Table:
        """A row a piece: its state, the minutes that it took, why it failed or is not done."""
        rows = []
        for piece in pieces:
            found = self.of(piece)
            rows.append((piece.name, found["state"], f"{found['seconds'] / 60:.1f}", found["reason"]))
        return Table("What needs a GPU", ("piece", "state", "minutes", "why"), rows, left=2)


def _new_folder(name: str) -> str:
    """The name of a folder of results that nobody has yet."""
    names = [name, *(f"{name}-{i}" for i in range(2, 100))]
    return next(each for each in names if not (RESULTS / each).exists())


def _follow(command: list[str], log: Path, seconds: float) -> tuple[int, bool, bool]:
    """Runs a command, shows what it prints and keeps all it says in ``log``.

    Args:
      command: the command line.
      log: a file.
      seconds: after which it is interrupted, and killed if that does not end it; 0 for no limit.

    Returns:
      Its exit code, whether it was interrupted, and whether it said that not all is measured.
    """
    cut, unfinished = threading.Event(), False
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=file, text=True,
            start_new_session=True,  # so that what it has started ends with it
        )  # fmt: skip

        def end() -> None:
            cut.set()
            _signal(process, signal.SIGINT)
            if not _ended(process, 15):
                _signal(process, signal.SIGKILL)

        timer = threading.Timer(seconds, end)
        if seconds:
            timer.start()
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(line)
                file.flush()
                unfinished |= line.strip() == kept.UNFINISHED
            code = process.wait()
        finally:
            timer.cancel()
            _signal(process, signal.SIGKILL)  # of this process's own end, too: nothing goes on behind it
            process.wait()
            process.stdout.close()
    return code, cut.is_set(), unfinished


def _ended(process: subprocess.Popen[str], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    return process.poll() is not None


def _signal(process: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _last_word(log: Path) -> str:
    """The line of a log that says why its command failed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1][:300]


def chosen(names: tuple[str, ...]) -> tuple[Piece, ...]:
    """The pieces of those names, in the order of ``PIECES``; all of none.

    Raises:
      ValueError: there is none of a name.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"--pieces must be among {', '.join(NAMES)}; got {', '.join(unknown)}")
    return tuple(piece for piece in PIECES if not names or piece.name in names)


def main(config: Config) -> None:
    with cli.bad_values_end_it():
        cli.require("--minutes", config.minutes, 0)
        pieces = chosen(config.pieces)
        folder = config.run_dir or Path("runs") / ("gpu-smoke" if config.smoke else "gpu")
        if config.list:
            for piece in pieces:
                command = piece.command(folder, config.smoke, 0)
                print(f"{piece.name}: {piece.title}\n  {shlex.join(['python', *command[1:]])}")
            return
        here = place()
        if here["backend"] != "gpu" and not config.smoke:
            raise ValueError(
                f"this measures a GPU, but JAX finds only {here['device']}; install jax[cuda13] where there is one, or "
                "see every piece run small here with --smoke (make gpu SMOKE=1)"
            )
        folder = run_folder("gpu", folder).absolute()
        held = contextlib.ExitStack()
        held.enter_context(alone_in(folder))
        run = Run(config, folder, here)
    with held:
        memory = f", {here['bytes'] / 2**30:.0f} GiB for JAX" if here["bytes"] else ""
        print(f"{here['device']}{memory}; {here['versions']}", flush=True)
        for line in foreseen(pieces, here, config.smoke):
            print(f"note: {line}", flush=True)
        for piece in run.left(pieces):
            if run.clock.late(60 * min(LEAST, config.minutes / 2)):
                break
            run.run(piece)
        _finish(run, pieces, folder)


def _finish(run: Run, pieces: tuple[Piece, ...], folder: Path) -> None:
    console = rich.console.Console()
    print()
    run.table(pieces).show(console if console.is_terminal else rich.console.Console(width=160))
    left = [piece.name for piece in run.left(pieces)]
    if left:
        smoke = " SMOKE=1" if run.config.smoke else ""
        command = ["python", "-m", "experiments.benchmarks.gpu", *sys.argv[1:]]
        print(f"to do: {', '.join(left)}; go on with: {shlex.join(command)} (make gpu{smoke})")
    print(f"written to {folder}")
    if failed := [piece.name for piece in pieces if run.of(piece)["state"] == "failed"]:
        cli.fail(f"{', '.join(failed)} failed: the reasons and the logs are in the table", 1)


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
