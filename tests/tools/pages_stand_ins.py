"""Stand-ins for the reader's program, on pages whose code is a part of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import jaxmp

SCALER_STATE = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2,
    "_growth_tracker": 1,
}


def program() -> dict[str, Any]:
    """Return the names of a small model in training."""
    x, y = jnp.ones((8, 8)), jnp.zeros((8, 8))
    model, tx = nn.Sequential([nn.Dense(8), nn.Dense(8)]), optax.adam(0.01)
    params = model.init(jax.random.key(0), x)["params"]
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "nn": nn, "optax": optax, "jaxmp": jaxmp, "partial": partial}
    names |= {"model": model, "params": params, "tx": tx, "opt_state": tx.init(params), "max_norm": 1.0}
    names |= {"x": x, "y": y, "batch": {"x": x, "y": y}, "state_dict": SCALER_STATE}
    names |= {"TrainState": TrainState, "DynamicScale": DynamicScale, "dynamic_scale": DynamicScale()}

    def loss_fn(params: Any, batch: Any, y: Any = None) -> jax.Array:
        x, y = (batch["x"], batch["y"]) if y is None else (batch, y)
        return jnp.mean((names["model"].apply({"params": params}, x) - y) ** 2)

    names["loss_fn"] = loss_fn
    return names
