"""The flags of every training script, and the function that starts a script."""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import io
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import tyro

from experiments.training.environment import program_line

C = TypeVar("C")
T = TypeVar("T")
GPU_SHARE = 0.95
"""The share of a GPU's memory that a script may take. JAX's default would leave a quarter unused."""
_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8  # glibc's malloc.h; mallopt(3)
BatchSize = Annotated[int, tyro.conf.arg(aliases=("--batch",))]


def _path(words: list[str]) -> Path:
    if not words[0]:  # Path("") would be the current folder
        raise ValueError("a folder must have a name, got '' (an unset variable?); write . for the current folder")
    return Path(words[0])


_PATH = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="DIR",
    instance_from_str=_path,
    is_instance=lambda value: value is None or isinstance(value, Path),
    str_from_instance=lambda value: [str(value)],
)
Folder = Annotated[Path | None, _PATH, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionFlags:
    """The dtypes of params and products, and the loss scale."""

    policy: str = "auto"
    """Precision: float32, tensorfloat32, mixed_float16, mixed_bfloat16, mixed_float8, float16, bfloat16, bfloat16_sr,
    O0, O2, O3, a string such as params=float32,compute=float16,output=float32, or auto for a policy that suits the
    device."""
    loss_scale: str = "auto"
    """Loss scale: none, static:4096, dynamic or headroom. dynamic and headroom may have parameters, as in
    dynamic:loss_scale=1024,period=100 or headroom:headroom=3. auto is dynamic if the policy computes in float16, else
    none."""
    autocast: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Leave the model in float32 and run the loss function under jaxmp.autocast, which decides for each operation.
    --policy then names the dtype of products, as in mixed_bfloat16."""
    opt_level: Annotated[Literal["O0", "O1", "O2", "O3"] | None, tyro.conf.arg(metavar="{O0,O1,O2,O3}")] = None
    """Apex's name for a policy together with its loss scale, in place of --policy; O1 is --autocast in float16."""
    override: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATTERN=POLICY")] = ()
    """Another policy for the modules whose path matches PATTERN, as in '**/Dense_1=float32'. Under autocast, paths
    begin with the model's name."""
    low_precision: Literal["none", "kahan", "stochastic", "bfloat16", "float8"] = "none"
    """A way to round bfloat16 params (--policy bfloat16_sr), so that they learn without float32 copies. bfloat16 and
    float8 round stochastically and also store the optimizer's moments in that format."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """Ways to reduce the memory of a step."""

    accumulate: int = 1
    """Microbatches per step. The number must divide the batch."""
    remat: str = "none"
    """Recomputation in the backward pass, to save memory: none, layers, dots, dots_no_batch, float8 (keeps only the
    operands of mixed_float8), or the name of a policy of jax.checkpoint_policies. Transformers also have attention,
    which keeps the results of attention and recomputes the rest of each block. It saves the most memory for the least
    time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """Evaluation, and records of a run during training."""

    evaluate_every: int = 50
    """Steps between evaluations on held-out examples; 0 to evaluate only at the end."""
    ema: float = 0.0
    """Decay of a moving average of the params, for example 0.99. The average is used to evaluate. 0 for no average."""
    watch: int = 0
    """Steps between watched steps; 0 for none. A watched step trains as usual. It also counts the values of weights,
    activations and gradients by magnitude. The counts are in watch.jsonl."""
    tensorboard: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also write the metrics and the counts of --watch for TensorBoard, with tensorboardX."""
    wandb: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also send the metrics and the counts of --watch to Weights & Biases."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Checkpoints, and resuming from a checkpoint."""

    checkpoint_every: int = 1000
    """Steps between checkpoints, which are written while training continues. The last step has a checkpoint too. 0 for
    no checkpoints."""
    keep: int = 3
    """Number of checkpoints to keep. The oldest are removed."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Continue from the last checkpoint in --run-dir. Give the flags with which the run began, or change some: more
    steps train further, and another policy or loss scale converts the state. With the same flags the result is the
    same, bit for bit, as without the stop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFlags:
    """Several devices."""

    mesh: Annotated[str | None, tyro.conf.arg(metavar="data=N,fsdp=N,tensor=N", help_behavior_hint="")] = None
    """How the devices of this machine share the work. data splits the batch and copies the params. fsdp splits the
    batch, the params and the optimizer state. tensor splits each product (gpt2 and bert only). A number that is left
    out is 1. (default: one device)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The seed and the folders of a run."""

    seed: int = 0
    """Seed of the params and of the order of the examples."""
    data_dir: Folder = None
    """Folder of the prepared data sets. (default: ~/.cache/jaxmp/data)"""
    run_dir: Folder = None
    """Folder to write config, metrics, curves, checkpoints and summary to. (default: runs/NAME-TIME)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(PrecisionFlags, MemoryFlags, EvaluationFlags, CheckpointFlags, DeviceFlags, RunFlags):
    """Flags of every training script."""


def require(flag: str, value: float, least: float, below: float = float("inf")) -> None:
    """Check a number from the command line.

    Raises:
      ValueError: the number is not in [least, below).
    """
    if not least <= value < below:
        limit = f" and below {below:g}" if below < math.inf else " and finite" if value == math.inf else ""
        raise ValueError(f"{flag} must be at least {least:g}{limit}, got {value:g}")


def chosen(flag: str, names: Sequence[str], among: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of ``among`` that a flag names, in their order.

    If the flag is empty, all entries are returned.

    Raises:
      ValueError: a name is not in ``among``.
    """
    if unknown := [name for name in names if name not in among]:
        raise ValueError(f"{flag} must be among {', '.join(among)}; got {', '.join(unknown)}")
    return {name: value for name, value in among.items() if name in (names or among)}


def check(config: Any) -> None:
    """Check the numbers that every training script takes.

    Raises:
      ValueError: a number is out of range.
    """
    require("--accumulate", config.accumulate, 1)
    require("--batch-size", config.batch_size, 1)
    require("--ema", config.ema, 0, 1)
    require("--seed", config.seed, 0, 2**31)
    require("--watch", config.watch, 0)
    require("--evaluate-every", config.evaluate_every, 0)
    require("--checkpoint-every", config.checkpoint_every, 0)
    require("--keep", config.keep, 1)
    if not 0 < config.learning_rate < math.inf:
        raise ValueError(f"--learning-rate must be positive and finite, got {config.learning_rate:g}")
    if config.batch_size % config.accumulate:
        raise ValueError(
            f"--accumulate must divide --batch-size, got {config.accumulate} for batches of {config.batch_size}"
        )


def parse(config_type: type[C], description: str, args: Sequence[str] | None = None) -> C:
    """Return the flags in ``args``, or in the command line of this process.

    ``--help`` ends the process with exit code 0. An unknown flag ends it with exit code 2.
    """
    program = " ".join(program_line()) if args is None else None
    options: Any = {"prog": program, "description": description, "args": args, "config": (tyro.conf.OmitArgPrefixes,)}
    groups = _groups(config_type)
    if not groups:
        return tyro.cli(config_type, **options)
    flags: Any = tyro.cli(dataclasses.make_dataclass("Flags", groups.items()), **options)
    return config_type(**{name: value for group in groups for name, value in vars(getattr(flags, group)).items()})


def _groups(config_type: Any) -> dict[str, type]:
    """Return the ``…Flags`` base classes of a class, by their titles in ``--help``.

    The result is empty if one of the class's fields is in no such base class.
    """
    classes = [base for base in config_type.__mro__ if base.__name__.endswith("Flags")]
    names = {field.name for base in classes for field in dataclasses.fields(base)}
    if names != {field.name for field in dataclasses.fields(config_type)}:
        return {}
    return {base.__name__.removesuffix("Flags").lower(): base for base in classes}


@contextmanager
def bad_values_end_it() -> Iterator[None]:
    """Turn errors in values of the command line into one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        fail(str(error))


def fail(message: str, code: int = 2) -> NoReturn:
    """End the process with one line on stderr."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


def plain_warnings() -> None:
    """Print each warning in one line, without its position in the code."""
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees, for the next step. Without glibc this does nothing.

    On a CPU, XLA allocates a step's temporaries with malloc. glibc maps new memory for each large block, so each
    step waits for page faults. Call this function before JAX starts threads.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
            mallopt(parameter, value)


def main(config_type: type[C], train: Callable[[C], Any], description: str) -> None:
    """Run a training script: read the flags, train, and print errors in one line."""
    config = parse(config_type, description)
    plain_warnings()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the terminal's encoding may lack letters of a sample
            stream.reconfigure(errors="replace")
    keep_freed_memory()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_SHARE))  # read when JAX first looks for a device
    try:
        train(config)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # at exit Python would flush into the broken file
        if isinstance(error, BrokenPipeError):  # the reader (head, less) has closed the pipe
            return
        fail(f"{error.filename or 'the output cannot be written'}: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(130)  # without a shutdown of the interpreter, in which compiling threads of XLA would crash
    except FloatingPointError as error:  # NonFiniteTrainingError
        fail(str(error), 1)
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            fail(f"out of memory; use a smaller --batch-size, --accumulate or --remat layers ({reason})", 1)
        raise


def run_folder(name: str, folder: Path | None) -> Path:
    """Return ``folder``, or a new folder ``runs/NAME-TIME``; make it if necessary.

    Raises:
      ValueError: no file can be written to the folder.
    """
    folder = folder or Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # an existing folder may not be writable
    except OSError as error:
        raise ValueError(f"nothing can be written to {folder} ({error.strerror}); take another --run-dir") from error
    return folder
