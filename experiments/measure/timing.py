"""Times several functions fairly: all in one process, warm, in turn, each call waited for."""

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
    """Milliseconds a call takes, one figure a round for each function.

    In a round every function has its turn, in an order that rotates; a turn is as many calls in a row as take about
    ``block_ms``, and ends when the device has finished. What drifts (clock, temperature, neighbours) hits all alike.

    Args:
      functions: name to function; what it returns is waited for.
      rounds: how many rounds to time, after one to warm up and one to see how long a call takes.
      block_ms: how long a turn should take, in milliseconds.
      after_round: called with the number of each round.
      failed: called with the name of a function that raised and with what it raised: it has no more turns, and the
        others go on. None ends the timing with what was raised.
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
    started = time.perf_counter()
    for _ in range(calls):
        result = function()
    jax.block_until_ready(result)
    return 1000 * (time.perf_counter() - started) / calls


def quartiles(times: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile."""
    if len(times) < 2:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, middle, high


def ratio(times: list[float], other: list[float]) -> tuple[float, float, float]:
    """Quartiles of one function's times over another's, round for round: what drifts cancels."""
    return quartiles([a / b for a, b in zip(times, other, strict=True)])


def against(times: Mapping[K, list[float]], reference: K) -> dict[K, dict[str, Any]]:
    """Return by function its ``milliseconds``, their quartiles, and its ratio.

    The quartiles ``ms`` and ``ratio`` are three numbers each; the ratio is to ``reference``.
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
    """A step without arguments that goes on from the state it left: ``compiled`` may donate it."""

    def step() -> Any:
        nonlocal state
        state, loss = compiled(state, batch)
        return state, loss

    return step
