"""Time several functions under the same conditions.

The functions run in one process, after warm-up, and take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

K = TypeVar("K")


def interleaved(
    functions: Mapping[K, Callable[[], Any]],
    rounds: int,
    block_ms: float = 100.0,
    after_round: Callable[[int], None] = lambda _: None,
    failed: Callable[[K, Exception], None] | None = None,
) -> dict[K, list[float]]:
    """Return the milliseconds of a call, one figure per round for each function.

    In a round every function has a turn, in an order that rotates. A turn is as many calls in a row as take about
    ``block_ms``, and it ends when the device has finished. So a drift of clock, temperature or load affects all
    functions in the same way. The time in which the device waits for the first call of a turn does not count, because
    a training loop waits only once.

    Args:
      functions: functions by name. They must return JAX arrays.
      rounds: the number of rounds to time. Two more rounds come first, to warm up and to measure the length of a call.
      block_ms: the target duration of a turn in milliseconds.
      after_round: called with the number of each round. The two first rounds have the numbers -2 and -1.
      failed: called with the name and the error of a function that raises. The function then has no more turns, and the
        others continue. If ``failed`` is None, the error is raised.
    """
    calls = dict.fromkeys(functions, 1)
    times: dict[K, list[float]] = {name: [] for name in functions}
    for round_ in range(-2, rounds):
        names = list(times)
        shift = round_ % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            try:
                milliseconds = _turn(functions[name], calls[name])
            except Exception as error:
                if failed is None:
                    raise
                failed(name, error)
                del times[name]
                continue
            if round_ == -1:
                calls[name] = max(1, round(block_ms / max(milliseconds, 1e-3)))
            elif round_ >= 0:
                times[name].append(milliseconds)
        after_round(round_)
    return times


def _turn(function: Callable[[], Any], calls: int) -> float:
    """Return the milliseconds of a call within a long row of calls.

    The first call of a row starts late, because the device waits for the host's Python code. Later calls do not: the
    host prepares them while the device computes. So a row of one call is subtracted from a longer row.
    """
    if calls == 1:
        return _milliseconds(function, 1)
    return (_milliseconds(function, calls + 1) - _milliseconds(function, 1)) / calls


def _milliseconds(function: Callable[[], Any], calls: int) -> float:
    """Return how long a row of calls takes, until the device has finished."""
    started = time.perf_counter()
    for _ in range(calls):
        result = function()
    jax.block_until_ready(result)
    return 1000 * (time.perf_counter() - started)


def quartiles(times: list[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    if len(times) < 2:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, middle, high


def ratio(times: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return the quartiles of the ratio of two functions' times.

    Two times of the same round are divided, so that drift cancels.
    """
    return quartiles([a / b for a, b in zip(times, other, strict=True)])


def against(times: Mapping[K, list[float]], reference: K) -> dict[K, dict[str, Any]]:
    """Return each function's ``milliseconds`` and the quartiles ``ms`` and ``ratio``.

    The ratio is to the times of ``reference`` in the same round.
    """
    return {
        name: {
            "milliseconds": milliseconds,
            "ms": quartiles(milliseconds),
            "ratio": ratio(milliseconds, times[reference]),
        }
        for name, milliseconds in times.items()
    }


def turn(compiled: Any, state: Any, batch: Any) -> Any:
    """Return a function without arguments that runs ``compiled`` on ``batch``.

    Each call uses the state that the call before returned, so ``compiled`` may donate the state.
    """

    def step() -> Any:
        nonlocal state
        state, loss = compiled(state, batch)
        return state, loss

    return step
