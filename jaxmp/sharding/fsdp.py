"""Specs of fully sharded params, and a table of the bytes on each device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxmp.base import tables
from jaxmp.base import trees as _tree
from jaxmp.policy.patterns import covers, first_match, require_first_matches, require_param_match
from jaxmp.sharding.specs import (
    Mesh,
    as_tuple,
    axes_in_spec,
    fitting,
    following,
    is_train_state,
    require_axes,
    require_mesh,
    require_specs,
    specs_in,
    text_of,
)

SpecRules = Mapping[str, PartitionSpec]


def fsdp_specs(
    shapes: Any,
    mesh: Mesh,
    *,
    axis: str = "fsdp",
    rules: SpecRules | None = None,
    min_size: int = 65_536,
    stacked: Iterable[str] | None = None,
) -> Any:
    """Return specs that split each param along its largest divisible axis.

    An axis is divisible if its size is a multiple of the number of devices along ``axis``. A leaf is not split if it
    has no divisible axis, or fewer than ``min_size`` values. Every device then holds the whole leaf in the leaf's
    dtype. :func:`gather` describes how the gradient of such a leaf is summed.

    Args:
      shapes: the params as arrays or ShapeDtypeStructs (from ``jax.eval_shape``), or a whole :class:`jaxmp.TrainState`.
        In a state, the optimizer's moments and the moving average of a param get the spec of the param. (Moments
        and averages are recognised by their path and shape.) All other leaves are not split.
      mesh: a ``Mesh`` or an ``AbstractMesh``.
      axis: the axis of the mesh to split over.
      rules: a mapping from pattern to spec, such as ``{"**/mlp/up": P("fsdp", "tensor")}``. A pattern covers the paths
        that it matches and all paths below them. The first match wins, as in :class:`jaxmp.PolicyMap`.
      min_size: the smallest number of values in a leaf that is split. In a stacked leaf, only the values of one layer
        count.
      stacked: patterns of leaves that stack the params of several layers along axis 0, as ``nn.scan`` does. Axis 0 of
        such a leaf is never split.

    Returns:
      A tree of ``PartitionSpec`` with the structure of ``shapes``.

    Raises:
      TypeError: ``mesh`` is not a mesh.
      ValueError: the mesh does not have the axis; a pattern matches nothing, or only leaves that an earlier rule
        matches; a rule's spec has more entries than the leaf has axes, names an unknown mesh axis, names a mesh axis
        twice, or splits an axis that is not divisible.

    >>> mesh = jax.sharding.AbstractMesh((2,), ("fsdp",))
    >>> shapes = jax.eval_shape(lambda: {"kernel": jnp.ones((512, 1024)), "bias": jnp.ones(1024)})
    >>> fsdp_specs(shapes, mesh) == {"bias": jax.P(), "kernel": jax.P(None, "fsdp")}
    True
    """
    require_mesh(mesh, "fsdp_specs(shapes, mesh)")
    if is_train_state(shapes):
        param_specs = fsdp_specs(shapes.params, mesh, axis=axis, rules=rules, min_size=min_size, stacked=stacked)
        return following(shapes, shapes.params, param_specs, mesh)
    require_axes(mesh, [axis], "axis")
    rules, stacked = dict(rules or {}), as_tuple(stacked)
    leaves = jax.tree.leaves_with_path(shapes)
    paths = [_tree.path_parts(path) for path, _ in leaves]
    require_first_matches(rules, paths)
    for pattern in stacked:
        require_param_match(pattern, paths)

    def spec_of(path: Any, leaf: Any) -> PartitionSpec:
        parts, shape = _tree.path_parts(path), tuple(leaf.shape)
        pattern = first_match(rules, parts)
        if pattern is not None:
            return fitting(rules[pattern], pattern, "/".join(parts), shape, mesh)
        first = int(any(covers(pattern, parts) for pattern in stacked))
        sizes = [(size, -dim) for dim, size in enumerate(shape) if dim >= first and size % mesh.shape[axis] == 0]
        if not sizes or math.prod(shape[first:]) < min_size or mesh.shape[axis] == 1:
            return PartitionSpec()
        return PartitionSpec(*[None] * -max(sizes)[1], axis)

    return jax.tree.map_with_path(spec_of, shapes)


@dataclasses.dataclass(frozen=True)
class ShardedLeaf:
    """A leaf with its shape and spec, and its bytes on one device.

    Attributes:
      path: the path of the leaf.
      shape: the shape of the whole array.
      dtype: the name of the array's dtype.
      spec: the leaf's spec as text.
      bytes: the bytes on one device.
      whole: whether each device has the whole leaf.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes: int
    whole: bool


@dataclasses.dataclass(frozen=True)
class Description(tables.Shown):
    """The bytes of each leaf on one device; ``str()`` returns a table of them."""

    rows: tuple[ShardedLeaf, ...]

    @property
    def bytes(self) -> int:
        """Return the bytes of all leaves on one device."""
        return sum(row.bytes for row in self.rows)

    @property
    def replicated(self) -> tuple[ShardedLeaf, ...]:
        """Return the leaves that are whole on every device, largest first."""
        return tuple(row for row in self.rows if row.whole)

    def _shown(self) -> Any:
        replicated = f"{sum(row.bytes for row in self.replicated):,} in {len(self.replicated)} leaves"
        title = f"{self.bytes:,} bytes on each device, including {replicated} that every device holds whole"
        cells = [(row.bytes, row.dtype, row.shape, row.spec, row.path) for row in self.rows]
        return title, ("bytes", "dtype", "shape", "spec", "leaf"), cells, ()


def describe(shapes: Any, specs: Any, mesh: Mesh) -> Description:
    """Return the bytes that ``shapes`` take on each device under ``specs``.

    Args:
      shapes: a tree of arrays or ShapeDtypeStructs: params, or a whole state.
      specs: a ``PartitionSpec`` for each leaf.
      mesh: a ``Mesh`` or an ``AbstractMesh``.

    Raises:
      TypeError: ``mesh`` is not a mesh.
      ValueError: the specs do not have the structure of ``shapes``, or split an axis that is not divisible.

    >>> mesh = jax.sharding.AbstractMesh((4,), ("fsdp",))
    >>> description = describe({"w": jax.ShapeDtypeStruct((64, 8), "float32")}, {"w": jax.P("fsdp")}, mesh)
    >>> description.bytes, description.replicated
    (512, ())
    """
    require_mesh(mesh, "describe(shapes, specs, mesh)")
    require_specs(shapes, specs)
    rows = []
    for (path, leaf), spec in zip(jax.tree.leaves_with_path(shapes), specs_in(specs), strict=True):
        name = _tree.path_name(path)
        fitting(spec, name, name, tuple(leaf.shape), mesh)
        parts = math.prod(mesh.shape[axis] for axis in axes_in_spec(spec))
        size = math.prod(leaf.shape) * leaf.dtype.itemsize // parts
        rows.append(ShardedLeaf(name, tuple(leaf.shape), leaf.dtype.name, text_of(spec), size, parts == 1))
    return Description(tuple(sorted(rows, key=lambda row: -row.bytes)))
