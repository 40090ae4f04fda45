"""Power-of-two scales change no bit; half gradients are treated as float32 ones."""

from __future__ import annotations

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_tools import bits, loss_fn, problem, same_bits, standard

import jaxmp
from jaxmp import DynamicLossScale, loss_scaling, value_and_grad

pytestmark = pytest.mark.once

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "clipped_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_and_unscaled_runs_agree_in_every_bit(name):
    params, batch = problem()
    plain, plain_params = standard(OPTIMIZERS[name]()), params
    plain_state = plain.init(params)
    tx = loss_scaling(standard(OPTIMIZERS[name]()), DynamicLossScale(2.0**15, period=2))  # grows during the run
    state = tx.init(params)

    @jax.jit
    def plain_step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = plain.update(grads, state, params)
        return loss, updates, optax.apply_updates(params, updates), state

    @jax.jit
    def scaled_step(params, state):
        loss, grads = value_and_grad(loss_fn, state)(params, batch)
        updates, state = tx.update(grads, state, params)
        return loss, updates, optax.apply_updates(params, updates), state

    for step in range(3):
        plain_loss, plain_updates, plain_params, plain_state = plain_step(plain_params, plain_state)
        loss, updates, params, state = scaled_step(params, state)
        assert bits(loss) == bits(plain_loss)
        assert same_bits(updates, plain_updates)
        assert same_bits(params, plain_params)
        assert same_bits(state.inner_state, plain_state)
        assert state.loss_scale.loss_scale == 2.0 ** (15 + (step + 1) // 2)
    assert state.skipped_steps == 0


@pytest.mark.filterwarnings("ignore:updates below")  # of half params, on purpose
def test_small_float16_gradients_do_not_underflow_adams_second_moment():
    """Keep the squares of small gradients, which are 0 in float16.

    With a square of 0, Adam would divide by epsilon, and the update would be -1.01 instead of -0.001.
    """
    true = np.full(3, 1e-4, np.float32)
    params = np.ones(3, np.float16)
    naive = standard(optax.adam(1e-3))
    naive_update, _ = jax.jit(lambda grads: naive.update(grads, naive.init(params), params))(true.astype(np.float16))
    assert (np.abs(naive_update) > 1).all()

    tx = loss_scaling(standard(optax.adam(1e-3)), DynamicLossScale(2.0**12))
    scaled = (true * 2**12).astype(np.float16)
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(jaxmp.get_loss_scale(state).unscale(scaled), state, params)
    oracle = standard(optax.adam(1e-3))
    widened = scaled.astype(np.float32) / 2**12
    ones = concrete.ones(3)
    expected, inner_state = jax.jit(oracle.update)(widened, oracle.init(ones), ones)
    assert same_bits(updates, expected) and same_bits(state.inner_state, inner_state)
    np.testing.assert_allclose(updates, -0.001, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:updates below")  # of half params, on purpose
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (OPTIMIZERS["clipped_adamw"], jnp.float16),
        (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2), jnp.bfloat16),
    ],
)
def test_the_inner_state_is_float32_for_half_params(make, dtype):
    params, batch = problem(dtype=dtype)
    tx = loss_scaling(standard(make()), DynamicLossScale())
    state = jax.eval_shape(tx.init, params)
    _, grads = jax.eval_shape(lambda state: value_and_grad(loss_fn, state)(params, batch), state)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    updates, new_state = jax.eval_shape(tx.update, grads, state, params)
    for leaf in jax.tree.leaves((updates, state.inner_state, new_state.inner_state)):
        assert leaf.dtype == jnp.float32 or jnp.issubdtype(leaf.dtype, jnp.integer)


@pytest.mark.filterwarnings("ignore:updates below")  # of half params, on purpose
def test_the_inner_transform_sees_float32_params_and_gradients():
    """Otherwise weight decay would be rounded to half precision."""
    dtypes = []

    def update(updates, state, params=None):
        dtypes.extend(leaf.dtype for leaf in jax.tree.leaves((updates, params)))
        return jax.tree.map(lambda g, p: g + 0.1 * p, updates, params), state

    params = concrete.array([1.0009765625], jnp.float16)
    tx = loss_scaling(optax.GradientTransformation(lambda params: (), update), DynamicLossScale())
    updates, _ = tx.update(concrete.zeros(1, jnp.float16), tx.init(params), params)
    assert set(dtypes) == {jnp.dtype("float32")} and updates == jnp.float32(0.1) * jnp.float32(1.0009765625)


def test_the_norm_in_the_state_is_that_of_the_true_gradients():
    params, batch = problem()
    tx = loss_scaling(optax.sgd(0.1), DynamicLossScale(), grad_norm=True)
    state = tx.init(params)
    assert state.grad_norm == 0

    @jax.jit
    def update(state):
        _, grads = value_and_grad(loss_fn, state)(params, batch)
        return tx.update(grads, state, params)[1]

    true_norm = jax.jit(lambda params: optax.tree.norm(jax.grad(loss_fn)(params, batch)))
    assert update(state).grad_norm == true_norm(params)
    assert loss_scaling(optax.sgd(0.1), DynamicLossScale()).init(params).grad_norm is None


def test_params_may_be_left_out_if_the_inner_transform_needs_none():
    params, batch = problem()
    tx = loss_scaling(optax.sgd(0.1), DynamicLossScale())

    @jax.jit
    def updates(state):
        _, grads = value_and_grad(loss_fn, state)(params, batch)
        return tx.update(grads, state)[0], tx.update(grads, state, params)[0]

    without_params, with_params = updates(tx.init(params))
    assert same_bits(without_params, with_params)


def test_float64_gradients_stay_float64():
    with jax.enable_x64(True):
        params, tx = np.ones(2), loss_scaling(standard(optax.adam(1e-3)), DynamicLossScale())

        @jax.jit
        def step(params):
            state = tx.init(params)
            loss, grads = value_and_grad(lambda p: jnp.sum(p**2) / 3, state)(params)
            return loss, grads, *tx.update(grads, state, params)

        loss, grads, updates, state = step(params)
        assert {loss.dtype, grads.dtype, updates.dtype, state.inner_state[0].nu.dtype} == {jnp.dtype("float64")}
        np.testing.assert_allclose(grads, 2 / 3, rtol=1e-15)
