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
    read = _of_package(device) or _of_library(device)
    if read is None:
        return None
    try:
        read()
    except OSError:  # this GPU has no such counter, or nobody may read it
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


def _of_package(device: str) -> Counter | None:
    """By nvidia-ml-py, where it is installed."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        by_index = device.isdigit()
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(device)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(device)
        )
    except pynvml.NVMLError:
        return None

    def read() -> float:
        try:
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
        except pynvml.NVMLError as error:
            raise OSError(f"NVML gives no energy: {error}") from error

    return read


def _of_library(device: str) -> Counter | None:
    """By the driver's library itself."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        failed = nvml.nvmlInit_v2() or (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(device)), ctypes.byref(handle))
            if device.isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
        )
    except (OSError, AttributeError):
        return None
    if failed:
        return None

    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        if error := nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
            raise OSError(f"NVML gives no energy: error {error}")
        return millijoules.value / 1000

    return read
