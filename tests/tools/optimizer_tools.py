"""A small problem for tests of optimizers and steps, and bitwise comparison."""

from __future__ import annotations

import functools
from typing import Any

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax


def standard(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Return ``tx`` under JAX's standard dtype promotion, which Adam needs.

    The code of jaxmp around it keeps strict promotion.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        with jax.numpy_dtype_promotion("standard"):
            return tx.init(params)

    @functools.wraps(tx.update)
    def update(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(*args, **kwargs)

    return optax.GradientTransformationExtraArgs(init, update)


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Return the dtype, shape and bytes of each leaf; for a key, those of its data."""

    def of_leaf(leaf):
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        return str(array.dtype), array.shape, array.tobytes()

    return [of_leaf(leaf) for leaf in jax.tree.leaves(tree)]


def same_bits(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and bits(a) == bits(b)


def problem(seed: int = 0, dtype: Any = jnp.float32) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the params of a network of two layers, and a batch of 8 examples."""
    rng = np.random.default_rng(seed)
    params = {
        "hidden": {"w": rng.normal(size=(3, 4)), "b": np.zeros(4)},
        "out": {"w": rng.normal(size=(4, 2))},
    }
    batch = {"x": rng.normal(size=(8, 3)), "y": rng.normal(size=(8, 2))}
    return jax.tree.map(lambda x: concrete.array(x, dtype), (params, batch))


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["hidden"]["w"] + params["hidden"]["b"])
    return jnp.mean(((hidden @ params["out"]["w"] - batch["y"]) ** 2).astype(jnp.float32))


def train_loss(params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[jax.Array, Any]:
    """Compute ``loss_fn`` with the signature of a train step's loss function."""
    return loss_fn(params, batch), model_state


def replace_element(tree: Any, leaf: int, value: float) -> Any:
    """Return ``tree`` with ``value`` as the last element of leaf number ``leaf``."""
    leaves, structure = jax.tree.flatten(tree)
    array = np.array(leaves[leaf])
    array.flat[-1] = value
    leaves[leaf] = jax.device_put(array)
    return structure.unflatten(leaves)
