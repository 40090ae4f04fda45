"""The power, the clocks and the throttling of a GPU, read from a fake NVML."""

from __future__ import annotations

import itertools
import sys
import time
import types

import pytest

from experiments.benchmarks.measure import power


class NVMLError(Exception):
    pass


class Nvml(types.ModuleType):
    """A fake NVML with the GPUs 3 and GPU-1234. GPU-1234 has no energy counter."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError

    def __init__(self):
        super().__init__("pynvml")
        self.watts = itertools.cycle([600.0, 700.0])
        self.reasons = itertools.cycle([0x4 | 0x1, 0x4 | 0x20])
        self.energy = itertools.count(1_000_000, 350_000)

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        if index != 3:
            raise NVMLError("not found")
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        if name != "GPU-1234":
            raise NVMLError("not found")
        return name

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700_000

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        return 1980

    def nvmlDeviceGetPowerUsage(self, handle):
        return 1000 * next(self.watts)

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return 1500

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return next(self.reasons)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 61

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if handle == "GPU-1234":
            raise NVMLError("not supported")
        return next(self.energy)


@pytest.fixture
def nvml(monkeypatch):
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def _reading(**options):
    with power.monitor(interval=0.001, **options) as gpu:
        time.sleep(0.02)
    return gpu.result()


def test_the_power_the_clocks_and_the_reasons_of_the_first_visible_gpu_are_read(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    reading = _reading()
    assert 600 < reading.watts < 700 and reading.power_limit == 700
    assert (reading.sm_clock, reading.max_sm_clock, reading.temperature) == (1500, 1980, 61)
    assert reading.joules == 350
    assert reading.throttled["power limit"] == pytest.approx(1.0)
    assert 0.2 < reading.throttled["temperature"] < 0.8
    assert 0.02 <= reading.seconds < 5


def test_a_gpu_without_an_energy_counter_has_no_joules(nvml):
    reading = _reading(device="GPU-1234")
    assert reading.joules is None and reading.watts > 0


def test_without_a_gpu_or_the_package_there_is_no_reading(nvml, monkeypatch):
    assert _reading(device="0") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert _reading(device="3") is None
