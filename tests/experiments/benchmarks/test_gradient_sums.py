"""The errors of sums of gradients, by way and in a whole run."""

from __future__ import annotations

import json

import jax
import numpy as np

from experiments.benchmarks import gradient_sums

CASES = {case.name: case for case in gradient_sums.cases(smoke=True)}


def test_jaxmp_sums_in_float32_where_a_dtype_by_hand_sums_in_half():
    for name in ("embedding", "convolution's bias"):
        errors = gradient_sums.measure(CASES[name], "bfloat16")["errors"]
        policy, autocast, by_hand = (errors[way] for way in gradient_sums.WAYS)
        assert max(policy, autocast) < 0.01 and by_hand > 2 * max(policy, autocast)


def test_the_reference_is_the_gradient_by_hand_in_float64():
    case = CASES["bias"]
    weights = gradient_sums.weights((*case.x.shape[:-1], 8)).astype(np.float64)
    by_hand = weights.sum(axis=tuple(range(case.x.ndim - 1)))[::-1]
    np.testing.assert_allclose(gradient_sums.gradient(case, "bfloat16", "float64"), by_hand, rtol=1e-12)
    assert not jax.config.jax_enable_x64


def test_a_run_writes_tables_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_sums, "cases", lambda smoke: [CASES["bias"]])
    gradient_sums.main(gradient_sums.Config(halves=("float16",), smoke=True, run_dir=tmp_path))
    (result,) = json.loads((tmp_path / "gradient_sums.json").read_text())["results"]
    assert list(result["errors"]) == list(gradient_sums.WAYS)
    assert "## float16" in (tmp_path / "gradient_sums.md").read_text() and (tmp_path / "gradient_sums.png").exists()
