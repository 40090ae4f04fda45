"""Place the arrays of a train state and of a batch on the devices of a step."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp.base import trees as _tree


def settled(state: Any) -> Any:
    """Return ``state`` in the form in which a step returns a state.

    The first step and all later steps then share one compilation. The arrays are strongly typed and on the devices of
    the params. Each array occurs once, because a buffer can be donated only once.
    """
    home = home_of(state.params)

    def settle(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf, jnp.asarray(leaf).dtype)
        return leaf if home is None or isinstance(leaf, jax.core.Tracer) else at_home(leaf, home)

    return jax.tree.map(settle, each_once(state))


def each_once(state: Any, of_batch: Iterable[Any] = ()) -> Any:
    """Return ``state`` so that each array occurs in it only once, and does not occur in ``of_batch``.

    Repeated arrays, such as those of a target network, are copied.
    """
    ids = {*map(id, of_batch)}
    return jax.tree.map(lambda leaf: copied_if_seen(leaf, ids), state)


def copied_if_seen(leaf: Any, ids: set[int]) -> Any:
    """Return ``leaf``, copied if its id is in ``ids``, and add its id to ``ids``."""
    is_repeated = id(leaf) in ids and isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    ids.add(id(leaf))
    return jnp.copy(leaf) if is_repeated else leaf


def home_of(tree: Any) -> Any:
    """Return the sharding for uncommitted arrays, or None.

    The sharding replicates over the mesh of ``tree``. If no array of ``tree`` is on a mesh, return the sharding of the
    first committed array. If no array is committed, return None.
    """
    shardings = [leaf.sharding for leaf in jax.tree.leaves(tree) if is_put(leaf)]
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return shardings[0] if shardings else None


def at_home(leaf: Any, home: Any) -> jax.Array:
    """Return ``leaf``, moved to ``home`` if ``leaf`` is uncommitted."""
    if is_put(leaf):
        return leaf
    return jax.device_put(leaf, home) if home.is_fully_addressable else _copier_to_all_devices(home)(leaf)


@functools.cache
def _copier_to_all_devices(home: Any) -> Any:
    """Return a function that copies an array or a random key to all devices."""
    return jax.jit(lambda leaf: leaf, out_shardings=home)


def placed_by_specs(path: Any, leaf: Any, wanted: NamedSharding) -> jax.Array:
    """Return ``leaf`` in the layout of a step's specs.

    Raises:
      ValueError: ``leaf`` is committed to another layout.
    """
    if is_put(leaf) and not _lies(leaf, wanted):
        raise ValueError(
            f"{_tree.path_name(path)!r} of the state must have the step's sharding {wanted}, got {leaf.sharding}; "
            "create the state with TrainState.create_sharded(…, sharding)"
        )
    return at_home(leaf, wanted)


def moved_to(leaf: Any, wanted: NamedSharding) -> Any:
    """Return ``leaf`` in the sharding ``wanted``."""
    return leaf if is_put(leaf) and _lies(leaf, wanted) else jax.device_put(leaf, wanted)


def _lies(leaf: jax.Array, wanted: NamedSharding) -> bool:
    """Return whether ``leaf`` has the sharding ``wanted``, on axes of the same types."""
    types = {sharding.mesh.axis_types for sharding in (leaf.sharding, wanted) if isinstance(sharding, NamedSharding)}
    return len(types) == 1 and leaf.sharding.is_equivalent_to(wanted, leaf.ndim)


def is_put(leaf: Any) -> bool:
    """Return whether ``leaf`` is a committed array."""
    # The slow test for jax.Array comes last.
    is_array = not isinstance(leaf, jax.core.Tracer) and hasattr(leaf, "committed")
    return is_array and leaf.committed and isinstance(leaf, jax.Array)


def require_params(params: Any) -> None:
    """Raise an error if ``params`` are empty, or include other collections."""
    if not jax.tree.leaves(params):
        raise ValueError(f"params must be a tree of arrays, got {params!r}; pass e.g. variables['params']")
    if isinstance(params, Mapping) and "params" in params and len(params) > 1:
        raise ValueError(
            f"params must be the trained params alone, got variables with {', '.join(map(repr, params))}; pass "
            "params=variables['params'], and the other collections as model_state="
        )
