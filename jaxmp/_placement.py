"""Where the arrays of a train state and of a batch lie, in microbatches too, and which of them are gone."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp import tree as _tree
from jaxmp._specs import as_tuple


def settled(state: Any) -> Any:
    """Return ``state`` in the form that a step returns it, so that all steps share one compilation.

    Arrays have strong types, lie where the params are committed to, and are in it once: a buffer is donated once only.
    """
    home = home_of(state.params)
    seen: set[int] = set()

    def settle(leaf: Any) -> Any:
        again = id(leaf) in seen
        seen.add(id(leaf))
        leaf = jnp.array(leaf, jnp.asarray(leaf).dtype, copy=again)
        return leaf if home is None or isinstance(leaf, jax.core.Tracer) else at_home(leaf, home)

    return jax.tree.map(settle, state)


def each_once(state: Any) -> Any:
    """Return ``state`` with copies of arrays that are in it twice, such as those of a target network."""
    leaves, structure = jax.tree.flatten(state)
    if len({*map(id, leaves)}) == len(leaves):  # as a rule
        return state
    seen: set[int] = set()
    return jax.tree.unflatten(structure, [copied_if_seen(leaf, seen) for leaf in leaves])


def copied_if_seen(leaf: Any, seen: set[int]) -> Any:
    """Return a copy of an array whose id is in ``seen``, else ``leaf``; add the id."""
    again = id(leaf) in seen and isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    seen.add(id(leaf))
    return jnp.copy(leaf) if again else leaf


def home_of(tree: Any) -> Any:
    """Return the sharding over all devices of a mesh in ``tree``, else that of a committed array, or None."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(tree) if is_put(leaf)]
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return shardings[0] if shardings else None


def at_home(leaf: Any, home: Any) -> jax.Array:
    """Return ``leaf``, moved to ``home`` if it is uncommitted."""
    if is_put(leaf):
        return leaf
    return jax.device_put(leaf, home) if home.is_fully_addressable else _spread(home)(leaf)


@functools.cache
def _spread(home: Any) -> Any:
    """Return a function that puts an array of every process onto all devices; device_put takes no PRNG key."""
    return jax.jit(lambda leaf: leaf, out_shardings=home)


def at(path: Any, leaf: Any, wanted: NamedSharding) -> jax.Array:
    """Return ``leaf`` where the specs of a step say.

    Raises:
      ValueError: it was put elsewhere.
    """
    if is_put(leaf) and not _lies(leaf, wanted):
        raise ValueError(
            f"{_tree.path_name(path)!r} of the state does not lie as the mesh and specs of the step say, {wanted}, but "
            f"{leaf.sharding}; make the state with jaxmp.sharding.init_state(…, mesh, specs)"
        )
    return at_home(leaf, wanted)


def moved_to(leaf: Any, wanted: NamedSharding) -> Any:
    return leaf if is_put(leaf) and _lies(leaf, wanted) else jax.device_put(leaf, wanted)


def _lies(leaf: jax.Array, wanted: NamedSharding) -> bool:
    """Return whether ``leaf`` has the sharding ``wanted``, on axes of the same types."""
    types = {sharding.mesh.axis_types for sharding in (leaf.sharding, wanted) if isinstance(sharding, NamedSharding)}
    return len(types) == 1 and leaf.sharding.is_equivalent_to(wanted, leaf.ndim)


def is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def is_put(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed


def is_deleted(tree: Any) -> bool:
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return any(leaf.is_deleted() for leaf in arrays if not isinstance(leaf, jax.core.Tracer))


def require_not_deleted(state: Any, error: Exception | None = None) -> None:
    """Raise an error, in place of ``error``, if an array of ``state`` was donated to an earlier step."""
    leaves = jax.tree.leaves_with_path(state)
    deleted = next((path for path, leaf in leaves if is_deleted(leaf)), None)
    if deleted is not None:
        remedy = getattr(state, "_to_copy", "use the state that the step returned")
        raise RuntimeError(
            f"{_tree.path_name(deleted)!r} was donated to an earlier step, which deleted it; {remedy}, or write "
            "make_train_step(..., donate=False)"
        ) from error


def require_params(params: Any) -> None:
    """Raise an error if ``params`` are empty, or a model's variables with more collections than the params."""
    if not jax.tree.leaves(params):
        raise ValueError(f"params are a tree of arrays, got {params!r}; pass what is trained, variables['params'] say")
    if isinstance(params, Mapping) and "params" in params and len(params) > 1:
        raise ValueError(
            f"params are what is trained, got variables with {', '.join(map(repr, params))}; pass "
            "params=variables['params'], and the other collections as model_state="
        )


def require_examples(batch: Any) -> None:
    """Raise an error if a batch has no examples: its loss is NaN, but its gradients are zeros, which train."""
    shapes = [shape for shape in map(jnp.shape, jax.tree.leaves(batch)) if shape]
    if {shape[0] for shape in shapes} == {0}:
        raise ValueError(
            f"a batch must have an example, got arrays of shape {', '.join(map(str, dict.fromkeys(shapes)))}; skip "
            "empty batches"
        )


def is_of_jax(leaf: Any) -> bool:
    """Return whether JAX takes a leaf for an array: a number, a key or a shape too."""
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def microbatches(batch: Any, n: int) -> Any:
    """Return a batch as ``n`` microbatches: leaves (batch, …) as (n, batch / n, …), example i in i % n.

    Scalars are repeated.

    Raises:
      ValueError: leaves have other numbers of examples; ``n`` does not divide them; on axes of type Explicit, the
        devices do not divide a microbatch.
    """
    arrays = [(path, leaf) for path, leaf in jax.tree.leaves_with_path(batch) if jnp.ndim(leaf) and jnp.size(leaf)]
    lengths = [(path, len(leaf)) for path, leaf in arrays]
    for path, length in lengths:
        if length != lengths[0][1]:
            raise ValueError(
                "accumulate_steps splits each array of a batch along its examples, got "
                f"{lengths[0][1]} of them in {_tree.path_name(lengths[0][0])!r} and {length} in "
                f"{_tree.path_name(path)!r}; put what all examples share into model_state"
            )

    def split(path: Any, leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if leaf.ndim == 0:
            return jnp.broadcast_to(leaf, (n,))
        examples = leaf.shape[0]
        where = f"batch entry {_tree.path_name(path)!r}" if path else "the batch"
        if examples % n:
            raise ValueError(
                f"accumulate_steps must divide the batch, got {n} for {examples} examples in {where}; use a batch of "
                f"{n * (examples // n + 1)}, say"
            )
        devices = _devices_along_rows(leaf)
        if examples // n % devices:
            parts = n * devices
            raise ValueError(
                f"the {devices} devices of a batch must divide its microbatches, got accumulate_steps={n} for "
                f"{examples} examples in {where}; use a batch of {parts * (examples // parts + 1)}, say"
            )
        return jnp.moveaxis(leaf.reshape(examples // n, n, *leaf.shape[1:]), 1, 0)

    return jax.tree.map_with_path(split, batch)


def _devices_along_rows(leaf: jax.Array) -> int:
    """Return how many devices axis 0 is split over by its type."""
    sharding = jax.typeof(leaf).sharding
    return math.prod(sharding.mesh.shape[name] for name in as_tuple(sharding.spec[0])) if sharding.spec else 1
