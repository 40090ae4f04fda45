"""A bad batch does not change a Linen model; a run that cannot go on says why."""

from __future__ import annotations

import concurrent.futures
import functools
import time

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from linen_zoo import numbers
from optimizer_tools import bits, problem, same_bits, standard, train_loss

import jaxmp
from jaxmp import DynamicLossScale, TrainState, loss_scaling, make_train_step
from jaxmp.training.stuck_runs import NonFiniteTrainingError

pytestmark = pytest.mark.once


class Net(nn.Module):
    """A model with BatchNorm and Dropout."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
        return nn.Dense(2)(x)


MODEL = Net()


def initial():
    with jax.numpy_dtype_promotion("standard"):  # BatchNorm mixes dtypes
        init = functools.partial(MODEL.init, train=False)
        return numbers(jax.eval_shape(init, jax.random.key(0), problem()[1]["x"]))


def linen_run(accumulate_steps=1, tx=None):
    _, batch = problem()

    def loss(params, model_state, batch, rng):
        variables = {"params": params, **model_state}
        out, new = MODEL.apply(variables, batch["x"], train=True, rngs={"dropout": rng}, mutable=["batch_stats"])
        return jnp.mean((out - batch["y"]) ** 2), new, {"largest": jnp.max(out)}

    variables = dict(initial())
    params = variables.pop("params")
    tx = tx or loss_scaling(optax.sgd(0.1, momentum=0.9), DynamicLossScale())
    state = TrainState.create(params=params, tx=tx, model_state=variables, rng=1, ema=True)
    return state, make_train_step(loss, ema_decay=0.9, accumulate_steps=accumulate_steps, donate=False), batch


def contents(state):
    """Return the arrays that a skipped step must not change."""
    scaling = jaxmp.optim.scaling_state.get_loss_scaling_state(state.opt_state)
    return state.params, scaling.inner_state, state.model_state, state.ema_params


def test_a_batch_with_one_nan_in_mid_training_changes_no_bit_of_params_moments_statistics_or_average():
    with jax.numpy_dtype_promotion("standard"):
        tx = loss_scaling(standard(optax.adamw(1e-2)), DynamicLossScale())
        state, step, batch = linen_run(4, tx)
        bad = {**batch, "x": batch["x"].at[5, 1].set(jnp.nan)}  # in one of four microbatches
        state, metrics = step(state, batch)
        before, untouched = state, contents(state)
        state, metrics = step(state, bad)
        assert bool(metrics["skipped"]) and same_bits(contents(state), untouched)
        assert not same_bits(state.rng, before.rng)
        assert (state.step, state.skipped_steps) == (2, 1)
        assert state.loss_scale == 2.0**14
        assert jnp.isnan(metrics["loss"]) and metrics["loss_scale"] == 2.0**15

        # Except for the rng, the run continues as if the bad batch had not been there, bit for bit.
        state, _ = step(state, batch)
        expected, _ = step(before.replace(rng=jax.random.split(before.rng)[0]), batch)
        assert not bool(_["skipped"]) and same_bits(contents(state), contents(expected))
        assert not same_bits(state.model_state, untouched[2])
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(contents(state)))


def test_with_multi_steps_a_bad_microbatch_leaves_the_statistics_alone_too():
    inner = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation()
    tx = loss_scaling(standard(inner), DynamicLossScale())
    with jax.numpy_dtype_promotion("standard"):
        state, step, batch = linen_run(tx=tx)
        bad = {**batch, "x": batch["x"].at[0, 0].set(jnp.inf)}
        state, _ = step(state, batch)
        untouched = contents(state)
        state, metrics = step(state, bad)
        assert bool(metrics["skipped"]) and state.skipped_steps == 1 and same_bits(contents(state), untouched)
        state, metrics = step(state, batch)
        assert not bool(metrics["skipped"]) and not same_bits(state.params, untouched[0])


def test_apply_gradients_skips_completely_but_sets_the_given_fields():
    params, _ = problem()
    tx = loss_scaling(standard(optax.adam(1e-2)), DynamicLossScale())
    state = TrainState.create(params=params, tx=tx, model_state={"n": concrete.zeros(())}, ema=True)

    @jax.jit
    def applied(state, grads):
        fields = {"model_state": {"n": jnp.ones(())}, "ema_decay": 0.9}
        assert state.apply_gradients(grads=grads, ema_decay=0.9).model_state is state.model_state
        with pytest.raises(ValueError, match="a moving average that this step would not update; pass ema_decay"):
            state.apply_gradients(grads=grads)
        bad = jax.tree.map(lambda p: p * jnp.nan, grads)
        skipped = state.apply_gradients(grads=bad, rng=jax.random.key(1), **fields)
        return skipped, state.apply_gradients(grads=grads, **fields)

    skipped, moved = applied(state, params)
    assert same_bits(contents(skipped), contents(state)) and skipped.skipped_steps == 1 and skipped.step == 1
    assert same_bits(skipped.rng, jax.random.key(1))
    assert moved.model_state["n"] == 1 and moved.skipped_steps == 0
    assert not same_bits(moved.params, params) and not same_bits(moved.ema_params, params)


# ---- training that can't go on


def fails_within(step, state, batch, steps):
    """Take ``steps`` steps; return the number of the failing step and its error."""
    for i in range(steps):
        try:
            state, metrics = step(state, batch)
        except ArithmeticError as error:
            assert isinstance(error, NonFiniteTrainingError)
            return i, str(error)
        jax.block_until_ready(metrics)
        time.sleep(0.001)
    return None, ""


@pytest.mark.parametrize("scale", [jaxmp.StaticLossScale(8.0), DynamicLossScale(1.0)])
def test_with_a_scale_that_cannot_fall_the_run_stops_soon_after_the_limit(scale):
    params, batch = problem()
    step = make_train_step(train_loss, max_consecutive_skips=5)
    batch["x"] = batch["x"].at[3, 0].set(jnp.nan)
    state = TrainState.create(params=params, tx=loss_scaling(optax.sgd(0.1), scale))
    at, text = fails_within(step, state, batch, 12)
    assert 5 <= at <= 8
    assert f"5 steps in a row were skipped, and the loss scale {float(scale.loss_scale):g} cannot fall further" in text
    assert "the loss (nan); gradients of 'hidden/b', 'hidden/w', 'out/w'; batch entries 'x'. Look for NaN in" in text


@pytest.mark.parametrize("scale", [jaxmp.HeadroomLossScale(loss_scale=2.0**10), DynamicLossScale(2.0**6, hysteresis=5)])
def test_while_the_scale_can_fall_the_run_goes_on(scale):
    params, batch = problem()
    step = make_train_step(train_loss, max_consecutive_skips=3)
    bad = {**batch, "x": batch["x"] * jnp.inf}
    state = TrainState.create(params=params, tx=loss_scaling(optax.sgd(0.1), scale))
    at, text = fails_within(step, state, bad, 20)
    assert 11 <= at <= 14 and f"{at} steps in a row were skipped, and the loss scale 1 cannot fall" in text


@pytest.mark.parametrize("kind", ["jitted step", "own step", "nnx"])
def test_a_loop_around_a_step_that_cannot_raise_ends_a_stuck_run_itself(kind):
    params, x, limit = {"w": concrete.ones(2)}, concrete.array([1.0, jnp.nan]), {"max_consecutive_skips": 3}
    tx = loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(8.0))

    def loss_fn(params, x):
        return jnp.sum(params["w"][...] * x)

    if kind == "jitted step":
        state, step = TrainState.create(params=params, tx=tx), jax.jit(make_train_step(loss_fn, **limit))
    elif kind == "own step":
        state = tx.init(params)
    else:
        model = nnx.Dict(w=nnx.Param(params["w"]))
        state = jaxmp.nnx.Optimizer(model, tx)
    for _ in range(3):
        jaxmp.raise_if_stuck(state, **limit)
        if kind == "jitted step":
            state, _ = step(state, x)
        elif kind == "own step":
            _, state = tx.update(jaxmp.value_and_grad(loss_fn, state)(params, x)[1], state, params)
        else:
            state.update(model, jaxmp.nnx.value_and_grad(loss_fn, state)(model, x)[1])
    with pytest.raises(NonFiniteTrainingError, match="3 steps in a row were skipped, and the loss scale 8 cannot fall"):
        jaxmp.raise_if_stuck(state, **limit)
    jaxmp.raise_if_stuck(state)
    if kind != "nnx":
        with pytest.raises(TypeError, match="call it outside, with the state that the step returned"):
            jax.jit(jaxmp.raise_if_stuck)(state)


def test_the_lowest_loss_scale_is_tried_before_the_run_stops():
    def loss(params, model_state, batch, rng):
        return jnp.sum((params["w"].astype(jnp.float16) * jnp.float16(40_000)).astype(jnp.float32)), model_state

    step = make_train_step(loss, max_consecutive_skips=3)
    tx = loss_scaling(optax.sgd(0.0), DynamicLossScale(8.0))
    state = TrainState.create(params={"w": concrete.full(2, 1e-3)}, tx=tx)
    with jax.transfer_guard_device_to_host("disallow"):
        for _ in range(6):
            state, metrics = step(state, 1.0)
            jax.block_until_ready(metrics)
    assert state.skipped_steps == 3 and state.loss_scale == 1 and not metrics["skipped"]


def test_finite_steps_in_between_restart_the_count():
    params, batch = problem()
    step = make_train_step(train_loss, max_consecutive_skips=3)
    bad = {**batch, "x": batch["x"] * jnp.nan}
    state = TrainState.create(params=params, tx=loss_scaling(optax.sgd(0.01), jaxmp.NoOpLossScale()))
    for i in range(24):
        state, metrics = step(state, batch if i % 3 == 2 else bad)
        jax.block_until_ready(metrics)
    assert state.skipped_steps == 16


def test_only_the_non_finite_params_are_named():
    params, batch = problem()

    def loss(params, model_state, batch, rng):
        return jnp.sum(params["hidden"]["w"]) + jnp.sqrt(jnp.sum(0 * params["out"]["w"])), model_state

    step = make_train_step(loss, max_consecutive_skips=2)
    state = TrainState.create(params=params, tx=optax.sgd(0.1))
    _, text = fails_within(step, state, batch, 9)
    assert "not finite now: gradients of 'out/w'. Look" in text


def test_a_run_stops_if_only_the_norm_of_the_gradients_is_not_finite():
    step = make_train_step(lambda p, s, b, r: (1e20 * jnp.sum(p["w"]), s), max_consecutive_skips=2)
    tx = loss_scaling(optax.sgd(1e-20), DynamicLossScale(4.0))
    params = {"w": concrete.ones(2)}
    at, text = fails_within(step, TrainState.create(params=params, tx=tx), 1.0, 9)
    assert 2 <= at <= 4
    assert "not finite now: no gradient, so it must be the gradients' norm or the optimizer's updates. Look" in text


def train_in_turn(step, states, batch, steps):
    """Train runs that take turns; return the number of the run that raises the error of a stuck run, and the error."""
    for n in range(steps):
        turn = n % len(states)
        try:
            states[turn], metrics = step(states[turn], batch)
        except NonFiniteTrainingError as error:
            return turn, str(error)
        jax.block_until_ready(metrics)
    return None, ""


def runs_with_one_of_nan(count, api="linen"):
    """Return ``count`` states of runs, of which the second has NaN as params, and their step."""
    if api == "nnx":
        pairs = []
        for n in range(count):
            model = nnx.Dict(w=nnx.Param(concrete.full(3, jnp.nan if n == 1 else 1.0)))
            pairs.append((model, jaxmp.nnx.Optimizer(model, optax.sgd(0.1))))
        nnx_step = jaxmp.nnx.make_train_step(lambda model, x: jnp.mean((model["w"] * x) ** 2), max_consecutive_skips=5)
        return pairs, lambda pair, batch: (pair, nnx_step(*pair, batch))
    values = [jnp.nan if n == 1 else 1.0 for n in range(count)]
    states = [TrainState.create(params={"w": concrete.full(3, value)}, tx=optax.sgd(0.1)) for value in values]
    return states, make_train_step(lambda params, x: jnp.mean((params["w"] * x) ** 2), max_consecutive_skips=5)


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_of_runs_that_take_turns_only_the_stuck_one_raises(api, count):
    states, step = runs_with_one_of_nan(count, api)
    turn, text = train_in_turn(step, states, concrete.ones(3), 100 * count)
    assert turn == 1 and "steps in a row were skipped" in text and "params 'w'" in text
    good, step = states[::2], runs_with_one_of_nan(count, api)[1]
    assert train_in_turn(step, good, concrete.ones(3), 60) == (None, "")


def test_an_example_of_a_vmap_skips_alone():
    params, batch = problem()
    state = TrainState.create(params=params, tx=loss_scaling(standard(optax.adam(1e-2)), DynamicLossScale()))
    step = make_train_step(train_loss, donate=False)
    batches = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * jnp.nan]), batch)
    both, metrics = jax.jit(jax.vmap(step.jitted, in_axes=(None, 0)))(state, batches)[:2]
    good, _ = step(state, batch)
    assert metrics["skipped"].tolist() == [False, True]
    for n, expected in enumerate((good, state)):
        wanted = jax.tree.leaves(contents(expected))
        for batched, leaf in zip(jax.tree.leaves(contents(both)), wanted, strict=True):
            np.testing.assert_allclose(batched[n], leaf, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.chain(tx, optax.trace(0.9)),
        lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(lambda count: 1.0 * count),
    ],
)
def test_a_skipped_step_keeps_the_state_of_transforms_around_loss_scaling_too(around):
    params, batch = problem()
    tx = standard(around(loss_scaling(optax.sgd(0.1), DynamicLossScale())))
    step = make_train_step(train_loss, donate=False)
    before, _ = step(TrainState.create(params=params, tx=tx), batch)
    after, metrics = step(before, {**batch, "x": batch["x"] * jnp.nan})
    assert metrics["skipped"] and bits(after.params) == bits(before.params)
    counters = {"loss_scale", "skipped_steps", "consecutive_skipped"}
    pairs = zip(*(jax.tree_util.tree_leaves_with_path(state.opt_state) for state in (before, after)), strict=True)
    changed = [path for (path, old), (_, new) in pairs if bits(old) != bits(new)]
    assert changed and all(counters & {getattr(key, "name", None) for key in path} for path in changed)


def test_a_step_inside_another_transformation_leaves_nothing_behind():
    params, batch = problem()
    step = make_train_step(train_loss, max_consecutive_skips=3, donate=False)
    state = TrainState.create(params=params, tx=loss_scaling(optax.sgd(0.1), jaxmp.NoOpLossScale()))
    bad = jax.tree.map(lambda leaf: jnp.stack([leaf * jnp.nan] * 4), batch)
    scanned, metrics = jax.lax.scan(step, state, bad)
    assert scanned.opt_state.consecutive_skipped == 4 and metrics["skipped"].all()
    new, _ = step(state, batch)  # the count of the scanned run does not affect this run
    assert new.opt_state.consecutive_skipped == 0
    assert fails_within(step, scanned, {**batch, "x": batch["x"] * jnp.nan}, 30)[0] is not None


def test_a_run_whose_next_batch_is_finite_goes_on():
    params, batch = problem()
    step = make_train_step(train_loss, max_consecutive_skips=5)
    state = TrainState.create(params=params, tx=loss_scaling(optax.sgd(0.1), jaxmp.NoOpLossScale()))
    bad = {**batch, "x": batch["x"] * jnp.nan}
    for _ in range(5):
        state, _ = step(state, bad)
    state, metrics = step(state, batch)  # this call reads the counters
    assert not metrics["skipped"] and state.opt_state.consecutive_skipped == 0
    with pytest.raises(NonFiniteTrainingError, match="batch entries 'x'") as raised:
        for _ in range(11):
            state, _ = step(state, bad)
    assert raised.value.batch is bad and not state.params["out"]["w"].is_deleted()


def test_threads_may_share_a_step():
    params, batch = problem()
    step = make_train_step(train_loss)
    step(TrainState.create(params=jax.tree.map(jnp.copy, params), tx=optax.sgd(0.1)), batch)

    def train(_):
        state = TrainState.create(params=jax.tree.map(jnp.copy, params), tx=optax.sgd(0.1))
        for _ in range(20):
            state, _ = step(state, batch)
        return int(state.step)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(train, range(4))) == [20] * 4
