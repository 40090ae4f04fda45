"""Models, states and specs for tests of train steps on a mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from recompiles import compiled_once

import jaxmp
from experiments.models.gpt2 import GPT2
from jaxmp import sharding
from jaxmp.program.walk import equations
from jaxmp.sharding import Sharding

VOCABULARY, SEQUENCE, WIDTH, LAYERS, BATCH = 64, 8, 32, 3, 8
MODEL = GPT2(vocabulary=VOCABULARY, sequence=SEQUENCE, layers=1, heads=2, width=WIDTH)


def tokens(n=BATCH):
    return np.random.default_rng(0).integers(0, VOCABULARY, (n, SEQUENCE + 1)).astype(np.int32)


@functools.partial(jax.jit, static_argnames="model")
def linen_params(model=MODEL):
    return model.init(jax.random.key(0), jnp.zeros((1, SEQUENCE), jnp.int32))["params"]


def linen_loss(model=MODEL):
    def loss_fn(params, model_state, batch, rng):
        return model.apply({"params": params}, batch[:, :-1], batch[:, 1:], method="loss"), model_state

    return loss_fn


def untyped(loss_fn):
    """Return ``loss_fn`` with Explicit axes turned into Auto axes."""

    def run(*args):
        if not jax.sharding.get_abstract_mesh().explicit_axes:
            return loss_fn(*args)
        return jax.sharding.auto_axes(loss_fn, out_sharding=P())(*args)

    return run


def stacked_params():
    rng = np.random.default_rng(0)

    def normal(*sizes):
        return jnp.asarray(rng.normal(size=sizes) / WIDTH**0.5, jnp.float32)

    return {
        "table": normal(VOCABULARY, WIDTH),
        "layers": {"up": normal(LAYERS, WIDTH, 2 * WIDTH), "down": normal(LAYERS, WIDTH, 2 * WIDTH)},
        "bias": normal(LAYERS, 2 * WIDTH),
    }


def stacked_loss(params, model_state, batch, rng):
    """Compute a loss with scanned layers, a transposed weight and a shared table."""

    def layer(x, params):
        weights, bias = params
        h = jnp.tanh(x @ weights["up"] + bias)
        return x + h @ weights["down"].T, None

    x = jnp.einsum("bv,vd->bd", jax.nn.one_hot(batch[:, 0], VOCABULARY), params["table"])
    x, _ = jax.lax.scan(layer, x, (params["layers"], params["bias"]))
    return jaxmp.losses.projected_cross_entropy(x, params["table"], batch[:, 1], chunks=2, softcap=5.0), model_state


def tx_of(scale=None):
    return jaxmp.loss_scaling(optax.sgd(0.05, momentum=0.9), scale or jaxmp.DynamicLossScale())


def specs_of(make_params, mesh, **options):
    return sharding.fsdp_specs(jax.eval_shape(make_params), mesh, min_size=512, **options)


def pair(make_params, loss_fn, mesh, specs, step_options=(), **options):
    """Return a step on one device and a step on the mesh, and the two states."""
    common = {"donate": False, **dict(step_options)}
    single_state = jaxmp.TrainState.create(params=make_params(), tx=tx_of())
    sharded_state = jaxmp.TrainState.create_sharded(make_params, tx_of(), Sharding(mesh, specs))
    steps = (
        jaxmp.make_train_step(loss_fn, **common),
        jaxmp.make_train_step(loss_fn, sharding=Sharding(mesh, specs, **options), **common),
    )
    return steps, (single_state, sharded_state)


def differences(expected, actual):
    leaves = zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in leaves]
    return max(np.abs(a - b).max() / np.abs(a).max() for a, b in pairs)


def after_five(steps, states, batch):
    states = list(states)
    for _ in range(5):
        for n, step in enumerate(steps):
            states[n], metrics = step(states[n], batch)
            assert not metrics["skipped"]
    assert compiled_once(steps[1])
    return states


def wire(step, state, batch, mesh):
    """Return the dtypes of gathered weights, by shape, and of reduced gradients."""
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(step.update)(state, batch)
    gathers, reductions = {}, set()
    for eqn in equations(program):
        if eqn.primitive.name == "sharding_constraint":
            aval = eqn.outvars[0].aval
            gathers.setdefault(aval.shape, set()).add(aval.dtype.name)
        if eqn.primitive.name in ("reduce_scatter", "psum", "psum_invariant"):
            reductions |= {var.aval.dtype.name for var in eqn.invars}
    return gathers, reductions


def where(eqn):
    """Return the spec of a sharding constraint."""
    return eqn.params["sharding"].spec
