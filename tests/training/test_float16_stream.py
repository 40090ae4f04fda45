"""A residual stream beyond float16's range ends with an error, and the override in it lets the run train."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

pytestmark = pytest.mark.once

ROWS, WIDTH, LAYERS = 16, 32, 4
TOKENS = np.random.default_rng(0).integers(0, ROWS, 32)
TARGETS = np.random.default_rng(1).normal(size=32).astype(np.float32)
BATCH = {"tokens": TOKENS, "targets": TARGETS}
ADVICE = (
    'If a residual stream passes 65,504, the largest float16 number, write the override {"primitive:add": "float32"}'
)
OVERRIDE = {"primitive:add": "float32"}
TABLE = nn.initializers.normal(3e4)


def stream(h, layers, norm, out):
    for layer in layers:
        h = h + 3e4 * jnp.tanh(layer(norm(h)))
    return out(norm(h))[..., 0]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        h = nn.Embed(ROWS, WIDTH, embedding_init=TABLE)(tokens)
        norm = nn.LayerNorm(use_bias=False, use_scale=False)
        return stream(h, [nn.Dense(WIDTH) for _ in range(LAYERS)], norm, nn.Dense(1))


def loss_of(predictions, batch):
    return jnp.mean((predictions.astype(jnp.float32) - batch["targets"]) ** 2)


def train(api, policy, overrides, batch=BATCH):
    """Train for ten steps, and return the loss."""
    scale, limit = jaxmp.DynamicLossScale(1.0), {"max_consecutive_skips": 2}
    model, of_step = Linen(), {"policy": policy, "overrides": overrides}
    params = jax.jit(Linen().init)(jax.random.key(0), TOKENS)["params"]
    if api == "linen":
        model, of_step = jaxmp.linen.apply_policy(model, policy, overrides), {}
    step = jaxmp.make_train_step(
        lambda params, batch: loss_of(model.apply({"params": params}, batch["tokens"]), batch), **of_step, **limit
    )
    state = jaxmp.TrainState.create(params=params, tx=jaxmp.loss_scaling(optax.adam(1e-2), scale))
    for _ in range(10):
        state, metrics = step(state, batch)
        loss = float(metrics["loss"])
    return loss


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("api", ["linen", "step"])
def test_the_error_names_the_override_that_lets_the_run_train(api):
    with pytest.raises(jaxmp.NonFiniteTrainingError, match=re.escape(ADVICE)):
        train(api, "mixed_float16", None)
    expected = train(api, "float32", None)
    np.testing.assert_allclose(train(api, "mixed_float16", OVERRIDE), expected, rtol=0.02)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("policy", "batch"),
    [
        ("mixed_float16", {**BATCH, "targets": TARGETS * np.nan}),
        ("mixed_bfloat16", {**BATCH, "targets": TARGETS * np.inf}),
    ],
)
def test_a_stuck_run_for_another_reason_is_not_told_of_the_range(policy, batch):
    with pytest.raises(jaxmp.NonFiniteTrainingError) as raised:
        train("linen", policy, OVERRIDE, batch)
    assert "residual stream" not in str(raised.value)
