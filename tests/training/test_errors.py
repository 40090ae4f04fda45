"""Mistakes with a train step raise an error that says what to write."""

from __future__ import annotations

import functools
import io

import concrete
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from error_tools import noted, refused
from flax import linen, nnx
from flax.training import train_state as flax_train_state
from optimizer_tools import problem, standard, train_loss

import jaxmp
from jaxmp import DynamicLossScale, TrainState, loss_scaling, make_eval_step, make_train_step

pytestmark = pytest.mark.once


def state_of(params=1.0, **fields):
    tx = loss_scaling(optax.sgd(0.1), DynamicLossScale())
    return TrainState.create(params=jax.tree.map(jnp.asarray, params), tx=tx, **fields)


def scales_for_two(params):
    parts = {name: loss_scaling(optax.sgd(0.1), DynamicLossScale()) for name in "ab"}
    return TrainState.create(params=params, tx=optax.multi_transform(parts, {"x": "a", "y": "b"}))


VARIABLES = {"params": {"w": concrete.ones(2)}, "batch_stats": {"mean": concrete.ones(2)}}
BAD_ARGUMENTS = {
    "no steps": (lambda: make_train_step(train_loss, accumulate_steps=0), ValueError, "accumulate_steps must be"),
    "half a step": (lambda: make_train_step(train_loss, accumulate_steps=2.0), ValueError, "got 2.0"),
    "a flag for steps": (lambda: make_train_step(train_loss, accumulate_steps=True), ValueError, "got True"),
    "no skips": (lambda: make_train_step(train_loss, max_consecutive_skips=0), ValueError, "max_consecutive_skips"),
    "remat": (lambda: make_train_step(train_loss, remat="dot"), ValueError, "nearest first: 'dots'"),
    "overrides alone": (
        lambda: make_train_step(train_loss, overrides={"a": "float32"}),
        ValueError,
        "pass policy='mixed_bfloat16'",
    ),
    "no overrides": (lambda: make_train_step(train_loss, overrides=3), TypeError, "overrides must map patterns"),
    "no function": (lambda: make_train_step(3), TypeError, "write def loss_fn(params, model_state, batch, rng)"),
    "a Linen model": (
        lambda: make_train_step(linen.Dense(3)),
        TypeError,
        "got an instance of Dense; pass a function that calls the model, to jaxmp.make_train_step for Linen",
    ),
    "a Linen model in an evaluation": (lambda: make_eval_step(linen.Dense(3)), TypeError, "got an instance of Dense"),
    "an NNX model": (
        lambda: make_train_step(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
        TypeError,
        "got an instance of Linear; pass a function that calls the model, to jaxmp.make_train_step for Linen and to",
    ),
    "a class of models": (lambda: make_train_step(linen.Dense), TypeError, "pass a function that calls Dense(...)"),
    "three arguments": (
        lambda: make_train_step(lambda params, batch, rng: params),
        TypeError,
        "takes (params, batch) or (params, model_state, batch, rng), got one of (params, batch, rng); put all data",
    ),
    "inputs and labels": (
        lambda: make_train_step(lambda params, x, y: params),
        TypeError,
        "takes (params, batch) or (params, model_state, batch, rng), got one of (params, x, y); put all data into one",
    ),
    "an NNX loss": (
        lambda: make_train_step(lambda model, batch: model),
        TypeError,
        "for an NNX model use jaxmp.nnx.make_train_step",
    ),
    "a keyword more": (
        lambda: make_eval_step(lambda p, s, b, r, *, train: (p, s)),
        TypeError,
        "(p, s, b, r, *, train)",
    ),
    "for NNX": (lambda: jaxmp.nnx.make_train_step(lambda p, s, b, r: (p, s)), TypeError, "takes (model, batch), got"),
    "params of None": (lambda: TrainState.create(params=None, tx=optax.sgd(0.1)), ValueError, "params must be"),
    "no params": (lambda: TrainState.create(params={}, tx=optax.sgd(0.1)), ValueError, "variables['params']"),
    "variables": (
        lambda: TrainState.create(params=VARIABLES, tx=optax.sgd(0.1)),
        ValueError,
        "params=variables['params'], and the other collections as model_state=",
    ),
    "no optimizer": (
        lambda: TrainState.create(params=jnp.ones(2), tx=DynamicLossScale()),
        TypeError,
        "got an instance of DynamicLossScale",
    ),
    "two loss scales": (
        lambda: scales_for_two({"x": jnp.ones(()), "y": jnp.ones(())}),
        ValueError,
        "an optimizer's state must have one loss scale, got 2",
    ),
}


def test_a_wrong_argument_is_refused():
    for what, row in BAD_ARGUMENTS.items():
        refused(*row, what=what)


def bfloat16_from_numpy():
    """Return what ``np.load`` returns for an array of bfloat16: raw bytes."""
    file = io.BytesIO()
    np.savez(file, w=np.full((2, 2), 1.5, ml_dtypes.bfloat16))
    file.seek(0)
    return np.load(file)["w"]


RAW = {"a": {"w": bfloat16_from_numpy()}}
WHOLE = {"a": {"w": concrete.ones((2, 2))}}


def nnx_model(array):
    return nnx.Dict(w=nnx.Param(array))


@pytest.mark.parametrize(
    ("take", "name"),
    [
        (lambda folder: TrainState.create(params=RAW, tx=optax.sgd(0.1)), "params/a/w"),
        (lambda folder: TrainState.create(params=WHOLE, model_state=RAW, tx=optax.sgd(0.1)), "model_state/a/w"),
        (lambda folder: loss_scaling(optax.sgd(0.1), DynamicLossScale()).init(RAW), "a/w"),
        (lambda folder: jaxmp.low_precision(optax.sgd(0.1)).init(RAW), "a/w"),
        (lambda folder: jaxmp.nnx.Optimizer(nnx_model(RAW["a"]["w"]), optax.sgd(0.1)), "w"),
        (lambda folder: jaxmp.autocast(lambda params: params["a"]["w"].sum(), "mixed_bfloat16")(RAW), "argument/0"),
        (lambda folder: make_train_step(lambda p, x: x.sum())(state_of(), RAW["a"]["w"]), "1"),
        (lambda folder: jaxmp.checkpoint.save(folder, RAW, step=0), "a/w"),
    ],
)
def test_bfloat16_that_numpy_saved_as_bytes_is_refused_with_the_remedy(take, name, tmp_path):
    with pytest.raises(TypeError, match=rf"'{name}' has the dtype \|V2, raw bytes.*\n.*view\(ml_dtypes.bfloat16\)"):
        take(tmp_path)


def test_a_decay_lies_between_0_and_1():
    for bad in (1.0, -0.1, 1.5, float("nan"), "0.9", False, concrete.ones(2)):
        refused(lambda bad=bad: make_train_step(train_loss, ema_decay=bad), ValueError, "must lie in [0, 1)", what=bad)


LOSSES = {
    "the loss alone": (lambda p, s: p, TypeError, "write return loss, model_state"),
    "one result": (lambda p, s: (p,), TypeError, "got tuple of 1"),
    "four results": (lambda p, s: (p, s, {}, {}), TypeError, "got tuple of 4"),
    "a list": (lambda p, s: [p, s], TypeError, "got list of 2"),
    "a dict": (lambda p, s: {"loss": p}, TypeError, "got dict"),
    "nothing": (lambda p, s: None, TypeError, "got NoneType"),
    "metrics that are none": (lambda p, s: (p, s, p), TypeError, "metrics of a loss function are a dict"),
    "a metric of the step": (lambda p, s: (p, s, {"loss_scale": p}), ValueError, "reports 'loss_scale' itself"),
    "losses": (lambda p, s: (p * jnp.ones(3), s), TypeError, "take its mean: jnp.mean(loss)"),
    "an integer loss": (lambda p, s: (1, s), TypeError, "compute it from floating values"),
    "another order": (lambda p, s: (s, p), TypeError, "return (loss, new_model_state), in this order"),
}


@pytest.mark.parametrize(("make", "policy"), [(make_train_step, None), (make_eval_step, "mixed_bfloat16")])
def test_a_wrong_result_of_a_loss_function_is_refused(make, policy):
    state = state_of()
    for what, (result, kind, phrase) in LOSSES.items():
        step = make(lambda p, s, b, r, result=result: result(p, s), policy=policy)
        refused(functools.partial(step, state, 1.0), kind, phrase, what=what)


@pytest.mark.parametrize("field", [{"model_state": {"mean": jnp.zeros(())}}, {"rng": 0}])
def test_a_loss_function_of_params_and_batch_needs_a_state_without_more(field):
    state = TrainState.create(params=concrete.ones(()), tx=optax.sgd(0.1), **field)
    (name,) = field
    step = make_train_step(lambda params, batch: params * batch)
    refused(lambda: step(state, 1.0), ValueError, f"the train state has a {name}, which loss_fn(params, batch) cannot")


def test_a_half_loss_is_refused_by_the_step_and_taken_by_the_evaluation():
    def loss(params, model_state, batch, rng):
        return jnp.sum(params).astype("bfloat16"), model_state

    refused(lambda: make_train_step(loss)(state_of(), 1.0), TypeError, "got bfloat16, which has two to three digits")
    assert make_eval_step(loss)(state_of(), 1.0)["loss"].dtype == jnp.float32


STATES = {
    "an entry less": ({"a": {"b": 1.0}}, {"a": {}}, ValueError, "'a/b' was float32 of shape () and is absent"),
    "none at all": ({"a": {"b": 1.0}}, None, ValueError, "'a/b' was float32 of shape () and is absent"),
    "an entry more": ({"a": 1.0}, {"a": 1.0, "c": 1.0}, ValueError, "'c' was absent and is float32"),
    "metrics": (None, {"accuracy": 1.0}, ValueError, "'accuracy' was absent"),
    "another shape": ({"a": 1.0}, {"a": [1.0, 2.0]}, ValueError, "absent"),
    "another size": (np.ones(2), np.ones(3), ValueError, "had the shape (2,) and has (3,)"),
    "fractions": ({"n": 0}, {"n": 0.5}, TypeError, "'n' was int32 and is float32; start with"),
    "complex numbers": ({"n": 0}, {"n": 1j}, TypeError, "'n' was int32 and is complex64; start with"),
}


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_model_state_that_differs_is_refused_with_the_leaf(accumulate_steps):
    for what, (before, after, kind, phrase) in STATES.items():
        before, after = jax.tree.map(jnp.asarray, (before, after))
        step = make_train_step(
            lambda p, s, b, r, after=after: (p * jnp.mean(b), after), accumulate_steps=accumulate_steps
        )
        refused(functools.partial(step, state_of(model_state=before), concrete.ones(2)), kind, phrase, what=what)


CALLS = {
    "Flax's state": (
        flax_train_state.TrainState.create(apply_fn=None, params=concrete.ones(2), tx=optax.sgd(0.1)),
        TypeError,
        "got flax.training.train_state.TrainState; make one with jaxmp.TrainState.create",
    ),
    "params": ({"w": concrete.ones(2)}, TypeError, "takes a jaxmp.TrainState, got builtins.dict"),
    "what a step returned": ((state_of(), {}), TypeError, "unpack it: state, metrics = step(state, batch)"),
}


def test_a_step_takes_only_a_train_state():
    step, evaluate = make_train_step(train_loss), make_eval_step(train_loss)
    tools = jaxmp.inspect.first_nonfinite(step), jaxmp.inspect.compare(step)
    for what, (state, kind, phrase) in CALLS.items():
        for use in (step, step.jitted, evaluate, evaluate.jitted, *tools):
            refused(functools.partial(use, state, problem()[1]), kind, phrase, what=what)


def test_a_step_names_the_arguments_that_it_takes():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1))
    x = concrete.ones((1, 2))
    step, evaluate = make_train_step(train_loss), make_eval_step(train_loss)
    nnx_step = jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x)))
    model_in_linen = "got flax.nnx.nn.linear.Linear; make one with jaxmp.TrainState.create(params=params, tx=tx), or "
    state_in_nnx = "step takes (model, optimizer, batch) with an NNX model, got jaxmp.training.state.TrainState; for"
    calls = {
        "the arguments of NNX": (step, (model, optimizer, x), f"{model_in_linen}for an NNX model write jaxmp.nnx.make"),
        "an NNX model in an evaluation": (evaluate, (model, x), "for an NNX model jit the loss function: nnx.jit(loss"),
        "inputs and labels": (step, (state_of(), x, x), "a step takes (state, batch), got (TrainState, ArrayImpl, Arr"),
        "no batch": (evaluate, (state_of(),), "got (TrainState); write step(state, batch), with all data in one batch"),
        "the arguments of Linen": (nnx_step, (state_of(), x), state_in_nnx),
        "no optimizer": (nnx_step, (model, x), "a step takes (model, optimizer, batch), got (Linear, ArrayImpl); wri"),
    }
    for what, (called, args, phrase) in calls.items():
        for call in (called, jaxmp.inspect.audit(called)):
            refused(functools.partial(call, *args), TypeError, phrase, what=what)


BATCHES = {
    "six in four": ({"x": concrete.ones(6)}, "got 4 for 6 examples in batch entry 'x'; use a batch of 8"),
    "two lengths": ({"x": concrete.ones(4), "y": concrete.ones(8)}, "got 4 in 'x' and 8 in 'y'"),
    "a raw key": ({"x": concrete.ones(4), "key": jax.random.PRNGKey(0)}, "got 2 in 'key' and 4 in 'x'"),
    "weights of classes": (
        {"weights": concrete.ones(16), "x": concrete.ones(8)},
        "8 in 'x'; put arrays that all examples",
    ),
}


def test_a_batch_that_does_not_divide_is_refused():
    step = make_train_step(lambda p, s, b, r: (p * jnp.mean(b["x"]), s), accumulate_steps=4)
    for what, (batch, phrase) in BATCHES.items():
        refused(functools.partial(step, state_of(), batch), ValueError, phrase, what=what)


def test_a_batch_without_examples_is_refused_because_zero_gradients_change_params():
    tx = standard(optax.adam(0.1))

    def loss(params, model_state, batch, rng):
        return jnp.mean((batch["x"] * batch["scale"]) @ params), model_state

    step = make_train_step(loss, accumulate_steps=2, donate=False)
    state, _ = step(TrainState.create(params=concrete.ones(3), tx=tx), {"x": concrete.ones((2, 3)), "scale": 1.0})
    for use in (step, make_train_step(loss), make_eval_step(loss)):
        refused(
            lambda use=use: use(state, {"x": jnp.ones((0, 3)), "scale": 1.0}),
            ValueError,
            "must have at least one example",
        )
    updates, _ = jax.jit(lambda ones: tx.update(0 * ones, tx.update(ones, tx.init(ones))[1]))(concrete.ones(3))
    assert float(jnp.abs(updates).min()) > 0.01  # zero gradients do change params
    step(state, {"x": concrete.ones((2, 3)), "scale": 1.0, "ids": concrete.ones((0, 5))})  # one entry may be empty


def test_a_batch_without_arrays_may_be_accumulated():
    step = make_train_step(lambda p, s, b, r: ((p - 1) ** 2, s), accumulate_steps=2)
    assert step(state_of(), None)[1]["loss"] == step(state_of(), {})[1]["loss"]


def test_a_moving_average_must_be_created_with_the_state():
    params, batch = problem()
    phrase = "TrainState.create(..., ema=True)"
    for use in (
        lambda: make_train_step(train_loss, ema_decay=0.9)(state_of(params), batch),
        lambda: state_of(params).apply_gradients(grads=params, ema_decay=0.9),
        lambda: make_eval_step(train_loss, use_ema=True)(state_of(params), batch),
    ):
        refused(use, ValueError, phrase)
    refused(lambda: make_train_step(train_loss)(state_of(params, ema=True), batch), ValueError, "would never update")


def test_a_state_that_was_donated_is_refused():
    step, state = make_train_step(train_loss), state_of(problem()[0])
    new, _ = step(state, problem()[1])
    phrases = "'step' was donated to an earlier step", "use the state that the step returned"
    for again in (step, make_train_step(train_loss, policy="mixed_bfloat16"), make_eval_step(train_loss)):
        refused(functools.partial(again, state, problem()[1]), RuntimeError, *phrases)
    for use in (
        lambda: state.with_tx(state.tx),
        lambda: jaxmp.inspect.first_nonfinite(step)(state, problem()[1]),
        lambda: state.apply_gradients(grads=problem()[0]),
    ):
        refused(use, RuntimeError, *phrases)
    refused(
        lambda: TrainState.create(params=state.params, tx=state.tx), RuntimeError, "'params/hidden/", "was donated to"
    )
    step(new, problem()[1])


def test_params_that_were_donated_are_refused_with_the_remedy_under_grad_too():
    policy, model = jaxmp.get_policy("mixed_bfloat16"), jaxmp.linen.apply_policy(linen.Dense(1), "mixed_bfloat16")
    x = concrete.ones((2, 3))
    params = model.init(jax.random.key(0), x)["params"]
    state = state_of(params)
    make_train_step(lambda params, batch: model.apply({"params": params}, batch).mean())(state, x)

    def loss(params):
        return (x @ params["kernel"]).mean()

    calls = {
        "a model": lambda: jax.grad(lambda params: model.apply({"params": params}, x).mean())(params),
        "a bound model": lambda: model.bind({"params": params})(x),
        "autocast": lambda: jax.grad(jaxmp.autocast(loss, policy))(params),
        "autocast to float32": lambda: jax.grad(jaxmp.autocast(loss, "float32"))(params),
        "value_and_grad": lambda: jaxmp.value_and_grad(loss, state_of().opt_state)(params),
        "wrap": lambda: jax.grad(policy.wrap(loss))(params),
        "a cast": lambda: jaxmp.get_policy("bfloat16").cast_to_param(params),
    }
    for what, call in calls.items():
        noted(call, "write make_train_step(..., donate=False)", what=what)
