"""Find the kinds of a call's arguments: params, optimizer state, batch, others."""

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
      path: the name of the argument and the path in the argument, joined by ``/``.
      is_recognised: whether the type of the leaf or the name of the argument determines the kind. Otherwise, the
        position of the argument determines the kind.
      path_in_state: the path in the params, the optimizer state or the statistics, if the type of the state is known;
        None for all other leaves. The audit checks the dtypes of leaves with this path. Averaged params and caches may
        have any dtype, so their ``path_in_state`` is None too.
    """

    value: Any
    kind: str
    path: str
    is_recognised: bool
    path_in_state: tuple[str, ...] | None


def leaves_of(args: Sequence[Any], names: Sequence[str], unknown: str = "") -> Iterator[Leaf]:
    """Yield the leaves of arguments with their kinds and paths.

    Args:
      args: the arguments of a call, or its results.
      names: the names of the arguments, if known.
      unknown: the kind of unrecognised leaves. Set ``unknown`` if ``args`` are results. Flax's collections are then not
        recognised either, because a collection of params among the results may contain gradients. Leave ``unknown``
        empty for arguments. The unrecognised leaves of the first argument are then the params, and those of a later
        argument are the batch. But if a part of the later argument is recognised, its other leaves are the params.
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
                full_path = path_name((*prefix, *path, *inner))
                yield Leaf(leaf, kind, full_path, recognised is not None, _path_in_state(node, path, inner))


def _kind_in(node: Any, path: Sequence[Any]) -> str | None:
    """Return the kind of the leaf at ``path`` in a node.

    Return None if the type of the node is unknown. For a train state or Flax's collections, return ``"params"`` if the
    path is empty.
    """
    field = str(getattr(path[0], "name", getattr(path[0], "key", ""))) if path else "params"
    if isinstance(node, nnx.Param):
        return "params"
    if isinstance(node, nnx.Variable):
        return "optimizer" if type(node).__name__.startswith("Opt") else "model_state"
    if isinstance(node, nnx.Optimizer) or _is_state_of_optimizer(node):
        return "optimizer"
    is_collections = isinstance(node, Mapping) and ("params" in node or "batch_stats" in node)
    is_train_state = hasattr(node, "params") and hasattr(node, "opt_state")  # jaxmp's or Flax's train state
    if is_collections or (is_train_state and not isinstance(node, Mapping)):
        return _KIND_OF_NAME.get(field, "model_state")
    return None


def _path_in_state(node: Any, path: Sequence[Any], inner: Sequence[Any]) -> tuple[str, ...] | None:
    """Return the path of a leaf in the params, the optimizer state or the statistics.

    The node is at ``path`` in the argument, and the leaf is at ``inner`` in the node. Return None for a leaf outside of
    the params, the optimizer state and the statistics.
    """
    kind = _kind_in(node, inner)
    if isinstance(node, (nnx.Param, nnx.BatchStat)):
        return _names(path)
    if isinstance(node, (nnx.Variable, nnx.Optimizer)) or _is_state_of_optimizer(node):
        return _names((*path, *inner)) if kind == "optimizer" else None
    if kind is None:
        return None
    field, *names = _names(inner)  # here the node is a train state or Flax's collections
    is_cache = field == "model_state" and names[:1] == ["cache"]
    if is_cache or field not in ("params", "opt_state", "model_state", "batch_stats"):
        return None
    has_collections = field != "opt_state" and names[:1] in (["params"], ["batch_stats"])
    return tuple(names[1:] if has_collections else names)


def _names(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(path_name((key,)) for key in path)


def _is_state_of_optimizer(node: Any) -> bool:
    package = type(node).__module__.partition(".")[0]
    return hasattr(node, "_fields") and package in ("optax", "jaxmp")


def sharding_on_mesh(leaf: Any) -> NamedSharding | None:
    """Return the ``NamedSharding`` of a leaf, or None if it has none."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def batch_axes(batch: Iterable[Any]) -> dict[str, int]:
    """Return the mesh axes that split a batch, with their sizes."""
    for leaf in batch:
        sharding = sharding_on_mesh(leaf)
        if sharding is not None and axes_of(sharding.spec[:1]):
            return {name: sharding.mesh.shape[name] for name in axes_of(sharding.spec[:1])}
    return {}
