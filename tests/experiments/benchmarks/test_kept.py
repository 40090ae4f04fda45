"""What a benchmark keeps in its run folder: what goes together there, until when, and where it was measured."""

from __future__ import annotations

import pytest

from experiments.benchmarks.shared import kept


def test_the_time_that_is_left_decides_whether_something_starts(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(kept.time, "monotonic", lambda: now[0])
    clock, endless = kept.Clock(minutes=8), kept.Clock(minutes=0)
    now[0] = 7 * 60.0
    assert not clock.late() and not clock.late(59) and not clock.unfinished
    assert clock.late(61) and clock.unfinished and clock.late()  # what is left is left, in order
    assert not endless.late(1e9) and not endless.unfinished


def test_a_setting_that_only_one_side_has_differs_and_smoke_explains_the_rest(tmp_path):
    there = {"device": "one", "energy_s": 2.0, "sizes": [1, 2]}
    kept.require_alike(tmp_path, {**there, "sizes": (1, 2)}, there)  # as JSON has it
    with pytest.raises(ValueError, match=f"but in {tmp_path} energy_s is 2.0 there and None here; take the device"):
        kept.require_alike(tmp_path, {"device": "one", "sizes": (1, 2)}, there)
    with pytest.raises(ValueError, match=f"but in {tmp_path} smoke is False there and True here; take"):
        kept.require_alike(tmp_path, {"smoke": True, "device": "another"}, {**there, "smoke": False})


def test_environments_are_joined_side_by_side_and_each_text_once():
    first = {"device": "one", "command": "a; b", "date": "2026-11-20"}
    again = {"device": "one", "command": "a", "date": "2026-11-21"}
    assert kept.joined([first, again]) == {"device": "one", "command": "a; b", "date": "2026-11-21"}
    assert kept.joined([again, {**first, "device": "two"}])["device"] == "one; two"
