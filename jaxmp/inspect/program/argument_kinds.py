"""Find the kinds of a call's arguments: params, optimizer state, batch, others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from jaxmp.base.trees import is_key, path_name
from jaxmp.optim.loss_scale import LossScale
from jaxmp.optim.low_precision import LowPrecisionState, paths_in_bfloat16
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
}
"""The kinds of arguments and of a train state's fields, by name."""


class Leaf(NamedTuple):
    """A leaf of the arguments of a call.

    Attributes:
      value: an array or a shape.
      kind: one of :data:`jaxmp.inspect._memory.memory.KINDS`.
      path: the name of the argument and the path in the argument, joined by ``/``.
      is_recognised: whether the type of the leaf or the name of the argument determines the kind. Otherwise, the
        position of the argument determines the kind.
      path_in_state: the path in the params, the optimizer state or the statistics, if the type of the state is known;
        None for all other leaves. The audit checks the dtypes of leaves with this path. Averaged params and caches may
        have any dtype, so their ``path_in_state`` is None too. The same holds for the leaves that the state of
        :func:`jaxmp.low_precision` itself stores in bfloat16.
      is_loss_scale: whether the leaf belongs to a loss scale of jaxmp.
    """

    value: Any
    kind: str
    path: str
    is_recognised: bool
    path_in_state: tuple[str, ...] | None
    is_loss_scale: bool = False


def leaves_of(args: Sequence[Any], names: Sequence[str]) -> Iterator[Leaf]:
    """Yield the leaves of a call's arguments with their kinds and paths.

    The unrecognised leaves of the first argument are the params, and those of a later argument are the batch. There is
    one exception: if a part of a later argument is recognised by its type, the unrecognised leaves of this argument
    are the params. Typed random keys and loss scales of jaxmp are always ``"other"``, and do not count as recognised
    here.

    Args:
      args: the arguments of the call.
      names: the names of the arguments, if known.
    """
    for position, arg in enumerate(args):
        name = names[position] if position < len(names) else ""
        nodes = jax.tree.leaves_with_path(arg, is_leaf=lambda node: _is_state(node) or isinstance(node, LossScale))
        by_position = "batch" if position and not any(_is_state(node) for _, node in nodes) else "params"
        prefix = [jax.tree_util.DictKey(name)] if name else []
        in_bfloat16, in_loss_scale = _paths_in_bfloat16(arg), _paths_in_loss_scales(arg)
        for path, node in nodes:
            for inner, leaf in jax.tree.leaves_with_path(node):
                recognised, path_in_state = _KIND_OF_NAME.get(name), None
                if _is_state(node):
                    recognised, path_in_state = _kind_and_path_in_state(node, path, inner)
                if (*path, *inner) in in_bfloat16 and leaf.dtype == jnp.bfloat16:
                    path_in_state = None
                is_other = is_key(leaf) or isinstance(node, LossScale)
                kind = "other" if is_other else recognised or by_position
                is_scale = (*path, *inner) in in_loss_scale
                name_of_leaf = path_name((*prefix, *path, *inner))
                yield Leaf(leaf, kind, name_of_leaf, recognised is not None, path_in_state, is_scale)


def _paths_in_bfloat16(arg: Any) -> set[tuple[Any, ...]]:
    """Return the paths of the leaves that states of :func:`jaxmp.low_precision` store in bfloat16."""

    def is_low_precision(node: Any) -> bool:
        return isinstance(node, LowPrecisionState)

    paths = set()
    for path, node in jax.tree.leaves_with_path(arg, is_leaf=is_low_precision):
        if is_low_precision(node):
            paths |= {(*path, *inner) for inner in paths_in_bfloat16(node)}
    return paths


def _paths_in_loss_scales(arg: Any) -> set[tuple[Any, ...]]:
    """Return the paths of the leaves of jaxmp's loss scales."""

    def is_loss_scale(node: Any) -> bool:
        return isinstance(node, LossScale)

    paths = set()
    for path, node in jax.tree.leaves_with_path(arg, is_leaf=is_loss_scale):
        if is_loss_scale(node):
            paths |= {(*path, *inner) for inner, _ in jax.tree.leaves_with_path(node)}
    return paths


def _is_state(node: Any) -> bool:
    """Return whether the type of a node determines the kinds of its leaves."""
    is_collections = isinstance(node, Mapping) and ("params" in node or "batch_stats" in node)
    is_train_state = hasattr(node, "params") and hasattr(node, "opt_state")  # jaxmp's or Flax's train state
    is_of_nnx = isinstance(node, (nnx.Variable, nnx.Optimizer))
    is_lookahead = isinstance(node, optax.LookaheadParams)
    return is_collections or is_train_state or is_of_nnx or is_lookahead or _is_state_of_optimizer(node)


def _kind_and_path_in_state(node: Any, path: Sequence[Any], inner: Sequence[Any]) -> tuple[str, tuple[str, ...] | None]:
    """Return the kind of a leaf, and its path in the params, state or statistics.

    The node is at ``path`` in the argument, and the leaf is at ``inner`` in the node. The second result is None for a
    leaf outside of the params, the optimizer state and the statistics.
    """
    if isinstance(node, nnx.Param):
        return "params", _names(path)
    if isinstance(node, optax.LookaheadParams):
        return "params", _names((*path, *inner))
    is_variable = isinstance(node, nnx.Variable)
    if is_variable and not type(node).__name__.startswith("Opt"):
        return "model_state", _names(path) if isinstance(node, nnx.BatchStat) else None
    if is_variable or isinstance(node, nnx.Optimizer) or _is_state_of_optimizer(node):
        return "optimizer", _names((*path, *inner))
    field, *names = _names(inner)  # here the node is a train state or Flax's collections
    kind = _KIND_OF_NAME.get(field, "model_state")
    is_cache = field == "model_state" and names[:1] == ["cache"]
    if is_cache or field not in ("params", "opt_state", "model_state", "batch_stats"):
        return kind, None
    has_collections = field != "opt_state" and names[:1] in (["params"], ["batch_stats"])
    return kind, tuple(names[1:] if has_collections else names)


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
