"""Find the roles of the arguments of an audited call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxmp.base.trees import path_name
from jaxmp.inspect.memory_kinds import batch_axes, leaves_of, sharding_on_mesh
from jaxmp.inspect.program.calls import names_of_arguments
from jaxmp.inspect.program.evidence import Argument, Sent
from jaxmp.inspect.traffic import Collective
from jaxmp.optim.loss_scale import LossScale, NoOpLossScale
from jaxmp.sharding.specs import axes_in_spec as axes_of

_ROLE_OF_CLASS = {
    nnx.Optimizer: "optimizer",
    nnx.OptState: "optimizer",
    nnx.OptVariable: "optimizer",
    nnx.Param: "params",
    nnx.BatchStat: "statistics",
}
_ROLE_OF_FIELD = {
    "params": "params",
    "opt_state": "optimizer",
    "batch_stats": "statistics",
    "model_state": "statistics",
}
"""The roles of the fields of a train state."""
_ROLE_OF_COLLECTION = {"params": "params", "batch_stats": "statistics"}
"""The roles of Flax's collections."""


def is_loss_scaled(args: Any) -> bool | None:
    """Return whether the arguments have a loss scale that is not a no-op.

    Without a loss scale, return None.
    """

    def is_loss_scale(node: Any) -> bool:
        return isinstance(node, LossScale)

    scales = [node for node in jax.tree.leaves(args, is_leaf=is_loss_scale) if is_loss_scale(node)]
    return any(not isinstance(scale, NoOpLossScale) for scale in scales) if scales else None


def roles_of(args: tuple[Any, ...]) -> list[Argument | None]:
    """Return the role of each array among the arguments; None if it is unknown."""

    def is_nnx(node: Any) -> bool:
        return isinstance(node, (*_ROLE_OF_CLASS, nnx.Variable))

    roles: list[Argument | None] = []
    for path, node in jax.tree.leaves_with_path(args, is_leaf=is_nnx):
        role = _role_of_nnx(node)
        for inner, _ in jax.tree.leaves_with_path(node):
            if role is not None:
                keys = (*path[1:], *inner) if role == "optimizer" else path[1:]
                roles.append(Argument(role, tuple(path_name((key,)) for key in keys)))
            elif inner:
                roles.append(None)
            else:
                roles.append(_role_in_path(path))
    return roles


def _role_of_nnx(node: Any) -> str | None:
    for cls, role in _ROLE_OF_CLASS.items():
        if isinstance(node, cls):
            return role
    return None


def _role_in_path(path: tuple[Any, ...]) -> Argument | None:
    """Return the role that a path gives an array.

    The first field of a train state or collection of Flax in the path decides.
    """
    for n, key in enumerate(path):
        role = _ROLE_OF_FIELD.get(getattr(key, "name", "")) or _ROLE_OF_COLLECTION.get(str(getattr(key, "key", "")))
        if role:
            names = [path_name((inner,)) for inner in path[n + 1 :]]
            if role == "statistics" and names[:1] == ["cache"]:
                return None
            while role != "optimizer" and names and names[0] in _ROLE_OF_COLLECTION:
                names = names[1:]
            return Argument(role, tuple(names))
    return None


def kinds_of(jitted: Any, inputs: tuple[Any, ...]) -> list[str | None]:
    """Return the kind of each array among the arguments; None if it is unknown.

    The kinds are those of :func:`jaxmp.inspect.memory`. Types and names determine the kind. Without these, the first
    argument is the params if it is a tree.
    """
    leaves = list(leaves_of(inputs, names_of_arguments(jitted)))
    is_array = hasattr(inputs[0], "dtype") if inputs else False
    recognised = {leaf.kind for leaf in leaves if leaf.is_recognised} - {"other"}
    if recognised or (inputs[1:] and not is_array):
        has_params = bool(recognised - {"batch"})
        return [leaf.kind if leaf.is_recognised or not has_params else "batch" for leaf in leaves]
    return ["batch" if is_array and len(leaves) == 1 else None] * len(leaves)


def sent_over_batch_axes(
    rows: Sequence[Collective], inputs: tuple[Any, ...], kinds: Sequence[str | None]
) -> Iterator[Sent]:
    """Yield the collectives over axes that split the batch.

    An array is treated as a weight if it has the size of an argument other than the batch, or of one of its layers.
    """
    leaves = list(zip(jax.tree.leaves(inputs), kinds, strict=True))
    over = set(batch_axes(leaf for leaf, kind in leaves if kind == "batch"))
    shardings = [sharding_on_mesh(leaf) for leaf, _ in leaves]
    mesh_axes = {name for sharding in shardings if sharding for name in sharding.mesh.shape}
    axes_by_size = _axes_of_weights(leaves, over)
    for row in rows:
        axes = set(row.axis.split("+"))
        if over and not axes & over and axes <= mesh_axes:
            continue
        itemsize = np.dtype(row.dtype).itemsize
        weights = split = 0
        for size in row.arrays:
            if size // itemsize in axes_by_size:
                weights += size
                split += size if axes & axes_by_size[size // itemsize] else 0
        yield Sent(row, weights, row.bytes - weights, split)


def _axes_of_weights(leaves: Sequence[tuple[Any, str | None]], over: set[str]) -> dict[int, set[str]]:
    """Return the mesh axes that split weights, by the size of the weights.

    Sizes are numbers of elements: of a whole weight, and of one of its layers.
    """
    axes_by_size: dict[int, set[str]] = {}
    for leaf, kind in leaves:
        sharding = sharding_on_mesh(leaf)
        if sharding is not None and kind != "batch" and leaf.shape:
            axes = set(axes_of(sharding.spec))
            size = leaf.size // math.prod(sharding.mesh.shape[name] for name in axes - over)
            axes_by_size.setdefault(size, set()).update(axes)
            axes_by_size.setdefault(size // max(leaf.shape[0], 1), set()).update(axes)
    return axes_by_size
