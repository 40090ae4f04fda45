"""loss_scaling around and inside optax's other wrappers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_tools import loss_fn, problem, replace_element, same_bits, standard

from jaxmp import DynamicLossScale, get_loss_scale, loss_scaling, value_and_grad

pytestmark = pytest.mark.once


@jax.jit
def gradients(params, state, batch):
    return value_and_grad(loss_fn, state)(params, batch)[1]


def run(tx, pattern, params, batch, **extra):
    """Take steps with finite (True) or NaN (False) gradients; return params, state."""
    state, update = tx.init(params), jax.jit(tx.update)
    for good in pattern:
        grads = gradients(params, state, batch)
        if not good:
            grads = replace_element(grads, 2, np.nan)
        updates, state = update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), a, b)


def test_loss_scaling_may_be_inside_or_around_a_chain():
    params, batch = problem()
    outside = loss_scaling(standard(optax.chain(optax.clip(0.1), optax.adam(1e-2))), DynamicLossScale())
    inside = standard(optax.chain(loss_scaling(optax.chain(optax.clip(0.1), optax.adam(1e-2)), DynamicLossScale())))
    halves = optax.chain(
        loss_scaling(standard(optax.chain(optax.clip(0.1), optax.scale_by_adam())), DynamicLossScale()),
        optax.scale(-1e-2),
    )
    ends = [run(tx, [True, False, True], params, batch) for tx in (outside, inside, halves)]
    assert same_bits(ends[0][0], ends[1][0])
    close(ends[0][0], ends[2][0])
    for _, state in ends:
        assert get_loss_scale(state).loss_scale == 2.0**14


def test_inside_multi_transform_every_loss_has_its_own_scale_and_the_whole_state_has_none():
    params, _ = problem()
    parts = {
        "a": loss_scaling(optax.adam(1e-2), DynamicLossScale()),
        "s": loss_scaling(optax.sgd(0.1), DynamicLossScale()),
    }
    tx = standard(optax.multi_transform(parts, {"hidden": "a", "out": "s"}))
    state = tx.init(params)
    with pytest.raises(ValueError, match="must have one loss scale"):
        get_loss_scale(state)
    grads = jax.tree.map(np.ones_like, params)
    grads["out"]["w"][0, 0] = np.inf
    updates, state = jax.jit(tx.update)(grads, state, params)
    scales = {name: float(get_loss_scale(state.inner_states[name]).loss_scale) for name in parts}
    assert scales == {"a": 2.0**15, "s": 2.0**14}
    assert (updates["out"]["w"] == 0).all() and (updates["hidden"]["w"] != 0).all()


def test_a_schedule_inside_does_not_advance_on_a_skipped_step():
    params, batch = problem()
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    tx = loss_scaling(standard(optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)), DynamicLossScale())
    _, state = run(tx, [True, False, False, True], params, batch)
    assert state.inner_state.count == 2
    np.testing.assert_allclose(state.inner_state.hyperparams["learning_rate"], 0.9, rtol=1e-6)
    _, state = run(loss_scaling(standard(optax.adam(schedule)), DynamicLossScale()), [True, False, True], params, batch)
    assert [int(leaf) for leaf in jax.tree.leaves(state.inner_state) if leaf.dtype == jnp.int32] == [2, 2]


# ---- MultiSteps


def test_around_multi_steps_a_bad_microbatch_is_dropped_and_the_window_grows_by_one():
    params, batch = problem()
    tx = loss_scaling(standard(optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()), DynamicLossScale())
    end, state = run(tx, [True, False, True], params, batch)
    assert state.inner_state.gradient_step == 1 and state.inner_state.mini_step == 0
    assert get_loss_scale(state).loss_scale == 2.0**14
    assert same_bits(end, run(tx, [True, True], params, batch)[0]) and not same_bits(end, params)
    unfinished, _ = run(tx, [True, False], params, batch)
    assert same_bits(unfinished, params)


# ---- apply_if_finite


# ---- extra arguments


def test_an_inner_transform_without_extra_arguments_gets_none():
    def update(updates, state, params=None):
        return jax.tree.map(lambda update: -0.1 * update, updates), state

    plain = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    params, batch = problem()
    stepped, _ = run(loss_scaling(plain, DynamicLossScale()), [True], params, batch, value=1.0, anything=2.0)
    expected, _ = run(loss_scaling(optax.sgd(0.1), DynamicLossScale()), [True], params, batch)
    assert same_bits(stepped, expected)
