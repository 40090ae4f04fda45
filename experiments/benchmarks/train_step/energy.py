"""Energy that the GPU took, from NVML's counter; none where there is no NVML."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

Counter = Callable[[], float]
"""Joules since the driver was loaded."""


def counter(device: str | None = None) -> Counter | None:
    """Reads the counter of the first GPU that this process may use; None where it cannot be read.

    Args:
      device: an index or a UUID of NVML's; None for the first of ``CUDA_VISIBLE_DEVICES``, or ``"0"``.
    """
    device = device or os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    try:
        read = _counter_of(device)
        read()
    except (OSError, AttributeError):  # no NVML, or one without this function; or nobody may read this GPU's counter
        return None
    return read


def joules(run: Callable[[], Any], read: Counter, seconds: float = 3.0) -> float:
    """Joules a call of ``run`` takes, which must wait for the device; the mean over ``seconds``.

    The counter moves about ten times a second, hence the length.

    Raises:
      ValueError: ``seconds`` is not positive.
    """
    if seconds <= 0:
        raise ValueError(f"energy is the mean over a time, which must be positive, got {seconds:g} seconds")
    started, first = time.perf_counter(), read()
    calls = 0
    while time.perf_counter() - started < seconds:
        run()
        calls += 1
    return (read() - first) / calls


def _counter_of(device: str) -> Counter:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")  # the driver's own library: there wherever a GPU is
    handle = ctypes.c_void_p()
    error = nvml.nvmlInit_v2() or (
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(device)), ctypes.byref(handle))
        if device.isdigit()
        else nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
    )
    if error:
        raise OSError(f"NVML has no GPU {device}: error {error}")

    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        if error := nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
            raise OSError(f"NVML gives no energy: error {error}")
        return millijoules.value / 1000

    return read
