"""The benchmark of float8: float8 products and speed-ups."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from experiments.benchmarks import float8

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's Adam needs it
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setenv("JAXMP_FLOAT8", "emulate")


def test_a_layer_has_the_gradients_of_bfloat16_but_for_the_rounding(emulated):
    results = []
    for way in (float8.HALF, float8.DEFAULT):
        start, step = float8.case_of("layer", 64, way, 64)
        _, (y, dx, dw) = jax.jit(step)(*start())
        assert (y.shape, dx.shape, dw.shape, y.dtype.name, dw.dtype.name) == (
            (64, 256), (64, 64), (64, 256), "bfloat16", "float32"
        )  # fmt: skip
        results.append([np.asarray(array, np.float32) for array in (y, dx, dw)])
    for half, ours in zip(*results, strict=True):
        assert 0.01 < np.linalg.norm(ours - half) / np.linalg.norm(half) < 0.1


@pytest.mark.slow("a whole run of a benchmark")
def test_every_part_has_its_rows_and_is_measured_once(emulated, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(float8.plots, "panels", lambda *_: None)
    config = float8.Config(parts=("layer",), smoke=True, rounds=2, block_ms=0.1, run_dir=tmp_path)
    (ours,) = float8.main(config)
    assert list(ours["rows"]) == list(float8.ALL) and ours["rows"][float8.HALF]["speed-up"] == 1
    assert all(row["ms"] > 0 and row["peak MiB"] > 0 for row in ours["rows"].values())
    assert "## SMOKE TEST, no result: A layer with a K×4K matrix" in (tmp_path / "float8.md").read_text()
    assert "speed-up" in capsys.readouterr().out
    monkeypatch.setattr(float8, "compared", pytest.fail)  # existing results are not measured again
    assert float8.main(config) == [ours]
    assert json.loads((tmp_path / "float8.json").read_text())["results"] == [ours]


@pytest.mark.absent_gpu
def test_compiled_for_a_gpu_the_products_of_a_layer_are_float8_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(float8.plots, "panels", lambda *_: None)
    config = float8.Config(parts=("product", "layer"), smoke=True, device="h200", run_dir=tmp_path)
    rows_by_part = {case["part"]: case["rows"] for case in float8.main(config)}
    assert [row["float8 of products"] for row in rows_by_part["product"].values()] == ["0 of 1", "1 of 1"]
    assert [row["float8 of products"] for row in rows_by_part["layer"].values()] == ["0 of 3", "3 of 3"]
    assert all("ms" not in row for rows in rows_by_part.values() for row in rows.values())
    assert "- target: NVIDIA H200 141GB HBM3e" in (tmp_path / "float8.md").read_text()
