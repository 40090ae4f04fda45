"""Trees whose small leaves are stored as vectors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxmp.base.trees import is_float_array, map_nodes_of_type, path_name


class Group(NamedTuple):
    """Leaves that are stored as one vector.

    Attributes:
      name: the name of the vector, such as ``"float32_1d"``.
      members: the numbers of the leaves.
    """

    name: str
    members: tuple[int, ...]


class InVector:
    """The place of a packed leaf in :attr:`PackedTree.separate`; a pytree without leaves."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InVector)

    def __hash__(self) -> int:
        return hash(InVector)


jax.tree_util.register_static(InVector)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The leaves of a tree that are packed.

    Attributes:
      shapes: the shape of each leaf of the tree.
      groups: the packed leaves.
    """

    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[Group, ...]

    def pack(self, tree: Any) -> PackedTree:
        """Return a tree of these shapes with its small leaves in vectors.

        A packed tree is returned unchanged.

        Raises:
          ValueError: the tree has other shapes, or several dtypes in a group.
        """
        if isinstance(tree, PackedTree):
            return tree
        self._require_shapes(tree)
        leaves, structure = jax.tree.flatten(tree)
        separate = list(leaves)
        vectors = {}
        for group in self.groups:
            parts = [leaves[number] for number in group.members]
            dtypes = sorted({str(jnp.result_type(part)) for part in parts})
            if len(dtypes) > 1:
                raise ValueError(
                    f"pack_small packs leaves of one dtype, got {' and '.join(dtypes)} where all params are of one "
                    "dtype; cast the gradients and the params to float32"
                )
            vector = jnp.concatenate([jnp.reshape(part, -1) for part in parts])
            dims = len(self.shapes[group.members[0]])
            vectors[group.name] = vector.reshape((1,) * (dims - 1) + vector.shape)
            for number in group.members:
                separate[number] = InVector()
        return PackedTree(vectors, jax.tree.unflatten(structure, separate), self)

    def _require_shapes(self, tree: Any) -> None:
        named = jax.tree.leaves_with_path(tree)
        if len(named) != len(self.shapes):
            raise ValueError(
                f"pack_small was initialised with a tree of {len(self.shapes)} leaves, got one of {len(named)} leaves; "
                "call tx.init(params) with these params"
            )
        for (path, leaf), shape in zip(named, self.shapes, strict=True):
            if jnp.shape(leaf) != shape:
                raise ValueError(
                    f"pack_small was initialised with the shape {shape} for {path_name(path)!r}, got "
                    f"{jnp.shape(leaf)}; call tx.init(params) with these params"
                )


@flax.struct.dataclass
class PackedTree:
    """A tree whose small leaves are stored as vectors.

    Attributes:
      vectors: the vectors by the name of their group.
      separate: the tree of the leaves that are stored separately, with :class:`InVector` in place of packed leaves.
      layout: the places of the packed leaves in the vectors.
    """

    vectors: dict[str, Any]
    separate: Any
    layout: Layout = flax.struct.field(pytree_node=False)

    def places(self) -> tuple[list[Any], Any]:
        """Return the leaves of the tree, with InVector for packed leaves, and its structure."""
        return jax.tree.flatten(self.separate, is_leaf=lambda node: isinstance(node, InVector))

    def unpacked(self) -> Any:
        """Return the tree with all of its leaves."""
        leaves, structure = self.places()
        for group in self.layout.groups:
            vector = jnp.reshape(self.vectors[group.name], -1)
            start = 0
            for number in group.members:
                shape = self.layout.shapes[number]
                end = start + math.prod(shape)
                leaves[number] = vector[start:end].reshape(shape)
                start = end
        return structure.unflatten(leaves)


def layout_of(params: Any, below: int) -> Layout:
    """Return the layout in which leaves with fewer than ``below`` elements are packed.

    Leaves are packed together if they have the same dtype and number of dimensions. Scalars are not packed.

    Raises:
      ValueError: a small leaf is known to be split over devices.
    """
    named = jax.tree.leaves_with_path(params)
    groups: dict[str, list[int]] = {}
    for number, (path, leaf) in enumerate(named):
        if is_float_array(leaf) and 0 < leaf.size < below and leaf.ndim:
            if _is_split(leaf):
                raise split_error(path_name(path))
            groups.setdefault(f"{leaf.dtype}_{leaf.ndim}d", []).append(number)
    packed = tuple(Group(name, tuple(members)) for name, members in groups.items() if len(members) > 1)
    return Layout(tuple(tuple(jnp.shape(leaf)) for _, leaf in named), packed)


def split_error(name: str) -> ValueError:
    """Return the error for a small param that is split over devices."""
    return ValueError(
        f"pack_small packs params that every device holds whole, got {name!r}, which is split over devices; write a "
        "smaller pack_small(below=…)"
    )


def _is_split(leaf: Any) -> bool:
    """Return whether a leaf is known to be split over devices."""
    sharding = getattr(jax.typeof(leaf) if isinstance(leaf, jax.core.Tracer) else leaf, "sharding", None)
    if sharding is None:
        return False
    if getattr(sharding, "mesh", None) is not None:
        return any(entry is not None for entry in sharding.spec)
    return not sharding.is_fully_replicated


def unpacked(tree: Any) -> Any:
    """Return ``tree`` with each :class:`PackedTree` in it unpacked."""
    return map_nodes_of_type(PackedTree.unpacked, tree, PackedTree)


def is_packed(node: Any) -> bool:
    """Return whether ``node`` is a :class:`PackedTree`."""
    return isinstance(node, PackedTree)


def packed_like(example: Any, tree: Any) -> Any:
    """Return ``tree`` packed where ``example`` is packed."""
    nodes: list[Any] = jax.tree.leaves(example, is_leaf=is_packed)
    structure: Any = jax.tree.structure(example, is_leaf=is_packed)
    parts = structure.flatten_up_to(tree)
    packed = [node.layout.pack(part) if is_packed(node) else part for node, part in zip(nodes, parts, strict=True)]
    return structure.unflatten(packed)
