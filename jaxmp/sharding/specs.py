"""Partition specs of params: check them, match them to a tree, and read them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxmp.base import trees as _tree
from jaxmp.base.arguments import printed
from jaxmp.optim.stored_moments import Float8Blocks

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def following(state: Any, params: Any, specs: Any, mesh: Mesh) -> Any:
    """Return the specs of a state, from the specs of its params.

    The optimizer's leaves are split like their params. A leaf gets the spec of a param if the leaf's path ends in the
    param's path and the shapes are equal. All other leaves are replicated.
    """
    known = {
        (_tree.path_parts(path), tuple(leaf.shape)): spec
        for (path, leaf), spec in zip(jax.tree.leaves_with_path(params), specs_in(specs), strict=True)
    }

    def spec_of(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, Float8Blocks):
            codes = spec_of(path, leaf.codes)
            is_divisible = all(
                size % devices_in(entry, mesh) == 0 for size, entry in zip(leaf.scales.shape, codes, strict=False)
            )
            scales: Any = codes if is_divisible else PartitionSpec()
            return dataclasses.replace(leaf, codes=codes, scales=scales)
        parts = _tree.path_parts(path)
        ends = ((parts[start:], tuple(leaf.shape)) for start in range(len(parts) + 1))
        return next((known[end] for end in ends if end in known), PartitionSpec())

    return jax.tree.map_with_path(spec_of, state, is_leaf=lambda node: isinstance(node, Float8Blocks))


def is_train_state(tree: Any) -> bool:
    """Return whether ``tree`` is a whole train state, not only params."""
    return hasattr(tree, "params") and hasattr(tree, "opt_state")


def text_of(spec: PartitionSpec) -> str:
    """Return a spec as text, such as ``P('data', None)``."""
    return f"P({', '.join(map(repr, spec))})"


def require_mesh(mesh: Any, call: str) -> None:
    """Raise a TypeError if ``mesh`` is not a mesh.

    ``call`` is the call that the user should write, such as ``"Sharding(mesh, specs)"``.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, got {printed(mesh)}; make it with jax.make_mesh((jax.device_count(),), "
            f"('fsdp',), axis_types=(jax.sharding.AxisType.Auto,)), and write {call}"
        )


def require_axes(mesh: Mesh, names: Iterable[str], argument: str) -> None:
    """Raise a ValueError if the mesh lacks an axis that ``argument`` names."""
    if missing := [name for name in names if name not in mesh.shape]:
        raise ValueError(
            f"{argument} must be in the mesh, which has the axes {', '.join(map(repr, mesh.shape)) or 'none'}, got "
            f"{missing[0]!r}; create the mesh with jax.make_mesh((…,), ({missing[0]!r}, …))"
        )


def require_specs(tree: Any, specs: Any) -> None:
    """Raise a ValueError unless ``specs`` have a spec for each leaf of ``tree``."""
    leaves = {_tree.path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(specs, is_leaf=is_spec)}
    names = [_tree.path_name(path) for path, _ in jax.tree.leaves_with_path(tree)]
    differences = [f"{type(leaf).__name__} for {name!r}" for name, leaf in leaves.items() if not is_spec(leaf)]
    differences += [f"none for {name!r}" for name in names if name not in leaves]
    differences += [f"one for {name!r}, which is not in the tree" for name in leaves if name not in names]
    structure: Any = jax.tree.structure(specs, is_leaf=is_spec)
    if structure != jax.tree.structure(tree):
        differences.append(str(structure))
    if differences:
        raise ValueError(
            f"specs must have a PartitionSpec for each array of the tree, got {differences[0]}; use "
            "jaxmp.sharding.fsdp_specs of these arrays"
        )


def fitting(spec: PartitionSpec, key: str, name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Return ``spec`` if it fits an array of ``shape``, else raise an error."""
    names = axes_in_spec(spec)
    require_axes(mesh, names, f"the axes of {key!r}")
    if len(spec) > len(shape) or len(set(names)) < len(names):
        raise ValueError(
            f"a spec must name each mesh axis at most once, and have at most one entry per axis of the array, got "
            f"{text_of(spec)} for {name!r} of shape {shape}; change the spec of {key!r}"
        )
    for size, entry in zip(shape, spec, strict=False):
        parts = devices_in(entry, mesh)
        if size % parts:
            raise ValueError(
                f"an axis must be divisible by the devices that split it, got size {size} over {parts} devices of "
                f"{entry!r} in {name!r} of shape {shape}; change the spec of {key!r}"
            )
    return spec


def is_spec(leaf: Any) -> bool:
    """Return whether ``leaf`` is a ``PartitionSpec``."""
    return isinstance(leaf, PartitionSpec)


def specs_in(specs: Any) -> list[PartitionSpec]:
    """Return the specs of a tree in order."""
    return jax.tree.leaves(specs, is_leaf=is_spec)


def as_tuple(entry: Any) -> tuple[str, ...]:
    """Return the names of axes in an entry of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def devices_in(entry: Any, mesh: Mesh) -> int:
    """Return the number of parts into which an entry of a spec splits an axis."""
    return math.prod(mesh.shape[name] for name in as_tuple(entry))


def axes_in_spec(spec: PartitionSpec) -> list[str]:
    """Return the names of all axes of the mesh in a spec."""
    return [name for entry in spec for name in as_tuple(entry)]


def without(spec: PartitionSpec, over: tuple[str, ...]) -> list[Any]:
    """Return the entries of a spec without the axes ``over``."""
    entries = (tuple(name for name in as_tuple(entry) if name not in over) for entry in spec)
    return [names[0] if len(names) == 1 else names or None for names in entries]
