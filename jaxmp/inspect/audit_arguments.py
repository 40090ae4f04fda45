"""Find the kinds of the arguments of an audited call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp.inspect.memory_kinds import Leaf, batch_axes, leaves_of, sharding_on_mesh
from jaxmp.inspect.program.calls import names_of_arguments
from jaxmp.inspect.program.evidence import Sent
from jaxmp.inspect.traffic import Collective
from jaxmp.optim.loss_scale import LossScale, NoOpLossScale
from jaxmp.sharding.specs import axes_in_spec as axes_of


def is_loss_scaled(args: Any) -> bool | None:
    """Return whether the arguments have a loss scale that is not a no-op.

    Without a loss scale, return None.
    """

    def is_loss_scale(node: Any) -> bool:
        return isinstance(node, LossScale)

    scales = [node for node in jax.tree.leaves(args, is_leaf=is_loss_scale) if is_loss_scale(node)]
    return any(not isinstance(scale, NoOpLossScale) for scale in scales) if scales else None


def arguments_of(jitted: Any, inputs: tuple[Any, ...]) -> list[Leaf]:
    """Return the arrays among the arguments with their kinds; ``"unknown"`` if a kind is unknown.

    The kinds are those of :func:`jaxmp.inspect.memory`. Types and names determine the kind. Without these, the first
    argument is the params if it is a tree.
    """
    leaves = list(leaves_of(inputs, names_of_arguments(jitted)))
    is_array = hasattr(inputs[0], "dtype") if inputs else False
    recognised = {leaf.kind for leaf in leaves if leaf.is_recognised} - {"other"}
    if not recognised and (is_array or not inputs[1:]):
        kind = "batch" if is_array and len(leaves) == 1 else "unknown"
        return [leaf._replace(kind=kind) for leaf in leaves]
    if recognised <= {"batch"}:
        return leaves
    return [leaf if leaf.is_recognised else leaf._replace(kind="batch") for leaf in leaves]


def sent_over_batch_axes(rows: Sequence[Collective], arguments: Sequence[Leaf]) -> Iterator[Sent]:
    """Yield the collectives over axes that split the batch.

    An array is treated as a weight if it has the size of an argument other than the batch, or of one of its layers.
    """
    over = set(batch_axes(leaf.value for leaf in arguments if leaf.kind == "batch"))
    shardings = [sharding_on_mesh(leaf.value) for leaf in arguments]
    mesh_axes = {name for sharding in shardings if sharding for name in sharding.mesh.shape}
    axes_by_size = _axes_of_weights(arguments, over)
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


def _axes_of_weights(arguments: Sequence[Leaf], over: set[str]) -> dict[int, set[str]]:
    """Return the mesh axes that split weights, by the size of the weights.

    Sizes are numbers of elements: of a whole weight, and of one of its layers.
    """
    axes_by_size: dict[int, set[str]] = {}
    for leaf in arguments:
        sharding = sharding_on_mesh(leaf.value)
        if sharding is not None and leaf.kind != "batch" and leaf.value.shape:
            axes = set(axes_of(sharding.spec))
            size = leaf.value.size // math.prod(sharding.mesh.shape[name] for name in axes - over)
            axes_by_size.setdefault(size, set()).update(axes)
            axes_by_size.setdefault(size // max(leaf.value.shape[0], 1), set()).update(axes)
    return axes_by_size
