"""Find the largest batch that fits in memory.

The step is compiled for several batch sizes, and is not run. The memory of a step grows about linearly with the batch.
So a line through the memory of two batches predicts the largest batch, and a few compilations find it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from rich import filesize

from experiments.measure import memory
from experiments.measure.memory import NO_ROOM
from experiments.training import processes
from experiments.training.experiment import Experiment
from experiments.training.run_folders import folder_to_resume

C = TypeVar("C")

SHARE = 0.9  # the share of the free memory for a step; evaluation and gaps between arrays need the rest
_COMPILATIONS = 5
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Found(NamedTuple):
    """The result of a search for the largest batch.

    Attributes:
      batch: the largest batch.
      bytes: the bytes that its step needs.
      limit: the bytes that a step may take.
      tried: the bytes of every batch that was compiled.
    """

    batch: int
    bytes: int
    limit: int
    tried: dict[int, int]

    def __str__(self) -> str:
        text = f"{self.batch}, whose step needs {in_words(self.bytes)} of {in_words(self.limit)}"
        more = min((size for size, need in self.tried.items() if need > self.limit), default=None)
        if more is None:
            return text
        return f"{text} ({more} would need {in_words(self.tried[more])})"


def largest_batch(
    needs: Callable[[int], int], limit: int, *, least: int = 1, multiple: int = 8, most: int = 2**20
) -> Found:
    """Return the largest batch whose step needs at most ``limit`` bytes.

    The search makes at most five compilations. Compilations that run out of memory do not count. The next larger batch
    does not fit, unless memory is so far from linear that five compilations are too few.

    Args:
      needs: compiles the step with a batch, and returns its bytes or ``NO_ROOM``. See :func:`step_bytes`.
      limit: the bytes that a step may take. See :func:`free_bytes`.
      least: the smallest batch, for example the number of microbatches. All batches are multiples of this number.
      multiple: batches that are large enough are also multiples of this number.
      most: the largest useful batch.

    Returns:
      A batch that was compiled and fits.

    Raises:
      ValueError: the smallest batch does not fit. The error says what it needs.

    >>> largest_batch(lambda batch: 1000 + 30 * batch, limit=10_000)[:3]
    (296, 9880, 10000)
    """
    step = math.lcm(least, multiple)

    def down(batch: int) -> int:
        return batch // step * step if batch >= step else batch // least * least

    tried = {least: needs(least)}
    if tried[least] > limit:
        raise ValueError(
            f"a batch of {least} must fit in memory, but its step needs {in_words(tried[least])} of "
            f"{in_words(limit)}; recompute more (--remat layers), use a half-precision policy, a smaller "
            "model or shorter examples, or raise --memory-limit if there is more memory"
        )
    fits, too_large, guess = least, math.inf, down(min(max(step, 2 * least), most))
    while guess > fits and sum(need < NO_ROOM for need in tried.values()) < _COMPILATIONS:
        tried[guess] = needs(guess)
        if tried[guess] <= limit:
            fits = guess
        else:
            too_large = guess
        after = fits + (step if fits >= step else least)  # the next larger batch
        if after >= too_large or after > most:
            break
        if tried.get(int(min(too_large, most + 1))) == NO_ROOM:  # its bytes are unknown, so bisect
            guess = max(after, down((fits + int(too_large)) // 2))
            continue
        # A line through the two batches next to the limit, or through the two largest if all fit.
        x, x2 = sorted(tried)[-2:] if too_large == math.inf else (fits, int(too_large))
        slope = (tried[x2] - tried[x]) / (x2 - x)
        expected = x + (limit - tried[x]) / slope if slope > 0 else 4 * fits
        # Try at least the next larger batch, so that the result is known to be the largest.
        guess = max(after, down(int(min(expected, most, too_large - 1))))
    return Found(fits, tried[fits], limit, tried)


def step_bytes(experiment: Experiment, batch_size: int) -> int:
    """Return the bytes of a train step, including its batch and the next batch.

    The next batch counts because it is on the device before the step ends.

    Raises:
      ValueError: the compiler does not report the memory of a step.
    """
    state = jax.eval_shape(experiment.init, 0)
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((batch_size, *leaf.shape[1:]), leaf.dtype), next(experiment.train_batches(0))
    )
    needed = memory.of_step(experiment.step, (state, batch))
    return needed + sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch))


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


def in_words(size: int) -> str:
    """Format a number of bytes.

    >>> in_words(1_930_000_000), in_words(512_000), in_words(1000)
    ('1.93 GB', '512.00 kB', '1.00 kB')
    """
    return "more than there is" if size >= NO_ROOM else filesize.decimal(size, precision=2)


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
        largest = largest_batch(
            lambda batch: step_bytes(experiment, batch), limit, least=flags.accumulate, most=most(config)
        )
    print(f"--batch-size auto: {largest}", flush=True)
    return dataclasses.replace(flags, batch_size=largest.batch)
