"""The ceilings of a device, to which the utilisation of train steps is relative."""

from __future__ import annotations

import pytest

from experiments.benchmarks.measure import ceiling
from jaxmp.inspect._profile import ceilings as profile_ceilings


def test_there_is_a_ceiling_for_each_dtype_that_the_device_has(monkeypatch):
    monkeypatch.setitem(profile_ceilings._WIDTHS, "cpu", 16)
    profile_ceilings._product_speed.cache_clear()
    result = ceiling.ceilings()
    profile_ceilings._product_speed.cache_clear()
    assert set(result["best"]) == {"fp32", "bf16", "fp16"} and min(result["best"].values()) > 0
    assert result["copy"] is None
    assert ceiling.sentence(result).endswith(f"fp16 {result['best']['fp16']:.3g}.")


def test_ceilings_are_in_tera(monkeypatch):
    speeds = {"float32": 40e12, "bfloat16": 700e12}
    monkeypatch.setattr(ceiling, "measure_ceilings", lambda dtypes: profile_ceilings.Ceilings(speeds, 4.2e12))
    result = ceiling.ceilings()
    assert result["best"] == {"fp32": pytest.approx(40), "bf16": pytest.approx(700)}
    assert (
        ceiling.sentence(result) == "Fastest product on this device, TFLOP/s: fp32 40, bf16 700; a copy moves 4.2 TB/s."
    )
