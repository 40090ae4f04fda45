"""Gradients that the optimizer discards do not skip a step."""

from __future__ import annotations

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp import DynamicLossScale, loss_scaling

PARAMS = {"trained": concrete.ones(2), "frozen": concrete.zeros(2)}
LABELS = {"trained": "trained", "frozen": "frozen"}
IS_FROZEN = {"trained": False, "frozen": True}


def loss_fn(params, batch):
    return jnp.sum(params["trained"] * batch) + jnp.sum(jnp.sqrt(jnp.abs(params["frozen"])))  # sqrt'(0) is infinite


def partition(of_frozen):
    return optax.partition({"trained": optax.sgd(0.5), "frozen": of_frozen}, LABELS)


def only_trained(updates, params):
    return {"trained": -0.5 * updates["trained"], "frozen": jnp.zeros_like(params["frozen"])}


DISCARDING = {
    "a partition": partition(optax.set_to_zero()),
    "a mask": optax.chain(optax.masked(optax.set_to_zero(), IS_FROZEN), optax.sgd(0.5)),
    "a mask before clipping": optax.chain(
        optax.masked(optax.set_to_zero(), IS_FROZEN), optax.clip_by_global_norm(10.0), optax.sgd(0.5)
    ),
    "a function": optax.stateless(only_trained),
}
USING = {
    "all are trained": optax.sgd(0.5),
    "a norm of all gradients": optax.chain(optax.clip_by_global_norm(1.0), partition(optax.set_to_zero())),
    "a factor of 0": partition(optax.scale(0.0)),
    "momentum of all gradients": optax.chain(optax.trace(0.9), partition(optax.set_to_zero())),
}


@pytest.mark.parametrize("tx", DISCARDING.values(), ids=DISCARDING)
def test_a_train_step_ignores_an_infinite_gradient_that_the_optimizer_discards(tx):
    state = jaxmp.TrainState.create(params=PARAMS, tx=loss_scaling(tx, DynamicLossScale()))
    state, metrics = jaxmp.make_train_step(loss_fn, donate=False)(state, np.float32([3, 4]))
    np.testing.assert_array_equal(state.params["trained"], 1 - 0.5 * np.float32([3, 4]))
    np.testing.assert_array_equal(state.params["frozen"], [0, 0])
    assert (metrics["grad_norm"], metrics["skipped"], state.loss_scale) == (5, False, 2**15)


@pytest.mark.parametrize("tx", USING.values(), ids=USING)
def test_a_train_step_is_skipped_if_the_optimizer_uses_the_infinite_gradient(tx):
    state = jaxmp.TrainState.create(params=PARAMS, tx=loss_scaling(tx, DynamicLossScale()))
    state, metrics = jaxmp.make_train_step(loss_fn, donate=False)(state, np.float32([3, 4]))
    np.testing.assert_array_equal(state.params["trained"], [1, 1])
    assert metrics["skipped"] and state.loss_scale == 2**14 and not np.isfinite(metrics["grad_norm"])


def test_an_own_jitted_step_ignores_discarded_gradients():
    tx = loss_scaling(DISCARDING["a partition"], DynamicLossScale(), grad_norm=True)

    @jax.jit
    def step(params, opt_state, batch):
        _, grads = jaxmp.value_and_grad(loss_fn, opt_state)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = step(PARAMS, tx.init(PARAMS), np.float32([3, 4]))
    np.testing.assert_array_equal(params["trained"], 1 - 0.5 * np.float32([3, 4]))
    assert (opt_state.skipped_steps, opt_state.grad_norm) == (0, 5)


def test_an_nnx_step_ignores_discarded_gradients():
    class Model(nnx.Module):
        def __init__(self):
            self.trained, self.frozen = nnx.Param(jnp.ones(2)), nnx.Param(jnp.zeros(2))

    def loss_of_model(model, batch):
        return loss_fn({"trained": model.trained[...], "frozen": model.frozen[...]}, batch)

    def labels(params):
        return jax.tree.map_with_path(lambda path, _: path[-1].key, params)

    tx = optax.partition({"trained": optax.sgd(0.5), "frozen": optax.set_to_zero()}, labels)
    model = Model()
    optimizer = jaxmp.nnx.Optimizer(model, tx, loss_scale=DynamicLossScale())

    @nnx.jit
    def step(model, optimizer, batch):
        _, grads = jaxmp.nnx.value_and_grad(loss_of_model, optimizer)(model, batch)
        optimizer.update(model, grads)

    step(model, optimizer, np.float32([3, 4]))
    np.testing.assert_array_equal(model.trained[...], 1 - 0.5 * np.float32([3, 4]))
    assert optimizer.skipped_steps == 0
