"""The kinds of a call's arguments: params, optimizer state, batch and others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxmp.base.trees import path_name
from jaxmp.sharding.specs import axes_in_spec as axes_of

_KIND_OF_NAME = {
    "params": "params",
    "ema_params": "params",
    "opt_state": "optimizer",
    "optimizer": "optimizer",
    "model_state": "model_state",
    "batch_stats": "model_state",
    "batch": "batch",
    "rng": "other",
    "key": "other",
    "step": "other",
    "skipped": "other",
    "stuck": "other",
}
"""The kinds of arguments and of a train state's fields, by name."""


class Leaf(NamedTuple):
    """A leaf of the arguments of a call.

    Attributes:
      value: an array or a shape.
      kind: one of :data:`jaxmp.inspect.memory_plan.KINDS`.
      path: its name.
      is_recognised: whether its type or the argument's name determines the kind. Otherwise its position does.
    """

    value: Any
    kind: str
    path: str
    is_recognised: bool


def leaves_of(args: Sequence[Any], names: Sequence[str], unknown: str = "") -> Iterator[Leaf]:
    """Yield the leaves of arguments with their kinds and paths.

    Args:
      args: the arguments of a call, or its results.
      names: the names of the arguments, if known.
      unknown: the kind of leaves that are not recognised. If it is empty, as for arguments, the first argument is the
        params and later ones are the batch. Set it for results, in which Flax's collections are not recognised, because
        a collection of params may contain gradients.
    """

    def kind_of(node: Any, path: Sequence[Any] = ()) -> str | None:
        return None if unknown and isinstance(node, Mapping) else _kind_in(node, path)

    def is_recognised(node: Any) -> bool:
        return kind_of(node) is not None

    for position, arg in enumerate(args):
        name = names[position] if position < len(names) else ""
        nodes = jax.tree.leaves_with_path(arg, is_leaf=is_recognised)
        by_position = "batch" if position and not any(is_recognised(node) for _, node in nodes) else "params"
        for path, node in nodes:
            for inner, leaf in jax.tree.leaves_with_path(node):
                recognised = kind_of(node, inner) or _KIND_OF_NAME.get(name)
                kind = recognised or unknown or by_position
                if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
                    kind = "other"
                prefix = [jax.tree_util.DictKey(name)] if name else []
                yield Leaf(leaf, kind, path_name((*prefix, *path, *inner)), recognised is not None)


def _kind_in(node: Any, path: Sequence[Any]) -> str | None:
    """Return the kind of the leaf at ``path`` in a node of a known type.

    Without a path it is the kind of the node's params. None for nodes of other types.
    """
    field = str(getattr(path[0], "name", getattr(path[0], "key", ""))) if path else "params"
    if isinstance(node, nnx.Param):
        return "params"
    if isinstance(node, nnx.Variable):
        return "optimizer" if type(node).__name__.startswith("Opt") else "model_state"
    if isinstance(node, nnx.Optimizer) or _is_state_of_optimizer(node):
        return "optimizer"
    is_collections = isinstance(node, Mapping) and "params" in node
    is_train_state = hasattr(node, "params") and hasattr(node, "opt_state")  # jaxmp's and Flax's
    if is_collections or (is_train_state and not isinstance(node, Mapping)):
        return _KIND_OF_NAME.get(field, "model_state")
    return None


def _is_state_of_optimizer(node: Any) -> bool:
    package = type(node).__module__.partition(".")[0]
    return hasattr(node, "_fields") and package in ("optax", "jaxmp")


def sharding_on_mesh(leaf: Any) -> NamedSharding | None:
    """Return the sharding of a leaf on a mesh, or None."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def batch_axes(batch: Iterable[Any]) -> dict[str, int]:
    """Return the mesh axes that split a batch, with their sizes."""
    for leaf in batch:
        sharding = sharding_on_mesh(leaf)
        if sharding is not None and axes_of(sharding.spec[:1]):
            return {name: sharding.mesh.shape[name] for name in axes_of(sharding.spec[:1])}
    return {}
