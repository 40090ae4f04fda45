"""Train steps give the results of loops written by hand."""

from __future__ import annotations

import functools
import re
import warnings

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of
from optimizer_tools import bits, loss_fn, problem, same_bits, standard, train_loss
from recompiles import compiled_once

import jaxmp
from jaxmp import DynamicLossScale, TrainState, loss_scaling, make_eval_step, make_train_step


def fresh(params, scale=None, **fields):
    tx = loss_scaling(optax.sgd(0.1, momentum=0.9), scale or DynamicLossScale())
    return TrainState.create(params=jax.tree.map(jnp.array, params), tx=tx, **fields)


@pytest.mark.once
def test_steps_equal_a_loop_written_by_hand_in_every_bit():
    params, batch = problem()
    plain = standard(optax.adam(1e-2))
    by_hand, plain_state = params, plain.init(params)
    tx = loss_scaling(standard(optax.adam(1e-2)), DynamicLossScale())
    state, step = TrainState.create(params=params, tx=tx), make_train_step(train_loss, donate=False)

    @jax.jit
    def plain_step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = plain.update(grads, state)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    for _ in range(3):
        by_hand, plain_state, loss, norm = plain_step(by_hand, plain_state)
        state, metrics = step(state, batch)
        assert bits((metrics["loss"], metrics["grad_norm"])) == bits((loss, norm))
    assert same_bits(state.params, by_hand) and same_bits(state.opt_state.inner_state, plain_state)
    assert (state.step, state.skipped_steps) == (3, 0)


@pytest.mark.once
def test_a_loss_function_may_take_only_params_and_batch_and_return_only_the_loss():
    params, batch = problem()

    def loss_and_metrics(params, batch):
        loss = loss_fn(params, batch)
        return loss, {"double": 2 * loss}

    def long_form(params, model_state, batch, rng):
        loss, metrics = loss_and_metrics(params, batch)
        return loss, model_state, metrics

    options = {"accumulate_steps": 2, "policy": "mixed_float16"}
    states, results = [], []
    for function in (long_form, loss_and_metrics, loss_fn):
        state, metrics = make_train_step(function, **options)(fresh(params, DynamicLossScale()), batch)
        states.append(state)
        results.append(metrics)
    assert same_bits(states[0].params, states[1].params) and same_bits(states[0].params, states[2].params)
    assert same_bits(results[0], results[1]) and "double" not in results[2]
    assert make_eval_step(loss_fn)(states[2], batch)["loss"] == loss_fn(states[2].params, batch)


def test_steps_are_compiled_once_never_wait_and_reuse_the_memory_of_the_state():
    params, batch = problem()
    state = fresh(params, rng=0, ema=True, model_state={"n": concrete.zeros(())})
    bad = {**batch, "x": batch["x"].at[0, 0].set(jnp.nan)}
    traces = []

    def loss(params, model_state, batch, rng):
        traces.append(1)
        return loss_fn(params, batch), {"n": model_state["n"] + 1}, {"own": jnp.float32(1)}

    step = make_train_step(loss, ema_decay=0.9)
    first = state
    with jax.transfer_guard("disallow"):
        for i in range(10):
            state, metrics = step(state, bad if i % 5 == 2 else batch)
    assert compiled_once(step) and len(traces) == 1
    arrays = jax.tree.leaves((first.params, first.opt_state.inner_state, first.ema_params, first.model_state))
    assert all(leaf.is_deleted() for leaf in arrays)
    assert (state.step, state.skipped_steps) == (10, 2) and state.model_state["n"] == 8
    assert metrics["own"] == 1


def test_arrays_that_are_also_in_the_batch_are_not_donated():
    def loss_fn(params, batch):
        target = batch["target"]["w"]
        return jnp.mean((batch["x"] @ params["w"] - batch["x"] @ target - 1) ** 2)

    def train(donate):
        state = TrainState.create(params={"w": jnp.ones((2, 1))}, tx=optax.sgd(0.1))
        step = make_train_step(loss_fn, donate=donate)
        batch = {"x": jnp.ones((4, 2)), "target": state.params}
        for _ in range(3):
            state, _ = step(state, batch)
        assert compiled_once(step)
        return state.params, batch["target"]

    assert same_bits(train(donate=True), train(donate=False))

    state = TrainState.create(params={"w": concrete.ones((2, 1))}, tx=optax.sgd(0.1))
    target = jax.device_put(state.params, jax.devices()[0])  # other arrays in the same memory
    with pytest.raises((RuntimeError, ValueError)) as error:
        make_train_step(loss_fn)(state, {"x": concrete.ones((4, 2)), "target": target})
    assert any("Copy it with jax.tree.map(jnp.copy, ...)" in note for note in error.value.__notes__)


# ---- microbatches


@pytest.mark.once
def test_microbatches_give_the_gradient_of_the_whole_batch():
    params, batch = problem()
    unsplit, metrics = make_train_step(train_loss, donate=False)(fresh(params), batch)
    split, split_metrics = make_train_step(train_loss, accumulate_steps=4)(fresh(params), batch)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(split_metrics[name], metrics[name], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), split.params, unsplit.params)
    assert split.opt_state.loss_scale.counter == 1  # the scale counts batches, not microbatches
    assert split.step == 1


class Squares(nn.Module):
    """A head without a dtype field."""

    @nn.compact
    def __call__(self, x):
        x = x.astype("float32") if x.dtype == jnp.int32 else x
        return jnp.square(x) @ self.param("scale", nn.initializers.ones, (8, 8))


class Headed(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.Dense(8, name="body")(x.astype("float32"))
        return body + Squares(name="head")(x)


@pytest.mark.once
@pytest.mark.parametrize(("steps", "inputs"), [(1, "bfloat16"), (2, "float16"), (2, "int32")])
def test_inputs_of_any_dtype_train_a_float32_head_in_microbatches_too(steps, inputs):
    model = jaxmp.linen.apply_policy(Headed(), "mixed_float16", {"head": "float32"})
    x = np.full((4, 8), 304) + 16 * np.arange(4)[:, None]  # exact in every dtype; the squares overflow in float16
    batch = jnp.asarray(x, inputs)

    def loss(params, model_state, batch, rng):
        return jnp.mean(model.apply({"params": params}, batch)) / 2**14, model_state

    tx = loss_scaling(optax.sgd(1.0), DynamicLossScale())
    body = {"kernel": concrete.ones((8, 8)), "bias": concrete.zeros(8)}
    state = TrainState.create(params={"body": body, "head": {"scale": concrete.ones((8, 8))}}, tx=tx)
    state, metrics = make_train_step(loss, accumulate_steps=steps)(state, batch)
    assert not metrics["skipped"]
    # The mean is over 8 columns, and each column of a param has the gradient of one of them.
    by_head, by_body = (np.mean(values, 0)[:, None] / 8 / 2**14 for values in (x**2, x))
    np.testing.assert_allclose(state.params["head"]["scale"], np.tile(1 - by_head, 8), rtol=1e-5)
    np.testing.assert_allclose(state.params["body"]["kernel"], np.tile(1 - by_body, 8), rtol=1e-5)


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:updates below")  # of the half params
def test_half_gradients_are_accumulated_in_float32():
    """Accumulate 2048 + 1 + 1 + 1, which is 2048 in float16."""

    def loss(params, model_state, batch, rng):
        return jnp.mean((batch * params).astype(jnp.float32)), model_state

    tx = loss_scaling(optax.sgd(1.0), jaxmp.NoOpLossScale())
    state = TrainState.create(params=concrete.ones((), jnp.float16), tx=tx)
    _, metrics = make_train_step(loss, accumulate_steps=4)(state, concrete.array([2048, 1, 1, 1], jnp.float16))
    assert metrics["grad_norm"] == 2051 / 4


@pytest.mark.once
def test_microbatches_take_every_nth_example_in_order_and_see_the_model_state_of_the_one_before():
    def loss(params, model_state, batch, rng):
        indices = model_state["seen"].at[model_state["count"]].set(batch["i"])
        state = {"seen": indices, "count": model_state["count"] + 1}
        return params * jnp.mean(batch["x"] * batch["temperature"]), state, {"first": batch["i"][0], "both": batch["i"]}

    model_state = {"seen": concrete.zeros((3, 2), jnp.int32), "count": concrete.zeros((), jnp.int32)}
    state = TrainState.create(params=concrete.ones(()), tx=optax.sgd(0.1), model_state=model_state)
    batch = {
        "i": concrete.arange(6),
        "x": concrete.ones(6),
        "temperature": jnp.float32(2.0),
    }  # each microbatch gets the scalar
    state, metrics = make_train_step(loss, accumulate_steps=3)(state, batch)
    np.testing.assert_array_equal(state.model_state["seen"], [[0, 3], [1, 4], [2, 5]])
    assert state.model_state["seen"].dtype == jnp.int32 and metrics["loss"] == 2
    assert metrics["first"] == 1  # the mean of 0, 1 and 2
    np.testing.assert_array_equal(metrics["both"], [1, 4])


@pytest.mark.once
def test_every_microbatch_has_its_own_random_numbers():
    def loss(params, model_state, batch, rng):
        return params * 0.0, model_state, {"draw": jax.random.uniform(rng), "square": jax.random.uniform(rng) ** 2}

    state = TrainState.create(params=concrete.ones(()), tx=optax.sgd(0.1), rng=0)
    _, metrics = make_train_step(loss, accumulate_steps=4)(state, concrete.ones(4))
    assert metrics["square"] - metrics["draw"] ** 2 > 1e-4  # the variance of the draws


# ---- moving average, remat, rng


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:updates below")  # of the half params
def test_the_moving_average_is_that_of_the_unrounded_params_in_float32():
    params = concrete.array([1.0, -2.0], jnp.bfloat16)
    state = TrainState.create(params=params, tx=optax.sgd(2.0**-12), ema=True)
    assert state.ema_params.dtype == jnp.float32

    def loss(params, model_state, batch, rng):
        return jnp.sum(params.astype(jnp.float32) * batch), model_state

    step = make_train_step(loss, ema_decay=0.75)
    current, average = np.array([1.0, -2.0]), np.array([1.0, -2.0])
    for _ in range(3):
        state, _ = step(state, concrete.array([1.0, 4.0]))
        unrounded = current - 2.0**-12 * np.array([1.0, 4.0])
        average = 0.75 * average + 0.25 * unrounded
        current = np.asarray(jnp.asarray(unrounded, jnp.bfloat16), np.float64)
        np.testing.assert_allclose(state.ema_params, average, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(state.params, np.float64), current)
    # A step of 2**-12 vanishes from the param 1, but not from its average.
    assert state.params[0] == 1 and state.ema_params[0] < 1


@pytest.mark.parametrize("place", ["one device", "a mesh", "nnx"])
def test_the_options_of_the_compiler_reach_xla_for_the_step_only(place):
    params, batch = problem()
    state = TrainState.create(params=params, tx=optax.sgd(0.1))
    options = {"xla_backend_optimization_level": 0}
    if place == "nnx":

        def train(compiler_options):
            model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            step = jaxmp.nnx.make_train_step(
                lambda model, batch: jnp.mean(model(batch["x"])), compiler_options=compiler_options
            )
            return step(model, jaxmp.nnx.Optimizer(model, optax.sgd(0.1)), batch)
    else:
        sharding = None
        if place == "a mesh":
            sharding = jaxmp.sharding.Sharding(mesh_of(data=4), jax.tree.map(lambda _: jax.P(), params))

        def train(compiler_options):
            step = make_train_step(train_loss, donate=False, sharding=sharding, compiler_options=compiler_options)
            return step(state, batch)[1]

    np.testing.assert_allclose(train(options)["loss"], train(None)["loss"], rtol=1e-6)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        train({"xla_no_such_option": 1})


def test_every_kind_of_remat_gives_the_same_gradients():
    params, batch = problem()
    expected = bits(make_train_step(train_loss, remat="none")(fresh(params), batch))
    policies = ("nothing_saveable", "dots", "dots_no_batch", "checkpoint_dots", jax.checkpoint_policies.dots_saveable)
    for remat in policies:
        step = make_train_step(train_loss, remat=remat)
        assert "remat" in str(jax.make_jaxpr(step.jitted)(fresh(params), batch))
        if remat in ("nothing_saveable", "dots"):  # the one that stores least, and one of the others
            assert bits(step(fresh(params), batch)) == expected


def test_a_step_with_other_options_is_the_step_that_these_options_make():
    params, batch = problem()
    options = {"xla_cpu_enable_fast_math": False}
    step = make_train_step(train_loss, accumulate_steps=2, compiler_options=options, donate=False)
    options["xla_no_such_option"] = 1  # the step has a copy
    other = step.with_options(accumulate_steps=1, ema_decay=0.9)
    assert other.options == {**step.options, "accumulate_steps": 1, "ema_decay": 0.9}
    state = TrainState.create(params=params, tx=standard(optax.sgd(0.1)), ema=True)
    direct = make_train_step(train_loss, ema_decay=0.9, donate=False)
    assert bits(other(state, batch)) == bits(direct(state, batch))
    with pytest.raises(ValueError, match="its options are unknown"):
        step.with_update(step.update).with_options(donate=True)


def test_the_rng_may_be_none_a_number_or_a_key_and_advances():
    tx = optax.sgd(0.1)

    def loss(params, model_state, batch, rng):
        return params * 0.0, model_state, {} if rng is None else {"draw": jax.random.uniform(rng)}

    step = make_train_step(loss, donate=False)

    def draws(rng):
        state, drawn = TrainState.create(params=jnp.ones(()), tx=tx, rng=rng), []
        for _ in range(3):
            state, metrics = step(state, jnp.ones(1))
            drawn.append(float(metrics["draw"]) if "draw" in metrics else None)
        return drawn, state.rng

    assert draws(None) == ([None] * 3, None)
    typed, _ = draws(jax.random.key(3))
    assert len(set(typed)) == 3
    for same in (3, np.int64(3), jax.random.PRNGKey(3)):
        assert draws(same)[0] == typed


# ---- metrics, dtypes, evaluation


@pytest.mark.once
def test_the_metrics_are_the_true_loss_the_scale_used_and_the_users_own():
    params, batch = problem()

    def loss(params, model_state, batch, rng):
        value = loss_fn(params, batch)
        return value, model_state, {"accuracy": value * 2, "per_class": jnp.arange(3), "nested": {"a": True}}

    state = fresh(params, DynamicLossScale(2.0**10, period=1))
    step = make_train_step(loss)
    reported = []
    for step_batch in (batch, batch, {**batch, "y": batch["y"] * jnp.inf}, batch):
        state, metrics = step(state, step_batch)
        reported.append((float(metrics["loss_scale"]), bool(metrics["skipped"])))
    assert reported == [(2.0**10, False), (2.0**11, False), (2.0**12, True), (2.0**11, False)]
    assert set(metrics) == {"loss", "grad_norm", "loss_scale", "skipped", "accuracy", "per_class", "nested"}
    assert metrics["accuracy"] == metrics["loss"] * 2 and metrics["per_class"].dtype == jnp.int32
    assert metrics["skipped"].dtype == jnp.bool_ and metrics["loss_scale"].dtype == jnp.float32


@pytest.mark.once
def test_an_optimizer_that_needs_the_loss_gets_it():
    params, batch = problem()
    plateau = standard(optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)))
    state = TrainState.create(params=params, tx=loss_scaling(plateau, DynamicLossScale()))
    step = make_train_step(train_loss)
    for _ in range(6):
        state, _ = step(state, batch)
    assert state.opt_state.inner_state[1].scale < 1


@pytest.mark.once
def test_an_optimizer_that_does_not_take_the_loss_is_not_given_it():
    params, batch = problem()
    sam = optax.contrib.sam(optax.sgd(0.125), optax.sgd(0.25), sync_period=2, opaque_mode=False)
    tx = loss_scaling(sam, DynamicLossScale(2.0**8))
    state = TrainState.create(params=jax.tree.map(jnp.array, params), tx=tx)
    step = make_train_step(train_loss)

    @jax.jit
    def by_hand(params, opt_state):
        updates, opt_state = sam.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with jax.numpy_dtype_promotion("standard"):  # SAM mixes dtypes
        opt_state = sam.init(params)
        for _ in range(4):
            state, metrics = step(state, batch)
            params, opt_state = by_hand(params, opt_state)
            assert not metrics["skipped"]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.params, params)


@pytest.mark.once
def test_the_warning_for_float16_products_without_a_scale_comes_once_and_only_where_it_is_true():
    def warned(dtype, scale, remat=None, sizes=(2,)):
        def loss(params, model_state, batch, rng):
            return jnp.mean((batch.astype(dtype) @ params.astype(dtype)).astype(jnp.float32)), model_state

        step = make_train_step(loss, remat=remat)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = TrainState.create(params=jnp.ones((3, 1)), tx=loss_scaling(optax.sgd(0.1), scale))
            run = step if len(sizes) > 1 else functools.partial(jax.eval_shape, step)  # tracing warns
            for size in sizes:
                state, _ = run(state, concrete.ones((size, 3)))
        return [str(warning.message) for warning in caught]

    messages = warned(jnp.float16, jaxmp.NoOpLossScale(), sizes=(2, 4))  # two compilations
    assert len(messages) == 1
    assert "float16 products and no loss scale" in messages[0]
    assert "tx = jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale())" in messages[0]
    assert len(warned(jnp.float16, jaxmp.NoOpLossScale(), remat="dots")) == 1
    (message,) = warned(jnp.float16, jaxmp.StaticLossScale(1.0))
    assert "float16 products and a loss scale of 1, so small gradients become zero" in message
    no_op, by_one, by_eight = jaxmp.NoOpLossScale(), jaxmp.StaticLossScale(1.0), jaxmp.StaticLossScale(8.0)
    wide = [(dtype, scale) for dtype in (jnp.float32, jnp.bfloat16) for scale in (no_op, by_one)]
    for dtype, scale in (*wide, (jnp.float16, by_eight), (jnp.float16, DynamicLossScale())):
        assert warned(dtype, scale) == []


@pytest.mark.once
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_a_loss_scale_or_a_half_policy_without_half_products_is_warned_of_once(library):
    x, traces = concrete.ones((4, 8)), []

    def warned(policy_of_model=None, loss_scale=None, is_elementwise=False, runs=0, **options):
        """Return the warnings of a step that runs ``runs`` times, or that is only traced."""
        if library == "linen":
            model = nn.Dense(8) if policy_of_model is None else jaxmp.linen.apply_policy(nn.Dense(8), policy_of_model)
            params = {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}
            step = make_train_step(
                lambda params, x: loss(lambda: model.apply({"params": params}, x), params), **options
            )
            tx = loss_scaling(optax.sgd(0.1), loss_scale or jaxmp.NoOpLossScale())
            args = [TrainState.create(params=params, tx=tx)]
        else:
            model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            model = model if policy_of_model is None else jaxmp.nnx.apply_policy(model, policy_of_model)
            step = jaxmp.nnx.make_train_step(lambda model, x: loss(lambda: model(x), vars(model)), **options)
            args = [model, jaxmp.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=loss_scale)]

        def loss(result, params):
            traces.append(1)
            return jnp.mean(params["bias"][...] if is_elementwise else result())

        traces.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if not runs:
                (jax if library == "linen" else nnx).eval_shape(step, *args, x)
            for _ in range(runs):
                result = step(*args, x)
                args[:1] = result[:1] if library == "linen" else args[:1]
        assert len(traces) == 1 and all(warning.filename == __file__ for warning in caught)
        return [str(warning.message) for warning in caught]

    (scaled,) = warned(loss_scale=jaxmp.StaticLossScale(8.0), runs=3)
    assert scaled.startswith("the step has a loss scale, but every product of its loss is float32;")
    assert "print(jaxmp.inspect.audit(step)(state, batch))" in scaled
    (half,) = warned("float32", policy="mixed_bfloat16", accumulate_steps=2)
    assert half.startswith("the step has a policy for bfloat16, but the policy of its model computes in float32;")
    (other,) = warned("mixed_float16", DynamicLossScale(), policy="mixed_bfloat16")
    assert other.startswith("the step has a policy for bfloat16, but the policy of its model computes in float16;")
    (wide,) = warned("mixed_bfloat16", policy="float32")
    assert wide.startswith("the step has a policy for float32, but the policy of its model computes in bfloat16;")
    remedies = [re.search("apply_policy.*", message)[0] for message in (half, other, wide)]
    assert all("where the model gets its policy, and leave policy= out of the step" in text for text in remedies)
    assert [re.search("'.*?'", text)[0] for text in remedies] == ["'mixed_bfloat16'", "'mixed_bfloat16'", "'float32'"]
    assert warned("float32", DynamicLossScale(), runs=3) == []  # a baseline in float32
    assert warned(None, DynamicLossScale(), policy="float32") == []
    assert warned(None, policy="mixed_bfloat16", overrides={"**": "float32"}) == []
    assert warned("mixed_float16", DynamicLossScale()) == []
    assert warned(None, DynamicLossScale(), policy="mixed_float16") == []
    assert warned(None, DynamicLossScale(), is_elementwise=True) == []
    assert warned(None, policy="mixed_bfloat16", overrides={"primitive:dot_general": "float32"}) == []


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_loss_that_uses_params_from_outside_of_it_is_warned_of(accumulate_steps):
    x, model = concrete.ones((4, 3)), nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    params = {"w": concrete.ones((3, 2))}
    state = TrainState.create(params=params, tx=optax.sgd(0.1))
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1))
    options = {"accumulate_steps": accumulate_steps, "donate": False}
    with pytest.warns(UserWarning, match="the loss does not depend on the params") as caught:
        make_train_step(lambda _, x: jnp.mean(x @ params["w"]), **options)(state, x)
        jaxmp.nnx.make_train_step(lambda _, x: jnp.mean(x @ jnp.ones((3, 2))), **options)(model, optimizer, x)
    assert len(caught) == 2
    make_train_step(lambda params, _: jnp.mean(params["w"]), **options)(state, x)  # without a warning


@pytest.mark.filterwarnings("ignore:updates below")  # of the half params
def test_evaluation_changes_no_state_and_can_use_the_moving_average():
    params, batch = problem(dtype=jnp.bfloat16)

    def loss(params, model_state, batch, rng):
        dtypes.add(params["out"]["w"].dtype)
        return loss_fn(params, batch), {"n": model_state["n"] + 1}, {"n": model_state["n"]}

    dtypes = set()
    state = fresh(params, model_state={"n": concrete.zeros(())}, ema=True, rng=0)
    step = make_train_step(loss, ema_decay=0.5)
    for _ in range(3):
        state, _ = step(state, batch)
    before = bits(state)
    now, averaged = make_eval_step(loss)(state, batch), make_eval_step(loss, use_ema=True)(state, batch)
    assert bits(state) == before
    assert set(now) == {"loss", "n"} and now["n"] == 3 and now["loss"].dtype == jnp.float32
    by_hand = jax.jit(loss_fn)
    np.testing.assert_allclose(now["loss"], by_hand(state.params, batch), rtol=1e-2)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.ema_params)
    np.testing.assert_allclose(averaged["loss"], by_hand(half, batch), rtol=1e-2)
    assert averaged["loss"] != now["loss"] and dtypes == {jnp.dtype("bfloat16")}


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "check_updates"), [({"policy": "mixed_float16"}, True), ({"accumulate_steps": 2}, False)], ids=str
)
def test_a_step_leaks_no_tracer(options, check_updates):
    params, batch = problem()
    tx = loss_scaling(standard(optax.adam(0.1)), DynamicLossScale(), check_updates=check_updates)
    state = TrainState.create(params=params, tx=tx)
    with jax.checking_leaks():
        jax.eval_shape(make_train_step(train_loss, **options).jitted, state, batch)
