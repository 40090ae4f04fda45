"""Time several functions in turn in one process.

If a function fails, the others are still timed.
"""

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
"""The text with which a row's error begins if a package is missing. Once it is installed, the row is measured."""


@dataclasses.dataclass
class Prepared:
    """A compiled function, such as a step, with its state on the device.

    Attributes:
      turn: calls the function without waiting. ``jax.block_until_ready`` can wait for the result.
      loss: calls the function and returns its loss; None if there is no loss.
      compile_seconds: the seconds to lower and compile the function, without making the model and its state. For torch,
        the seconds of the first call.
      compiled_bytes: the peak bytes of the program as planned by the compiler; None for torch.
      about: further figures of the function.
    """

    turn: Callable[[], Any]
    loss: Callable[[], float] | None = None
    compile_seconds: float = 0.0
    compiled_bytes: int | None = None
    about: dict[str, Any] = dataclasses.field(default_factory=dict)


def broken(figures: dict[str, Any]) -> str | None:
    """Return an error if a row's loss is not finite, else None.

    The figures of such a row are not judged, because a step on non-finite numbers may be faster or take less power.
    """
    loss = figures.get("loss")
    return None if loss is None or math.isfinite(float(loss)) else f"not judged: its loss is {loss}"


def reason(error: BaseException) -> str:
    """Return the reason why a row has no figures, in a few words."""
    text = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return OUT_OF_MEMORY
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{LACKS}{error.name.partition('.')[0]}"
    return f"{type(error).__name__}: {' '.join((text.splitlines() or [''])[0].split())[:160]}"


def failed(error: BaseException) -> str:
    """Print the traceback of a row that failed, and return the reason."""
    text = reason(error)
    if text != OUT_OF_MEMORY:
        traceback.print_exception(error)
    return text


def together(
    prepared: dict[str, Prepared], rounds: int, block_ms: float, after_round: Callable[[int], None] = lambda _: None
) -> dict[str, dict[str, Any]]:
    """Time all rows in turn.

    Return the milliseconds of each row by round, and its final loss. A row that fails has an ``error`` instead and is
    removed from ``prepared``. The others are still timed.
    """
    names = list(prepared)
    turns = {name: row.turn for name, row in prepared.items()}
    figures: dict[str, dict[str, Any]] = {}

    def fails(name: str, error: Exception) -> None:
        figures[name] = {"error": failed(error)}
        del turns[name], prepared[name]  # frees its memory for the others

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
    """Prepare all functions and call each once.

    Return the prepared functions, and the errors of the functions that failed.
    """
    prepared, errors = dict[str, Prepared](), dict[str, str]()
    for name, ready in make.items():
        before(name)
        try:
            prepared[name] = ready()
            if prepared[name].turn:
                jax.block_until_ready(prepared[name].turn())
        except Exception as error:  # if one fails, the others are still prepared
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
    """Return each function's times and their ratio to the first function's times.

    A function that fails has an ``error`` instead.

    Args:
      make: functions that return a :class:`Prepared`, by name.
      rounds: the number of rounds of timing. With 0, nothing is timed.
      block_ms: the target duration of a turn in milliseconds.
      tell: called with the number of rounds done since the last call, and with a text for the progress bar.
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
    """Set the compilation caches of JAX and torch to ``folder``.

    Another process then need not compile again.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    jax.config.update("jax_compilation_cache_dir", str(folder / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # else JAX keeps the folder from its first compilation
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
