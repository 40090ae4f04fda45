"""Run the benchmarks that need a GPU, in pieces.

The most valuable pieces come first.

python -m experiments.benchmarks.gpu --minutes 9

A piece is a run of another benchmark; --list prints all pieces with their commands. When the minutes are up, the piece
that is running is stopped, and keeps what it has measured. The same command continues, and runs pieces again that
failed. Each kind of device has its own run folder, which has the logs, and the compiled programs in cache/. The results
of each piece are copied to experiments/results/NAME-DATE-DEVICE.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from experiments.benchmarks.measure import caches
from experiments.benchmarks.shared import records
from experiments.report.progress import UNFINISHED
from experiments.training import cli

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
LEAST = 1.0
"""The minutes that must be left for a piece to start, because compiling takes about a minute."""
TO_REPORT = 0.1
"""The share of a piece's minutes that is left for writing its results."""


class Piece(NamedTuple):
    """A run of a benchmark.

    Attributes:
      name: the name of the piece.
      title: what the piece measures.
      benchmark: the benchmark that the piece runs, or ``compare``. Its results are files of this name.
      flags: the flags of the benchmark.
      smoke: the flags that make the benchmark small.
      folder: the folder inside the run folder. Pieces with the same folder are reported together.
      full: the flags at full size.
    """

    name: str
    title: str
    benchmark: str
    flags: tuple[str, ...]
    smoke: tuple[str, ...]
    folder: str
    full: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Return the module that the piece runs."""
        return "experiments.compare" if self.benchmark == "compare" else f"experiments.benchmarks.{self.benchmark}"

    def command(self, run_dir: Path, small: bool, minutes: float) -> list[str]:
        """Return the command line of the piece."""
        flags = [*self.flags, *(self.smoke if small else self.full)]
        flags += ["--minutes", f"{minutes:.2f}"] if minutes else []
        folder = run_dir / self.folder
        if folder.is_relative_to(ROOT):
            folder = folder.relative_to(ROOT)  # results record the command, and should not name this machine's folders
        return [sys.executable, "-m", self.module, *flags, "--run-dir", str(folder)]


MODELS = {"bert": "BERT", "gpt2": "GPT-2", "resnet50": "ResNet-50"}
SMOKE = ("--smoke",)
_SHORT = ("--steps", "2", "--batch-size", "4")
_TRAIN_RESNET = (
    "--task", "cifar10", "--batch-size", "256", "--flags", "model=resnet50", "image-size=224", "epochs=11",
    "optimizer=sgd", "learning-rate=0.1", "weight-decay=5e-4", "schedule=cosine", "flip", "shift=4",
)  # fmt: skip


def steps(
    kind: str, title: str, rows: tuple[str, ...], rounds: int = 12, models: tuple[str, ...] = tuple(MODELS)
) -> list[Piece]:
    """Return a piece for each model that compares rows of the benchmark `train_step`, which take turns."""
    pieces = []
    for model in models:
        flags = ("--models", model, "--rows", *rows, "--rounds", str(rounds))
        text = f"{MODELS[model]}'s train step: {title}"
        pieces.append(Piece(f"{kind}-{model}", text, "train_step", flags, SMOKE, "train_step"))
    return pieces


def images(kind: str, title: str, policy: str, folder: str = "images") -> Piece:
    """Return a piece that trains ResNet-50 on CIFAR-10, or with another ``folder`` only some steps of it."""
    full = (*_TRAIN_RESNET, *(("--reference", "tensorfloat32") if folder == "images" else ("--steps", "200")))
    title = f"ResNet-50 on CIFAR-10 at 224×224: {title}"
    return Piece(f"images-{kind}", title, "compare", ("--seeds", "0", "--policies", policy), _SHORT, folder, full)


def losses(model: str, steps: str) -> Piece:
    """Return a piece that compares the loss of a transformer in half precision and in float32, over seeds."""
    title = f"{MODELS[model]}'s loss in half precision and in float32, over seeds"
    flags = ("--task", model, "--policies", "mixed_bfloat16", "mixed_float16", "--loss-scales", "dynamic")
    small = ("--seeds", "0", *_SHORT, "--flags", "layers=1", "heads=2", "width=32", "context=8", "test-batches=1")
    return Piece(f"accuracy-{model}", title, "compare", flags, small, f"accuracy_{model}", ("--steps", steps))


PIECES = (
    *steps("cublas", "bf16 at three settings without products in Triton",
           ("jaxmp-bf16-cublas", "jaxmp-bf16-2chunks-cublas", "jaxmp-bf16-remat-cublas", "hand-bf16",
            "hand-bf16-cublas", "compile-bf16"), models=("bert", "gpt2")),
    *steps("step", "bf16 at three settings, by hand and torch.compile",
           ("jaxmp-bf16", "jaxmp-bf16-2chunks", "jaxmp-bf16-remat", "hand-bf16", "compile-bf16")),
    *steps("fp16", "fp16 with a dynamic and a constant scale", ("jaxmp-fp16", "jaxmp-fp16-constant", "compile-bf16")),
    *steps("autocast", "autocast, a policy and code by hand",
           ("jaxmp-bf16", "autocast-bf16", "unprepared-bf16", "hand-bf16")),
    *steps("tf32", "bf16 and TF32", ("jaxmp-bf16", "jaxmp-tf32"), rounds=5),
    *steps("fp32", "bf16 and fp32", ("jaxmp-bf16", "jaxmp-fp32"), rounds=5),
    *steps("hand-fp32", "bf16, and fp32 by hand", ("jaxmp-bf16", "hand-fp32"), rounds=5),
    images("bf16", "bf16", "mixed_bfloat16"),
    images("fp16", "fp16", "mixed_float16"),
    images("fp32", "some steps of fp32, for its time and memory", "float32", "images_fp32"),
    images("tf32", "TF32, which accuracies are compared with", "tensorfloat32"),
    Piece("float8", "the speed-up of float8 in products, blocks and steps", "float8", (),
          (*SMOKE, "--rounds", "2", "--block-ms", "1"), "float8"),
    Piece("loss_scaling", "the time that loss scaling adds to a step", "loss_scaling", ("--models", "gpt2", "mlp"),
          ("--layers", "1", "--width", "64", "--vocabulary", "64", "--rounds", "2", "--block-ms", "1",
           "--batch-size", "2", "--sequence", "8"), "loss_scaling"),
    losses("gpt2", "1000"),
    losses("bert", "750"),
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
    command = [sys.executable, "-m", "experiments.benchmarks.shared.devices"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"JAX must find a device, but the process that looked for it failed: {last_line(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def device_name(here: dict[str, Any]) -> str:
    """Return a short name of the device for folders.

    >>> device_name({"device": "1 × NVIDIA H100 80GB HBM3 (gpu)"})
    'h100-80gb-hbm3'
    """
    name = re.sub(r"^\d+ × |\(.*|NVIDIA", "", here["device"])
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def last_line(text: str) -> str:
    """Return the last line of a text that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")


def run(piece: Piece, folder: Path, small: bool, minutes: float) -> bool:
    """Run a piece until it ends or the minutes are up, and return whether it failed.

    A piece that is done has an empty file NAME.done in the run folder.
    """
    command = piece.command(folder, small, (1 - TO_REPORT) * minutes)
    print(f"\n== {piece.name}: {piece.title}\n$ {shlex.join(['python', *command[1:]])}", flush=True)
    variables = {**os.environ, **caches.variables(folder / "cache")}
    log, started = folder / f"{piece.name}.log", time.monotonic()
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=variables, stdout=file, stderr=file, timeout=60 * minutes or None
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    said = log.read_text(errors="replace")
    if code == 0 and UNFINISHED not in said:
        (folder / f"{piece.name}.done").touch()
    state = "stopped: the minutes were up" if code is None else f"failed: {last_line(said)}" if code else "ended"
    print(f"== {piece.name}: {state}, after {time.monotonic() - started:.0f} s; see {log}", flush=True)
    return bool(code)


def publish(piece: Piece, folder: Path, device: str) -> None:
    """Copy a result, complete or not, to the results of today."""
    name = f"{piece.folder}-{datetime.date.today():%Y%m%d}-{device}"
    for file in (folder / piece.folder).glob(f"{piece.benchmark}.*"):
        (RESULTS / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, RESULTS / name / file.name)


def main(config: Config) -> None:
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
                f"this benchmark needs a GPU, but JAX finds only {here['device']}; install jax[cuda13] on a machine "
                "with a GPU, or run every piece at small size with --smoke (make gpu SMOKE=1)"
            )
        device = device_name(here)
        if config.run_dir is None and not config.smoke:
            folder /= device
        folder = cli.run_folder("gpu", folder).absolute()
    print(f"{here['device']}; {here['versions']}", flush=True)
    ends, failed = time.monotonic() + 60 * config.minutes, []
    for piece in pieces:
        left = (ends - time.monotonic()) / 60 if config.minutes else 0.0
        if (folder / f"{piece.name}.done").exists() or (config.minutes and left < min(LEAST, config.minutes / 2)):
            continue
        if run(piece, folder, config.smoke, left):
            failed.append(piece.name)
        if not config.smoke:
            publish(piece, folder, device)
    to_do = [piece.name for piece in pieces if not (folder / f"{piece.name}.done").exists()]
    print(f"\nto do: {', '.join(to_do) or 'nothing'}; written to {folder}, with compiled programs in cache/")
    if failed:
        cli.fail(f"{', '.join(failed)} failed: see the logs", 1)


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
