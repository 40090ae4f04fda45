"""Measurements compared with counts by hand: gradients, accuracy and time."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import pytest

from experiments.measure import gradients, timing
from experiments.training import experiment as metrics


def test_a_zero_share_is_of_the_entries_that_the_reference_has():
    reference = {"a": jnp.array([1.0, 2.0, 0.0, -3.0]), "b": jnp.array([[1e-9], [0.0]])}
    grads = {"a": jnp.array([0.0, 2.0, 0.0, -0.0]), "b": jnp.array([[0.5], [7.0]])}
    assert gradients.zero_share(reference, grads) == 2 / 4
    with pytest.raises(ValueError, match="must not all be zero"):
        gradients.zero_share(jnp.zeros(3), jnp.ones(3))


def test_accuracy_counts_a_tie_of_n_as_one_nth():
    logits = jnp.array([[3.0, 1, 2], [1, 1, 0], [2, 2, 2], [0, 5, 1], [jnp.nan, 1, 2]])
    assert float(metrics.accuracy(logits, jnp.array([0, 1, 2, 0, 1]))) == pytest.approx((1 + 1 / 2 + 1 / 3) / 5)


def test_timing_takes_turns_in_an_order_that_rotates_and_drops_the_warm_up():
    order: list[str] = []
    times = timing.interleaved({name: functools.partial(order.append, name) for name in "abc"}, rounds=3, block_ms=0)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds == ["bca", "cab", "abc", "bca", "cab"]  # two rounds warm up
    assert {name: len(milliseconds) for name, milliseconds in times.items()} == {"a": 3, "b": 3, "c": 3}
