"""Gradients of a layer's half result that code between layers repeats."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import compiled
from flax import nnx
from jax import lax
from linen_zoo import HALVES
from program_tools import half_sums

import jaxmp

LIMITS = {"bfloat16": 0.02, "float16": 0.003}


def vmapped_twice(t, x):
    return jax.vmap(jax.vmap(lambda pixel: pixel + t[0]))(x)


# Functions that repeat the half result of a layer, `t` of the shape (8, 1). No product reads the repeated values.
AS_WRITTEN = {
    "table looked up": lambda t, x: t[jnp.arange(4096) % 8],
    "sliced at a place": lambda t, x: jax.vmap(lambda n: lax.dynamic_slice_in_dim(t, n, 4))(jnp.arange(4096) % 4),
    "in each turn": lambda t, x: lax.scan(lambda c, _: (c, c * t), x[0, 0], length=4096)[1],
    "in turns of turns": lambda t, x: lax.scan(
        lambda c, _: (c, lax.scan(lambda c, _: (c, c * t), c, length=64)[1]), x[0, 0], length=64
    )[1],
    "often in each turn": lambda t, x: lax.scan(
        lambda c, n: (c, jnp.stack([jnp.tanh(t * n + k) for k in range(8)])),
        x[0, 0],
        jnp.arange(40).astype(t.dtype) / 40,
    )[1],
    "looked up in each turn": lambda t, x: lax.scan(lambda c, _: (c, c * t[jnp.arange(200) % 2]), x[0, 0], length=200)[
        1
    ],
    "one row of it in each turn": lambda t, x: lax.scan(lambda c, row: (c, row * t[0]), x[0, 0], x[:, :200])[1],
    "a time added to all pixels": lambda t, x: x + t[0],
    "tiled": lambda t, x: jnp.tile(t, (4096, 1)),
    "under two vmaps": vmapped_twice,
    "in a checkpoint": lambda t, x: jax.checkpoint(lambda t: x + t[0])(t),
    "the largest of equals": lambda t, x: jax.ops.segment_max(t[jnp.arange(4096) % 8], jnp.arange(4096) % 8, 8),
}


def as_written(layer: Any, case: str) -> jax.Array:
    t = layer(jnp.eye(8))
    return jnp.sum(AS_WRITTEN[case](t, jnp.ones((8, 512, 1), t.dtype)).astype(jnp.float32))


class InLinen(nn.Module):
    case: str

    @nn.compact
    def __call__(self) -> jax.Array:
        return as_written(nn.Dense(1, name="layer"), self.case)


class InNNX(nnx.Module):
    def __init__(self, case: str) -> None:
        self.case, self.layer = case, nnx.Linear(8, 1, rngs=nnx.Rngs(0))

    def __call__(self) -> jax.Array:
        return as_written(self.layer, self.case)


def summed(api: str, case: str, params: Any, policy: str | None) -> jax.Array:
    if api == "Linen":
        linen = InLinen(case) if policy is None else jaxmp.linen.apply_policy(InLinen(case), policy)
        return linen.apply({"params": {"layer": params}})
    model = InNNX(case)
    model.layer.kernel[...], model.layer.bias[...] = params["kernel"], params["bias"]
    return (model if policy is None else jaxmp.nnx.apply_policy(model, policy))()


@pytest.mark.parametrize("api", ["Linen", "NNX"])
@pytest.mark.parametrize("policy", HALVES)
def test_half_values_repeated_between_layers_have_float32_gradient_sums(policy, api):
    params = {"kernel": jnp.full((8, 1), 0.125), "bias": jnp.zeros(1)}
    cases = list(AS_WRITTEN)[list(HALVES).index(policy) + 2 * (api == "NNX") :: 4]

    def gradients(params: Any, under: str | None) -> Any:
        return {case: jax.grad(functools.partial(summed, api, case, policy=under))(params) for case in cases}

    program = compiled(lambda params: (gradients(params, None), gradients(params, policy))).trace(params)
    assert not half_sums(program.jaxpr)
    true, got = program.lower().compile()(params)
    for case in cases:
        for name, value in true[case].items():
            error = np.linalg.norm(got[case][name] - value)
            assert error <= LIMITS[HALVES[policy]] * np.linalg.norm(value), (case, name)
