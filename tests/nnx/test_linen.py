"""Linen and NNX models with equal weights and policies give equal numbers."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from linen_zoo import data, numbers, quick_jit, same_bits
from nnx_zoo import compiled, module_with_numbers, rngs, values

import jaxmp

IMAGE = data(2, 5, 5, 3)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(8, (3, 3), name="conv")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.99, name="norm")(x))
        x = nn.LayerNorm(name="layer_norm")(x)
        return nn.Dense(8, name="out")(x * self.param("gain", nn.initializers.normal(), (8,)))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv, self.norm = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs, epsilon=1e-5)
        self.layer_norm, self.out = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.gain = nnx.Param(jnp.zeros(8))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x)))
        return self.out(self.layer_norm(x) * self.gain)


pytestmark = pytest.mark.usefixtures("standard_promotion")  # the norms of Linen and NNX add half and float32


@pytest.mark.once
def test_linen_and_nnx_give_the_same_outputs_gradients_and_statistics():
    linen = jaxmp.linen.apply_policy(Linen(), "O2")
    shapes = jax.eval_shape(linen.init, jax.random.key(0), IMAGE)
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes["batch_stats"])
    variables = {"params": numbers(shapes["params"]), "batch_stats": ones}
    bare = module_with_numbers(lambda: Nnx(rngs()))
    nnx.update(bare, variables["params"])
    model = jaxmp.nnx.apply_policy(bare, "O2")

    def linen_loss(params: Any) -> Any:
        out, state = linen.apply({**variables, "params": params}, IMAGE, mutable=["batch_stats"])
        return jnp.sum(out.astype("float32") ** 2), (out, state["batch_stats"]["norm"])

    def nnx_loss(model: Any) -> Any:
        out = model(IMAGE)
        return jnp.sum(out.astype("float32") ** 2), out

    by_linen = quick_jit(jax.value_and_grad(linen_loss, has_aux=True))
    (_, (want, statistics)), want_grads = by_linen(variables["params"])
    (_, out), grads = compiled(nnx.value_and_grad(nnx_loss, has_aux=True), model)
    same_bits(out, want)
    same_bits(nnx.to_pure_dict(values(model, nnx.BatchStat))["norm"], statistics)
    grads = nnx.to_pure_dict(nnx.as_pure(grads))
    assert jax.tree.structure(grads) == jax.tree.structure(want_grads)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want_grads))
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        # Linen and NNX add some cotangents in different orders, also without a policy.
        np.testing.assert_allclose(got, wanted, rtol=2**-7, atol=1e-4 * largest)
