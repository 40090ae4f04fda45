"""The leaves of a state by name, and what a checkpoint records about them."""

from __future__ import annotations

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmp.base.trees import is_key, nodes_of_type, path_name, require_no_raw_bytes
from jaxmp.nnx.training import state_of
from jaxmp.optim.loss_scale import LossScale
from jaxmp.optim.low_precision import LowPrecisionState
from jaxmp.optim.scaling_state import LossScalingState


def is_nnx_pair(state: Any) -> bool:
    """Return whether ``state`` is a pair with an NNX object, which should be a model and its optimizer."""
    is_pair = isinstance(state, (tuple, list)) and len(state) == 2
    return is_pair and any(isinstance(part, nnx.Pytree) for part in state)


def as_tree(state: Any) -> Any:
    """Return a pytree of arrays: ``state``, or the train state of an NNX model with its optimizer.

    Raises:
      TypeError: ``state`` has an NNX object without its optimizer, or the optimizer is not a ``jaxmp.nnx.Optimizer``.
    """
    if is_nnx_pair(state):
        return state_of(*state)
    for node in nodes_of_type(state, nnx.Pytree):
        raise TypeError(
            f"a checkpoint has one NNX model with its optimizer, got {type(node).__name__} without it;\n"
            "pass the pair (model, optimizer), or nnx.state(...) of all NNX objects"
        )
    return state


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, such as ``params/Dense_0/kernel``.

    Raises:
      ValueError: two leaves have the same name.
      TypeError: a leaf is neither an array nor a number, or has a dtype of raw bytes.
    """
    require_no_raw_bytes(tree)
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = path_name(path)
        if name in leaves:
            raise ValueError(f"the leaves of a state need different paths, got {name!r} twice; rename one of them")
        if not hasattr(leaf, "dtype") and not is_python_number(leaf):
            raise TypeError(
                f"a checkpoint has arrays and numbers, got {type(leaf).__name__} at {name!r};\n"
                "leave it out, or save it with metadata={...}"
            )
        leaves[name] = leaf
    return leaves


def is_python_number(leaf: Any) -> bool:
    """Return whether ``leaf`` is a number without a dtype."""
    return isinstance(leaf, (bool, int, float, complex)) and not hasattr(leaf, "dtype")


def dtype_of(leaf: Any) -> np.dtype:
    """Return the dtype of a leaf.

    NumPy arrays and Python numbers keep their 64 bits without ``jax_enable_x64``.
    """
    is_of_numpy = isinstance(leaf, (np.ndarray, np.generic)) or is_python_number(leaf)
    return np.result_type(leaf) if is_of_numpy else jnp.result_type(leaf)


def is_below(name: str, path: str) -> bool:
    """Return whether ``name`` is the path of a node or of a leaf in that node."""
    return name == path or name.startswith(f"{path}/")


def loss_scales(tree: Any) -> dict[str, LossScale]:
    """Return the loss scales of a tree by their paths."""
    states = _nodes(tree, LossScalingState)
    return {f"{path}/loss_scale".lstrip("/"): state.loss_scale for path, state in states.items()}


def low_precision_paths(tree: Any) -> list[str]:
    """Return the paths of the states of :func:`jaxmp.low_precision` in a tree."""
    return [*_nodes(tree, LowPrecisionState)]


def _nodes(tree: Any, cls: type) -> dict[str, Any]:
    def is_node(node: Any) -> TypeGuard[Any]:
        return isinstance(node, cls)

    nodes = jax.tree.leaves_with_path(tree, is_leaf=is_node)
    return {path_name(path): node for path, node in nodes if is_node(node)}


def record_of(tree: Any) -> dict[str, Any]:
    """Return a JSON object that describes what the arrays of a tree do not show."""
    leaves = leaves_by_name(tree)
    return {
        "format": 1,
        "loss_scales": {path: {"class": type(scale).__name__} for path, scale in loss_scales(tree).items()},
        "low_precision": low_precision_paths(tree),
        "keys": {name: str(jax.random.key_impl(leaf)) for name, leaf in leaves.items() if is_key(leaf)},
    }


def array_to_write(leaf: Any) -> Any:
    """Return an array that stays valid when ``leaf`` is donated or overwritten.

    A typed key becomes its data. Orbax copies arrays of other devices to the host before a save returns. Of arrays that
    are in the memory of the host already, it would only keep a view, so they are copied here.
    """
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array):
        return np.array(leaf, dtype_of(leaf))
    platforms = {device.platform for device in leaf.sharding.device_set}  # type: ignore[attr-defined]
    is_on_host = "cpu" in platforms or "host" in str(leaf.sharding.memory_kind)
    return jnp.copy(leaf) if is_on_host else leaf
