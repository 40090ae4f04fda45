"""Find the largest batch that fits in memory, for ``--batch-size auto``.

The step is compiled for several batch sizes, and is not run.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from experiments.measure import memory
from experiments.training import processes
from experiments.training.experiment import Experiment
from experiments.training.run_folders import folder_to_resume
from jaxmp.base.tables import byte_text

C = TypeVar("C")

SHARE = 0.9  # the share of the free memory for a step; the next batch, evaluation and gaps between arrays need the rest
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def free_bytes(limit: str | None = None) -> int:
    """Return the bytes that a step may take.

    The result is ``limit``, or a share of the free memory of the device. For a CPU this is the memory of the host.

    Raises:
      ValueError: ``limit`` is not a number of bytes, or it is None and the device does not report its free memory.
    """
    if limit is not None:
        return read_bytes(limit)
    if stats := jax.local_devices()[0].memory_stats():
        return int(SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]))
    try:
        available = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        available = None
    if available is None:
        raise ValueError(
            "this device does not say how much memory is free; set it with --memory-limit, for example 4GB"
        )
    return int(SHARE * 1024 * int(available[1]))


def read_bytes(text: str) -> int:
    """Read a number of bytes.

    Raises:
      ValueError: ``text`` is not a positive number of bytes.

    >>> read_bytes("2GB"), read_bytes("1.5 GiB"), read_bytes("4096")
    (2000000000, 1610612736, 4096)
    """
    match = re.fullmatch(r"([\d.]+)\s*([kmgt]?i?)b?", text.strip().lower())
    try:
        size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    except (ValueError, KeyError):
        size = 0
    if size <= 0:
        raise ValueError(f"--memory-limit is a number of bytes, got {text!r}; write 20GB or 512MiB, for example")
    return size


def settled(name: str, config: C, prepare: Callable[[C], Experiment], most: Callable[[C], int]) -> C:
    """Return a script's flags with a number in place of ``--batch-size auto``.

    A resumed run keeps its batch size.

    Args:
      name: the name of the experiment.
      config: the flags.
      prepare: makes the experiment that the flags describe.
      most: returns the largest useful batch for the flags.

    Raises:
      ValueError: the smallest batch does not fit, or there is no run to resume.
    """
    flags: Any = config
    if flags.batch_size != "auto":
        if flags.memory_limit is not None:
            raise ValueError(f"--memory-limit is for --batch-size auto, got --batch-size {flags.batch_size}")
        return config
    if flags.mesh is not None or processes.several():
        raise ValueError("--batch-size auto works on a single device; give a number with --mesh and --processes")
    if flags.resume:
        began = json.loads((folder_to_resume(name, flags.run_dir) / "config.json").read_text())
        return dataclasses.replace(flags, batch_size=began["config"]["batch_size"])
    experiment = prepare(dataclasses.replace(flags, batch_size=flags.accumulate))
    limit = free_bytes(flags.memory_limit)  # after prepare(), because the data may be on the device
    print("looking for the largest batch that fits", file=sys.stderr, flush=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no loss scale", category=UserWarning)  # training shows it
        args = jax.eval_shape(experiment.init, 0), next(experiment.train_batches(0))
        largest = memory.largest_batch(experiment.step, args, limit, at_most=most(config))
    if not largest:
        raise ValueError(
            f"a batch of {flags.accumulate} must fit into {byte_text(limit)}, but its step needs more; recompute more "
            "(--remat layers), use a half-precision policy, a smaller model or shorter examples, or raise "
            "--memory-limit if there is more memory"
        )
    print(f"--batch-size auto: {largest}, the largest batch whose step fits into {byte_text(limit)}", flush=True)
    return dataclasses.replace(flags, batch_size=largest)
