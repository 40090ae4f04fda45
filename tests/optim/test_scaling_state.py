"""The state of loss scaling is read, wrapped, saved and restored."""

from __future__ import annotations

import pickle

import cloudpickle
import concrete
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_tools import bits, loss_fn, problem, replace_element, same_bits, standard

import jaxmp
from jaxmp import DynamicLossScale, get_loss_scale, loss_scaling, value_and_grad
from jaxmp.optim.scaling_state import get_loss_scaling_state, has_loss_scale

pytestmark = pytest.mark.once


def train(tx, params, state, batch, pattern):
    """Take steps with finite gradients (True) or with a NaN in one of them (False)."""
    for good in pattern:
        _, grads = value_and_grad(loss_fn, state)(params, batch)
        updates, state = tx.update(grads if good else replace_element(grads, 1, np.nan), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


# ---- finding the scale, scaling by hand


def test_the_scale_is_found_wherever_it_is_nested():
    scale = jaxmp.HeadroomLossScale()
    inner = loss_scaling(optax.sgd(0.1), scale)
    params = {"a": concrete.ones(2), "b": concrete.ones(2)}
    nests = [
        inner,
        optax.chain(optax.identity(), optax.chain(inner)),
        optax.masked(inner, {"a": True, "b": False}),
        optax.multi_transform({"x": inner, "y": optax.set_to_zero()}, {"a": "x", "b": "y"}),
        optax.MultiSteps(inner, 2),
        optax.apply_if_finite(inner, 2),
    ]
    for tx in nests:
        state = tx.init(params)
        assert has_loss_scale(state) and type(get_loss_scale(state)) is type(scale)
        assert get_loss_scale(state).loss_scale == scale.loss_scale
    assert not has_loss_scale(optax.adam(1e-3).init(params))
    wrapped = {"optimizer": [inner.init(params)], "step": 3}  # any tree may contain the state
    assert get_loss_scaling_state(wrapped).skipped_steps == 0


def test_argnums_aux_and_keyword_arguments_work_as_in_jax():
    state = loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(4.0)).init(concrete.ones(1))

    def fun(a, n, b, *, power=1):
        return jnp.sum(a * b["x"] ** power) * n, {"sum": a + 1, "text": "kept"}

    a, n, b = concrete.array([1.0, 2.0]), 3, {"x": concrete.array([3.0, 4.0])}
    for argnums in (0, 2, -1, (0, 2), [2], np.int64(0), jnp.int32(0), (np.int64(0), jnp.int32(2)), np.array([0, 2])):
        (loss, aux), grads = value_and_grad(fun, state, argnums=argnums, has_aux=True)(a, n, b, power=2)
        (value, _), expected = jax.value_and_grad(fun, argnums=argnums, has_aux=True)(a, n, b, power=2)
        assert loss == value and aux["text"] == "kept" and (aux["sum"] == a + 1).all()
        assert same_bits(grads, expected)
    assert value_and_grad(lambda p: p**2, state)(3.0)[1] == 6  # a Python float has a gradient too


@pytest.mark.filterwarnings("ignore:updates below")  # of half params, on purpose
def test_the_returned_loss_and_gradients_are_float32():
    params = {"half": concrete.ones(2, jnp.float16), "full": concrete.ones(2)}
    state = loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(4.0)).init(params)

    def fun(params):
        return jnp.sum(params["half"].astype(jnp.float32)) + jnp.sum(params["full"])

    loss, grads = value_and_grad(fun, state)(params)
    assert loss.dtype == jnp.float32 and loss == 4
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(grads))


# ---- wrapping, other kinds of scale


def test_a_running_adam_is_wrapped_without_losing_its_moments():
    params, batch = problem()
    plain = standard(optax.adam(1e-2))
    state = plain.init(params)

    def plain_step(params, state):
        updates, state = plain.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = plain_step(params, state)
    tx = loss_scaling(standard(optax.adam(1e-2)), DynamicLossScale())
    wrapped_params, wrapped = train(tx, params, jaxmp.wrap_opt_state(state, DynamicLossScale()), batch, [True, True])
    for _ in range(2):
        params, state = plain_step(params, state)
    assert same_bits(wrapped_params, params) and same_bits(wrapped.inner_state, state)


def test_a_wrapped_state_has_the_structure_that_updates_keep():
    params, batch = problem()
    tx = loss_scaling(optax.sgd(0.1), DynamicLossScale(), grad_norm=True)
    wrapped = jaxmp.wrap_opt_state(optax.sgd(0.1).init(params), DynamicLossScale(), grad_norm=True)
    assert same_bits(wrapped, tx.init(params))
    assert jax.tree.structure(train(tx, params, wrapped, batch, [True])[1]) == jax.tree.structure(wrapped)


# ---- saving and restoring


def restored(state, how):
    if how == "flax bytes":
        blank = jax.tree.map(jnp.zeros_like, state)
        return flax.serialization.from_bytes(blank, flax.serialization.to_bytes(state))
    if how == "flax dict":
        return flax.serialization.from_state_dict(state, flax.serialization.to_state_dict(state))
    return (pickle if how == "pickle" else cloudpickle).loads((pickle if how == "pickle" else cloudpickle).dumps(state))


def test_a_state_saved_mid_run_continues_bit_for_bit():
    params, batch = problem()
    scale = DynamicLossScale(2.0**13, period=3, hysteresis=2)
    tx = loss_scaling(standard(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))), scale, grad_norm=True)
    params, state = train(tx, params, tx.init(params), batch, [True, False, True, True])
    end = train(tx, params, state, batch, [False, True, True])
    for how in ("flax bytes", "flax dict", "pickle", "cloudpickle"):
        copy = restored(state, how)
        assert same_bits(copy, state)
        assert vars(copy.loss_scale).keys() == vars(state.loss_scale).keys()
        assert jax.tree.structure(copy.loss_scale) == jax.tree.structure(state.loss_scale)
        assert same_bits(train(tx, params, copy, batch, [False, True, True]), end)


def test_a_restored_state_needs_no_second_compilation():
    params, batch = problem()
    tx = loss_scaling(standard(optax.adam(1e-2)), DynamicLossScale())
    update, grads = jax.jit(tx.update), jax.grad(loss_fn)(params, batch)
    _, state = update(grads, tx.init(params), params)
    traces = []
    counted = jax.jit(lambda *args: traces.append(1) or tx.update(*args))
    ends = [
        counted(grads, start, params) for start in (state, restored(state, "pickle"), restored(state, "flax bytes"))
    ]
    assert len(traces) == 1 and bits(ends[0]) == bits(ends[1]) == bits(ends[2])
