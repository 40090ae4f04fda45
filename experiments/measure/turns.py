"""Time several functions in turn in one process; each may fail alone."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from experiments.measure import timing

OUT_OF_MEMORY = "out of memory"
LACKS = "not installed: "
"""Before the package that a row needs: once it is there, the row is measured."""


@dataclasses.dataclass
class Prepared:
    """A compiled function whose state is on the device, such as a step.

    Attributes:
      turn: does it once, without waiting; what it returns ``jax.block_until_ready`` can wait for.
      loss: does it once more for its loss; None if it has no loss.
      compile_seconds: from Python to a program, of torch the first call; without what makes the model and its state.
      compiled_bytes: what the program needs at most by its compiler's account; None of torch.
      about: what else is known of it.
    """

    turn: Callable[[], Any]
    loss: Callable[[], float] | None = None
    compile_seconds: float = 0.0
    compiled_bytes: int | None = None
    about: dict[str, Any] = dataclasses.field(default_factory=dict)


def broken(figures: dict[str, Any]) -> str | None:
    """Return why a row's figures are not judged: its loss is not finite.

    Such a step may be fast, or take little power.
    """
    loss = figures.get("loss")
    return None if loss is None or math.isfinite(float(loss)) else f"not judged: its loss is {loss}"


def reason(error: BaseException) -> str:
    """Why a row has no figures, in a few words."""
    text = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return OUT_OF_MEMORY
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{LACKS}{error.name.partition('.')[0]}"
    return f"{type(error).__name__}: {' '.join((text.splitlines() or [''])[0].split())[:160]}"


def failed(error: BaseException) -> str:
    """The same, and where it was raised on stderr: a row that fails does not end the run."""
    text = reason(error)
    if text != OUT_OF_MEMORY:
        traceback.print_exception(error)
    return text


def together(
    prepared: dict[str, Prepared], rounds: int, block_ms: float, after_round: Callable[[int], None] = lambda _: None
) -> dict[str, dict[str, Any]]:
    """Milliseconds of each row, round for round and all in turn, and the loss that each ends with.

    A row that fails meanwhile has an ``error`` instead and is taken out of ``prepared``; the others go on.
    """
    names = list(prepared)
    turns = {name: row.turn for name, row in prepared.items()}
    figures: dict[str, dict[str, Any]] = {}

    def fails(name: str, error: Exception) -> None:
        figures[name] = {"error": failed(error)}
        del turns[name], prepared[name]  # the others may have its memory

    for name, times in timing.interleaved(turns, rounds, block_ms, after_round, fails).items():
        figures[name] = {"milliseconds": times}
        if loss := prepared[name].loss:
            try:
                figures[name]["loss"] = loss()
            except Exception as error:
                fails(name, error)
    return {name: figures[name] for name in names}


def all_of(
    make: Mapping[str, Callable[[], Prepared]], before: Callable[[str], None]
) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Every way ready to take its turns after a first one, and why those that are not are not."""
    prepared, errors = dict[str, Prepared](), dict[str, str]()
    for name, ready in make.items():
        before(name)
        try:
            prepared[name] = ready()
            if prepared[name].turn:
                jax.block_until_ready(prepared[name].turn())
        except Exception as error:  # whatever a library raises: the others go on
            prepared.pop(name, None)
            errors[name] = failed(error)
            gc.collect()
    return prepared, errors


def compared(
    make: Mapping[str, Callable[[], Prepared]],
    rounds: int,
    block_ms: float,
    tell: Callable[[int, str], None],
) -> dict[str, dict[str, Any]]:
    """Return each way's times and their ratio to the first one's, or its ``error``.

    Args:
      make: name to what makes it ready.
      rounds: of timing; of none, nothing is run.
      block_ms: milliseconds of a turn.
      tell: called with how many more rounds are done, and with what comes next.
    """
    prepared, errors = all_of(make, lambda name: tell(0, f"compiling {name}"))
    rows = {name: prepared[name].about if name in prepared else {"error": errors[name]} for name in make}
    timed = together(prepared, rounds, block_ms, lambda i: tell(int(i >= 0), "timing, in turn")) if rounds else {}
    for name, row in timed.items():
        why = row.get("error") or broken(row)
        rows[name] = {"error": why} if why else rows[name] | row
    times = {name: row["milliseconds"] for name, row in rows.items() if "milliseconds" in row}
    if (first := next(iter(make))) in times:
        rows |= {name: rows[name] | row for name, row in timing.against(times, first).items()}
    return rows


@contextlib.contextmanager
def caches_in(folder: Path) -> Iterator[None]:
    """JAX and torch keep there what they compiled: the process that times need not compile it again."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    jax.config.update("jax_compilation_cache_dir", str(folder / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # JAX looks for a folder when it first compiles, and keeps to what it found
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
