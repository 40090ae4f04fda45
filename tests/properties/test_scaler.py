"""The train step and NNX have properties 14 to 26 of tests/README.md."""

from __future__ import annotations

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from linen_zoo import products, quick_jit, standard_promotion
from optimizer_tools import bits, loss_fn, problem, same_bits, standard
from places import TOOLS
from properties_zoo import X, each_api, mixed, pure

import jaxmp
from jaxmp import DynamicLossScale, TrainState, make_train_step

pytestmark = pytest.mark.once

TRACES = json.loads((TOOLS / "gradscaler_traces.json").read_text())["runs"]


class Net(nnx.Module):
    """A model with BatchNorm and Dropout."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(self.hidden(x))))


def nnx_run(tx=None, policy="mixed_float16", model=None, scale=None):
    """Return a model under a policy, an optimizer and a compiled step."""
    model = mixed(Net() if model is None else model, policy)
    scale = DynamicLossScale(2.0**10) if scale is None else scale
    optimizer = jaxmp.nnx.Optimizer(model, tx or standard(optax.adamw(1e-2)), loss_scale=scale)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = jaxmp.nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2), optimizer)(model)
        optimizer.update(model, grads)
        return loss

    return model, optimizer, step


def contents(model, optimizer):
    """Return the arrays that a skipped step must not change.

    These are the inner state, and all Variables except the counts of the rngs.
    """
    scaling = jaxmp.optim.scaling_state.get_loss_scaling_state(nnx.as_pure(optimizer.opt_state))
    return jax.tree.leaves((nnx.state(model, nnx.Not(nnx.RngState)), scaling.inner_state))


# --- 14: the recorded trace of torch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["train step", "NNX"])
def test_a_run_has_the_scales_that_torchs_gradscaler_had(way):
    trace = TRACES["a short interval"]
    flags = [finite for finite, steps in trace["pattern"] for _ in range(steps)][:60]
    scales = [scale for scale, steps in trace["scales"] for _ in range(steps)][:60]
    assert {True, False} == set(flags) and len(set(scales)) > 3
    loss_scale, got = DynamicLossScale.from_torch(trace["start"]), []
    if way == "NNX":
        model, optimizer, step = nnx_run(
            optax.sgd(1e-3), "mixed_bfloat16", nnx.Linear(8, 8, rngs=nnx.Rngs(0)), loss_scale
        )
        for finite in flags:
            step(model, optimizer, X if finite else X * jnp.nan)
            got.append(float(optimizer.loss_scale))
    else:
        params, batch = problem()
        state = TrainState.create(params=params, tx=jaxmp.loss_scaling(optax.sgd(1e-3), loss_scale))
        train = make_train_step(lambda params, _, batch, rng: (loss_fn(params, batch), None), max_consecutive_skips=100)
        for finite in flags:
            state, _ = train(state, batch if finite else {**batch, "x": batch["x"] * jnp.nan})
            got.append(float(state.opt_state.loss_scale.loss_scale))
    assert got == scales


# --- 17, 19, 20: the results without loss scaling ---------------------------------------------------------------------


def test_a_scaled_nnx_run_that_clips_has_the_params_gradients_and_optimizer_state_of_an_unscaled_one():
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
    rngs = nnx.Rngs(0)
    bare = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs))
    model, optimizer, _ = nnx_run(tx, "mixed_bfloat16", nnx.clone(bare), DynamicLossScale(period=2))
    other = mixed(bare, "mixed_bfloat16")
    plain = nnx.Optimizer(other, tx, wrt=nnx.Param)

    def loss_of(model):
        return jnp.mean((model(X) - 1) ** 2)

    @nnx.jit
    def step(model, optimizer, other, plain):
        scaled = jaxmp.nnx.value_and_grad(loss_of, optimizer)(model)
        unscaled = nnx.value_and_grad(loss_of)(other)
        optimizer.update(model, scaled[1])
        plain.update(other, unscaled[1])
        return nnx.as_pure(scaled), nnx.as_pure(unscaled), optax.tree.norm(nnx.as_pure(unscaled[1]))

    with standard_promotion():
        for _ in range(3):
            scaled, unscaled, norm = step(model, optimizer, other, plain)
            assert bits(scaled) == bits(unscaled) and norm > 0.1
    assert optimizer.loss_scale == 2.0**16
    assert bits(contents(model, optimizer)) == bits([nnx.state(other, nnx.Not(nnx.RngState)), plain.opt_state])


@each_api
def test_a_gradient_penalty_through_a_model_is_that_of_the_true_loss_in_the_policys_dtype(api):
    def slope(pure_model, params):
        """Return a penalty on the gradient with respect to the input."""
        along = jax.grad(lambda x: jnp.sum(pure_model.apply(params, x).astype(jnp.float32)))(X)
        return jnp.mean((jnp.sqrt(jnp.sum(along**2, 1)) - 1) ** 2)

    def fun(w, x):
        return jnp.tanh(x @ w) @ w

    got, want = pure(mixed(api.Own(fun), "mixed_bfloat16"), X), pure(api.Own(fun), X)
    state = jaxmp.loss_scaling(optax.sgd(0.1), DynamicLossScale()).init(want.params)

    def penalized(params):
        return slope(got, params)

    @quick_jit
    def both(params, state):
        return jaxmp.value_and_grad(penalized, state)(params), jax.value_and_grad(lambda p: slope(want, p))(params)

    (loss, grads), (expected_loss, expected) = both(want.params, state)
    rounding = 5 * 2.0**-7  # the bfloat16 error of two layers and two derivatives is 0.3 % to 3.3 %
    assert abs(loss - expected_loss) <= rounding * abs(expected_loss)
    for got_leaf, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(got_leaf - leaf) <= rounding * np.linalg.norm(leaf)
    assert set(products(jax.grad(penalized), want.params)) == {"bfloat16"}


# --- 21: accumulation -------------------------------------------------------------------------------------------------


def test_with_accumulation_only_full_batches_count_and_a_bad_microbatch_skips_the_batch():
    params, batch = problem()
    tx = jaxmp.loss_scaling(optax.sgd(0.1), DynamicLossScale(period=3))
    state = TrainState.create(params=params, tx=tx)
    step = make_train_step(
        lambda params, _, batch, rng: (loss_fn(params, batch), None), accumulate_steps=4, donate=False
    )
    history = []
    for position in (None, None, None, 5, None):  # the bad example, which is in one microbatch
        step_batch = batch if position is None else {**batch, "x": batch["x"].at[position].set(jnp.inf)}
        before = state
        state, metrics = step(state, step_batch)
        scale = state.opt_state.loss_scale
        history.append((int(scale.counter), float(scale.loss_scale), int(state.skipped_steps)))
        assert same_bits(state.params, before.params) == bool(metrics["skipped"]) == (position is not None)
    assert history == [(1, 2.0**15, 0), (2, 2.0**15, 0), (0, 2.0**16, 0), (0, 2.0**15, 1), (1, 2.0**15, 1)]


def test_an_nnx_optimizer_around_multi_steps_applies_full_windows_only():
    with standard_promotion():
        tx = optax.MultiSteps(standard(optax.sgd(0.1)), 2).gradient_transformation()
        model, optimizer, step = nnx_run(tx, model=nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
        changed, last = [], bits(nnx.state(model))
        for bad in (False, True, False, False, False):
            step(model, optimizer, X * jnp.nan if bad else X)
            changed.append(bits(nnx.state(model)) != last)
            last = bits(nnx.state(model))
    assert changed == [False, False, True, False, True] and optimizer.skipped_steps == 1


# --- 22 and 23 --------------------------------------------------------------------------------------------------------


def test_only_the_nnx_optimizer_of_the_bad_loss_skips_and_backs_off():
    pair = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(seed)) for seed in range(2)])
    runs = [nnx_run(optax.sgd(0.1), model=model) for model in pair]
    before = [bits(nnx.state(model)) for model, _, _ in runs]
    for (model, optimizer, step), x in zip(runs, (X, X * jnp.inf), strict=True):
        step(model, optimizer, x)
    assert [bits(nnx.state(model)) == old for (model, _, _), old in zip(runs, before, strict=True)] == [False, True]
    assert [int(optimizer.skipped_steps) for _, optimizer, _ in runs] == [0, 1]
    assert [float(optimizer.loss_scale) for _, optimizer, _ in runs] == [2.0**10, 2.0**9]


def test_an_nnx_run_that_was_saved_goes_on_bit_for_bit():
    bad = X * jnp.nan
    with standard_promotion():
        model, optimizer, step = nnx_run(scale=DynamicLossScale(2.0**10, period=2))
        for x in (X, bad, X):
            step(model, optimizer, x)
        state = nnx.state((model, optimizer))
        saved = pickle.dumps(jax.tree.leaves(nnx.as_pure(nnx.state((model, optimizer), nnx.Not(nnx.RngKey)))))
        fresh, fresh_optimizer, _ = nnx_run(scale=DynamicLossScale(2.0**10, period=2))
        blank = nnx.state((fresh, fresh_optimizer), nnx.Not(nnx.RngKey))
        nnx.update((fresh, fresh_optimizer), jax.tree.unflatten(jax.tree.structure(blank), pickle.loads(saved)))
        assert bits(nnx.state((fresh, fresh_optimizer))) == bits(state)
        for x in (X, bad, X, X):
            step(model, optimizer, x)
            step(fresh, fresh_optimizer, x)
    assert bits(nnx.state((fresh, fresh_optimizer))) == bits(nnx.state((model, optimizer)))
    assert optimizer.skipped_steps == fresh_optimizer.skipped_steps == 2


# --- 25 ---------------------------------------------------------------------------------------------------------------


def test_an_infinity_on_one_device_makes_an_nnx_step_skip_on_every_device():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    split, replicated = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())
    model, optimizer, step = nnx_run(model=nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    with standard_promotion():
        for thing in (model, optimizer):
            nnx.update(thing, jax.device_put(nnx.state(thing), replicated))
        before, x = bits(nnx.state(model)), jax.device_put(jnp.ones((8, 8)), split)
        step(model, optimizer, jax.device_put(x.at[5, 1].set(jnp.inf), split))
        for shard in model.kernel[...].addressable_shards:
            assert bits(shard.data) == before[-1:]
        scales = optimizer.loss_scale.addressable_shards
        assert [float(shard.data) for shard in scales] == [2.0**9] * 4
        step(model, optimizer, x)
    assert optimizer.skipped_steps == 1 and bits(nnx.state(model)) != before
