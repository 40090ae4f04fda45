"""The order in which rules are applied cannot matter, for a state only rises."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from autocast_tools import layer_norm, normal

from jaxmp._internals.jax.equations import opened
from jaxmp.engine import decide as decide_module
from jaxmp.engine.graph import build
from jaxmp.engine.rules import Rules

X, W = normal(0, 4, 8), normal(1, 8, 8)


def block(x, w):
    for _ in range(2):
        scores = layer_norm(x) @ w @ w.T
        x = x + jax.nn.softmax(scores) @ w
        x = x + jax.nn.gelu(x @ w) @ w
    return jnp.mean((x @ w - 1) ** 2)


def recurrent(x, w):
    def turn(state, now):
        hidden, total = state
        hidden = jnp.tanh(hidden @ w + now)
        return (hidden, total + hidden.sum()), hidden

    (_, total), all_hidden = jax.lax.scan(turn, (x, 0.0), jnp.stack([x] * 3))
    return jnp.floor(all_hidden @ w) + total


def distances(x, w):
    codes = jnp.sum(w**2, 1)
    far = jnp.sum((x @ w) ** 2, 1, keepdims=True) - 2 * (x @ w) @ w.T + codes
    nearest = w[jnp.argmin(far, 1)]
    return (x @ w + jax.lax.stop_gradient(nearest - x @ w)) @ w


def decisions(program):
    graph = build(*opened(program), Rules(jnp.dtype(jnp.bfloat16)))
    decide_module.decide(graph, [None])
    return [(node.name, node.state, node.compute, node.dtype) for node in graph.nodes]


@pytest.mark.parametrize("fun", [block, recurrent, distances, jax.grad(block)])
def test_shuffled_rules_decide_the_same(fun, monkeypatch):
    program = jax.make_jaxpr(fun)(X, W)
    expected = decisions(program)
    settle = decide_module._settle
    raisers = decide_module.RAISERS
    for seed, order in enumerate(itertools.permutations(raisers)):

        def settled_in_another_order(nodes, seed=seed):
            shuffled = list(nodes)
            random.Random(seed).shuffle(shuffled)
            settle(shuffled)

        monkeypatch.setattr(decide_module, "_settle", settled_in_another_order)
        monkeypatch.setattr(decide_module, "RAISERS", order)
        assert decisions(program) == expected
