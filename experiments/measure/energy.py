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
        nvml = ctypes.CDLL("libnvidia-ml.so.1")  # the driver's own library: there wherever a GPU is
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
    except (OSError, AttributeError):  # no NVML, or one without this function; or nobody may read this GPU's counter
        return None
    return read


def joules(run: Callable[[], Any], read: Counter, seconds: float = 3.0) -> float:
    """Joules a call of ``run`` takes, which must wait for the device; the mean over ``seconds``.

    The counter moves about ten times a second, hence the length.
    """
    started, first, calls = time.perf_counter(), read(), 0
    while time.perf_counter() - started < seconds:
        run()
        calls += 1
    return (read() - first) / calls
