"""Measure the energy that an NVIDIA GPU uses for a call.

The energy comes from NVML, the management library in NVIDIA's driver, through the package nvidia-ml-py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import jax

CALLS = 4
"""The calls after which the host waits for the device, so that the device is as busy as in a turn."""


def of_call(turn: Callable[[], Any], seconds: float) -> float | None:
    """Return the joules of a call by the GPU's own counter.

    The GPU updates its counter about ten times a second, so the measurement takes seconds.

    Args:
      turn: a call that does not wait for the device. ``jax.block_until_ready`` can wait for its result.
      seconds: how long to repeat the call; 0 to measure nothing.

    Returns:
      The joules. None without an NVIDIA GPU that counts its energy, or without nvidia-ml-py.
    """
    before = _joules() if seconds else None
    if before is None:
        return None
    started, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - started < seconds:
        for _ in range(CALLS):
            result = turn()
        jax.block_until_ready(result)
        calls += CALLS
    after = _joules()
    return None if after is None else (after - before) / calls


def _joules() -> float | None:
    """Return the energy that the first visible GPU has used since its driver was loaded."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    try:
        pynvml.nvmlInit()
        by_index = pynvml.nvmlDeviceGetHandleByIndex
        handle = by_index(int(device)) if device.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(device)
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    except pynvml.NVMLError:
        return None
