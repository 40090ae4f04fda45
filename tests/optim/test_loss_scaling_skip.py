"""A non-finite step changes only the loss scale and the counters."""

from __future__ import annotations

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from optimizer_tools import bits, loss_fn, problem, replace_element, same_bits, standard

import jaxmp
from jaxmp import DynamicLossScale, loss_scaling, value_and_grad

pytestmark = pytest.mark.once

BAD = [np.inf, -np.inf, np.nan]


@jax.jit
def gradients(params, state, batch):
    return value_and_grad(loss_fn, state)(params, batch)[1]


def run(tx, params, state, batch, bad=None, leaf=0):
    """Take one step; if ``bad`` is not None, it replaces one element of a gradient."""
    grads = gradients(params, state, batch)
    if bad is not None:
        grads = replace_element(grads, leaf, bad)
    updates, state = jax.jit(tx.update)(grads, state, params)
    return updates, optax.apply_updates(params, updates), state


@pytest.mark.parametrize(("bad", "leaf"), [*zip(BAD, range(3), strict=True)])
def test_a_bad_step_changes_no_bit_of_params_or_state_and_the_scale_backs_off(bad, leaf):
    params, batch = problem()
    params["out"]["w"] = params["out"]["w"].at[0].set(concrete.array([-0.0, 0.0]))
    tx = loss_scaling(standard(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))), DynamicLossScale())
    _, params, before = run(tx, params, tx.init(params), batch)
    params["hidden"]["b"] = params["hidden"]["b"].at[0].set(-0.0)
    updates, new_params, after = run(tx, params, before, batch, bad, leaf)
    assert all((leaf == 0).all() and np.signbit(leaf).all() for leaf in jax.tree.leaves(updates))
    assert same_bits(new_params, params)
    assert same_bits(after.inner_state, before.inner_state)
    assert after.loss_scale.loss_scale == before.loss_scale.loss_scale / 2 == 2.0**14
    assert after.loss_scale.counter == 0 and before.loss_scale.counter == 1
    assert (after.skipped_steps, after.consecutive_skipped, after.last_finite) == (1, 1, False)


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_with_check_updates_non_finite_updates_skip_the_step(value):
    def update(updates, state, params=None):
        return jax.tree.map(lambda g: jnp.where(g > 0, value, g), updates), state + 1

    inner = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    params = {"w": concrete.array([1.0, -0.0])}
    tx = loss_scaling(inner, DynamicLossScale(), check_updates=True)
    updates, state = jax.jit(tx.update)({"w": concrete.array([-1.0, 1.0])}, tx.init(params), params)
    assert same_bits(optax.apply_updates(params, updates), params)
    assert state.inner_state == 0 and state.skipped_steps == 1 and state.loss_scale.loss_scale == 2.0**14
    updates, state = jax.jit(tx.update)({"w": concrete.array([-1.0, -1.0])}, state, params)
    assert state.inner_state == 1 and state.skipped_steps == 1


@pytest.mark.parametrize("make", [lambda: optax.clip_by_global_norm(1.0), lambda: optax.adam(1e-2)])
def test_gradients_whose_squares_overflow_skip_the_step_so_that_clipping_and_second_moments_stay_finite(make):
    params = {"w": concrete.ones((2, 2)), "b": concrete.ones(2)}
    bare, tx = standard(make()), loss_scaling(standard(make()), DynamicLossScale(8.0))
    for largest, finite in ((1e15, True), (8e18, True), (3e19, False), (3e37, False)):
        true = {"w": concrete.full((2, 2), -1.0), "b": concrete.array([1.0, largest])}
        before = tx.init(params)
        updates, state = jax.jit(tx.update)(true, before, params)
        assert state.last_finite == finite
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, state)))
        if finite:
            assert updates["b"][1] != 0
            continue
        assert same_bits(state.inner_state, before.inner_state) and state.loss_scale.loss_scale == 4
        assert all((leaf == 0).all() and np.signbit(leaf).all() for leaf in jax.tree.leaves(updates))
        # Without loss scaling, these gradients spoil the updates or the state.
        wrong, spoilt = jax.jit(bare.update)(true, bare.init(params), params)
        lost = [bool((leaf == 0).any() or not np.isfinite(leaf).all()) for leaf in jax.tree.leaves((wrong, spoilt))]
        assert any(lost)


@pytest.mark.filterwarnings("ignore:updates below")  # of half params, on purpose
def test_the_norm_is_one_of_all_leaves_and_is_float32_for_half_gradients():
    tx = loss_scaling(optax.sgd(0.1), jaxmp.NoOpLossScale(), grad_norm=True)
    params = {"a": concrete.ones(4, jnp.bfloat16), "b": concrete.ones(4, jnp.bfloat16)}
    gradient = concrete.full(4, 8e18, jnp.bfloat16)  # 4 squares sum to 2.6e38, 8 to 5e38
    _, state = tx.update({"a": gradient, "b": concrete.zeros(4, jnp.bfloat16)}, tx.init(params), params)
    assert state.last_finite and np.isclose(state.grad_norm, 1.6e19, rtol=0.01)
    _, state = tx.update({"a": gradient, "b": gradient}, state, params)
    assert not state.last_finite and np.isinf(state.grad_norm)
    half = {name: concrete.full(4, 300, jnp.float16) for name in params}  # the square overflows float16
    _, state = tx.update(half, state, params)
    assert state.last_finite and np.isclose(state.grad_norm, 300 * 8**0.5)


def test_float64_gradients_have_the_range_of_float64():
    with jax.enable_x64(True):
        tx = loss_scaling(optax.sgd(0.1), jaxmp.NoOpLossScale())
        params = {"a": concrete.ones(2, jnp.float64), "b": concrete.ones(2, jnp.float32)}
        for largest, finite in ((1e100, True), (1e160, False), (np.nan, False)):
            grads = {"a": concrete.array([1.0, largest]), "b": concrete.ones(2, jnp.float32)}
            _, state = jax.jit(tx.update)(grads, tx.init(params), params)
            assert state.last_finite == finite
        _, state = jax.jit(tx.update)(
            {"a": concrete.ones(2), "b": concrete.full(2, 3e38, jnp.float32)}, tx.init(params), params
        )
        assert not state.last_finite  # the second moment of "b" is float32


def test_without_check_updates_only_gradients_are_tested_as_in_torch():
    tx = loss_scaling(optax.scale(jnp.inf), DynamicLossScale())
    updates, state = tx.update(concrete.ones(2), tx.init(concrete.ones(2)), concrete.ones(2))
    assert jnp.isinf(updates).all() and state.last_finite
    updates, state = tx.update(concrete.array([1.0, jnp.nan]), state, concrete.ones(2))
    assert (updates == 0).all() and not state.last_finite
    divide = optax.stateless(lambda updates, params: updates / jnp.sum(updates * 0))
    tx = loss_scaling(divide, jaxmp.NoOpLossScale(), check_updates=True)
    updates, state = tx.update(concrete.ones(2), tx.init(concrete.ones(2)), concrete.ones(2))
    assert not state.last_finite and np.signbit(updates).all()


@pytest.mark.filterwarnings("ignore:updates below")  # of half params, on purpose
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.complex64])
def test_adding_the_skipped_updates_changes_no_bit_of_other_dtypes(dtype):
    special = [-0.0, 0.0, 1.5, -np.inf] if dtype != jnp.complex64 else [complex(-0.0, -0.0), complex(-0.0, 0.0), 1j]
    params = concrete.array(special, dtype)
    tx = loss_scaling(optax.sgd(0.1), DynamicLossScale())
    updates, state = tx.update(concrete.full(len(special), jnp.nan, dtype), tx.init(params), params)
    with jax.numpy_dtype_promotion("standard"):
        assert bits(optax.apply_updates(params, updates)) == bits(params)
    assert state.skipped_steps == 1


@pytest.mark.filterwarnings("ignore:updates below")  # of half params, on purpose
def test_the_scale_falls_until_float16_gradients_no_longer_overflow():
    params = {"w": concrete.ones(2, jnp.float16)}
    tx = loss_scaling(optax.sgd(2.0**-10), DynamicLossScale(2.0**15))
    state = tx.init(params)
    scales = []
    for _ in range(5):
        loss, grads = value_and_grad(lambda p: jnp.sum(p["w"].astype(jnp.float32)) * 8, state)(params)
        assert loss == 16
        scales.append(int(state.loss_scale.loss_scale))
        updates, state = tx.update(grads, state, params)
    assert scales == [2**15, 2**14, 2**13, 2**12, 2**12]  # 8 * 2**13 is 65536, float16's infinity
    assert state.skipped_steps == 3 and (updates["w"] == -(2.0**-7)).all()


class AnySequenceOfSteps(RuleBasedStateMachine):
    """Take any sequence of finite and bad steps, and compare with two oracles.

    The oracles are an optimizer that takes only the finite steps, and torch's rule for the scale in plain Python.
    """

    @initialize(
        start=st.sampled_from([1.0, 2.0, 2.0**10, 2.0**24]),
        period=st.integers(1, 4),
        factor=st.sampled_from([2.0, 4.0]),
        lowest=st.sampled_from([1.0, 0.25]),
    )
    def begin(self, start, period, factor, lowest):
        self.params = self.plain_params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[0.5]])}
        self.scale, self.counter, self.period, self.factor, self.lowest = start, 0, period, factor, lowest
        loss_scale = DynamicLossScale(start, period=period, factor=factor, min_loss_scale=lowest)
        self.tx, self.plain = loss_scaling(optax.sgd(0.1, momentum=0.9), loss_scale), optax.sgd(0.1, momentum=0.9)
        self.state, self.plain_state = self.tx.init(self.params), self.plain.init(self.params)
        self.skipped = self.consecutive = 0

    def step(self, grads):
        updates, self.state = self.tx.update(grads, self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)

    @rule(values=st.lists(st.floats(-4, 4, width=16), min_size=3, max_size=3))
    def good(self, values):
        values = [round(value * 256) / 256 for value in values]  # so no product is subnormal
        grads = {"a": jnp.array(values[:2], jnp.float32), "b": jnp.full((1, 1), values[2], jnp.float32)}
        self.step(grads)
        updates, self.plain_state = self.plain.update(grads, self.plain_state)
        self.plain_params = optax.apply_updates(self.plain_params, updates)
        self.counter += 1
        if self.counter >= self.period:
            self.counter = 0
            if self.scale * self.factor <= 2.0**24:
                self.scale *= self.factor
        self.consecutive = 0
        self.check()

    @rule(value=st.sampled_from(BAD), leaf=st.integers(0, 1))
    def bad(self, value, leaf):
        self.step(replace_element(jax.tree.map(jnp.ones_like, self.params), leaf, value))
        self.scale, self.counter = max(self.scale / self.factor, self.lowest), 0
        self.skipped, self.consecutive = self.skipped + 1, self.consecutive + 1
        self.check()

    def check(self):
        assert same_bits(self.params, self.plain_params)
        assert same_bits(self.state.inner_state, self.plain_state)
        assert float(self.state.loss_scale.loss_scale) == self.scale
        assert int(self.state.loss_scale.counter) == self.counter
        assert int(self.state.skipped_steps) == self.skipped and int(self.state.consecutive_skipped) == self.consecutive


AnySequenceOfSteps.TestCase.settings = settings(max_examples=6, stateful_step_count=12)
TestAnySequenceOfSteps = AnySequenceOfSteps.TestCase
