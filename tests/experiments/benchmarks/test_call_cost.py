"""The benchmark call_cost: every variant trains alike, and the goal is judged."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from experiments.benchmarks import call_cost

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_every_variant_trains_to_the_same_params():
    batch = call_cost.problem()[1]
    ends = {}
    for label, (step, state) in call_cost.variants().items():
        for _ in range(3):
            state, _ = step(state, batch)
        params = state[0] if label == call_cost.REFERENCE else state.params
        ends[label] = jax.tree.leaves(params)
    for leaves in ends.values():
        for leaf, expected in zip(leaves, ends[call_cost.REFERENCE], strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)


def test_a_short_run_writes_a_row_for_each_variant_and_a_verdict(tmp_path, capsys):
    call_cost.main(call_cost.Config(rounds=2, block_ms=0.5, run_dir=tmp_path / "run"))
    rows = json.loads((tmp_path / "run" / "call_cost.json").read_text())["results"]
    assert list(rows) == [call_cost.REFERENCE, "Flax's TrainState", call_cost.GOAL]
    assert rows[call_cost.REFERENCE]["arrays"] == [15, 14] and rows[call_cost.REFERENCE]["ratio"] == [1, 1, 1]
    text = (tmp_path / "run" / "call_cost.md").read_text()
    assert text.count("\n| ") == len(rows) + 2 and "the goal at most 2.5" in text
    for ratio, verdict in ((2.5, "met"), (2.51, "NOT MET")):
        timed = {label: row | {"ratio": [1.6, ratio, 2.8]} for label, row in rows.items()}
        expected = f"{verdict}: jaxmp, dynamic scale / plain JAX and optax is {ratio:.2f}, the goal at most 2.5"
        assert call_cost.table(timed).notes == (expected,)
