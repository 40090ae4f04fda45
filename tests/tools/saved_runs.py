"""A small Linen run and a small NNX run for tests of checkpoints."""

from __future__ import annotations

import functools
from typing import Any

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from linen_zoo import numbers
from optimizer_tools import standard

import jaxmp

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}
BAD = {"x": BATCH["x"] * np.nan}
ADAM = standard(optax.adam(1e-2))  # one object, so that a step is compiled once for several runs


class Net(nn.Module):
    """A Linen network with BatchNorm and dropout."""

    @nn.compact
    def __call__(self, x, is_training=True):
        x = nn.Dense(6)(x)
        x = nn.BatchNorm(use_running_average=not is_training)(x)
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not is_training)(x))


@functools.cache
def _shapes(policy: str) -> Any:
    """Return the shapes and dtypes of the variables of ``Net`` under a policy."""
    model = jaxmp.linen.apply_policy(Net(), policy)
    with jax.numpy_dtype_promotion("standard"):
        return jax.eval_shape(functools.partial(model.init, is_training=False), jax.random.key(0), BATCH["x"])


def linen_run(policy: str = "mixed_float16", scale: Any = None, tx: Any = None, seed: int = 0, **fields: Any) -> Any:
    """Return a fresh train state and a loss function."""
    model = jaxmp.linen.apply_policy(Net(), policy)
    tx = tx or ADAM
    fields = {"rng": seed + 1, "ema": True, **fields}
    state = jaxmp.TrainState.create(
        params=numbers(_shapes(policy)["params"], seed),
        model_state={"batch_stats": {"BatchNorm_0": {"mean": concrete.zeros(6), "var": concrete.ones(6)}}},
        tx=jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale(2.0**10, period=2) if scale is None else scale),
        **fields,
    )

    def loss_fn(params, model_state, batch, rng):
        output, new = model.apply(
            {"params": params, **model_state}, batch["x"], rngs={"dropout": rng}, mutable=["batch_stats"]
        )
        return jnp.mean((output.astype(jnp.float32) - 1) ** 2), new

    return state, loss_fn


class NNXNet(nnx.Module):
    """An NNX network with BatchNorm and dropout."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.hidden, self.norm = nnx.Linear(4, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs)
        self.dropout, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(self.hidden(x))))


def nnx_run(policy: str = "mixed_float16", scale: Any = None, seed: int = 0, ema: bool = True) -> Any:
    """Return a fresh NNX model and its optimizer."""
    model = jaxmp.nnx.apply_policy(NNXNet(seed), policy)
    scale = jaxmp.DynamicLossScale(2.0**10, period=2) if scale is None else scale
    return model, jaxmp.nnx.Optimizer(model, ADAM, loss_scale=scale, ema=ema)


def nnx_loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]).astype(jnp.float32) - 1) ** 2)
