"""The energy that a GPU used, read from a fake NVML."""

from __future__ import annotations

import itertools
import sys
import types

import pytest

from experiments.benchmarks.measure import energy


def test_the_energy_of_a_call_is_that_of_the_counter_of_the_first_visible_gpu(monkeypatch):
    counter, calls = itertools.count(1_000_000, 350_000), []
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index

    def energy_of(handle):
        if handle != 3:
            raise nvml.NVMLError("not supported")
        return next(counter)

    nvml.nvmlDeviceGetTotalEnergyConsumption = energy_of
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert energy.of_call(lambda: calls.append(1), 0.01) == pytest.approx(350 / len(calls))
    assert energy.of_call(lambda: None, 0.0) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert energy.of_call(lambda: None, 0.01) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy.of_call(lambda: None, 0.01) is None
