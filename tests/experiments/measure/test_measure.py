"""Measurements compared with counts by hand: FLOPs, gradients, memory, time."""

from __future__ import annotations

import functools
import math
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from experiments.benchmarks.models.mlp import MLP
from experiments.measure import flops, gradients, timing
from experiments.models.gpt2 import GPT2
from experiments.models.images import CNN
from experiments.models.next_token import NextToken
from experiments.training import experiment as metrics

HALF, FULL = jnp.ones((8, 16), jnp.float16), jnp.ones((8, 16), jnp.float32)


def test_a_product_counts_two_for_each_multiply_add_of_every_member_of_a_batch():
    assert flops.count(lambda x, y: x @ y, jnp.ones((3, 4)), jnp.ones((4, 5))) == {"float32": 2 * 3 * 4 * 5}

    def fun(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("bhqd,bhkd->bhqk", x, y)

    assert flops.count(fun, jnp.ones((2, 3, 5, 7)), jnp.ones((2, 3, 11, 7))) == {"float32": 2 * 2 * 3 * 5 * 11 * 7}


def test_a_convolution_counts_its_kernel_at_every_output():
    for groups, channels in [(1, 4), (2, 2)]:
        convolve = functools.partial(
            jax.lax.conv_general_dilated,
            window_strides=(2, 2),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        counted = flops.count(convolve, jnp.ones((2, 8, 6, 4)), jnp.ones((3, 5, channels, 10)))
        assert counted == {"float32": 2 * (2 * 4 * 3 * 10) * (3 * 5 * channels)}


def test_operands_decide_the_dtype_and_the_wider_one_wins():
    def fun(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    count = 2 * 8 * 8 * 16
    assert flops.count(fun, HALF, HALF) == {"float16": count}
    assert flops.count(fun, HALF.astype(jnp.bfloat16), HALF.astype(jnp.bfloat16)) == {"bfloat16": count}
    assert flops.count(fun, HALF, FULL) == {"float32": count}


def test_the_precision_of_a_float32_product_and_the_gpu_decide_what_it_runs_in(monkeypatch):
    def product(x, precision):
        return jnp.dot(x, x.T, precision=precision)

    for precision, dtype in [
        (None, "float32"),  # the CPU of the tests has no tensor cores
        ("highest", "float32"),
        ("tensorfloat32", "tensorfloat32"),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, "float32"),
        (jax.lax.DotAlgorithmPreset.TF32_TF32_F32, "tensorfloat32"),
        (jax.lax.DotAlgorithmPreset.BF16_BF16_F32, "bfloat16"),
    ]:
        assert list(flops.count(functools.partial(product, precision=precision), FULL)) == [dtype]

    device = types.SimpleNamespace(
        device_kind="NVIDIA A100-SXM4-80GB", platform="gpu", compute_capability="8.0", client=None
    )
    a100 = jaxmp.hardware.detect(device)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jaxmp.hardware, "detect", lambda: a100)
    assert list(flops.count(lambda x: x @ x.T, FULL)) == ["tensorfloat32"]


def test_a_train_step_of_two_dense_layers_counts_forward_and_backward_products():
    batch, width, classes = 8, 16, 10
    model = jaxmp.linen.apply_policy(MLP(layers=1, width=width, classes=classes), "mixed_float16")
    params = model.init(jax.random.key(0), FULL)["params"]

    def loss(params, x):
        return model.apply({"params": params}, x).sum()

    first, second = 2 * batch * 16 * width, 2 * batch * width * classes
    # The input needs no gradient: the first layer has two products, the second three.
    assert flops.count(jax.grad(loss), params, FULL) == {"float16": 2 * first + 3 * second}


def test_a_zero_share_is_of_the_entries_that_the_reference_has():
    reference = {"a": jnp.array([1.0, 2.0, 0.0, -3.0]), "b": jnp.array([[1e-9], [0.0]])}
    grads = {"a": jnp.array([0.0, 2.0, 0.0, -0.0]), "b": jnp.array([[0.5], [7.0]])}
    assert gradients.zero_share(reference, grads) == 2 / 4
    with pytest.raises(ValueError, match="must not all be zero"):
        gradients.zero_share(jnp.zeros(3), jnp.ones(3))


class Tagger(nn.Module):
    """A linear model of tokens, with weights whose gradients can be computed by hand."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(2, 8, name="embed")(tokens)
        x = nn.Dense(8, kernel_init=lambda *_: jnp.asarray(KERNEL), name="hidden")(x)
        return nn.Dense(8, use_bias=False, kernel_init=nn.initializers.ones, name="head")(x)


# float16's smallest subnormal is 2**-24: half of it rounds to zero, the next larger number does not.
SLOPES = np.repeat(np.array([1.0, 2.0**-10, 2.0**-25, 2.0**-30], np.float32), 2)
KERNEL = np.repeat(np.array([[1.0], [2.0**-30]], np.float32), 4, 0) * np.ones(8, np.float32)
TOKENS = np.array([0, 1, 1, 0, 1])


def gradients_of_tagger(way: str, scale: float) -> tuple[dict, list[jax.Array]]:
    """Return the gradients of the sum of the model's outputs times ``SLOPES``, under a policy or under autocast."""
    params = Tagger().init(jax.random.key(0), TOKENS)["params"]
    overrides = {"head": "float32"} if way == "head in float32" else None
    policy = way if way == "float32" else "mixed_float16"
    model = Tagger() if way == "autocast" else jaxmp.linen.apply_policy(Tagger(), policy, overrides)

    def loss_fn(params, model_state, batch, rng):
        return (model.apply({"params": params}, batch) * SLOPES).sum(), model_state

    tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(scale))
    state = jaxmp.TrainState.create(params=params, tx=tx)
    fun = jaxmp.autocast(loss_fn, policy) if way == "autocast" else loss_fn
    return gradients.gradients(fun, state, TOKENS)


@pytest.mark.parametrize(
    ("way", "scale", "lost"),
    [("policy", 1.0, 4), ("autocast", 1.0, 4), ("policy", 2.0**4, 2), ("head in float32", 1.0, 0)],
)
def test_gradients_of_activations_are_those_of_a_backward_pass_by_hand(way, scale, lost):
    head_dtype = np.float32 if way == "head in float32" else np.float16
    of_head = np.tile((scale * SLOPES).astype(head_dtype), (len(TOKENS), 1))
    of_hidden = (of_head.astype(np.float32) @ np.ones((8, 8), np.float32)).astype(np.float16)
    of_embed = (of_hidden.astype(np.float32) @ KERNEL.astype(np.float16).T.astype(np.float32)).astype(np.float16)

    params, activations = gradients_of_tagger(way, scale)
    assert [gradient.dtype for gradient in activations] == [np.float32, np.float16, head_dtype]
    for gradient, by_hand in zip(activations, [of_embed, of_hidden, of_head], strict=True):
        np.testing.assert_array_equal(gradient, by_hand)

    # Of the 120 gradients, the ``lost`` smallest of each row of the head vanish. So do four of each embedding, because
    # the last four rows of the kernel are zero in float16.
    reference = gradients_of_tagger("float32", 1.0)
    assert gradients.zero_share(reference[1], activations) == len(TOKENS) * (lost + 4) / 120
    assert params["head"]["kernel"].dtype == jnp.float32
    assert gradients.zero_share(reference[0]["head"], params["head"]) == lost / 8


def test_products_in_scans_and_in_functions_with_derivative_rules_have_activations():
    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))

    def loss_fn(params, model_state, batch, rng):
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), product(batch, params["first"]), params["others"])
        return x.sum(), model_state

    params = {"first": 2 * jnp.ones((2, 2)), "others": 3 * jnp.ones((2, 2, 2))}
    tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.NoOpLossScale())
    state = jaxmp.TrainState.create(params=params, tx=tx)
    _, (of_first, of_others) = gradients.gradients(loss_fn, state, jnp.ones((3, 2)))
    np.testing.assert_array_equal(of_first, np.full((3, 2), 36.0))  # each later product adds up two terms times 3
    np.testing.assert_array_equal(of_others, np.stack([np.full((3, 2), 6.0), np.ones((3, 2))]))


def test_accuracy_counts_a_tie_of_n_as_one_nth():
    logits = jnp.array([[3.0, 1, 2], [1, 1, 0], [2, 2, 2], [0, 5, 1], [jnp.nan, 1, 2]])
    assert float(metrics.accuracy(logits, jnp.array([0, 1, 2, 0, 1]))) == pytest.approx((1 + 1 / 2 + 1 / 3) / 5)


def test_metrics_come_out_in_order_some_steps_late_and_none_is_lost():
    pending, logged = metrics.PendingMetrics(), []
    for step in range(20):
        new = list(pending.push(step, {"loss": jnp.float32(step)}))
        assert all(old <= step - 8 for old, _ in new)
        logged += new
    logged += list(pending.drain())
    assert logged == [(step, {"loss": float(step)}) for step in range(20)]


def test_timing_takes_turns_in_an_order_that_rotates_and_drops_the_warm_up():
    order: list[str] = []
    times = timing.interleaved({name: functools.partial(order.append, name) for name in "abc"}, rounds=3, block_ms=0)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds == ["bca", "cab", "abc", "bca", "cab"]  # two rounds warm up
    assert {name: len(milliseconds) for name, milliseconds in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_function_that_fails_has_no_more_turns_and_the_others_go_on():
    calls: list[str] = []
    errors: dict[str, Exception] = {}

    def fails():
        calls.append("b")
        if calls.count("b") == 4:
            raise MemoryError("no room")

    functions = {"a": lambda: calls.append("a"), "b": fails, "c": lambda: calls.append("c")}
    times = timing.interleaved(functions, rounds=4, block_ms=0, failed=errors.__setitem__)
    assert list(times) == ["a", "c"] and all(len(milliseconds) == 4 for milliseconds in times.values())
    assert list(errors) == ["b"] and str(errors["b"]) == "no room" and calls.count("b") == 4
    with pytest.raises(MemoryError, match="no room"):
        calls.clear()
        timing.interleaved(functions, rounds=4, block_ms=0)
    assert timing.interleaved({}, rounds=3) == {}


def test_a_turn_of_timing_lasts_about_as_long_as_asked_and_leaves_out_the_wait_for_its_first_call(monkeypatch):
    clock = [0.0]
    calls: list[int] = []

    def call():
        calls.append(1)
        clock[0] += 0.002

    def wait(_):
        clock[0] += 0.003  # once in each row of calls

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing.jax, "block_until_ready", wait)
    times = timing.interleaved({"a": call}, rounds=2, block_ms=20)
    assert len(calls) == 1 + 1 + 2 * (1 + 5)  # a call seems to take 2 + 3 ms at first
    assert times["a"] == pytest.approx([2.0, 2.0])


def test_models_have_the_params_and_logits_they_should():
    for model, example, shape, count in [
        (CNN(), jnp.ones((2, 8, 8, 1)), (2, 10), 320 + (4 * 4 * 32 + 1) * 128 + 129 * 10),
        (NextToken(), jnp.ones((2, 4), jnp.int32), (2, 2048), 2048 * 64 + 257 * 256 + 257 * 64 + 65 * 2048),
        (MLP(2, 16, 10), jnp.ones((2, 8)), (2, 10), 9 * 16 + 17 * 16 + 17 * 10),
        (GPT2(), jnp.ones((2, 8), jnp.int32), (2, 8, 50257), 124_439_808 + (50304 - 50257) * 768),
    ]:
        logits, variables = jax.eval_shape(model.init_with_output, jax.random.key(0), example)
        assert logits.shape == shape
        assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables)) == count
