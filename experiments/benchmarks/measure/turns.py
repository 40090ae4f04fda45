"""Time several functions in turn in one process.

If a function fails, the others are still timed.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax

from experiments.measure import timing

OUT_OF_MEMORY = "out of memory"


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


MOVED, APART = 0.01, 0.05
"""How far a loss may move while a row is timed, and how far it may be from those of the other rows, as shares."""


def not_judged(rows: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return the reason for each row that must not be compared with the rows that took turns with it.

    The time of a step depends on its numbers, because a GPU that computes on zeros needs less power and keeps higher
    clocks. So rows are compared only if their losses are alike and did not move. Rows without ``loss_before`` are
    judged by :func:`broken` alone.
    """
    reasons = {name: why for name, row in rows.items() if (why := broken(row))}
    losses = dict[str, float]()
    for name, row in rows.items():
        if name in reasons or row.get("loss_before") is None or "loss" not in row:
            continue
        before, after = float(row["loss_before"]), float(row["loss"])
        if abs(after - before) <= MOVED * abs(before):
            losses[name] = after
        else:
            reasons[name] = f"not judged: its loss moved from {before:.4g} to {after:.4g} while it was timed"
    typical = statistics.median(losses.values()) if losses else 0.0
    for name, loss in losses.items():
        if abs(loss - typical) > APART * abs(typical):
            reasons[name] = f"not judged: its loss is {loss:.4g}, and that of the other rows is {typical:.4g}"
    return reasons


def reason(error: BaseException) -> str:
    """Return the reason why a row has no figures, in a few words."""
    text = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return OUT_OF_MEMORY
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"not installed: {error.name.partition('.')[0]}"
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

    Return the milliseconds of each row by round, and its loss before and after. A row that fails has an ``error``
    instead and is removed from ``prepared``. The others are still timed.
    """
    turns = {name: row.turn for name, row in prepared.items()}
    figures: dict[str, dict[str, Any]] = {name: {} for name in prepared}

    def fails(name: str, error: Exception) -> None:
        figures[name] = {"error": failed(error)}
        del turns[name], prepared[name]  # frees its memory for the others

    def save_losses(key: str) -> None:
        for name, row in list(prepared.items()):
            if row.loss:
                try:
                    figures[name][key] = row.loss()
                except Exception as error:
                    fails(name, error)

    save_losses("loss_before")
    for name, times in timing.interleaved(turns, rounds, block_ms, after_round, fails).items():
        figures[name]["milliseconds"] = times
    save_losses("loss")
    return figures


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
