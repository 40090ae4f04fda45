"""Read the power, the clocks and the throttling of an NVIDIA GPU while code runs.

The numbers come from NVML, the management library in NVIDIA's driver, through the package nvidia-ml-py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

_REASONS = {
    0x004: "power limit",
    0x020: "temperature",
    0x040: "temperature",
    0x080: "power brake",
}
"""The reasons for lower clocks, by NVML's bit. Bits for an idle GPU and for chosen clocks are left out."""


@dataclasses.dataclass(frozen=True)
class PowerReading:
    """The power, clocks and throttling of a GPU while code ran.

    Attributes:
      seconds: the time between the first and the last sample.
      watts: the mean power.
      power_limit: the power limit in watts.
      joules: the energy by the GPU's own counter; None if the GPU has no such counter.
      sm_clock: the mean clock of the multiprocessors in MHz.
      max_sm_clock: the highest clock that the GPU may have, in MHz.
      throttled: the share of samples in which the clocks were lowered, by reason, such as ``"power limit"``.
      temperature: the highest temperature in degrees Celsius.
    """

    seconds: float
    watts: float
    power_limit: float
    joules: float | None
    sm_clock: float
    max_sm_clock: float
    throttled: dict[str, float]
    temperature: float


@dataclasses.dataclass(frozen=True)
class _Sample:
    seconds: float
    watts: float
    sm_clock: float
    reasons: frozenset[str]
    temperature: float


class Monitor:
    """The samples of a GPU, taken by a thread."""

    def __init__(self, gpu: _Gpu | None, interval: float) -> None:
        self._gpu = gpu
        self._interval = interval
        self._samples: list[_Sample] = []
        self._joules: list[float | None] = []
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._take_samples, args=(gpu,), daemon=True)

    def start(self) -> None:
        """Begin to take samples."""
        if self._gpu is not None:
            self._joules.append(self._gpu.joules())
            self._thread.start()

    def stop(self) -> None:
        """Take the last sample."""
        if self._gpu is not None:
            self._has_ended.set()
            self._thread.join()
            self._joules.append(self._gpu.joules())

    def result(self) -> PowerReading | None:
        """Return the readings; None without an NVIDIA GPU or without nvidia-ml-py."""
        if self._gpu is None or not self._samples:
            return None
        samples = self._samples
        first, last = self._joules
        throttled: dict[str, float] = {}
        for sample in samples:
            for reason in sorted(sample.reasons):
                throttled[reason] = throttled.get(reason, 0.0) + 1 / len(samples)
        return PowerReading(
            seconds=samples[-1].seconds - samples[0].seconds,
            watts=statistics.fmean(sample.watts for sample in samples),
            power_limit=self._gpu.power_limit,
            joules=None if first is None or last is None else last - first,
            sm_clock=statistics.fmean(sample.sm_clock for sample in samples),
            max_sm_clock=self._gpu.max_sm_clock,
            throttled=throttled,
            temperature=max(sample.temperature for sample in samples),
        )

    def _take_samples(self, gpu: _Gpu) -> None:
        with contextlib.suppress(gpu.error):  # the samples until then are returned
            self._samples.append(gpu.sample())
            has_ended = False
            while not has_ended:
                has_ended = self._has_ended.wait(self._interval)
                self._samples.append(gpu.sample())


class _Gpu:
    """A GPU in NVML.

    Raises:
      pynvml.NVMLError: NVML has no such GPU, or cannot read it.
    """

    def __init__(self, nvml: Any, device: str) -> None:
        self._nvml = nvml
        self.error: type[Exception] = nvml.NVMLError
        nvml.nvmlInit()
        if device.isdigit():
            self._handle = nvml.nvmlDeviceGetHandleByIndex(int(device))
        else:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(device)
        self.power_limit = nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1000
        self.max_sm_clock = float(nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_SM))
        self.sample()

    def sample(self) -> _Sample:
        nvml, handle = self._nvml, self._handle
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return _Sample(
            seconds=time.perf_counter(),
            watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            sm_clock=float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            reasons=frozenset(reason for bit, reason in _REASONS.items() if bits & bit),
            temperature=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )

    def joules(self) -> float | None:
        try:
            millijoules: int = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._nvml.NVMLError:  # an older GPU
            return None
        return millijoules / 1000


@contextlib.contextmanager
def monitor(interval: float = 0.02, device: str | None = None) -> Iterator[Monitor]:
    """Read a GPU every ``interval`` seconds while the body of the context runs.

    A GPU updates its power and its energy about ten times a second, so the body should take at least half a second.

    Args:
      interval: the seconds between two samples.
      device: an NVML index or UUID. The default is the first device in ``CUDA_VISIBLE_DEVICES``, or ``"0"``.

    >>> with monitor() as gpu:
    ...     _ = sum(range(1000))
    >>> gpu.result() is None or gpu.result().watts > 0
    True
    """
    device = device or os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    readings = Monitor(_find_gpu(device), interval)
    readings.start()
    try:
        yield readings
    finally:
        readings.stop()


def _find_gpu(device: str) -> _Gpu | None:
    """Return a GPU in NVML; None if there is none, or if the package nvidia-ml-py is not installed."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        return _Gpu(pynvml, device)
    except pynvml.NVMLError:
        return None
