"""Find the kinds of an audited call's arguments: params, batch and so on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxmp.inspect._audit.evidence import Sent
from jaxmp.inspect.compiled.collectives import Collective
from jaxmp.inspect.program.argument_kinds import Leaf, batch_axes, leaves_of, sharding_on_mesh
from jaxmp.inspect.program.calls import names_of_arguments
from jaxmp.sharding.specs import axes_in_spec as axes_of


def arguments_of(jitted: Any, inputs: tuple[Any, ...]) -> list[Leaf]:
    """Return the leaves of an audited call's arguments, with their kinds.

    A leaf is recognised if its type, or the name of its argument, determines its kind. The kinds of recognised leaves
    are those of :func:`jaxmp.inspect.memory`. An unrecognised leaf is part of the batch, with two exceptions. It keeps
    the kind that :func:`jaxmp.inspect.memory` gives it if:

    - the only recognised leaves are the batch; or
    - no leaf is recognised, and the first argument is not a single array.

    Leaves that are recognised as ``"other"`` do not count here.
    """
    leaves = list(leaves_of(inputs, names_of_arguments(jitted)))
    recognised = {leaf.kind for leaf in leaves if leaf.is_recognised} - {"other"}
    is_array_first = bool(inputs) and hasattr(inputs[0], "dtype")
    if recognised == {"batch"} or not (recognised or is_array_first):
        return leaves
    return [leaf if leaf.is_recognised else leaf._replace(kind="batch") for leaf in leaves]


def sent_over_batch_axes(rows: Sequence[Collective], arguments: Sequence[Leaf]) -> Iterator[Sent]:
    """Yield the collectives over mesh axes that split the batch.

    Collectives whose axes are unknown are included. If no axis splits the batch, all collectives are included. A
    :class:`Sent` also has the bytes of weights. A sent array counts as a weight if it has the size of an argument
    other than the batch, or the size of one layer of this argument. (Axis 0 of stacked weights is the layer.)
    """
    axes_of_batch = set(batch_axes(leaf.value for leaf in arguments if leaf.kind == "batch"))
    shardings = [sharding_on_mesh(leaf.value) for leaf in arguments]
    mesh_axes = {name for sharding in shardings if sharding for name in sharding.mesh.shape}
    axes_by_size = _axes_of_weights(arguments, axes_of_batch)
    for row in rows:
        axes = set(row.axis.split("+"))
        if axes_of_batch and not axes & axes_of_batch and axes <= mesh_axes:
            continue
        itemsize = np.dtype(row.dtype).itemsize
        weights = split = 0
        for size in row.arrays:
            if size // itemsize in axes_by_size:
                weights += size
                split += size if axes & axes_by_size[size // itemsize] else 0
        yield Sent(row, weights, row.bytes - weights, split)


def _axes_of_weights(arguments: Sequence[Leaf], axes_of_batch: set[str]) -> dict[int, set[str]]:
    """Return the mesh axes that split weights, by the size of the weights.

    All arguments except the batch are weights here. A size is the number of elements on one device after the weight is
    gathered over ``axes_of_batch``. Each weight has two sizes: for all layers, and for one layer (one index of axis 0).
    """
    axes_by_size: dict[int, set[str]] = {}
    for leaf in arguments:
        sharding = sharding_on_mesh(leaf.value)
        if sharding is not None and leaf.kind != "batch" and leaf.value.shape:
            axes = set(axes_of(sharding.spec))
            size = leaf.value.size // math.prod(sharding.mesh.shape[name] for name in axes - axes_of_batch)
            axes_by_size.setdefault(size, set()).update(axes)
            axes_by_size.setdefault(size // max(leaf.value.shape[0], 1), set()).update(axes)
    return axes_by_size
