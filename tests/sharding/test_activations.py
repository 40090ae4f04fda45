"""Values computed from weights and examples are activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mesh_steps import untyped
from meshes import mesh_of

import jaxmp
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.walk import equations
from jaxmp.sharding import Sharding

pytestmark = pytest.mark.usefixtures("standard_promotion")

SLOW = pytest.mark.slow("the same for axes that the loss makes Auto: compiles a large program")


def step_on(mesh, loss_fn, params):
    """Return a train step and a state whose params are split over a mesh."""
    specs = {name: P("fsdp") for name in params}
    state = jaxmp.TrainState.create_sharded(lambda: params, optax.sgd(1.0), Sharding(mesh, specs), rng=0)
    return jaxmp.make_train_step(untyped(loss_fn), sharding=Sharding(mesh, specs), donate=False), state


def gradients_of(step, state, batch):
    new, _ = step(state, batch)
    return {name: np.asarray(leaf) - np.asarray(new.params[name]) for name, leaf in state.params.items()}


COMPUTED_WEIGHTS = {
    "a matrix of the batch": lambda w, x: w + x.T @ x / 2**20,
    "a product with the batch": lambda w, x: w @ (jnp.eye(4) + 0 * (x.T @ x)),
    "drawn noise": lambda w, x, rng: w + 2.0**-20 * jax.random.normal(rng, w.shape),
    "fast weights": lambda w, x: jax.lax.fori_loop(0, 2, lambda _, w: w + 0 * (x.T @ x), w),
}
SPELLINGS = {
    "bare": lambda x, w: x @ w,
    "in a call": jax.jit(lambda x, w: jnp.cos(0 * x) * (x @ w), inline=False),
    "in a loop": lambda x, w: jax.lax.scan(lambda y, _: (y + x @ w, None), jnp.zeros_like(x), None, length=1)[0],
    "in a branch": lambda x, w: jax.lax.cond(jnp.sum(x) > 0, lambda x, w: x @ w, lambda x, w: x, x, w),
    "computed again": jax.checkpoint(lambda x, w: x @ w),
}


PAIRS = {
    "bare": "drawn noise",
    "in a call": "a matrix of the batch",
    "in a loop": "a product with the batch",
    "in a branch": "a matrix of the batch",
    "computed again": "fast weights",
}


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=SLOW)])
def test_products_of_computed_weights_sum_in_float32_and_round_once(kind):
    """Use integers, whose sums float32 represents exactly and bfloat16 does not."""

    def loss_fn(params, model_state, batch, rng):
        total = 0.0
        for spelling, how in PAIRS.items():
            more = (rng,) if how == "drawn noise" else ()
            weight = COMPUTED_WEIGHTS[how](params[spelling], batch, *more).astype("bfloat16")
            total += jnp.sum(SPELLINGS[spelling](batch.astype("bfloat16"), weight).astype("float32"))
        return total, model_state

    params = {name: np.ones((4, 4), np.float32) for name in PAIRS}
    batch = np.random.default_rng(0).integers(1, 10, (512, 4)).astype(np.float32)
    exact = np.broadcast_to(batch.sum(0)[:, None], (4, 4))
    rounded_once = exact.astype(jnp.bfloat16).astype(np.float32)
    mesh = mesh_of(kind)
    step, state = step_on(mesh, loss_fn, params)
    with jax.set_mesh(mesh):  # look at the program, because a CPU widens half sums over devices
        products = [
            eqn for eqn in equations(jax.make_jaxpr(step.update)(state, batch)) if eqn.primitive.name in PRODUCTS
        ]
    dtypes = [eqn.outvars[0].aval.dtype.name for eqn in products if eqn.outvars[0].aval.shape == (4, 4)]
    assert len(dtypes) > len(PAIRS) and set(dtypes) == {"float32"}
    gradients = gradients_of(step, state, batch)
    for spelling, how in PAIRS.items():
        if how != "a matrix of the batch":
            np.testing.assert_array_equal(gradients[spelling], rounded_once, err_msg=spelling)
        np.testing.assert_allclose(gradients[spelling], exact, rtol=2**-8, err_msg=spelling)


@pytest.mark.parametrize(("rows", "kind"), [(16, AxisType.Explicit), (32, AxisType.Auto)])
def test_activations_of_the_shape_of_a_weight_are_activations_whatever_the_batch(rows, kind):
    """Multiply each example by its own param, before a custom derivative."""

    def loss_in(dtype):
        def loss_fn(params, model_state, batch, rng):
            m, w = params["m"].astype(dtype), params["w"].astype(dtype)
            x = jax.nn.relu(batch.astype(dtype) * (m if rows == 16 else jnp.concatenate([m, m])))
            return jnp.sum((x @ w).astype("float32")), model_state

        return loss_fn

    params = {name: np.ones((16, 16), np.float32) for name in "mw"}
    batch = np.random.default_rng(0).integers(100, 255, (rows, 16)).astype(np.float32)
    exact = jax.jit(jax.grad(lambda params: loss_in("float32")(params, None, batch, None)[0]))(params)
    gradients = gradients_of(*step_on(mesh_of(kind), loss_in("bfloat16"), params), batch)
    np.testing.assert_array_equal(gradients["w"], exact["w"])
    np.testing.assert_allclose(gradients["m"], exact["m"], rtol=2**-8)


@pytest.mark.once
def test_a_learned_start_of_what_a_loop_changes_by_the_examples_trains():
    """Train a recurrent state, and weights that each iteration updates."""

    def loss_in(dtype):
        def loss_fn(params, model_state, batch, rng):
            x = batch.astype(dtype)

            def turn(carry, _):
                state, weight = carry
                state = jnp.tanh(x @ params["w"].astype(dtype) + state @ weight.astype(dtype))
                return (state, weight - 1e-3 * (batch.T @ state.astype("float32"))), None

            start = jnp.broadcast_to(params["state"].astype(dtype), x.shape), params["weight"]
            (state, _), _ = jax.lax.scan(turn, start, None, length=3)
            return jnp.mean(state.astype("float32") ** 2), model_state

        return loss_fn

    rng = np.random.default_rng(0)
    shapes = {"w": (8, 8), "weight": (8, 8), "state": (8,)}
    params = {name: rng.normal(size=size).astype(np.float32) / 4 for name, size in shapes.items()}
    batch = rng.normal(size=(32, 8)).astype(np.float32)
    exact = jax.jit(jax.grad(lambda params: loss_in("float32")(params, None, batch, None)[0]))(params)
    gradients = gradients_of(*step_on(mesh_of(AxisType.Auto), loss_in("bfloat16"), params), batch)
    for name, gradient in exact.items():
        assert np.linalg.norm(gradients[name] - gradient) <= 0.02 * np.linalg.norm(gradient), name
