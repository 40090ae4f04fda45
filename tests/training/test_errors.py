"""What is wrong with a train step is said where it enters: the rule, what came, the remedy."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state as flax_train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizer_tools import problem, standard, train_loss

import jaxmp
from jaxmp import DynamicLossScale, TrainState, loss_scaling, make_eval_step, make_train_step

pytestmark = pytest.mark.once


def state_of(params=1.0, **fields):
    tx = loss_scaling(optax.sgd(0.1), DynamicLossScale())
    return TrainState.create(params=jax.tree.map(jnp.asarray, params), tx=tx, **fields)


@pytest.mark.parametrize(
    "wrong",
    [{"accumulate_steps": 0}, {"accumulate_steps": 2.0}, {"accumulate_steps": True}, {"max_consecutive_skips": 0}],
)
def test_numbers_of_steps_below_one_or_not_whole_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a whole number of at least 1, got"):
        make_train_step(train_loss, **wrong)


@pytest.mark.parametrize("decay", [1.0, -0.1, 1.5, float("nan"), "0.9", False, jnp.ones(2)], ids=repr)
def test_a_decay_that_is_no_decay_is_refused(decay):
    with pytest.raises(
        ValueError, match=r"ema_decay must lie in \[0, 1\), got .*; 0.999 averages over about 1,000 steps"
    ):
        make_train_step(train_loss, ema_decay=decay)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("dot", "dots"),
        ("fulll", "full"),
        ("save_only_these_names", ""),
        ("__class__", ""),
        ("nothing_savable", "nothing"),
    ],
)
def test_an_unknown_remat_policy_lists_those_there_are_nearest_first(name, nearest):
    with pytest.raises(ValueError, match=f"unknown remat policy '{name}'; known, nearest first: .?{nearest}") as error:
        make_train_step(train_loss, remat=name)
    for known in ("full", "dots_no_batch", "everything"):
        assert known in str(error.value)


def test_a_moving_average_must_be_asked_for_when_the_state_is_made():
    params, batch = problem()
    with pytest.raises(
        ValueError, match=r"ema_decay needs a moving average to update: TrainState.create\(..., ema=True"
    ):
        make_train_step(train_loss, ema_decay=0.9)(state_of(params), batch)
    with pytest.raises(
        ValueError, match=r"ema_decay needs a moving average to update: TrainState.create\(..., ema=True"
    ):
        state_of(params).apply_gradients(grads=params, ema_decay=0.9)
    with pytest.raises(
        ValueError, match=r"use_ema needs a state with a moving average: TrainState.create\(..., ema=True"
    ):
        make_eval_step(train_loss, use_ema=True)(state_of(params), batch)


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda p: p, "the loss alone"),
        (lambda p: jnp.stack([p, p]), r"float32 of shape \(2,\)"),
        (lambda p: (p,), "tuple of 1"),
        (lambda p: (p, None, {}, {}), "tuple of 4"),
        (lambda p: [p, None], "list of 2"),
        (lambda p: {"loss": p}, "dict"),
        (lambda p: None, "NoneType"),
    ],
)
@pytest.mark.parametrize("make", [make_train_step, make_eval_step])
def test_a_loss_function_that_returns_something_else_is_told_what_to_return(make, result, got):
    text = rf"returns \(loss, new_model_state\) or \(loss, new_model_state, metrics\), got {got}; write return"
    with pytest.raises(TypeError, match=text):
        make(lambda p, s, b, r: result(p))(state_of(), 1.0)


@pytest.mark.parametrize("make", [make_train_step, make_eval_step])
def test_metrics_must_be_a_dict_with_names_of_their_own(make):
    with pytest.raises(TypeError, match=r"metrics must be a dict of names and values, got float32 of shape \(\)"):
        make(lambda p, s, b, r: (p, s, p))(state_of(), 1.0)
    for name in ("loss", "grad_norm", "loss_scale", "skipped"):
        text = f"the step reports loss, grad_norm, loss_scale, skipped itself, got a metric '{name}'; rename it"
        with pytest.raises(ValueError, match=text):
            make(lambda p, s, b, r, name=name: (p, s, {"other": p, name: p}))(state_of(), 1.0)


class Label:
    """What is no array, as a metric."""


@pytest.mark.parametrize(
    ("metrics", "got"),
    [
        ({1: jnp.ones(())}, "the name 1; write '1', say"),
        ({1: jnp.ones(()), "a": 1.0}, "the name 1"),
        ({"a": "text"}, "str for 'a'; leave it out, or return a number for it"),
        ({"a": np.array("text")}, "ndarray for 'a'"),
        ({"a": {"b": [1.0, Label()]}}, "Label for 'a/b/1'"),
        ({"a": jax.random.key(0)}, "for 'a'; leave it out"),
    ],
)
@pytest.mark.parametrize("make", [make_train_step, make_eval_step])
def test_metrics_are_numbers_by_names_that_are_strings(make, metrics, got):
    said = "a loss function's metrics must be arrays or numbers by names that are strings, got "
    with pytest.raises(TypeError, match=f"{said}.*{re.escape(got)}"):
        make(lambda p, s, b, r: (p, s, metrics))(state_of(), 1.0)
    _, found = make_train_step(lambda p, s, b, r: (p, s, {"a": {"b": [True, p]}, "c": None}))(state_of(), 1.0)
    assert found["a"]["b"][0] and found["a"]["b"][1] == 1


def test_a_batch_without_arrays_may_be_accumulated():
    step = make_train_step(lambda p, s, b, r: ((p - 1) ** 2, s), accumulate_steps=2)
    assert step(state_of(), None)[1]["loss"] == step(state_of(), {})[1]["loss"]


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_model_state_of_another_structure_is_refused(accumulate_steps):
    given = {"batch_stats": {"mean": jnp.zeros(2)}}
    for returned in ({"batch_stats": {}}, None, {**given, "cache": jnp.zeros(1)}):
        step = make_train_step(
            lambda p, s, b, r, new=returned: (p * jnp.mean(b), new), accumulate_steps=accumulate_steps
        )
        with pytest.raises(
            ValueError, match=r"must return a model state of the structure it was given, but .*return None"
        ):
            step(state_of(model_state=given), jnp.ones(2))
    step = make_train_step(lambda p, s, b, r: (p * jnp.mean(b), given), accumulate_steps=accumulate_steps)
    with pytest.raises(ValueError, match=r"pass the whole of it to TrainState.create\(model_state=…\)"):
        step(state_of(), jnp.ones(2))


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_metrics_in_the_place_of_the_model_state_are_told_from_it(accumulate_steps):
    step = make_train_step(
        lambda p, s, b, r: (p * jnp.mean(b), {"accuracy": jnp.ones(()), "n": b[0]}), accumulate_steps=accumulate_steps
    )
    said = (
        "it was given None and returned a dict of 'accuracy', 'n': for metrics, return loss, model_state, metrics; "
        "for a model state, pass the whole of it to TrainState.create(model_state=…)"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        step(state_of(), jnp.ones(2))


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: loss_scaling(tx, DynamicLossScale())])
def test_lookahead_is_refused_with_the_way_by_hand_which_works(wrap):
    tx = wrap(standard(optax.lookahead(optax.sgd(0.5), 1, 0.5)))
    pair = optax.LookaheadParams.init_synced({"w": jnp.array([2.0])})
    said = r"one tree of params, .*, got optax.lookahead, which updates a pair .*; call tx.init\(pair\) .* by hand"
    with pytest.raises(ValueError, match=said):
        TrainState.create(params=pair, tx=tx)
    if isinstance(opt_state := tx.init(pair), optax.LookaheadState):
        return
    _, grads = jaxmp.value_and_grad(lambda params: jnp.sum(params["w"] ** 2), opt_state)(pair.fast)
    updates, _ = tx.update(grads, opt_state, pair)
    new = optax.apply_updates(pair, updates)
    assert new.fast["w"] == new.slow["w"] == 1.0  # half of the way from 2 to 2 - 0.5 * 4


def test_a_line_search_is_refused_with_the_way_by_hand_which_works():
    def loss_of(params):
        return jnp.sum(params["w"] ** 2)

    params, tx = {"w": jnp.array([2.0])}, loss_scaling(standard(optax.lbfgs()), DynamicLossScale())
    step = make_train_step(lambda params, s, b, r: (loss_of(params), s))
    said = r"gives an optimizer the gradients, .* says: .*'value_fn'; a line search .* needs a step of your own"
    with pytest.raises(TypeError, match=said):
        step(TrainState.create(params=params, tx=tx), jnp.ones(2))
    opt_state = tx.init(params)
    loss, grads = jaxmp.value_and_grad(loss_of, opt_state)(params)
    updates, _ = tx.update(grads, opt_state, params, value=loss, grad=grads, value_fn=loss_of)
    assert loss_of(optax.apply_updates(params, updates)) < loss


def test_an_estimate_of_the_hessian_is_refused_with_the_way_by_hand_which_works():
    def loss_of(params, *_):
        return jnp.sum(params["w"] ** 2)

    params, tx = {"w": jnp.array([2.0])}, loss_scaling(standard(optax.contrib.sophia(0.1)), DynamicLossScale())
    said = r"says: obj_fn must be provided .* needs a step of your own: .*sophia\), with obj_fn=loss_of_params"
    with pytest.raises(TypeError, match=said):
        make_train_step(lambda params, s, b, r: (loss_of(params), s))(
            TrainState.create(params=params, tx=tx), jnp.ones(2)
        )
    opt_state = tx.init(params)
    loss, grads = jaxmp.value_and_grad(loss_of, opt_state)(params)
    updates, _ = tx.update(grads, opt_state, params, obj_fn=loss_of)
    assert loss_of(optax.apply_updates(params, updates)) < loss


def test_an_optimizer_that_makes_gradients_itself_is_refused_with_the_way_by_hand_which_works():
    def loss_of(params, *_):
        return jnp.sum(params["w"] ** 2)

    params = {"w": jnp.array([2.0])}
    tx = loss_scaling(
        standard(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)), DynamicLossScale()
    )
    said = r"says: grad_fn must be provided when opaque_mode=True; a line search .*, with grad_fn= of the loss itself"
    with pytest.raises(TypeError, match=said):
        make_train_step(lambda params, s, b, r: (loss_of(params), s))(
            TrainState.create(params=params, tx=tx), jnp.ones(2)
        )
    opt_state = tx.init(params)
    loss, grads = jaxmp.value_and_grad(loss_of, opt_state)(params)
    updates, _ = tx.update(grads, opt_state, params, grad_fn=jax.grad(loss_of))
    assert loss_of(optax.apply_updates(params, updates)) < loss


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_model_state_of_another_shape_is_refused(accumulate_steps):
    step = make_train_step(lambda p, s, b, r: (p * jnp.mean(b), jnp.ones(3)), accumulate_steps=accumulate_steps)
    with pytest.raises(ValueError, match=r"model state of the shapes it was given, but '' had \(\) and has \(3,\)"):
        step(state_of(model_state=jnp.ones(())), jnp.ones(2))


def test_a_batch_that_does_not_divide_is_named():
    step = make_train_step(lambda p, s, b, r: (p * jnp.mean(b["x"]["y"]), s), accumulate_steps=4)
    text = "accumulate_steps must divide the batch, got 4 for 6 examples in batch entry 'x/y'; use a batch of 8, say"
    with pytest.raises(ValueError, match=re.escape(text)):
        step(state_of(), {"x": {"y": jnp.ones(6)}})
    step = make_train_step(lambda p, s, b, r: (p * jnp.mean(b), s), accumulate_steps=4)
    with pytest.raises(ValueError, match="got 4 for 6 examples in the batch; use a batch of 8, say"):
        step(state_of(), jnp.ones(6))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_microbatches_are_whole_on_each_device_where_types_say_where_they_lie(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    examples = np.arange(32, dtype=np.float32)

    def stepped(n):
        state = jax.device_put(state_of(), NamedSharding(mesh, P()))
        batch = {"x": jax.device_put(examples, NamedSharding(mesh, P("data")))}
        return make_train_step(lambda p, s, b, r: (jnp.mean(p * b["x"]), s), accumulate_steps=n)(state, batch)

    for n in (1, 2, 8):
        new, metrics = stepped(n)
        assert metrics["loss"] == examples.mean()
        np.testing.assert_allclose(new.params, 1 - 0.1 * examples.mean(), rtol=1e-6)
    if kind is AxisType.Auto:
        assert stepped(16)[1]["loss"] == examples.mean()  # of two examples each, for four devices
        return
    said = (
        "the 4 devices that a batch is split over on axes of type Explicit must divide each of its microbatches, got "
        "accumulate_steps=16 for 32 examples in batch entry 'x', 2 in each; use a batch of 64, say, or fewer "
        "accumulate_steps"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        stepped(16)


def test_a_float16_loss_is_refused_by_the_step_and_taken_by_the_evaluation():
    def loss(params, model_state, batch, rng):
        return jnp.sum(params).astype(jnp.float16), model_state

    with pytest.raises(TypeError, match="a loss to be scaled must be float32, got float16"):
        make_train_step(loss)(state_of(), 1.0)
    assert make_eval_step(loss)(state_of(), 1.0)["loss"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda p: p * jnp.ones(3), r"got float32 of shape \(3,\); take its mean: jnp.mean\(loss\)"),
        (lambda p: None, r"got NoneType; return \(loss, new_model_state\), in this order"),
        (lambda p: {"loss": p}, "got dict; return"),
        (lambda p: 1, r"got int32 of shape \(\); compute it from floating values"),
    ],
)
@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
@pytest.mark.parametrize("make", [make_train_step, make_eval_step])
def test_a_loss_that_is_no_floating_scalar_is_described(make, policy, loss, text):
    with pytest.raises(TypeError, match=f"a loss must be a floating scalar, {text}"):
        make(lambda p, s, b, r: (loss(p), s), policy=policy)(state_of(), 1.0)


@pytest.mark.parametrize("make", [make_train_step, make_eval_step])
def test_a_loss_function_of_other_arguments_is_told_which_it_gets_before_any_step(make):
    with pytest.raises(
        TypeError,
        match=r"takes \(params, model_state, batch, rng\), but this one takes \(params, batch\); write def loss_fn",
    ):
        make(lambda params, batch: params)
    with pytest.raises(TypeError, match=r"takes \(p, s, b, r, \*, train\); write"):
        make(lambda p, s, b, r, *, train: (p, s))
    with pytest.raises(TypeError, match="a loss function must be callable, got 3; write def"):
        make(3)
    with pytest.raises(
        TypeError, match=r": an NNX model is trained by jaxmp\.nnx\.make_train_step\(loss_fn\).*nnx\.jit"
    ):
        make(lambda model, batch: model(batch))
    with pytest.raises(TypeError, match=r"takes \(model, batch\), but this one takes \(p, s, b, r\); .*batch\)$"):
        jaxmp.nnx.make_train_step(lambda p, s, b, r: (p, s))
    make(lambda *args: args[:2])(state_of(), 1.0)


def test_a_state_that_a_step_has_had_is_told_from_the_one_it_returned():
    step, state = make_train_step(train_loss), state_of(problem()[0])
    new, _ = step(state, problem()[1])
    text = r"to a donating step once only, but 'step' in this one is gone: .*; go on with the state that the step ret"
    for again in (step, make_train_step(train_loss, policy="mixed_bfloat16"), make_eval_step(train_loss)):
        with pytest.raises(RuntimeError, match=text):
            again(state, problem()[1])
    uses = (
        state.with_tx,
        lambda _: jaxmp.inspect.first_nonfinite(step)(state, problem()[1]),
        lambda _: state.apply_gradients(grads=problem()[0]),
    )
    for use in uses:
        with pytest.raises(RuntimeError, match=text):
            use(state.tx)
    with pytest.raises(RuntimeError, match=r"but 'params/hidden/.' in this one is gone"):
        TrainState.create(params=state.params, tx=state.tx)
    step(new, problem()[1])


def away(params, model_state, batch, rng):
    """How far the params are from the target in the batch."""
    distances = jax.tree.map(lambda param, target: jnp.mean((param - target) ** 2), params, batch["target"])
    return jax.tree.reduce(jnp.add, distances) * jnp.mean(batch["x"]), model_state


@pytest.mark.parametrize("on_device", [False, True])
def test_an_array_of_the_state_in_the_batch_is_named_with_the_copy_to_make(on_device):
    params, x = {"a": jnp.ones(3), "b": jnp.zeros(2)}, jnp.ones(4)
    x = jax.device_put(x, jax.devices()[0]) if on_device else x  # to which the state is moved, by reference
    step, state = make_train_step(away), state_of(params)
    said = (
        "a donating step deletes the arrays of the state that it is given, so that a batch must have none of them, but "
        "entry 'target/{}' of it is {}; copy it before the step, jax.tree.map(jnp.copy, state.params), say, or make "
        "the step with make_train_step(..., donate=False)"
    )
    with pytest.raises(RuntimeError, match=re.escape(said.format("b", "'params/b' of this state"))):
        step(state, {"x": x, "target": {"a": jnp.ones(3), "b": state.params["b"]}})
    copied = jax.tree.map(jnp.copy, state.params)
    assert make_train_step(away, donate=False)(state, {"x": x, "target": state.params})[1]["loss"] == 0
    old = state.params
    state, metrics = step(state, {"x": x, "target": copied})
    assert metrics["loss"] == 0
    for again in (step, make_eval_step(away)):
        with pytest.raises(
            RuntimeError,
            match=re.escape("entry 'target/a' of it is gone with an earlier state; copy it before the step"),
        ):
            again(state, {"x": x, "target": old})
    step(state, {"x": x, "target": copied})


@pytest.mark.parametrize(
    ("state_on", "batch_on", "remedy"),
    [
        (
            0,
            "mesh",
            "'state/step' put on cpu:0 and others on cpu:0, cpu:1; write jax.device_put(state, jax",
        ),
        ("mesh", 2, "'batch' put on cpu:2 and others on cpu:0, cpu:1; write jax.device_put(batch, jax"),
        (0, 1, "'batch' put on cpu:1 and others on cpu:0; write jax.device_put(batch, device)"),
    ],
)
def test_arrays_put_on_different_devices_are_named_with_where_they_must_be(state_on, batch_on, remedy):
    step, devices = make_train_step(lambda p, s, batch, r: (jnp.mean(p * batch), s), donate=False), jax.devices()
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:2])
    places = [*devices, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())]
    state, batch = (
        jax.device_put(tree, places[-1 if where == "mesh" else where])
        for tree, where in ((state_of(), state_on), (jnp.ones(4), batch_on))
    )
    with pytest.raises(
        ValueError, match="the state and the batch of a step must be on the same devices, got"
    ) as raised:
        step(state, batch)
    assert remedy in str(raised.value).replace("TFRT_CPU_", "cpu:")
    mended = jax.device_put((state, batch), places[-1 if "mesh" in (state_on, batch_on) else 0])
    step(state_of(), batch)  # a state that was put nowhere goes where the batch is
    step(*mended)


@pytest.mark.parametrize("make", [make_train_step, make_eval_step])
def test_another_state_than_ours_is_named_with_what_makes_ours(make):
    flax_state = flax_train_state.TrainState.create(apply_fn=None, params=jnp.ones(2), tx=optax.sgd(0.1))
    text = r"takes a jaxmp.TrainState and a batch, got {} as the state; make it with jaxmp.TrainState.create\("
    with pytest.raises(TypeError, match=text.format("flax.training.train_state.TrainState")):
        make(train_loss)(flax_state, 1.0)
    with pytest.raises(TypeError, match=text.format("dict")):
        make(train_loss)({"w": jnp.ones(2)}, 1.0)
    with pytest.raises(TypeError, match=text.format("flax.training.train_state.TrainState")):
        jaxmp.inspect.first_nonfinite(make_train_step(train_loss))(flax_state, 1.0)


@pytest.mark.parametrize("make", [make_train_step, make_eval_step])
def test_arguments_in_another_order_are_described(make):
    step, batch = make(train_loss), problem()[1]
    for use in (step, step.jitted):
        for wrong, came in ((jnp.ones((8, 4)), r"float32 of shape \(8, 4\)"), (batch, "dict")):
            with pytest.raises(TypeError, match=f"takes a jaxmp.TrainState and a batch, got {came} as the state; make"):
                use(wrong, state_of())
    with pytest.raises(TypeError, match="got str as the state"):
        step("text", state_of())


@pytest.mark.parametrize(
    ("rng", "came"),
    [
        (0.5, "0.5"),
        ("0", "'0'"),
        (True, "True"),
        ({"dropout": jax.random.key(0)}, "dict"),
        (jax.random.split(jax.random.key(0), 3), r"key<fry> of shape \(3,\)"),
        (jax.random.split(jax.random.PRNGKey(0), 3), r"uint32 of shape \(3, 2\)"),
        (jnp.zeros((), jnp.int32), r"int32 of shape \(\)"),
    ],
)
def test_what_is_no_key_is_refused_when_the_state_is_made(rng, came):
    with pytest.raises(TypeError, match=f"rng must be one PRNG key, or an int to make it of, got {came}; pass jax.ra"):
        state_of(rng=rng)


@pytest.mark.parametrize("rng", [3, np.int64(3), jax.random.key(3), jax.random.PRNGKey(3), np.array([0, 3], np.uint32)])
def test_a_key_is_a_key_whatever_it_is_made_of(rng):
    found = state_of(rng=rng).rng
    assert (jax.random.uniform(found) == jax.random.uniform(jax.random.key(3))).all()


@pytest.mark.parametrize(
    ("params", "came"),
    [
        (None, "None"),
        ({}, "{}"),
        ("text", "str for 'the params'"),
        ({"a": jnp.ones(2), "b": ["c"]}, "str for 'b/0'"),
        ({"a": np.array(["b"])}, "ndarray of str32 for 'a'"),
    ],
    ids=["none", "empty", "text", "leaf", "texts"],
)
def test_params_that_are_no_arrays_are_refused_when_the_state_is_made(params, came):
    with pytest.raises(TypeError, match=f"params are a tree of arrays, got {came}; pass what is trained, params="):
        TrainState.create(params=params, tx=optax.sgd(0.1))


@pytest.mark.parametrize(
    ("state", "came"), [("text", "str for 'the model state'"), ({"a": {"b": "c"}}, "str for 'a/b'")]
)
def test_a_model_state_that_is_no_array_is_refused_when_the_state_is_made(state, came):
    with pytest.raises(
        TypeError, match=f"model_state is a tree of arrays, which the loss .* got {came}; leave all else"
    ):
        state_of(model_state=state)


@pytest.mark.parametrize("ema", [0.999, "no", None])
def test_a_decay_is_no_flag(ema):
    with pytest.raises(TypeError, match=rf"ema is True or False, got {ema!r}; .* make_train_step\(ema_decay=0.999\)"):
        state_of(ema=ema)


@pytest.mark.parametrize("make", [make_train_step, jaxmp.make_eval_step])
@pytest.mark.parametrize("overrides", [3, ["**/head"]])
def test_overrides_without_a_policy_are_a_mapping_first(make, overrides):
    with pytest.raises(TypeError, match=r"overrides map patterns to policies, got .*; write "):
        make(lambda *args: args, overrides=overrides)


@pytest.mark.parametrize("make", [make_train_step, jaxmp.nnx.make_train_step])
def test_donate_is_no_text(make):
    with pytest.raises(TypeError, match="donate is True or False, got 'no'; pass donate=False to keep the states"):
        make(lambda *args: args, donate="no")


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_batch_without_examples_is_refused_for_its_gradients_are_zeros_that_move_params(accumulate_steps):
    tx = standard(optax.adam(0.1))

    def loss(params, model_state, batch, rng):
        return jnp.mean((batch["x"] * batch["scale"]) @ params), model_state

    step = make_train_step(loss, accumulate_steps=accumulate_steps, donate=False)
    state, _ = step(TrainState.create(params=jnp.ones(3), tx=tx), {"x": jnp.ones((2, 3)), "scale": 1.0})
    for each in (step, make_eval_step(loss)):
        with pytest.raises(ValueError, match=r"must have an example, got arrays of shape \(0, 3\); leave out the step"):
            each(state, {"x": jnp.ones((0, 3)), "scale": 1.0})
    updates, _ = tx.update(jnp.zeros(3), tx.update(jnp.ones(3), tx.init(jnp.ones(3)))[1])
    assert float(jnp.abs(updates).min()) > 0.01  # what it would have done
    step(state, {"x": jnp.ones((2, 3)), "scale": 1.0, "ids": jnp.ones((0, 5))})  # one entry may be empty


def test_a_raw_key_of_random_numbers_in_a_batch_that_is_split_is_named():
    step = make_train_step(lambda p, s, b, r: (jnp.mean(b["x"] * p), s), accumulate_steps=2)
    for key in (jax.random.PRNGKey(0), np.zeros(2, np.uint32)):
        with pytest.raises(ValueError, match=r"a raw key of random numbers is an array, .*: pass jax.random.key\(0\)"):
            step(state_of(1.0), {"x": jnp.ones(4), "key": key})
    with pytest.raises(ValueError, match=r"closes over it(\n|$)"):
        step(state_of(1.0), {"x": jnp.ones(4), "weights": jnp.ones(2)})
    step(state_of(1.0), {"x": jnp.ones(4), "key": jax.random.key(0)})


def test_params_without_gradients_are_refused():
    with pytest.raises(TypeError, match="only floating params have gradients, got 'ids' of dtype int32; move it out"):
        make_train_step(lambda p, s, b, r: (p["w"], s))(state_of({"w": 1.0, "ids": 1}), 1.0)


def test_an_optimizer_with_several_loss_scales_is_refused_when_the_state_is_made():
    parts = {name: loss_scaling(optax.sgd(0.1), DynamicLossScale()) for name in "ab"}
    tx = optax.multi_transform(parts, {"x": "a", "y": "b"})
    with pytest.raises(ValueError, match="one loss has one scale, but this optimizer's state has 2"):
        TrainState.create(params={"x": jnp.ones(()), "y": jnp.ones(())}, tx=tx)


def test_what_training_stops_with_is_an_arithmetic_error():
    assert issubclass(jaxmp.NonFiniteTrainingError, ArithmeticError)


def test_a_policy_for_recomputation_that_is_none_is_refused():
    with pytest.raises(
        TypeError, match=r'remat must be None, the name of a policy or a policy .*got True; "full" reco'
    ):
        make_train_step(train_loss, remat=True)


def test_a_loss_scale_in_place_of_the_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"must be one of optax's, got an instance of DynamicLossScale; write optax"):
        TrainState.create(params=jnp.ones(2), tx=DynamicLossScale())


def test_a_loss_scale_is_never_printed_whole():
    scale, model = DynamicLossScale(), linen.Dense(2)
    for call in (
        lambda: jaxmp.loss_scaling(scale, optax.sgd(0.1)),
        lambda: jaxmp.low_precision(scale),
        lambda: jaxmp.linen.apply_policy(model, scale),
        lambda: jaxmp.autocast(train_loss, scale),
        lambda: make_train_step(train_loss, policy=scale),
    ):
        with pytest.raises(TypeError, match="got an instance of DynamicLossScale;") as raised:
            call()
        assert "period" not in str(raised.value) and len(str(raised.value)) < 300


def test_what_a_step_returned_is_to_be_unpacked():
    step, (params, batch) = make_train_step(train_loss, donate=False), problem()
    returned = step(state_of(params), batch)
    for use in (step, jaxmp.inspect.first_nonfinite(step), jaxmp.inspect.compare(step)):
        with pytest.raises(TypeError, match=r"a step returned .*; unpack it: state, metrics = step\(state, batch\)$"):
            use(returned, batch)


@pytest.mark.parametrize(
    ("leaf", "came"),
    [
        (["a", "b"], "got str for 'name/0'"),
        (np.array(["a", "b"]), "got ndarray of str32 for 'name'"),
        (np.array([None, {}], object), "got ndarray of object for 'name'"),
        (object(), "got object for 'name'"),
    ],
    ids=["list", "texts", "objects", "object"],
)
def test_a_batch_with_what_is_no_array_is_refused_with_its_place(leaf, came):
    for make in (functools.partial(make_train_step, donate=False), make_eval_step):
        step = make(lambda p, s, batch, r: (jnp.mean(p * batch["x"]), s))
        with pytest.raises(TypeError, match=f"a batch holds arrays and numbers, {re.escape(came)}; leave it out of"):
            step(state_of(), {"x": jnp.ones(2), "name": leaf})


def test_a_loss_function_that_needs_what_the_state_was_not_given_is_told_what_to_give():
    def notes(draw, **given):
        def loss_fn(params, model_state, batch, rng):
            return params * draw(model_state, rng), model_state

        with pytest.raises((TypeError, ValueError, ZeroDivisionError)) as raised:
            make_train_step(loss_fn, donate=False)(state_of(**given), jnp.ones(2))
        return [note for note in getattr(raised.value, "__notes__", ()) if note.startswith("jaxmp: ")]

    (note,) = notes(lambda state, rng: jax.random.normal(rng))
    assert note.endswith("does this one need TrainState.create(model_state=…, rng=…)?")
    (note,) = notes(lambda state, rng: state["batch_stats"]["mean"], rng=0)
    assert note.endswith("does this one need TrainState.create(model_state=…)?")
    assert not notes(lambda state, rng: 1 / 0)  # an error that tells of no None
    assert not notes(lambda state, rng: None + 1.0, rng=0, model_state={"mean": jnp.ones(())})


def test_an_nnx_step_says_nothing_of_a_train_state():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1))
    with pytest.raises(TypeError, match="NoneType") as raised:
        jaxmp.nnx.make_train_step(lambda model, batch: model(batch) + None)(model, optimizer, jnp.ones((1, 2)))
    assert not [note for note in getattr(raised.value, "__notes__", ()) if note.startswith("jaxmp: ")]
