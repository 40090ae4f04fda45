"""The mesh of a call's arguments."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.sharding import NamedSharding, use_abstract_mesh


def mesh_of(tree: Any) -> Any:
    """Return the first mesh of a pytree of arrays, shapes or shardings, or None."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", leaf)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    return None


def within_mesh_of_shapes(tree: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context that sets the mesh of a pytree of shapes, if the shapes are on a mesh.

    If the pytree has arrays on a mesh, the context sets no mesh, because a real call with these arrays sets none. The
    function may use another mesh, as a function of ``jax.pmap`` does.
    """
    mesh = mesh_of(tree)
    has_arrays = any(isinstance(leaf, jax.Array) and mesh_of(leaf) is not None for leaf in jax.tree.leaves(tree))
    if mesh is None or has_arrays:
        return contextlib.nullcontext()
    return use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh))
