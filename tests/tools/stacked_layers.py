"""Stacked layers, their specs, and a loss that gathers one layer at a time."""

from __future__ import annotations

import math

import concrete
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmp import sharding

LAYERS, WIDTH, BATCH = 3, 64, 8


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def make_params():
    rng = np.random.default_rng(0)

    def normal(*sizes):
        return concrete.array(rng.normal(size=sizes) / math.sqrt(WIDTH), jnp.float32)

    return {
        "up": normal(LAYERS, WIDTH, 2 * WIDTH),
        "down": normal(LAYERS, 2 * WIDTH, WIDTH),
        "bias": concrete.zeros((LAYERS, 2 * WIDTH)),
    }


def loss_on(specs, dtype="bfloat16", **options):
    """Return a loss over stacked layers that gathers one layer at a time."""
    of_layer = jax.tree.map(lambda spec: P(*spec[1:]), specs, is_leaf=lambda leaf: isinstance(leaf, P))

    def loss_fn(params, model_state, batch, rng):
        def layer(x, params):
            gathered = sharding.gather(params, of_layer, dtype, **options)
            h = (x.astype(dtype) @ gathered["up"].astype(dtype)).astype(jnp.float32) + gathered["bias"]
            return (jax.nn.gelu(h).astype(dtype) @ gathered["down"].astype(dtype)).astype(jnp.float32), None

        x, _ = jax.lax.scan(layer, batch, params)
        return jnp.mean(x**2), model_state

    return loss_fn


def a_batch():
    return np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype(np.float32)


SPECS = {"up": P(None, None, "fsdp"), "down": P(None, "fsdp"), "bias": P()}
WHOLE = {name: P() for name in SPECS}
