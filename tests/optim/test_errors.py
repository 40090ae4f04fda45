"""Mistakes with loss scaling raise an error that says what to write."""

from __future__ import annotations

import dataclasses
import math

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_tools import refused
from flax import nnx
from loss_scale_tools import TRACES
from optimizer_tools import standard

import jaxmp
from jaxmp import DynamicLossScale, HeadroomLossScale, StaticLossScale, loss_scaling, value_and_grad
from jaxmp.base.dtypes import UnknownDtypeError

pytestmark = pytest.mark.once

SGD = optax.sgd(0.1)


def tx_of(inner=None):
    return loss_scaling(inner or optax.sgd(0.1), DynamicLossScale())


def state():
    return tx_of().init(jnp.ones(2))


def adam_state():
    return optax.adam(1e-3).init(jnp.ones(2))


WRAP = "wrap the optimizer, tx = jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale())"
PAIR = {"a": concrete.ones(2), "b": concrete.ones(2)}


AB = {"a": "x", "b": "y"}


def partition(other, a=None):
    return optax.partition({"x": a or tx_of(), "y": other}, AB)


def all_x(params):
    return jax.tree.map(lambda _: "x", params)


def loss_of_pair(params):
    return jnp.sum(params["a"] * params["b"])


MISTAKES = {
    "arguments of loss_scaling": {
        "a number as the scale": (
            lambda: loss_scaling(SGD, 2.0**15),
            TypeError,
            "got 32768.0; write jaxmp.DynamicLossScale",
        ),
        "a scale's class": (lambda: loss_scaling(SGD, DynamicLossScale), TypeError, "DynamicLossScale()"),
        "swapped": (lambda: loss_scaling(DynamicLossScale(), SGD), TypeError, "an optax transform, got an"),
        "grad_norm as a number": (
            lambda: loss_scaling(SGD, DynamicLossScale(), grad_norm=1.0),
            TypeError,
            "put optax.clip_by_global_norm(1.0) inside loss_scaling",
        ),
    },
    "how many scales there are": {
        "twice": (lambda: tx_of(tx_of()).init(jnp.ones(2)), ValueError, "loss_scaling was put inside loss_scaling"),
        "twice in a chain": (
            lambda: tx_of(optax.chain(optax.clip(1.0), tx_of())).init(jnp.ones(2)),
            ValueError,
            "remove the inner loss_scaling",
        ),
        "twice by hand": (
            lambda: jaxmp.wrap_opt_state(state(), DynamicLossScale()),
            ValueError,
            "remove the inner loss_scaling",
        ),
        "none in get_loss_scale": (lambda: jaxmp.get_loss_scale(adam_state()), ValueError, WRAP),
        "none in value_and_grad": (lambda: value_and_grad(jnp.sum, adam_state()), ValueError, WRAP),
        "two": (
            lambda: jaxmp.get_loss_scale(optax.chain(tx_of(), tx_of()).init(jnp.ones(2))),
            ValueError,
            "one loss scale, got 2; put one loss_scaling around the whole optimizer",
        ),
        **{
            f"Adam {place}": (
                lambda tx=tx: value_and_grad(jnp.sum, tx.init(jnp.ones(2))),
                ValueError,
                "loss_scaling must be around all transforms with a state, got ScaleByAdamState beside it",
            )
            for place, tx in {
                "after it": optax.chain(tx_of(), optax.adam(0.1)),
                "before it": optax.chain(optax.scale_by_adam(), tx_of()),
                "after it in a named chain": optax.named_chain(("scaled", tx_of()), ("adam", optax.adam(0.1))),
                "after the chain of it": optax.chain(optax.chain(tx_of(), optax.identity()), optax.adam(0.1)),
            }.items()
        },
        **{
            f"{place} that does not cover all params": (
                lambda tx=tx: value_and_grad(loss_of_pair, tx.init(PAIR)),
                ValueError,
                "must be around the whole optimizer, got it inside of a partition or a mask: it does not skip the "
                "steps of the other params;\nwrite loss_scaling(optax.partition(...), loss_scale)",
            )
            for place, tx in {
                "a partition with momentum": partition(optax.sgd(0.1, momentum=0.9)),
                "a partition without a state": partition(optax.scale(-0.1)),
                "a partition with set_to_zero": partition(optax.set_to_zero()),
                "a multi_transform": optax.multi_transform({"x": tx_of(), "y": optax.scale_by_learning_rate(0.1)}, AB),
                "a partition in a chain": optax.chain(optax.clip(1.0), partition(optax.scale(-0.1))),
                "a partition in a partition": partition(optax.scale(-0.1), a=optax.partition({"x": tx_of()}, all_x)),
                "a mask": optax.masked(tx_of(), {"a": True, "b": False}),
                "a mask in a chain": optax.chain(
                    optax.masked(tx_of(), {"a": True, "b": False}),
                    optax.masked(optax.scale(-0.1), {"a": False, "b": True}),
                ),
            }.items()
        },
        "the params as its state": (
            lambda: value_and_grad(jnp.sum, {"w": jnp.ones(2)}),
            ValueError,
            "an optimizer's state with a loss scale is needed, got dict; wrap the optimizer, tx = ",
        ),
        "a model as the loss": (
            lambda: value_and_grad(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), state()),
            TypeError,
            "jaxmp.value_and_grad takes a loss function, got an instance of Linear; pass a function that calls",
        ),
        "the optimizer as its state": (
            lambda: value_and_grad(jnp.sum, tx_of()),
            ValueError,
            "and pass opt_state = tx.init(params)",
        ),
    },
    "params": {
        "with a function": (
            lambda: value_and_grad(lambda p: jnp.sum(p["w"]), state())({"w": jnp.ones(2), "act": jnp.tanh}),
            TypeError,
            "got the function 'tanh' at 'act';\nfor a model of Equinox, write params, static = eqx.partition(",
        ),
        "with a function in the last argument": (
            lambda: value_and_grad(lambda x, p: jnp.sum(p["w"]), state(), argnums=-1)(
                {"act": jnp.tanh}, {"w": jnp.ones(2), "act": jnp.cos}
            ),
            TypeError,
            "got the function 'cos' at 'act'",
        ),
        "of a state with a function": (
            lambda: jaxmp.TrainState.create(params={"w": jnp.ones(2), "act": jnp.tanh}, tx=SGD),
            TypeError,
            "TrainState.create takes params that are arrays, got the function 'tanh' at 'act'",
        ),
    },
    "losses": {
        "float16": (
            lambda: value_and_grad(lambda p: jnp.sum(p.astype(jnp.float16)), state())(jnp.ones(2)),
            TypeError,
            "logits.astype(jnp.float32)",
        ),
        "aux without a pair": (
            lambda: value_and_grad(lambda p: jnp.sum(p), state(), has_aux=True)(jnp.ones(2)),
            TypeError,
            "with has_aux=True the function returns (loss, aux), got float32",
        ),
        "a pair the other way round": (
            lambda: value_and_grad(lambda p: ({}, jnp.sum(p)), state(), has_aux=True)(jnp.ones(2)),
            TypeError,
            "return (loss, aux), in this order",
        ),
        "a pair without has_aux": (
            lambda: value_and_grad(lambda p: (jnp.sum(p), p), state())(jnp.ones(2)),
            TypeError,
            "got tuple of 2; pass has_aux=True",
        ),
        "several": (lambda: value_and_grad(lambda p: p, state())(jnp.ones(2)), TypeError, "its mean: jnp.mean(loss)"),
        "an integer": (
            lambda: value_and_grad(jnp.argmax, state())(jnp.ones(2)),
            TypeError,
            "got int32 of shape (); compute it from floating values",
        ),
    },
    "updates": {
        "of another optimizer's state": (
            lambda: tx_of().update(jnp.ones(2), adam_state(), jnp.ones(2)),
            TypeError,
            "got tuple; call tx.init again",
        ),
        "that would be broadcast": (
            lambda: tx_of().update({"a": jnp.ones(1)}, tx_of().init({"a": jnp.ones(2)}), {"a": jnp.ones(2)}),
            ValueError,
            "the update of 'a' has the shape (1,), but its param has (2,)",
        ),
        "kept inside MultiSteps": (
            lambda: jaxmp.keep_if_skipped(optax.MultiSteps(tx_of(), 2).init(jnp.ones(2)), 1.0, 0.0),
            ValueError,
            "loss_scaling must see every step, got it inside of MultiStepsState; put it around",
        ),
        "inside apply_if_finite": (
            lambda: value_and_grad(jnp.sum, optax.apply_if_finite(optax.chain(tx_of()), 3).init(jnp.ones(2))),
            ValueError,
            "loss_scaling must see every step, got it inside of ApplyIfFiniteState; put it around",
        ),
        "a state inside MultiSteps": (
            lambda: jaxmp.TrainState.create(params=jnp.ones(2), tx=optax.MultiSteps(tx_of(), 2)),
            ValueError,
            "jaxmp.loss_scaling(optax.MultiSteps(tx, 4), loss_scale)",
        ),
    },
    "loss scales": {
        "a half flag": (
            lambda: DynamicLossScale().adjust(jnp.float32(1)),
            ValueError,
            "grads_finite must be a boolean scalar, got float32 of shape (); pass jaxmp.jmp.all_finite(grads)",
        ),
        "several flags": (
            lambda: HeadroomLossScale().adjust(jnp.array([True]), 1.0),
            ValueError,
            "grads_finite must be a boolean scalar, got bool of shape (1,)",
        ),
        "headroom without the largest gradient": (
            lambda: HeadroomLossScale().adjust(True),
            ValueError,
            "HeadroomLossScale needs grad_max",
        ),
        "a tracer as a static number": (
            lambda: jax.jit(lambda x: DynamicLossScale(factor=x))(2.0),
            ValueError,
            "factor must be a finite number above 1, got ",
        ),
        "a disabled GradScaler": (lambda: DynamicLossScale.from_torch({}), KeyError),
        "a dead GradScaler": (
            lambda: DynamicLossScale.from_torch({**TRACES["backoff to nothing"]["start"], "scale": 0.0}),
            ValueError,
            "loss_scale must be positive and finite",
        ),
        "the words of torch": (
            lambda: DynamicLossScale(init_scale=2.0, growth_interval=100),
            TypeError,
            "DynamicLossScale got the argument 'init_scale', which is called 'loss_scale' here; write loss_scale=...",
        ),
        "an argument that there is not": (lambda: DynamicLossScale(inital_scale=2.0), TypeError, "'inital_scale'"),
        "a replaced factor": (
            lambda: dataclasses.replace(DynamicLossScale(), factor=0.5),
            ValueError,
            "factor must be a finite number above 1",
        ),
    },
}


@pytest.mark.parametrize("about", MISTAKES)
def test_a_mistake_is_refused(about):
    for what, (call, kind, *phrases) in MISTAKES[about].items():
        refused(call, kind, *phrases, what=what)


BAD_FIELDS = [
    *(({"loss_scale": bad}, "loss_scale must be positive and finite") for bad in (0, -1.0, math.nan, math.inf, 1e-40)),
    *(({"loss_scale": bad}, "2**15 is a usual") for bad in (1e39, "big", None, object(), concrete.zeros(()))),
    ({"factor": 1}, "factor must be a finite number above 1, got 1: growth multiplies by it"),
    ({"factor": math.nan}, "factor must be a finite number above 1, got nan"),
    ({"factor": math.inf}, "factor must be a finite number above 1, got inf"),
    ({"backoff": 0}, "backoff must be between 0 and 1, both excluded, got 0: None stands for 1/factor"),
    ({"backoff": 1.0}, "backoff must be between 0 and 1, both excluded, got 1.0"),
    ({"period": 0}, "period must be a whole number of steps, from 1 to"),
    ({"period": 2.5}, "period must be a whole number"),
    ({"period": 2**31}, "period must be a whole number"),
    ({"hysteresis": 0}, "hysteresis must be a whole number"),
    ({"counter": -1}, "counter must be a whole number of steps, 0 or more, got -1"),
    ({"countdown": -1, "hysteresis": 2}, "countdown must be a whole number"),
    ({"countdown": 50, "hysteresis": 2}, "countdown must be at most hysteresis, got 50 and 2"),
    ({"min_loss_scale": -1}, "min_loss_scale must be finite in float32 and not negative, got -1"),
    ({"max_loss_scale": math.inf}, "max_loss_scale must be positive and finite in float32, got inf"),
    ({"min_loss_scale": 8, "max_loss_scale": 4}, "min_loss_scale must not be above max_loss_scale, got 8.0 and 4"),
    ({"loss_scale": 0.5}, "got 0.5 outside of 1.0 to 16777216.0: start within"),
    ({"loss_scale": 2.0**30}, "loss_scale must lie between"),
]
BAD_FIELDS_OF_HEADROOM = [
    ({"loss_scale": 0.0}, "loss_scale must be positive and finite"),
    ({"headroom": -1}, "headroom must be a number from 0 to 128, got -1: 4 leaves a factor of 16 before overflow"),
    ({"running_max": math.nan}, "running_max must be finite in float32 and not negative, got nan"),
    ({"loss_scale": 1000.0}, "loss_scale must be a power of two, got 1000.0: HeadroomLossScale has no other"),
    ({"min_loss_scale": 3}, "min_loss_scale must be a power of two, got 3.0"),
    ({"max_loss_scale": 65504.0}, "max_loss_scale must be a power of two"),
]
BAD_FIELDS_OF_STATIC = [({"loss_scale": 0.0}, "positive and finite"), ({"loss_scale": None}, "positive and finite")]


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (DynamicLossScale, BAD_FIELDS),
        (HeadroomLossScale, BAD_FIELDS_OF_HEADROOM),
        (StaticLossScale, BAD_FIELDS_OF_STATIC),
    ],
)
def test_a_bad_number_of_a_loss_scale_is_named(make, rows):
    for arguments, phrase in rows:
        refused(lambda arguments=arguments: make(**arguments), ValueError, phrase, what=arguments)


def test_an_unknown_dtype_of_a_loss_scale_is_named():
    refused(lambda: HeadroomLossScale(dtype="flaot16"), UnknownDtypeError, "unknown dtype 'flaot16'")


def test_an_integer_array_becomes_float32_with_jmps_warning():
    for name in ("loss_scale", "min_loss_scale"):
        with pytest.warns(UserWarning, match=f"Expected floating type for {name}, got int32: it becomes") as caught:
            scale = DynamicLossScale(**{name: jnp.int32(2)})
        assert caught[0].filename == __file__
        assert scale.loss_scale.dtype == jnp.float32 and float(getattr(scale, name)) == 2


def test_an_object_that_is_not_an_optimizer_is_refused():
    train_state = jaxmp.TrainState.create(params=concrete.ones(2), tx=SGD)
    for wrong in (None, optax.adam, DynamicLossScale(), {"w": 1.0}):
        for use in (
            lambda wrong: loss_scaling(wrong, DynamicLossScale()),
            jaxmp.low_precision,
            lambda wrong: jaxmp.TrainState.create(params=jnp.ones(2), tx=wrong),
            train_state.with_tx,
            lambda wrong: jaxmp.nnx.Optimizer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), wrong),
        ):
            refused(lambda use=use, wrong=wrong: use(wrong), TypeError, "an optimizer must be an optax transform, got ")


NOT_OURS = [
    (lambda: value_and_grad(lambda p: 1.0 * p["n"], state())({"n": jnp.ones((), int)}), TypeError),  # integer params
    (lambda: value_and_grad(jnp.sum, state(), "w")(jnp.ones(2)), TypeError),  # a name as argnums
    (lambda: value_and_grad(lambda p: jnp.sum(p), state())(p=jnp.ones(2)), TypeError),  # no positional argument
    (lambda: jaxmp.keep_if_skipped(state(), {"mean": jnp.ones(())}, {"var": jnp.ones(())}), ValueError),
    # The inner state of another optimizer, and an optimizer that changes the structure of its state.
    (lambda: tx_of(standard(optax.adam(1e-3))).update(jnp.ones(2), state(), jnp.ones(2)), Exception),
    (
        lambda: tx_of(optax.GradientTransformation(lambda _: (), lambda grads, *_: (grads, (1,)))).update(
            jnp.ones(2), tx_of(optax.identity()).init(jnp.ones(2)), jnp.ones(2)
        ),
        ValueError,
    ),
]


def test_errors_of_jax_and_optax_are_raised_unchanged():
    for call, kind in NOT_OURS:
        with pytest.raises(kind):
            call()


def test_an_error_of_the_inner_transform_is_raised_unchanged():
    def fail(updates, state, params=None):
        raise RuntimeError("its own trouble")

    tx = tx_of(optax.GradientTransformation(lambda params: (), fail))
    for params in (concrete.ones(2), None):
        with pytest.raises(RuntimeError, match="its own trouble"):
            tx.update(concrete.ones(2), tx.init(concrete.ones(2)), params)


def test_the_loss_may_be_one_example_of_a_vmap_or_a_python_number():
    losses, _ = jax.vmap(value_and_grad(lambda p: jnp.sum(p), state()))(concrete.ones((3, 2)))
    assert losses.shape == (3,) and value_and_grad(lambda p: 1.0, state())(concrete.ones(2))[0] == 1


def test_a_loss_scale_that_was_donated_is_refused():
    train_state = jaxmp.TrainState.create(params=concrete.ones(2), tx=tx_of())
    jaxmp.make_train_step(lambda p, s, b, r: (jnp.sum(p), s))(train_state, concrete.ones(2))
    refused(
        lambda: value_and_grad(jnp.sum, train_state.opt_state)(jnp.ones(2)),
        RuntimeError,
        "'loss_scale' was donated to an earlier step",
    )


def test_an_update_with_a_donated_state_or_params_is_refused():
    tx = tx_of(optax.add_decayed_weights(0.1))
    old = jaxmp.TrainState.create(params=concrete.ones(2), tx=tx)
    new, _ = jaxmp.make_train_step(lambda p, s, b, r: (jnp.sum(p), s))(old, concrete.ones(2))
    refused(lambda: tx.update(jnp.ones(2), old.opt_state, new.params), RuntimeError, "'opt_state/", "was donated")
    refused(lambda: tx.update(jnp.ones(2), new.opt_state, old.params), RuntimeError, "'params' was donated")


@pytest.mark.parametrize("other", [optax.scale(-0.1), optax.set_to_zero()], ids=["scale", "set_to_zero"])
def test_inside_of_loss_scaling_a_partition_skips_the_steps_of_all_params(other):
    tx = loss_scaling(optax.partition({"x": SGD, "y": other}, AB), DynamicLossScale())
    state = tx.init(PAIR)
    for bad, is_skipped in ((jnp.inf, True), (1.0, False)):
        grads = value_and_grad(lambda params, bad=bad: loss_of_pair(params) * bad, state)(PAIR)[1]
        new = optax.apply_updates(PAIR, tx.update(grads, state, PAIR)[0])
        expected = 1 if is_skipped else 1 - np.float32(0.1)
        np.testing.assert_array_equal(new["a"], np.full(2, expected, np.float32))


def test_a_train_state_skips_the_steps_of_all_params_of_a_partition_around_loss_scaling():
    state = jaxmp.TrainState.create(params=PAIR, tx=partition(optax.scale(-0.1)))
    skipped = state.apply_gradients(grads={"a": jnp.ones(2), "b": jnp.full(2, jnp.inf)})
    stepped = state.apply_gradients(grads={"a": jnp.ones(2), "b": jnp.ones(2)})
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(skipped.params))
    assert all((leaf == np.float32(1) - np.float32(0.1)).all() for leaf in jax.tree.leaves(stepped.params))
