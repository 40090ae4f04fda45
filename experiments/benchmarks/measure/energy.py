"""Measure the energy, the power and the clocks of a GPU while it repeats a call."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from experiments.benchmarks.measure import power

CALLS = 4
"""The calls after which the host waits for the device, so that the device is as busy as in a turn."""


def of_call(turn: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Return the joules of a call, and the readings of the GPU.

    The GPU updates its counter of energy about ten times a second, so the measurement takes seconds.

    Args:
      turn: a call that does not wait for the device. ``jax.block_until_ready`` can wait for its result.
      seconds: how long to repeat the call; 0 to measure nothing.

    Returns:
      ``joules`` of a call, and ``power``, the fields of a :class:`experiments.benchmarks.measure.power.PowerReading`.
      Both are None if nothing can be read.
    """
    reading, calls = None, 0
    if seconds:
        started = time.perf_counter()
        with power.monitor() as monitor:
            while not calls or time.perf_counter() - started < seconds:
                for _ in range(CALLS):
                    result = turn()
                jax.block_until_ready(result)
                calls += CALLS
        reading = monitor.result()
    if reading is None:
        return {"joules": None, "power": None}
    joules = reading.watts * reading.seconds if reading.joules is None else reading.joules
    return {"joules": joules / calls, "power": dataclasses.asdict(reading)}
