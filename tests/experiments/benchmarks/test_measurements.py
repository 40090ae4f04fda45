"""Results that a benchmark keeps in a run folder, with device and versions."""

from __future__ import annotations

import json

import pytest

from experiments.benchmarks.shared import measurements

WHERE = {"device": "one", "versions": "1", "date": "2026-11-20", "command": "a"}


def test_settings_that_differ_are_refused_and_environments_are_joined(tmp_path):
    file = tmp_path / "a.json"
    measurements.Measurements(tmp_path, 0, WHERE, energy_s=2.0, smoke=False).save("a", {}, sizes=(1, 2))
    setting = {"device": "one", "versions": "1", "smoke": False}
    measurements.require_alike(file, {**setting, "energy_s": 2.0, "sizes": (1, 2)})  # as a list in JSON
    with pytest.raises(ValueError, match=f"but in {file} energy_s is 2.0 there and None here; use the device"):
        measurements.require_alike(file, {**setting, "sizes": (1, 2)})
    with pytest.raises(ValueError, match=f"but in {file} smoke is False there and True here; use"):
        measurements.require_alike(file, {"smoke": True, "device": "another"})

    first = {"device": "one", "command": "a; b", "date": "2026-11-20"}
    again = {"device": "one", "command": "a", "date": "2026-11-21"}
    assert measurements.joined([first, again]) == {"device": "one", "command": "a; b", "date": "2026-11-21"}
    assert measurements.joined([again, {**first, "device": "two"}])["device"] == "one; two"


def test_existing_results_are_not_measured_again_unless_they_failed(tmp_path):
    measured = []

    def measure(**figures):
        return lambda: measured.append(figures) or figures

    results = measurements.Measurements(tmp_path, 0, WHERE)
    assert results.get("a", measure(error="no room"))["error"] == "no room"
    assert results.get("a", measure(ms=1))["ms"] == results.get("a", measure(ms=2))["ms"] == 1 and len(measured) == 2
    assert results.get("b", lambda: None) is None and not results.read("b")  # there was no time left
    with pytest.raises(ValueError, match="width is None there and 64 here"):
        results.get("a", measure(ms=3), width=64)
    assert len(results.environments) == 3 and json.loads((tmp_path / "a.json").read_text())["environment"] == WHERE


def test_without_time_earlier_results_stay_and_the_command_says_that_something_is_left(tmp_path, capsys):
    measurements.Measurements(tmp_path, 0, WHERE).save("a", {"error": "no room"})
    results = measurements.Measurements(tmp_path, 1e-9, WHERE)
    assert results.get("a", lambda: {"ms": 1})["error"] == "no room" and results.get("b", lambda: {"ms": 1}) is None
    results.end()
    assert capsys.readouterr().out == f"{measurements.UNFINISHED}\n"
