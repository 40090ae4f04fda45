"""The benchmark of tune: its models run, and its table has the measured figures."""

from __future__ import annotations

import json

import pytest

from experiments.benchmarks import tune

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.slow("tunes a model twice")
def test_a_run_records_each_model_and_half_format(tmp_path):
    tune.main(tune.Config(models=("Gaussian process",), smoke=True, run_dir=tmp_path))
    results = json.loads((tmp_path / "tune.json").read_text())["results"]
    assert [result["half"] for result in results] == ["bfloat16", "float16"]
    for result in results:
        assert result["met"] and result["tuned"] <= min(result["autocast"], 2 * result["floor"])
    assert "| Gaussian process | float16 |" in (tmp_path / "tune.md").read_text()
