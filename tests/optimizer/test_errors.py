"""What is wrong is said where it enters: the rule, what came, the remedy."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optimizer_tools import standard

import jaxmp
from jaxmp import DynamicLossScale, loss_scaling, value_and_grad

pytestmark = pytest.mark.once


def tx_of(inner=None):
    return loss_scaling(inner or optax.sgd(0.1), DynamicLossScale())


@pytest.mark.parametrize("wrong", [2.0**15, None, "dynamic", DynamicLossScale])
def test_what_is_no_loss_scale_is_refused(wrong):
    with pytest.raises(TypeError, match=r"a loss scale must be one of jaxmp's or jmp's, got .*DynamicLossScale\(\)"):
        loss_scaling(optax.sgd(0.1), wrong)


@pytest.mark.parametrize("wrong", [None, optax.adam, DynamicLossScale(), {"w": 1.0}])
def test_what_is_no_optimizer_is_refused(wrong):
    state = jaxmp.TrainState.create(params=jnp.ones(2), tx=optax.sgd(0.1))
    for use in (
        lambda: loss_scaling(wrong, DynamicLossScale()),
        lambda: jaxmp.low_precision(wrong),
        lambda: jaxmp.TrainState.create(params=jnp.ones(2), tx=wrong),
        lambda: state.with_tx(wrong),
        lambda: jaxmp.nnx.Optimizer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), wrong),
    ):
        with pytest.raises(
            TypeError, match=r"an optimizer must be one of optax's, got .*; write optax.adam\(1e-3\), say"
        ):
            use()


@pytest.mark.parametrize("wrong", [1, None, jnp.ones(2, jnp.int32), jnp.complex64(1)])
def test_a_loss_that_is_not_floating_is_not_scaled_by_hand(wrong):
    with pytest.raises(TypeError, match=r"a loss must be floating, got .*; compute it from floating values"):
        jaxmp.scale_loss(wrong, tx_of().init(jnp.ones(2)))


def test_loss_scaling_inside_loss_scaling_is_refused():
    for inner in (tx_of(), optax.chain(optax.clip(1.0), tx_of()), optax.apply_if_finite(tx_of(), 3)):
        with pytest.raises(
            ValueError, match=r"one loss has one scale.*loss_scaling was put inside loss_scaling; remove"
        ):
            tx_of(inner).init(jnp.ones(2))
    with pytest.raises(ValueError, match="has a loss scale already"):
        jaxmp.wrap_opt_state(tx_of().init(jnp.ones(2)), DynamicLossScale())


def test_a_state_without_a_loss_scale_is_refused_by_every_reader():
    state = optax.adam(1e-3).init(jnp.ones(2))
    text = r"must contain a loss scale, got tuple without one; wrap the optimizer, .*jaxmp\.wrap_opt_state"
    readers = [
        lambda: jaxmp.get_loss_scale(state),
        lambda: jaxmp.scale_loss(1.0, state),
        lambda: jaxmp.unscale(jnp.ones(2), state),
        lambda: value_and_grad(jnp.sum, state),
    ]
    for read in readers:
        with pytest.raises(ValueError, match=text):
            read()


def test_a_state_with_several_loss_scales_is_refused():
    state = optax.chain(tx_of(), tx_of()).init(jnp.ones(2))
    with pytest.raises(
        ValueError, match="has 2; put loss_scaling outside multi_transform, or, for separate losses, pass"
    ):
        jaxmp.get_loss_scale(state)


def test_a_float16_loss_is_refused():
    state = tx_of().init(jnp.ones(2))
    text = r"must be float32, got float16, .*overflows; compute the loss from float32 values, e.g. from logits.astype"
    with pytest.raises(TypeError, match=text):
        value_and_grad(lambda p: jnp.sum(p.astype(jnp.float16)), state)(jnp.ones(2))
    with pytest.raises(TypeError, match=text):
        jaxmp.scale_loss(jnp.float16(1), state)


def test_params_that_are_not_floating_are_named():
    state = tx_of().init(jnp.ones(2))
    params = {"w": jnp.ones(2), "table": {"ids": jnp.arange(3)}}
    with pytest.raises(TypeError, match="only floating params have gradients, got 'table/ids' of dtype int32; move it"):
        value_and_grad(lambda p: jnp.sum(p["w"]), state)(params)
    with pytest.raises(TypeError, match="'table/ids'"):
        value_and_grad(lambda a, p: jnp.sum(a), state, argnums=(0, 1))(jnp.ones(2), params)


@pytest.mark.parametrize("argnums", ["w", None, 0.5, (0, "w"), jnp.ones((40, 40))])
def test_argnums_are_places(argnums):
    with pytest.raises(TypeError, match=r"argnums are places of arguments, whole numbers, got .*; pass 0 for"):
        value_and_grad(jnp.sum, tx_of().init(jnp.ones(2)), argnums)


@pytest.mark.parametrize("wrong", [1.0, "yes", None, jnp.ones(2)])
def test_flags_are_true_or_false(wrong):
    with pytest.raises(TypeError, match=r"^grad_norm is True or False, got .*; to clip, put optax"):
        loss_scaling(optax.sgd(0.1), DynamicLossScale(), grad_norm=wrong)
    with pytest.raises(TypeError, match=r"^check_updates is True or False, got .*; pass True to test the updates"):
        loss_scaling(optax.sgd(0.1), DynamicLossScale(), check_updates=wrong)
    with pytest.raises(TypeError, match=r"^has_aux is True or False, got .*; pass has_aux=True for a function"):
        value_and_grad(jnp.sum, tx_of().init(jnp.ones(2)), has_aux=wrong)
    with pytest.raises(TypeError, match=r"^use_ema is True or False, got .*; pass True to evaluate the moving average"):
        jaxmp.make_eval_step(lambda *_: 0, use_ema=wrong)


def test_gradients_that_are_not_floating_are_named():
    tx = tx_of()
    params = {"w": jnp.ones(2), "n": jnp.ones(3)}
    for wrong, dtype in ((jnp.arange(3), "int32"), (np.zeros(3, bool), "bool")):
        with pytest.raises(TypeError, match=f"gradients must be floating, got 'n' of dtype {dtype}; move that param"):
            tx.update({"w": jnp.ones(2), "n": wrong}, tx.init(params), params)


def test_gradients_that_jax_makes_for_integer_params_are_refused():
    params = {"w": jnp.ones(2), "n": jnp.arange(2)}
    grads = jax.grad(lambda p: jnp.sum(p["w"]), allow_int=True)(params)
    tx = tx_of()
    with pytest.raises(TypeError, match=r"gradients must be floating, got 'n' of dtype .*float0"):
        tx.update(grads, tx.init(params), params)


@pytest.mark.parametrize("empty", [{}, [], None, {"frozen": None}])
def test_empty_gradients_are_refused(empty):
    tx = tx_of()
    with pytest.raises(
        ValueError, match="an update needs gradients, got an empty tree; pass the gradients of the params"
    ):
        tx.update(empty, tx.init(empty), empty)


def test_trees_that_do_not_match_are_told_leaf_by_leaf():
    tx = tx_of(standard(optax.adamw(1e-3)))
    params = {"a": jnp.ones(2), "b": {"w": jnp.ones((2, 3)), "c": jnp.ones(())}}
    grads = {"a": jnp.ones(3), "b": {"w": jnp.ones((2, 3)), "d": jnp.ones(())}}
    text = (
        "and 3 leaves differ: 'a': gradient (3,), param (2,); 'b/d': gradient (), param missing; 'b/c': gradient "
        "missing, param (); pass the params that the gradients were taken of"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        tx.update(grads, tx.init(params), params)
    text = r"must have its param's shape, but for 'a' of shape \(2,\) the optimizer made \(3,\): pass the params that"
    with pytest.raises(ValueError, match=text):  # which optax's apply_updates might have broadcast
        tx_of().update({"a": jnp.ones(3)}, tx_of().init({"a": jnp.ones(2)}), {"a": jnp.ones(2)})


def test_a_state_of_another_type_is_refused():
    for state in (optax.adam(1e-3).init(jnp.ones(2)), None):
        with pytest.raises(
            TypeError, match=r"takes the state that its own init made, got .*; call tx.init again, or wrap"
        ):
            tx_of().update(jnp.ones(2), state, jnp.ones(2))


def test_a_state_of_another_optimizer_is_refused():
    adam, momentum = tx_of(standard(optax.adam(1e-3))), tx_of(standard(optax.sgd(0.1, momentum=0.9)))
    changing = tx_of(
        optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (updates, (1,)))
    )
    text = r"from the optimizer that loss_scaling wraps, whose state for these params has the structure .*; call"
    for tx, other in ((adam, momentum), (momentum, adam), (changing, changing)):
        with pytest.raises(ValueError, match=text):
            tx.update(jnp.ones(2), other.init(jnp.ones(2)), jnp.ones(2))


def test_a_state_whose_leaf_changes_its_shape_is_named():
    tx = tx_of(
        optax.GradientTransformation(
            lambda params: {"a": jnp.zeros(2)}, lambda updates, state, params=None: (updates, {"a": jnp.zeros(3)})
        )
    )
    with pytest.raises(ValueError, match=r"for these params has 'a' of shape \(3,\), got \(2,\); call tx.init again"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


def test_an_inner_transform_that_fails_for_another_reason_says_so_itself():
    def fail(updates, state, params=None):
        raise RuntimeError("its own trouble")

    tx = tx_of(optax.GradientTransformation(lambda params: (), fail))
    for params in (jnp.ones(2), None):
        with pytest.raises(RuntimeError, match="its own trouble"):
            tx.update(jnp.ones(2), tx.init(jnp.ones(2)), params)


def test_a_state_for_params_of_other_shapes_is_refused():
    tx = tx_of(standard(optax.adam(1e-3)))
    with pytest.raises((TypeError, ValueError), match=r"shape|broadcast"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(())), jnp.ones(3))


def test_a_function_with_aux_must_return_a_pair():
    state = tx_of().init(jnp.ones(2))
    for result in (lambda p: jnp.sum(p), lambda p: [jnp.sum(p), 1], lambda p: (jnp.sum(p), 1, 2)):
        with pytest.raises(
            TypeError,
            match=r"with has_aux the function must return a pair \(loss, aux\), got .*; write return loss, aux, or",
        ):
            value_and_grad(result, state, has_aux=True)(jnp.ones(2))


def test_what_jax_refuses_it_refuses_in_its_own_words():
    state = tx_of().init(jnp.ones(2))
    with pytest.raises(TypeError, match="requires at least 1 positional arguments"):
        value_and_grad(lambda p: jnp.sum(p), state)(p=jnp.ones(2))


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda p: p, r"got float32 of shape \(2,\); take its mean: jnp.mean\(loss\)"),
        (lambda p: jnp.argmax(p), r"got int32 of shape \(\); compute it from floating values"),
        (lambda p: jax.lax.complex(*p), r"got complex64 of shape \(\); compute it from floating values"),
        (lambda p: (jnp.sum(p), p), r"got tuple of 2; pass has_aux=True to return \(loss, aux\)"),
        (lambda p: {"loss": jnp.sum(p)}, "got dict; pass has_aux=True"),
        (lambda p: None, "got NoneType; pass has_aux=True"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_loss_that_is_no_floating_scalar_is_described_with_what_to_write(wrap, loss, text):
    with pytest.raises(TypeError, match=f"a loss must be a floating scalar, {text}"):
        wrap(value_and_grad(loss, tx_of().init(jnp.ones(2))))(jnp.ones(2))


def test_a_loss_with_aux_that_is_no_floating_scalar_is_told_the_order():
    with pytest.raises(TypeError, match=r"got dict; return \(loss, aux\), in this order"):
        value_and_grad(lambda p: ({}, jnp.sum(p)), tx_of().init(jnp.ones(2)), has_aux=True)(jnp.ones(2))


def test_a_loss_per_example_under_vmap_and_one_of_a_python_number_are_scalars():
    state = tx_of().init(jnp.ones(2))
    losses, _ = jax.vmap(value_and_grad(lambda p: jnp.sum(p), state))(jnp.ones((3, 2)))
    assert losses.shape == (3,) and value_and_grad(lambda p: 1.0, state)(jnp.ones(2))[0] == 1


def test_errors_come_while_tracing_too():
    tx = tx_of()
    with pytest.raises(ValueError, match="got an empty tree"):
        jax.jit(tx.update)({}, tx.init({}), {})
    with pytest.raises(TypeError, match="must be float32, got float16"):
        jax.jit(lambda s: value_and_grad(lambda p: p.astype(jnp.float16), s)(1.0))(tx.init(jnp.ones(2)))


def test_a_loss_scale_that_a_step_has_deleted_is_named():
    tx = tx_of()
    state = jaxmp.TrainState.create(params=jnp.ones(2), tx=tx)
    jaxmp.make_train_step(lambda p, s, b, r: (jnp.sum(p), s))(state, jnp.ones(2))
    uses = [
        lambda opt_state: value_and_grad(jnp.sum, opt_state)(jnp.ones(2)),
        lambda opt_state: jaxmp.scale_loss(jnp.float32(1), opt_state),
        lambda opt_state: jaxmp.unscale(jnp.ones(2), opt_state),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="to a donating step once only, but 'loss_scale' in this one is gone"):
            use(state.opt_state)
        use(tx.init(jnp.ones(2)))


def test_an_update_of_what_a_step_has_deleted_says_so():
    tx = tx_of(optax.add_decayed_weights(0.1))
    old = jaxmp.TrainState.create(params=jnp.ones(2), tx=tx)
    state, _ = jaxmp.make_train_step(lambda p, s, b, r: (jnp.sum(p), s))(old, jnp.ones(2))
    for opt_state, params in ((old.opt_state, state.params), (state.opt_state, old.params)):
        with pytest.raises(RuntimeError, match=r"to a donating step once only, but '(opt_state/.*|params)' in"):
            tx.update(jnp.ones(2), opt_state, params)
