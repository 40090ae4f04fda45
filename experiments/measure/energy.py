"""Measure the energy of a GPU with NVML's counter."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

Counter = Callable[[], float]
"""A function that returns the joules since the driver was loaded."""


def counter(device: str | None = None) -> Counter | None:
    """Return the energy counter of the first GPU that this process may use.

    The result is None if the counter cannot be read.

    Args:
      device: an NVML index or UUID; None for the first device in ``CUDA_VISIBLE_DEVICES``, or ``"0"`` if that is empty.
    """
    device = device or os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")  # a part of the GPU's driver
        handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()

        def read() -> float:
            if error := nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
                raise OSError(f"NVML gives no energy: error {error}")
            return millijoules.value / 1000

        if device.isdigit():
            find, name = nvml.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(int(device))
        else:
            find, name = nvml.nvmlDeviceGetHandleByUUID, device.encode()
        if nvml.nvmlInit_v2() or find(name, ctypes.byref(handle)):
            return None
        read()
    except (OSError, AttributeError):  # no NVML, an old NVML, or a counter that may not be read
        return None
    return read


def joules(run: Callable[[], Any], read: Counter, seconds: float = 3.0) -> float:
    """Return the joules of a call of ``run``, averaged over ``seconds``.

    ``run`` must wait for the device. The counter is updated only about ten times a second, so the measurement takes
    seconds.
    """
    started, first, calls = time.perf_counter(), read(), 0
    while time.perf_counter() - started < seconds:
        run()
        calls += 1
    return (read() - first) / calls
