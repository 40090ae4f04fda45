"""Runs of Linen and NNX models under a policy: they compile once, and keep no array."""

from __future__ import annotations

import gc
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from both_apis import X, each_api, mixed, pure
from flax import nnx
from linen_zoo import numbers, rngs, same_bits, standard_promotion

import jaxmp

pytestmark = pytest.mark.once


SCALE = 1.0


@each_api
def test_a_call_outside_of_jit_computes_with_the_current_value_of_all_that_its_code_reads(api, monkeypatch):
    scales = [1.0]
    bare = api.WithParam(lambda w, x: x @ w * SCALE * scales[0])
    function, params = pure(bare, X)
    under_policy, _ = pure(mixed(bare, "mixed_bfloat16"), X)
    for call in (under_policy, jaxmp.autocast(function, "mixed_bfloat16")):
        before = [call(params, X) for _ in range(3)][-1]
        monkeypatch.setattr(sys.modules[__name__], "SCALE", 4.0)
        same_bits(call(params, X), 4 * before)
        scales[0] = 2.0
        same_bits(call(params, X), 8 * before)
        monkeypatch.undo()
        scales[0] = 1.0


def linen_training(traces):
    """Return a train step and its first state."""
    model = mixed(nn.Sequential([nn.Dense(8), nn.BatchNorm(False)]), "mixed_float16")

    def loss(params, model_state, batch, rng):
        traces.append(1)
        out, model_state = model.apply({"params": params, **model_state}, batch, mutable=["batch_stats"])
        return jnp.mean((out - 1) ** 2), model_state

    variables = numbers(jax.eval_shape(model.init, rngs(), X))
    tx = jaxmp.loss_scaling(optax.sgd(0.01, momentum=0.9), jaxmp.DynamicLossScale(period=3))
    state = jaxmp.TrainState.create(params=variables.pop("params"), tx=tx, model_state=variables)
    return jaxmp.make_train_step(loss), state


def nnx_training(traces):
    rngs = nnx.Rngs(0)
    model = mixed(nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)), "mixed_float16")
    scale = jaxmp.DynamicLossScale(period=3)
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.01, momentum=0.9), loss_scale=scale)

    @nnx.jit
    def update(model, optimizer, x):
        traces.append(1)
        loss, grads = jaxmp.nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2), optimizer)(model)
        optimizer.update(model, grads)
        return loss

    def step(state, batch):
        return state, update(*state, batch)

    return step, (model, optimizer)


@pytest.mark.parametrize("training", [linen_training, nnx_training])
def test_steps_with_some_skips_compile_once_and_keep_no_array(training):
    traces, alive = [], []
    bad = X.at[1, 2].set(jnp.inf)
    with standard_promotion():
        step, state = training(traces)
        for i in range(8):
            state, _ = jax.block_until_ready(step(state, bad if i == 4 else X))
            if i == 0:
                first = len(traces)
            if i in (2, 7):
                gc.collect()
                alive.append(len(jax.live_arrays()))
    assert len(traces) == first <= 2
    assert alive[1] == alive[0]
