"""The energy that a GPU used."""

from __future__ import annotations

import contextlib
import types

import pytest

from experiments.benchmarks.measure import energy, power


def test_the_energy_of_a_call_is_that_of_the_counter_or_else_the_power_in_the_time(monkeypatch):
    calls = []
    for joules, expected in ((1200.0, 1200.0), (None, 2.0 * 600.0)):
        reading = power.PowerReading(2.0, 600.0, 700.0, joules, 1500.0, 1980.0, {"power limit": 0.5}, 60.0)
        fake_monitor = types.SimpleNamespace(result=lambda reading=reading: reading)
        monkeypatch.setattr(energy.power, "monitor", lambda fake=fake_monitor: contextlib.nullcontext(fake))
        calls.clear()
        measured = energy.of_call(lambda: calls.append(1), seconds=0.01)
        assert calls and measured["joules"] == pytest.approx(expected / len(calls))
        assert measured["power"]["throttled"] == {"power limit": 0.5}
    monkeypatch.undo()
    nothing = {"joules": None, "power": None}
    assert energy.of_call(lambda: None, 0.0) == energy.of_call(lambda: None, 0.001) == nothing  # here is no GPU
