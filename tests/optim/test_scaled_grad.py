"""value_and_grad returns true gradients, without the loss scale."""

from __future__ import annotations

import warnings

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optimizer_tools import bits, loss_fn, problem, same_bits, train_loss

import jaxmp
from jaxmp import DynamicLossScale, TrainState, keep_if_skipped, loss_scaling, make_train_step, value_and_grad

pytestmark = pytest.mark.once

SCALED = DynamicLossScale(2.0**15)


def clip(tx):
    return optax.chain(optax.clip_by_global_norm(0.1), tx)


def step_of_plain_jax(tx, params, batch):
    @jax.jit
    def step(params, opt_state):
        updates, _ = tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates)

    return step(params, tx.init(params))


def step_by_update(tx, params, batch):
    @jax.jit
    def step(params, opt_state):
        _, grads = value_and_grad(loss_fn, opt_state)(params, batch)
        updates, _ = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates)

    return step(params, tx.init(params))


def train_step(tx, params, batch):
    state = TrainState.create(params=params, tx=tx)
    return make_train_step(train_loss, donate=False)(state, batch)[0].params


@pytest.mark.parametrize("step", [step_by_update, train_step])
def test_clipping_inside_and_before_loss_scaling_clips_the_true_gradients(step):
    params, batch = problem()
    expected = step_of_plain_jax(clip(optax.sgd(0.5)), params, batch)
    inside = step(loss_scaling(clip(optax.sgd(0.5)), SCALED), params, batch)
    before = step(clip(loss_scaling(optax.sgd(0.5), SCALED)), params, batch)
    for clipped in (inside, before):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), clipped, expected)


def test_a_loss_scale_that_is_a_constant_of_a_jitted_step_is_warned_of():
    def loss(params, batch):  # short, because some calls below compile each operation
        return jnp.vdot(params, batch)

    params, batch, batches = concrete.ones(2), concrete.ones(2), concrete.ones((1, 2))
    opt_state = loss_scaling(optax.sgd(0.5), SCALED).init(params)
    gradient = value_and_grad(loss, opt_state)
    with pytest.warns(UserWarning, match="is a constant of this jitted function") as caught:
        jax.make_jaxpr(jax.jit(gradient))(params, batch)
        jax.make_jaxpr(jax.jit(jax.vmap(gradient, in_axes=(None, 0))))(params, batches)
    assert len(caught) == 2
    # Without a warning:
    jax.make_jaxpr(jax.jit(lambda opt_state, params: value_and_grad(loss, opt_state)(params, batch)))(opt_state, params)
    gradient(params, batch)
    jax.lax.scan(lambda total, _: (total + gradient(params, batch)[0], None), 0.0, length=2)
    jax.vmap(gradient, in_axes=(None, 0))(params, batches)
    constant = loss_scaling(optax.sgd(0.5), jaxmp.StaticLossScale(8.0)).init(params)
    jax.make_jaxpr(jax.jit(value_and_grad(loss, constant)))(params, batch)


def test_a_gradient_function_of_an_nnx_optimizer_follows_its_loss_scale():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=DynamicLossScale(2.0**16))

    def loss(model):
        return model.bias.astype(jnp.float16).sum().astype(jnp.float32)

    gradient = jaxmp.nnx.value_and_grad(loss, optimizer)
    with pytest.warns(UserWarning, match="NNX, the optimizer"):
        nnx.jit(lambda model: gradient(model))(model)
    for _ in range(3):  # 2**16 overflows in float16, and 2**15 does not
        _, grads = gradient(model)
        optimizer.update(model, grads)
    assert int(optimizer.skipped_steps) == 1 and optimizer.loss_scale == 2.0**15


def test_gradients_of_plain_jax_train_a_wrapped_optimizer():
    params, batch = problem()
    expected = step_of_plain_jax(optax.sgd(0.5), params, batch)
    tx = loss_scaling(optax.sgd(0.5), SCALED)
    assert same_bits(step_of_plain_jax(tx, params, batch), expected)
    state = TrainState.create(params=params, tx=tx)
    new = jax.jit(lambda state: state.apply_gradients(grads=jax.grad(loss_fn)(state.params, batch)))(state)
    assert same_bits(new.params, expected)


@pytest.mark.parametrize("by_train_step", [False, True])
def test_clipping_before_loss_scaling_does_not_hide_an_overflow(by_train_step):
    """Skip a step whose infinite gradient clipping would hide.

    In float16, the gradient 8 times the scale 2**15 is infinite. Clipping by value would make it 1.
    """
    tx = optax.chain(optax.clip(1.0), loss_scaling(optax.sgd(0.5), SCALED))
    params = {"w": concrete.ones(2)}

    def loss_of(params):
        return 8 * jnp.sum(params["w"].astype(jnp.float16)).astype(jnp.float32)

    if by_train_step:
        state = TrainState.create(params=params, tx=tx)
        step = make_train_step(lambda params, model_state, batch, rng: (loss_of(params), model_state), donate=False)
        new, _ = step(state, concrete.ones(1))
        after, opt_state = new.params, new.opt_state
    else:
        opt_state = tx.init(params)
        _, grads = value_and_grad(loss_of, opt_state)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        after = optax.apply_updates(params, updates)
    assert same_bits(after, params)
    assert jaxmp.get_loss_scale(opt_state).loss_scale == 2.0**14


def test_keep_if_skipped_keeps_statistics_bit_for_bit():
    tx = clip(loss_scaling(optax.sgd(0.5), SCALED))
    params = {"w": concrete.ones(2)}

    @jax.jit
    def step(params, statistics, opt_state, x):
        def loss_of(params):
            return jnp.sum(params["w"] * x), {"mean": jnp.mean(x), "count": statistics["count"] + 1}

        (_, new), grads = value_and_grad(loss_of, opt_state, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), keep_if_skipped(opt_state, new, statistics), opt_state

    old = {"mean": concrete.array(-0.0, jnp.bfloat16), "count": concrete.array(0)}
    skipped = step(params, old, tx.init(params), concrete.array([1.0, jnp.inf]))
    assert bits(skipped[:2]) == bits((params, old))
    _, taken, _ = step(skipped[0], skipped[1], skipped[2], concrete.array([1.0, 2.0]))
    assert taken["mean"] == 1.5 and taken["mean"].dtype == jnp.bfloat16 and taken["count"] == 1


def scaled_by_hand(params, batch, scale):
    return jax.grad(lambda params: scale.scale(loss_fn(params, batch)))(params)


def microbatches(gradient, params, batch, scale):
    def add(total, x):
        grads = gradient(params, {**batch, "x": batch["x"] + x}, scale)
        return jax.tree.map(jnp.add, total, grads), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), jnp.arange(2.0))[0]


def over(grads, number):
    return jax.tree.map(lambda grad: grad / number, grads)


def clipped(grads, norm):
    return optax.clip_by_global_norm(norm).update(grads, optax.EmptyState())[0]


def clipped_by_hand(grads, norm):
    factor = jnp.minimum(1.0, norm / (optax.tree.norm(grads) + 1e-6))
    return jax.tree.map(lambda grad: grad * factor, grads)


def normalized(grads):
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda grad: grad / norm, grads)


TWICE, NEVER = "divided by the loss scale once too often", "still multiplied by the loss scale"
LOST = "were multiplied by the loss scale and never divided by it"
STEPS = {  # the gradients of a step, and what the warning says
    "unscaled twice": (lambda p, b, s, true: s.unscale(true(p, b, s)), TWICE),
    "unscaled twice after accumulation": (lambda p, b, s, true: s.unscale(microbatches(true, p, b, s)), TWICE),
    "scaled twice": (lambda p, b, s, true: true(p, b, s, lambda *args: s.scale(loss_fn(*args))), NEVER),
    "never unscaled": (lambda p, b, s, true: scaled_by_hand(p, b, s), NEVER),
    "never unscaled after accumulation": (
        lambda p, b, s, true: over(microbatches(scaled_by_hand, p, b, s), 2.0),
        NEVER,
    ),
    "clipped and never unscaled": (lambda p, b, s, true: clipped(scaled_by_hand(p, b, s), 1.0), LOST),
    "clipped by hand and never unscaled": (
        lambda p, b, s, true: clipped_by_hand(scaled_by_hand(p, b, s), 1.0),
        LOST,
    ),
    "clipped by value and never unscaled": (
        lambda p, b, s, true: jax.tree.map(lambda grad: jnp.clip(grad, -1.0, 1.0), scaled_by_hand(p, b, s)),
        LOST,
    ),
    "clipped to a scaled norm and never unscaled": (
        lambda p, b, s, true: clipped(scaled_by_hand(p, b, s), 1.0 * s.loss_scale),
        NEVER,
    ),
    "unscaled, then clipped": (lambda p, b, s, true: clipped(s.unscale(scaled_by_hand(p, b, s)), 1.0), None),
    "unscaled, then clipped by hand": (
        lambda p, b, s, true: clipped_by_hand(over(scaled_by_hand(p, b, s), s.loss_scale), 1.0),
        None,
    ),
    "clipped to a scaled norm, then unscaled": (
        lambda p, b, s, true: s.unscale(clipped_by_hand(scaled_by_hand(p, b, s), 1.0 * s.loss_scale)),
        None,
    ),
    "of jaxmp, then clipped": (lambda p, b, s, true: clipped_by_hand(true(p, b, s), 1.0), None),
    "divided by their norm": (lambda p, b, s, true: normalized(scaled_by_hand(p, b, s)), None),
    "of jaxmp": (lambda p, b, s, true: true(p, b, s), None),
    "of jaxmp after accumulation": (lambda p, b, s, true: over(microbatches(true, p, b, s), 2.0), None),
    "by hand": (lambda p, b, s, true: s.unscale(scaled_by_hand(p, b, s)), None),
    "divided by the number": (lambda p, b, s, true: over(scaled_by_hand(p, b, s), s.loss_scale), None),
    "divided in another jitted function": (
        lambda p, b, s, true: jax.jit(lambda grads, scale: over(grads, scale))(scaled_by_hand(p, b, s), s.loss_scale),
        None,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_gradients_with_a_wrong_power_of_the_loss_scale_are_warned_of(name):
    params, batch = problem()
    tx = loss_scaling(optax.sgd(0.5), SCALED)
    gradient, warning = STEPS[name]

    @jax.jit
    def step(params, opt_state):
        def true(params, batch, scale, loss_of=loss_fn):
            return value_and_grad(loss_of, opt_state)(params, batch)[1]

        grads = gradient(params, batch, jaxmp.get_loss_scale(opt_state), true)
        return tx.update(grads, opt_state, params)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            _, opt_state = step(params, tx.init(params))
    assert [warning in str(record.message) for record in caught] == ([] if warning is None else [True])
    assert opt_state.skipped_steps == 0


def test_scaled_gradients_of_another_jitted_function_are_not_warned_of():
    params, batch = problem()
    tx = loss_scaling(optax.sgd(0.5), SCALED)

    @jax.jit
    def accumulate(total, params, opt_state):
        return jax.tree.map(jnp.add, total, scaled_by_hand(params, batch, jaxmp.get_loss_scale(opt_state)))

    @jax.jit
    def update(grads, params, opt_state):
        scale = jaxmp.get_loss_scale(opt_state)
        losses = [scale.scale(loss_fn(params, batch))]  # a scaled loss that is not differentiated
        return tx.update(scale.unscale(over(grads, 2.0)), opt_state, params), losses

    opt_state, grads = tx.init(params), jax.tree.map(jnp.zeros_like, params)
    for _ in range(2):
        grads = accumulate(grads, params, opt_state)
    (updates, _), _ = update(grads, params, opt_state)
    expected = jax.tree.map(lambda grad: -0.5 * np.asarray(grad), jax.jit(jax.grad(loss_fn))(params, batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)


def test_gradients_with_a_wrong_power_of_the_loss_scale_are_warned_of_in_nnx():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.5), loss_scale=SCALED)

    def loss(model):
        return jnp.mean(model(jnp.ones((1, 2))) ** 2)

    def unscaled_twice(model, optimizer):
        _, grads = jaxmp.nnx.value_and_grad(loss, optimizer)(model)
        return jaxmp.get_loss_scale(nnx.as_pure(optimizer.opt_state)).unscale(grads)

    def never_unscaled(model, optimizer):
        return nnx.grad(lambda model: loss(model) * optimizer.loss_scale)(model)

    for gradient, warning in ((unscaled_twice, TWICE), (never_unscaled, NEVER)):

        @nnx.jit
        def step(model, optimizer, gradient=gradient):
            optimizer.update(model, gradient(model, optimizer))

        with pytest.warns(UserWarning, match=warning) as caught:
            step(model, optimizer)
        assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("scale", [DynamicLossScale(), jaxmp.HeadroomLossScale(8.0)])
def test_params_with_integer_leaves_are_differentiated_and_updated_as_by_jax(scale):
    params = {"w": concrete.ones((4, 4)), "columns": concrete.arange(3)}

    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"])[:, params["columns"]])

    masked = optax.masked(optax.sgd(0.1), {"w": True, "columns": False})
    tx = loss_scaling(masked, scale)
    opt_state, args = tx.init(params), (params, concrete.full((2, 4), 0.1))
    with pytest.raises(TypeError, match="allow_int"):
        value_and_grad(loss, opt_state)(*args)

    @jax.jit
    def step(opt_state, params, x):
        value, grads = value_and_grad(loss, opt_state, allow_int=True)(params, x)
        return value, grads, tx.update(grads, opt_state, params)[0]

    @jax.jit
    def plain_step(params, x):
        value, grads = jax.value_and_grad(loss, allow_int=True)(params, x)
        return value, grads, masked.update(grads, masked.init(params), params)[0]

    value, grads, updates = step(opt_state, *args)
    expected_value, expected, expected_updates = plain_step(*args)
    assert value == expected_value and grads["columns"].dtype == jax.dtypes.float0
    assert same_bits(grads["w"], expected["w"])
    assert updates["columns"].dtype == jax.dtypes.float0
    assert same_bits(updates["w"], expected_updates["w"])
