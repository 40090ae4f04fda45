"""The ceilings of a device are measured, written and told with what they are missing."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from experiments.benchmarks import ceiling


def test_every_kind_of_product_is_the_product_of_its_matrices():
    for name, kind in ceiling.KINDS.items():
        a, b = kind.matrices((4, 8, 16))
        product = jax.jit(kind.product)(a, b)
        assert product.dtype == kind.result and a.dtype == b.dtype == kind.dtype, name
        wide = [np.asarray(x).astype(np.float64) * (0.5 if kind.scaled else 1) for x in (a, b)]
        np.testing.assert_allclose(np.asarray(product, np.float64), wide[0] @ wide[1], rtol=2e-2, atol=0.5)
        assert wide[0].std() > 0.1, name  # zeros would be faster


def test_the_two_matrices_of_a_cube_are_drawn_apart():
    a, b = ceiling.KINDS["float32"].matrices((8, 8, 8))
    assert abs(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1]) < 0.5


def test_the_benchmark_writes_a_ceiling_for_each_dtype_that_the_device_has(monkeypatch, tmp_path, capsys):
    some = ("float32", "tensorfloat32", "float8_e4m3fn, scaled")
    monkeypatch.setattr(ceiling, "KINDS", {name: ceiling.KINDS[name] for name in some})
    monkeypatch.setattr(ceiling, "SMOKE_SHAPES", ((8, 16, 8), (16, 8, 8)))
    monkeypatch.setattr(ceiling, "SMOKE_COPY_BYTES", 4096)
    result = ceiling.main(ceiling.Config(smoke=True, rounds=1, block_ms=0.1, run_dir=tmp_path))
    assert json.loads((tmp_path / "ceiling.json").read_text())["matmul"] == result["matmul"]
    assert list(result["matmul"]) == list(ceiling.KINDS) and result["copy"] > 0
    assert set(result["matmul"]["tensorfloat32"].values()) == {"no tensorfloat32 on this device"}
    assert result["best"]["float32"] == max(result["matmul"]["float32"].values()) > 0
    assert "tensorfloat32" not in result["best"]
    markdown, printed = (tmp_path / "ceiling.md").read_text(), capsys.readouterr().out
    for text in ("8×16×8", "16×8×8", "–: tensorfloat32: no tensorfloat32 on this device", "TB/s", "- device:"):
        assert text in markdown and text in printed


def test_tflops_and_bandwidth_follow_from_the_times(monkeypatch):
    monkeypatch.setattr(ceiling.timing, "interleaved", lambda turns, *_: {name: [2.0, 4.0, 6.0] for name in turns})
    result = ceiling.ceilings(((10, 20, 30),), copy_bytes=4000, kinds=("float32",))
    assert result["matmul"]["float32"]["10×20×30"] == pytest.approx(2 * 10 * 20 * 30 / 4e-3 / 1e12)
    assert result["copy"] == pytest.approx(2 * 4000 / 4e-3 / 1e12)


def test_without_a_gpu_the_error_says_so_and_offers_smoke(capsys):
    assert jax.default_backend() == "cpu"
    with pytest.raises(SystemExit) as stopped:
        ceiling.main(ceiling.Config())
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    assert "this benchmark measures a GPU, but JAX finds only cpu" in said and "--smoke" in said
