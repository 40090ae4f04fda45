"""Linen and NNX models have properties 10 to 13 of tests/README.md."""

from __future__ import annotations

import gc
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from linen_zoo import HALVES, data, numbers, products, quick_jit, rngs, same_bits, standard_promotion
from properties_zoo import NNX, SEQUENCE, Linen, X, each_api, mixed, pure

import jaxmp
from jaxmp.program.walk import equations

pytestmark = pytest.mark.once

# --- 10: evaluation ---------------------------------------------------------------------------------------------------


@each_api
def test_an_evaluation_before_or_inside_the_loss_changes_no_bit_of_the_gradients(api):
    layer = api.Own(lambda w, x: jnp.tanh(x @ w))
    model = mixed(api.Calls([layer, api.dense()], lambda a, b, x: b(a(x))), "mixed_float16")
    apply, params = pure(model, X)

    def loss(params, target):
        return jnp.mean((apply(params, X) - target) ** 2)

    def with_evaluation(params):
        return loss(params, jax.lax.stop_gradient(apply(params, X + 1)))

    target = quick_jit(apply)(params, X + 1)
    apply(params, X + 1), jax.eval_shape(apply, params, X)  # evaluate eagerly and abstractly
    want = quick_jit(jax.grad(loss))(params, target)
    same_bits(quick_jit(jax.grad(with_evaluation))(params), want)
    assert all(leaf.any() for leaf in jax.tree.leaves(want))


def variables(model):
    """Return the identities of the Variables of an NNX model."""
    return [id(node) for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)]


def test_an_evaluation_of_an_nnx_model_leaves_its_variables_alone():
    rngs = nnx.Rngs(0)
    model = mixed(nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)), "mixed_float16")
    before = jax.tree.map(jnp.copy, nnx.state(model))
    model_variables = variables(model)

    @nnx.jit
    def gradient(model, x):
        return nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)

    with standard_promotion():
        first = gradient(nnx.clone(model), X)
        model.eval()
        model(X), nnx.jit(lambda model: model(X))(model)
        model.train()
        same_bits(nnx.state(model), before)
        assert variables(model) == model_variables
        same_bits(gradient(model, X), first)


# --- 11: many steps ---------------------------------------------------------------------------------------------------


def linen_training(traces):
    """Return a train step and its first state."""
    model = mixed(Linen.Calls([nn.Dense(8), nn.BatchNorm(False)], lambda a, b, x: b(a(x))), "mixed_float16")

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
            state, _ = jax.block_until_ready(step(state, bad if i % 5 == 4 else X))
            if i == 0:
                first = len(traces)
            if i in (2, 7):
                gc.collect()
                alive.append(len(jax.live_arrays()))
    assert len(traces) == first <= 2
    assert alive[1] == alive[0]


# --- 12: carries ------------------------------------------------------------------------------------------------------


def step_of_a_cell(carry, w, u, x):
    carry = jnp.tanh(carry @ w + x @ u)
    return carry, carry * 2


class LinenCell(nn.Module):
    """A recurrent cell without a ``dtype``."""

    @nn.compact
    def __call__(self, carry: Any, x: jax.Array) -> Any:
        w, u = (self.param(name, nn.initializers.lecun_normal(), (8, 8)) for name in "wu")
        return step_of_a_cell(carry, w, u, x)


class NNXCell(nnx.Module):
    """:class:`LinenCell` in NNX."""

    def __init__(self):
        self.w, self.u = (nnx.Param(data(8, 8, seed=seed)) for seed in range(2))

    def __call__(self, carry: Any, x: jax.Array) -> Any:
        return step_of_a_cell(carry, self.w[...], self.u[...], x)


class LinenLoop(nn.Module):
    """An RNN of a Linen cell, or a scan of LinenCell, with the carry as argument."""

    cell: str

    @nn.compact
    def __call__(self, carry: Any, x: jax.Array) -> Any:
        if self.cell != "own":
            return nn.RNN(getattr(nn, self.cell)(8), return_carry=True)(x, initial_carry=carry)
        options = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        return nn.scan(LinenCell, in_axes=1, out_axes=1, **options)()(carry, x)


class NNXLoop(nnx.Module):
    """:class:`LinenLoop` in NNX."""

    def __init__(self, cell: str):
        rngs = nnx.Rngs(0)
        self.cell = NNXCell() if cell == "own" else None
        self.rnn = nnx.RNN(getattr(nnx, cell)(8, 8, rngs=rngs), return_carry=True, rngs=rngs) if cell != "own" else None

    def __call__(self, carry: Any, x: jax.Array) -> Any:
        if self.rnn is not None:
            return self.rnn(x, initial_carry=carry)
        scan = nnx.scan(lambda cell, carry, x: cell(carry, x), in_axes=(None, nnx.Carry, 1), out_axes=(nnx.Carry, 1))
        return scan(self.cell, carry, x)


# Pairs of a policy and the dtype of a carry. Each half dtype and float32 occurs as the compute and the carry dtype.
CARRIES = [
    ("mixed_float16", "float32"),
    ("mixed_float16", "bfloat16"),
    ("mixed_bfloat16", "bfloat16"),
    ("float32", "float16"),
]


@pytest.mark.parametrize(("api", "cell"), [(Linen, "own"), (NNX, "own"), (Linen, "LSTMCell"), (NNX, "SimpleCell")])
def test_a_loop_takes_a_carry_of_any_dtype_and_products_have_the_dtype_of_the_policy(api, cell):
    model = (LinenLoop if api is Linen else NNXLoop)(cell)
    # Library cells: the usual float32 carry, and a half carry beside float32 products.
    for policy, dtype in CARRIES if cell == "own" else CARRIES[::3]:
        state = jnp.zeros((2, 8), dtype)
        carry = (state, state) if "LSTM" in cell else state
        with standard_promotion():
            pure_model = pure(mixed(model, policy), carry, SEQUENCE, abstract=True)
            jaxpr = jax.make_jaxpr(pure_model.apply)(pure_model.params, carry, SEQUENCE)
            (loop,) = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan")
            carries = [var.aval.dtype.name for var in loop.outvars if var.aval.shape == state.shape]
            # A carry that reaches only products may also be in the compute dtype.
            half = jaxmp.get_policy(policy).compute_dtype.name
            assert set(carries) <= {"float32", half}
            assert jax.eval_shape(pure_model.apply, pure_model.params, carry, SEQUENCE)[1].dtype == jnp.float32
            gradient = jax.grad(pure_model.loss(carry, SEQUENCE))
            assert set(products(gradient, pure_model.params)) == {half}


@pytest.mark.parametrize(("api", "policy"), [(Linen, "mixed_bfloat16"), (NNX, "mixed_float16")])
def test_a_loop_gives_the_bits_of_steps_with_casts_by_hand(api, policy):
    half, carry = HALVES[policy], jnp.ones((2, 8))
    got = pure(mixed((LinenLoop if api is Linen else NNXLoop)("own"), policy), carry, SEQUENCE)
    u, w = jax.tree.leaves(got.params)

    def by_hand(carry, x):
        new, y = step_of_a_cell(*(value.astype(half) for value in (carry, w, u, x)))
        return new.astype(carry.dtype), y

    end, ys = quick_jit(lambda carry, xs: jax.lax.scan(by_hand, carry, xs))(carry, jnp.swapaxes(SEQUENCE, 0, 1))
    same_bits(quick_jit(got.apply)(got.params, carry, SEQUENCE), (end, jnp.swapaxes(ys, 0, 1).astype(jnp.float32)))


# --- 13: unsafe code --------------------------------------------------------------------------------------------------


@each_api
def test_a_float16_loss_is_refused_with_what_to_write_instead(api):
    model = mixed(api.dense(), "p=f32,c=f16,o=f16")
    text = "must be float32, got float16, in which the scaled loss may overflow; compute it from float32"
    loss_scale = jaxmp.DynamicLossScale()
    with pytest.raises(TypeError, match=text):
        if api is NNX:
            optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=loss_scale)
            jaxmp.nnx.value_and_grad(lambda model: jnp.mean(model(X)), optimizer)(model)
        else:
            apply, params = pure(model, X)
            state = jaxmp.loss_scaling(optax.sgd(0.1), loss_scale).init(params)
            jaxmp.value_and_grad(lambda params: jnp.mean(apply(params, X)), state)(params)
