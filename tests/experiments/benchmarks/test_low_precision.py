"""The benchmark of low precision: memory, and the bytes that an update moves."""

from __future__ import annotations

import json

import pytest

from experiments.benchmarks import low_precision

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's Adam mixes dtypes
SOME = (*low_precision.VARIANTS[:4], ("kahan", "bfloat16"))
SMALL = {"smoke": True, "rows": 8, "rounds": 2, "block_ms": 0.1}


@pytest.mark.slow("a whole run of a benchmark")
def test_every_way_to_store_is_timed_and_some_steps_are_compiled(tmp_path, capsys, monkeypatch):
    config = low_precision.Config(run_dir=tmp_path, **SMALL)
    monkeypatch.setattr(low_precision, "VARIANTS", SOME)
    compiled = low_precision.step_mib(config, low_precision.REFERENCE)  # each takes seconds, so compile only one
    monkeypatch.setattr(low_precision, "step_mib", lambda *_: compiled)
    rows = low_precision.main(config)
    assert list(rows) == list(SOME)
    bytes_per_param = {" ".join(variant): round(row["kept"], 1) for variant, row in rows.items()}
    assert bytes_per_param["float32 float32"] == 12 and bytes_per_param["kahan bfloat16"] == 8
    assert [bytes_per_param[f"stochastic {moments}"] for moments in ("float32", "bfloat16", "float8")] == [10, 6, 4]
    assert rows[low_precision.REFERENCE]["ratio"] == 1 and all(row["ms"] > 0 for row in rows.values())
    steps = [row["step"] for row in rows.values() if "step" in row]
    assert len(steps) == 4 and min(steps) > 0
    written = json.loads((tmp_path / "low_precision.json").read_text())
    assert written["variants"]["stochastic float8"]["kept"] == pytest.approx(4, abs=0.1)
    text = (tmp_path / "low_precision.md").read_text()
    assert "SMOKE TEST, no result: AdamW of 8×2048" in text and "the goal" not in text
    assert "| stochastic | bfloat16 | 6.00 |" in text and "/ float32" in capsys.readouterr().out


@pytest.mark.absent_gpu
def test_on_a_gpu_an_update_moves_no_more_bytes_than_needed(monkeypatch, tmp_path):
    monkeypatch.setattr(low_precision, "step_mib", lambda config, variant: {"float8": 40.0}.get(variant[1], 100.0))
    monkeypatch.setattr(low_precision, "VARIANTS", SOME)
    rows = low_precision.main(low_precision.Config(device="h200", rows=1024, run_dir=tmp_path))
    moved = {" ".join(variant): row["moved"] for variant, row in rows.items()}
    # Bytes per param: the gradient 4, the param 2 + 2, and each moment for its reads and writes. float8 reads the
    # gradient and the codes once more, and has a scale for each 256 params.
    stochastic = [moved[f"stochastic {moments}"] for moments in ("float32", "bfloat16", "float8")]
    assert stochastic == pytest.approx([24, 16, 18.2], abs=0.1)
    assert max(row["temporary"] for row in rows.values()) < 0.1
    assert "ms" not in rows[low_precision.REFERENCE]
    text = (tmp_path / "low_precision.md").read_text()
    assert "NOT MET: step MiB, stochastic, bfloat16 / float32 is 1.000, the goal at most 0.57" in text
    assert "met: step MiB, stochastic, float8 / float32 is 0.400, the goal at most 0.47" in text
    assert "- target: NVIDIA H200 141GB HBM3e" in text and "jax-cuda13-plugin" in text
