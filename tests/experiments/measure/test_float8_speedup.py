"""The model of what float8 gains has the rates that were measured."""

from __future__ import annotations

import sys

import pytest

from experiments.measure import float8_speedup


def test_the_model_is_that_of_the_measurements(monkeypatch, capsys):
    # fast sums, and precise ones in the backward pass
    measured = {768: [0.95, 0.91], 2048: [1.24, 1.18], 4096: [1.44, 1.35]}
    for width, gains in measured.items():
        modelled = [float8_speedup.speedup(width, "h200", kind) for kind in ("fast", "fast_forward")]
        assert modelled == pytest.approx(gains, abs=0.04)
    with pytest.raises(ValueError, match="no rates of float8 products and of memory of NVIDIA A100"):
        float8_speedup.speedup(2048, "a100")
    monkeypatch.setattr(sys, "argv", ["float8_speedup", "h200"])
    float8_speedup.main()
    assert "4096 wide: 1.33 times bfloat16's speed" in capsys.readouterr().out
