"""The benchmark of error budgets."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks.real_libraries import budgets, collect, registry

W, X = (jax.random.normal(jax.random.key(seed), shape) / 3 for seed, shape in ((0, (8, 8)), (1, (16, 8))))


def steps(w):
    h = X @ w
    for _ in range(6):
        h = h + 0.003 * jnp.tanh(h)  # the line with the largest share
    return jnp.mean(jnp.exp(h @ w))


def test_the_tables_have_the_largest_line_and_what_float32_avoids(monkeypatch, tmp_path):
    monkeypatch.setattr(collect, "FAMILIES", ())
    monkeypatch.setattr(collect, "PROGRAMS", [registry.Program("optax", "steps", lambda: (steps, W))])
    result = budgets.main(budgets.Config(run_dir=tmp_path, probes=1))
    (row,) = result["programs"]
    assert row["largest"]["line"].startswith("test_budgets.py:") and row["largest"]["share"] > 0.5
    assert row["largest"]["operation"] in ("add", "add_any")
    assert row["avoided"]["pointwise is float32"] > 1e-4  # the exponential
    assert not {"product", "between half operations"} & {*row["avoided"]}
    text = (tmp_path / "budgets.md").read_text()
    assert "| optax: steps | test_budgets.py:" in text and "| pointwise is float32 | 1 |" in text


def test_a_program_that_takes_too_long_is_stopped():
    with pytest.raises(TimeoutError, match="longer than 1 s"), budgets.time_limit(1):
        time.sleep(3)


def test_programs_that_are_not_reached_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(collect, "FAMILIES", ())
    monkeypatch.setattr(collect, "PROGRAMS", [registry.Program("optax", "steps", lambda: (steps, W))])
    result = budgets.main(budgets.Config(run_dir=tmp_path, minutes=1e-9))
    assert not result["programs"] and "not reached in time" in result["failed"]["optax: steps"]
    assert "failed: optax: steps: TimeoutError: not reached" in (tmp_path / "budgets.md").read_text()
