"""A mixture of experts on a mesh: products with an axis of experts, and a router with a float32 result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mesh_steps import wire
from meshes import mesh_of

import jaxmp
from jaxmp.program.walk import equations
from jaxmp.sharding import Sharding, fsdp_specs

pytestmark = pytest.mark.usefixtures("standard_promotion")

TOKENS, WIDTH, RANK, EXPERTS = 16, 32, 16, 8
SHAPES = {
    "hidden": (WIDTH, WIDTH),
    "left": (WIDTH, RANK),
    "right": (RANK, EXPERTS),
    "up": (EXPERTS, WIDTH, 2 * WIDTH),
    "down": (EXPERTS, 2 * WIDTH, WIDTH),
}


def make_params():
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape) / 6, jnp.float32) for name, shape in SHAPES.items()}


def route(params, x):
    """Multiply an activation by a weight, and two weights by each other, with float32 results."""
    x = jax.nn.relu(x @ params["hidden"])
    with jaxmp.precision("float32_result"):
        logits = x @ (params["left"] @ params["right"])
    return jax.nn.softmax(logits)


def loss_fn(params, x):
    hidden = jax.nn.silu(jnp.einsum("btd,edh->bteh", x, params["up"]))
    outputs = jnp.einsum("bteh,ehd->bted", hidden, params["down"])
    return jnp.mean(jnp.einsum("bted,bte->btd", outputs, route(params, x)) ** 2)


def loss_of_router(params, x):
    return jnp.mean(route(params, x) ** 2)


def step_of(loss_fn, sharding=None):
    return jaxmp.make_train_step(loss_fn, policy="mixed_bfloat16", sharding=sharding, donate=False)


def on_mesh():
    """Return a mesh, a sharding that splits every param, and a state."""
    mesh = mesh_of()
    sharding = Sharding(mesh, fsdp_specs(jax.eval_shape(make_params), mesh, min_size=64))
    return mesh, sharding, jaxmp.TrainState.create_sharded(make_params, optax.sgd(1.0), sharding)


X = np.random.default_rng(1).normal(size=(8, TOKENS, WIDTH)).astype(np.float32)


def test_a_step_is_near_that_of_one_device():
    _, sharding, state = on_mesh()
    start = make_params()
    single, _ = step_of(loss_fn)(jaxmp.TrainState.create(params=start, tx=optax.sgd(1.0)), X)
    sharded, _ = step_of(loss_fn, sharding)(state, X)
    for name, param in start.items():
        expected, moved = (np.asarray(after.params[name]) - np.asarray(param) for after in (single, sharded))
        assert np.linalg.norm(moved - expected) <= 0.02 * np.linalg.norm(expected), name


def test_a_float32_result_has_half_products_in_the_backward_pass():
    mesh, sharding, state = on_mesh()
    step = step_of(loss_of_router, sharding)
    gathers, reductions = wire(step, state, X, mesh)
    assert gathers[SHAPES["hidden"]] == {"bfloat16"} and reductions == {"float32"}
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(step.update)(state, X)
    products = [eqn for eqn in equations(program) if eqn.primitive.name == "dot_general"]
    assert {atom.aval.dtype.name for eqn in products for atom in eqn.invars} == {"bfloat16"}
    logits = [eqn.outvars[0].aval.dtype.name for eqn in products if eqn.outvars[0].aval.shape == (8, TOKENS, EXPERTS)]
    assert logits[0] == "float32"  # the others are in the backward pass
