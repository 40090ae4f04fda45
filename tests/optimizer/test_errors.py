"""Mistakes with loss scaling have an error that says what to write."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from optimizer_tools import standard

import jaxmp
from jaxmp import DynamicLossScale, loss_scaling, value_and_grad

pytestmark = pytest.mark.once


def tx_of(inner=None):
    return loss_scaling(inner or optax.sgd(0.1), DynamicLossScale())


def refused(call, kind, *phrases):
    """Require an error of a call that has these phrases, of at most three lines."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    for phrase in phrases:
        assert phrase in message
    assert len(message) <= 3 * 120


def state():
    return tx_of().init(jnp.ones(2))


def adam_state():
    return optax.adam(1e-3).init(jnp.ones(2))


WRAP = "wrap the optimizer, tx = jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale())"
MISTAKES = {
    "a number as the scale": (
        lambda: loss_scaling(optax.sgd(0.1), 2.0**15),
        TypeError,
        "got 32768.0; write jaxmp.loss",
    ),
    "no scale": (lambda: loss_scaling(optax.sgd(0.1), None), TypeError, "a loss scale must be one of jaxmp's"),
    "a scale's class": (lambda: loss_scaling(optax.sgd(0.1), DynamicLossScale), TypeError, "DynamicLossScale()"),
    "arguments swapped": (
        lambda: loss_scaling(DynamicLossScale(), optax.sgd(0.1)),
        TypeError,
        "one of optax's, got an",
    ),
    "twice": (lambda: tx_of(tx_of()).init(jnp.ones(2)), ValueError, "loss_scaling was put inside loss_scaling"),
    "twice in a chain": (
        lambda: tx_of(optax.chain(optax.clip(1.0), tx_of())).init(jnp.ones(2)),
        ValueError,
        "remove the inner one",
    ),
    "twice by hand": (lambda: jaxmp.wrap_opt_state(state(), DynamicLossScale()), ValueError, "remove the inner one"),
    "no scale in get_loss_scale": (lambda: jaxmp.get_loss_scale(adam_state()), ValueError, WRAP),
    "no scale in scale_loss": (lambda: jaxmp.scale_loss(1.0, adam_state()), ValueError, WRAP),
    "no scale in unscale": (lambda: jaxmp.unscale(jnp.ones(2), adam_state()), ValueError, WRAP),
    "no scale in value_and_grad": (lambda: value_and_grad(jnp.sum, adam_state()), ValueError, WRAP),
    "the optimizer as its state": (lambda: jaxmp.get_loss_scale(tx_of()), ValueError, "opt_state = tx.init(params)"),
    "two scales": (
        lambda: jaxmp.get_loss_scale(optax.chain(tx_of(), tx_of()).init(jnp.ones(2))),
        ValueError,
        "state has 2; put one loss_scaling around the whole optimizer",
    ),
    "a float16 loss": (
        lambda: value_and_grad(lambda p: jnp.sum(p.astype(jnp.float16)), state())(jnp.ones(2)),
        TypeError,
        "logits.astype(jnp.float32)",
    ),
    "a float16 loss by hand": (lambda: jaxmp.scale_loss(jnp.float16(1), state()), TypeError, "got float16"),
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
    "losses": (lambda: value_and_grad(lambda p: p, state())(jnp.ones(2)), TypeError, "take its mean: jnp.mean(loss)"),
    "an integer loss": (
        lambda: jax.jit(value_and_grad(jnp.argmax, state()))(jnp.ones(2)),
        TypeError,
        "got int32 of shape (); compute it from floating values",
    ),
    "another optimizer's state": (
        lambda: tx_of().update(jnp.ones(2), adam_state(), jnp.ones(2)),
        TypeError,
        "got tuple; call tx.init again",
    ),
    "an update that would be broadcast": (
        lambda: tx_of().update({"a": jnp.ones(1)}, tx_of().init({"a": jnp.ones(2)}), {"a": jnp.ones(2)}),
        ValueError,
        "the update of 'a' has the shape (1,), its param (2,)",
    ),
    "grad_norm as a number": (
        lambda: loss_scaling(optax.sgd(0.1), DynamicLossScale(), grad_norm=1.0),
        TypeError,
        "put optax.clip_by_global_norm(1.0) inside loss_scaling",
    ),
    "check_updates as text": (
        lambda: loss_scaling(optax.sgd(0.1), DynamicLossScale(), check_updates="yes"),
        TypeError,
        "check_updates is True or False, got 'yes'",
    ),
    "has_aux as None": (lambda: value_and_grad(jnp.sum, state(), has_aux=None), TypeError, "has_aux is True or False"),
    "use_ema as an array": (
        lambda: jaxmp.make_eval_step(lambda *_: 0, use_ema=jnp.ones(2)),
        TypeError,
        "use_ema is True or False",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused(mistake):
    refused(*MISTAKES[mistake])


@pytest.mark.parametrize("wrong", [None, optax.adam, DynamicLossScale(), {"w": 1.0}])
def test_what_is_no_optimizer_is_refused(wrong):
    train_state = jaxmp.TrainState.create(params=jnp.ones(2), tx=optax.sgd(0.1))
    for use in (
        lambda: loss_scaling(wrong, DynamicLossScale()),
        lambda: jaxmp.low_precision(wrong),
        lambda: jaxmp.TrainState.create(params=jnp.ones(2), tx=wrong),
        lambda: train_state.with_tx(wrong),
        lambda: jaxmp.nnx.Optimizer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), wrong),
    ):
        refused(use, TypeError, "an optimizer must be one of optax's, got ")


NOT_OURS = {
    "integer params": (lambda: value_and_grad(lambda p: 1.0 * p["n"], state())({"n": jnp.ones((), int)}), TypeError),
    "a name as argnums": (lambda: value_and_grad(jnp.sum, state(), "w")(jnp.ones(2)), TypeError),
    "no argument": (lambda: value_and_grad(lambda p: jnp.sum(p), state())(p=jnp.ones(2)), TypeError),
    "another optimizer's inner state": (
        lambda: tx_of(standard(optax.adam(1e-3))).update(jnp.ones(2), state(), jnp.ones(2)),
        Exception,
    ),
    "a state that changes its structure": (
        lambda: tx_of(optax.GradientTransformation(lambda _: (), lambda grads, *_: (grads, (1,)))).update(
            jnp.ones(2), tx_of(optax.identity()).init(jnp.ones(2)), jnp.ones(2)
        ),
        ValueError,
    ),
    "a state for other shapes": (
        lambda: tx_of(standard(optax.adam(1e-3))).update(
            jnp.ones(3), tx_of(standard(optax.adam(1e-3))).init(jnp.ones(())), jnp.ones(3)
        ),
        (TypeError, ValueError),
    ),
}


@pytest.mark.parametrize("mistake", NOT_OURS)
def test_what_jax_and_optax_refuse_they_refuse_in_their_own_words(mistake):
    call, kind = NOT_OURS[mistake]
    with pytest.raises(kind):
        call()


def test_an_inner_transform_that_fails_says_so_itself():
    def fail(updates, state, params=None):
        raise RuntimeError("its own trouble")

    tx = tx_of(optax.GradientTransformation(lambda params: (), fail))
    for params in (jnp.ones(2), None):
        with pytest.raises(RuntimeError, match="its own trouble"):
            tx.update(jnp.ones(2), tx.init(jnp.ones(2)), params)


def test_a_loss_per_example_under_vmap_and_one_of_a_python_number_are_scalars():
    losses, _ = jax.vmap(value_and_grad(lambda p: jnp.sum(p), state()))(jnp.ones((3, 2)))
    assert losses.shape == (3,) and value_and_grad(lambda p: 1.0, state())(jnp.ones(2))[0] == 1


def test_a_loss_scale_that_was_donated_is_refused():
    train_state = jaxmp.TrainState.create(params=jnp.ones(2), tx=tx_of())
    jaxmp.make_train_step(lambda p, s, b, r: (jnp.sum(p), s))(train_state, jnp.ones(2))
    for use in (
        lambda opt_state: value_and_grad(jnp.sum, opt_state)(jnp.ones(2)),
        lambda opt_state: jaxmp.scale_loss(jnp.float32(1), opt_state),
        lambda opt_state: jaxmp.unscale(jnp.ones(2), opt_state),
    ):
        refused(lambda use=use: use(train_state.opt_state), RuntimeError, "'loss_scale' was donated to an earlier step")
        use(state())


def test_an_update_of_what_was_donated_is_refused():
    tx = tx_of(optax.add_decayed_weights(0.1))
    old = jaxmp.TrainState.create(params=jnp.ones(2), tx=tx)
    new, _ = jaxmp.make_train_step(lambda p, s, b, r: (jnp.sum(p), s))(old, jnp.ones(2))
    refused(lambda: tx.update(jnp.ones(2), old.opt_state, new.params), RuntimeError, "'opt_state/", "was donated")
    refused(lambda: tx.update(jnp.ones(2), new.opt_state, old.params), RuntimeError, "'params' was donated")
