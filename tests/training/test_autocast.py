"""Steps with ``policy=`` run the loss function under autocast."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from linen_zoo import data, dtypes_of, numbers, same_bits, same_computation
from recompiles import compiled_once

import jaxmp
from jaxmp.program.walk import equations, product_dtypes

pytestmark = pytest.mark.once  # tests/engine and test_step.py run on the newest JAX


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3, name="head")(nn.relu(x))


NET = Net()
BATCH = {"x": data(8, 5), "y": jnp.arange(8) % 3}


def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    logits, model_state = NET.apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, model_state, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}


def initial() -> Any:
    return numbers(jax.eval_shape(NET.init, jax.random.key(0), BATCH["x"]))


def new_state(loss_scale: Any = None) -> jaxmp.TrainState:
    variables = dict(initial())
    tx = jaxmp.loss_scaling(optax.sgd(0.3, momentum=0.9), loss_scale or jaxmp.DynamicLossScale(2.0**10))
    return jaxmp.TrainState.create(params=variables.pop("params"), tx=tx, model_state=variables, ema=True)


def make(policy: Any = None, **kwargs: Any) -> Any:
    return jaxmp.make_train_step(loss_fn, policy=policy, ema_decay=0.9, donate=False, **kwargs)


def dtypes_in(step: Any) -> set[str]:
    return product_dtypes(jax.make_jaxpr(getattr(step, "jitted", step))(new_state(), BATCH))


def test_the_step_and_the_evaluation_multiply_in_the_compute_dtype():
    assert dtypes_in(make("mixed_float16")) == {"float16"}
    assert dtypes_in(jaxmp.make_eval_step(loss_fn, policy="bfloat16")) == {"bfloat16"}


def test_a_float32_policy_means_no_autocast():
    evaluate, bare = (jaxmp.make_eval_step(loss_fn, policy=policy) for policy in ("float32", None))
    assert dtypes_in(make("float32")) == dtypes_in(evaluate) == dtypes_in(bare) == {"float32"}
    same_bits(evaluate(new_state(), BATCH), bare(new_state(), BATCH))


def test_a_float32_policy_brings_the_precision_of_its_products():
    for policy, expected in (("float32", {"HIGHEST"}), ("tensorfloat32", {"HIGH"}), ("O0", {"HIGHEST"}), (None, set())):
        program = jax.make_jaxpr(jaxmp.make_eval_step(loss_fn, policy=policy))(new_state(), BATCH)
        products = [eqn for eqn in equations(program) if eqn.primitive.name == "dot_general"]
        precisions = set()
        for eqn in products:
            precisions |= {part.name for part in eqn.params["precision"] or ()}
        assert precisions == expected


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_a_step_is_that_of_the_loss_function_under_autocast_by_hand(policy):
    mixed = jaxmp.get_policy(policy).with_output_dtype("float32")
    by_hand = jaxmp.make_train_step(jaxmp.autocast(loss_fn, mixed), ema_decay=0.9, donate=False)
    same_computation(make(policy).jitted, by_hand.jitted, new_state(), BATCH)


@pytest.mark.parametrize("kwargs", [{"accumulate_steps": 2}, {"remat": "dots"}], ids=str)
def test_under_autocast_the_state_stays_float32_and_one_program_is_compiled(kwargs):
    step, state = make("mixed_float16", **kwargs), new_state()
    losses = []
    for _ in range(30):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] / 2
    assert dtypes_of((state.params, state.model_state, state.ema_params)) == {"float32"}
    assert compiled_once(step) and int(state.skipped_steps) == 0


def test_overrides_reach_the_autocast():
    assert dtypes_in(make("mixed_bfloat16", overrides={"**/head": "float32"})) == {"bfloat16", "float32"}
    evaluate = jaxmp.make_eval_step(loss_fn, policy="mixed_float16", overrides={"**/head": "float32"})
    assert dtypes_in(evaluate) == {"float16", "float32"}


def test_wrong_policies_and_overrides_raise_at_once():
    for make_step in (jaxmp.make_train_step, jaxmp.make_eval_step):
        for kwargs, error, text in (
            ({"policy": "O2"}, TypeError, "has no modules"),
            ({"policy": "mixed_float17"}, ValueError, "unknown policy 'mixed_float17'"),
            ({"policy": "float64"}, ValueError, "autocast must compute in float16, bfloat16 or float32, got"),
            ({"overrides": {"a": "float32"}}, ValueError, r"got \{'a': 'float32'\} and policy=None; pass"),
            ({"policy": "mixed_float16", "overrides": {"a": "float31"}}, ValueError, "'half' .* got 'float31'"),
        ):
            with pytest.raises(error, match=text):
                make_step(loss_fn, **kwargs)


def test_an_override_that_matches_nothing_raises_when_the_step_is_traced():
    for policy in ("mixed_float16", "float32"):
        step = make(policy, overrides={"**/heda": "float32"})
        with pytest.raises(ValueError, match=r"'\*\*/heda' matched none; nearest paths: .*Net/head"):
            jax.eval_shape(step.jitted, new_state(), BATCH)


def test_a_model_under_its_own_autocast_keeps_its_policy():
    model = jaxmp.linen.autocast(NET, "mixed_float16", {"head": "float32"})

    def loss_under_autocast(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        logits, model_state = model.apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), model_state

    steps = [
        jaxmp.make_train_step(loss_under_autocast, ema_decay=0.9, donate=False, policy=policy)
        for policy in (None, "mixed_float16")
    ]
    same_computation(*(step.jitted for step in steps), new_state(), BATCH)
    assert dtypes_in(steps[1]) == {"float16", "float32"}
