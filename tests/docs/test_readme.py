"""The five lines of the README run and learn."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from pages import blocks
from places import ROOT

import jaxmp

pytestmark = pytest.mark.once

README = ROOT / "README.md"


@pytest.mark.slow("runs the code of the docs")
def test_the_five_lines_of_the_readme_run_and_learn():
    (example,) = blocks(README)
    net = nn.Sequential([nn.Dense(256), nn.relu, nn.Dense(10)])
    batch = {"x": jax.random.normal(jax.random.key(0), (64, 784)), "y": jnp.arange(64) % 10}
    scope: dict[str, Any] = {"jaxmp": jaxmp, "model": net, "tx": optax.adam(1e-3), "batch": batch}
    scope["params"] = net.init(jax.random.key(1), batch["x"])["params"]

    def loss_fn(params, batch):
        logits = scope["model"].apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    scope["loss_fn"] = loss_fn
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam is not strict about dtypes
        exec(example.code, scope)
        state = scope["state"]
        for _ in range(100):
            state, metrics = scope["step"](state, batch)
    assert len(example.code.splitlines()) == 5
    assert float(metrics["loss"]) < 0.1 and float(metrics["loss_scale"]) == 2.0**15 and not metrics["skipped"]
