"""Where the arrays of a train state and of a batch lie, in microbatches too, and which of them are gone."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp.base import trees as _tree
from jaxmp.base.arguments import printed
from jaxmp.sharding.specs import as_tuple


def settled(state: Any) -> Any:
    """``state`` in the form that a step gives it, so that the first step and those after it share one compilation.

    That is arrays of strong type where the params are committed to; and none twice, for a buffer can be donated only
    once.
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
    """``state`` with copies of the arrays that are in it twice (a target network, say): each is deleted but once."""
    leaves, structure = jax.tree.flatten(state)
    if len({*map(id, leaves)}) == len(leaves):  # as a rule
        return state
    seen: set[int] = set()
    return jax.tree.unflatten(structure, [copied_if_seen(leaf, seen) for leaf in leaves])


def copied_if_seen(leaf: Any, seen: set[int]) -> Any:
    """A copy of ``leaf`` if it is an array whose id is in ``seen``, which it is from then on."""
    again = id(leaf) in seen and isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    seen.add(id(leaf))
    return jnp.copy(leaf) if again else leaf


def home_of(tree: Any) -> Any:
    """The sharding over all devices of the mesh that an array of ``tree`` is on; else a committed one's; or None."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(tree) if is_put(leaf)]
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return shardings[0] if shardings else None


def at_home(leaf: Any, home: Any) -> jax.Array:
    """``leaf``, at ``home`` if it was put on no device."""
    if is_put(leaf):
        return leaf
    return jax.device_put(leaf, home) if home.is_fully_addressable else _spread(home)(leaf)


@functools.cache
def _spread(home: Any) -> Any:
    """Puts an array that every process has onto the devices of all, where device_put takes no PRNG key."""
    return jax.jit(lambda leaf: leaf, out_shardings=home)


def at(path: Any, leaf: Any, wanted: NamedSharding) -> jax.Array:
    """``leaf`` as the specs of a step say.

    Raises:
      ValueError: it was put elsewhere.
    """
    if is_put(leaf) and not _lies(leaf, wanted):
        raise ValueError(
            f"a state must lie as the mesh and specs of the step say, {wanted} for {_tree.path_name(path)!r}, got "
            f"{leaf.sharding}; make it with TrainState.create_sharded(make_params, tx, sharding)"
        )
    return at_home(leaf, wanted)


def moved_to(leaf: Any, wanted: NamedSharding) -> Any:
    return leaf if is_put(leaf) and _lies(leaf, wanted) else jax.device_put(leaf, wanted)


def _lies(leaf: jax.Array, wanted: NamedSharding) -> bool:
    """Whether ``leaf`` lies so, on axes of these types."""
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
    """Raises, in place of ``error``, if ``state`` was given to a step before, which deleted its arrays."""
    leaves = jax.tree.leaves_with_path(state)
    deleted = next((path for path, leaf in leaves if is_deleted(leaf)), None)
    if deleted is not None:
        of_trees = (
            "go on with the state that the step returned (state, metrics = step(state, batch)), copy what another run "
            "is to start from (jax.tree.map(jnp.copy, params)) before the first one"
        )
        raise RuntimeError(
            f"a state can be given to a donating step once only, but {_tree.path_name(deleted)!r} in this one is gone: "
            f"a step has had it, or another state of the same arrays; {_to_copy(state, of_trees)}"
        ) from error


def require_apart(state: Any, batch: Any, error: Exception) -> None:
    """Raises, in place of ``error``, if ``batch`` has an array that a step deletes with ``state``, or has deleted."""
    is_clash = "donated" in str(error)  # which a step survives that does not read the array
    owners = {mark: path for path, leaf in jax.tree.leaves_with_path(state) for mark in _marks(leaf) if is_clash}
    for path, leaf in jax.tree.leaves_with_path(batch):
        owner = next((owners[mark] for mark in _marks(leaf) if mark in owners), None)
        if owner is None and (not is_deleted(leaf) or is_deleted(state)):
            continue
        entry = f"entry {_tree.path_name(path)!r} of it" if path else "it"
        came = "is gone with an earlier state" if owner is None else f"is {_tree.path_name(owner)!r} of this state"
        raise RuntimeError(
            "a donating step deletes the arrays of the state that it is given, so that a batch must have none of them, "
            f"but {entry} {came}; "
            f"{_to_copy(state, 'copy it before the step, jax.tree.map(jnp.copy, state.params), say')}"
        ) from error


def _to_copy(state: Any, of_trees: str) -> str:
    """What helps where a step has deleted what is still needed: as a state of another kind says it, or ``of_trees``."""
    return f"{getattr(state, '_to_copy', of_trees)}, or make the step with make_train_step(..., donate=False)"


def require_arrays(batch: Any, error: Exception) -> None:
    """Raises, in place of ``error``, if a leaf of ``batch`` is nothing that JAX takes."""
    if (came := _no_array(batch, "the batch")) is not None:
        raise TypeError(
            f"a batch holds arrays and numbers, got {came}; leave it out of what the step is given, or make numbers of "
            "it"
        ) from error


def require_params(params: Any, model_state: Any) -> None:
    """Raises if ``params`` are None or empty, or a leaf of them or of the model state is no array."""
    for path, leaf in jax.tree.leaves_with_path({"params": params, "model_state": model_state}):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"a state is made of arrays, got the shape {leaf} for {_tree.path_name(path)!r}; for the shapes of a "
                "state, write jax.eval_shape(lambda: TrainState.create(params=model.init(key, x)['params'], tx=tx)), "
                "with all that makes arrays in it"
            )
    if (leaf := _no_array(model_state, "the model state")) is not None:
        raise TypeError(
            f"model_state is a tree of arrays, which the loss function returns anew, got {leaf}; leave all else out"
        )
    came = printed(params) if not jax.tree.leaves(params) else _no_array(params, "the params")
    if came is not None:
        raise TypeError(
            f"params are a tree of arrays, got {came}; pass what is trained, params=model.init(key, x)['params'] say, "
            "and keep all else out of it"
        )


def require_examples(batch: Any) -> None:
    """Raises if a ``batch`` has no examples: a mean over none is NaN, though its gradients are zeros, which train."""
    shapes = [shape for shape in map(jnp.shape, jax.tree.leaves(batch)) if shape]
    if {shape[0] for shape in shapes} == {0}:
        raise ValueError(
            f"a batch must have an example, got arrays of shape {', '.join(map(str, dict.fromkeys(shapes)))}; leave "
            "out the step for a batch that has none"
        )


def _no_array(tree: Any, name: str) -> str | None:
    """What a leaf of ``tree`` is that JAX does not take, and where it is; None if there is none."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not is_of_jax(leaf):
            kind = type(leaf).__name__ + (f" of {leaf.dtype.name}" if isinstance(leaf, np.ndarray) else "")
            return f"{kind} for {_tree.path_name(path) or name!r}"
    return None


def is_of_jax(leaf: Any) -> bool:
    """Whether JAX takes a leaf for an array: a number, a key or a shape too."""
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def _marks(leaf: Any) -> set[Any]:
    """What an array is known by: itself, and where its numbers lie, which another array object may have too."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return set()
    has_numbers = not leaf.is_deleted() and leaf.size and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    parts = leaf.addressable_shards if has_numbers else ()
    return {id(leaf), *(("lies at", part.device, part.data.unsafe_buffer_pointer()) for part in parts)}


def tell_of_devices(state: Any, batch: Any, error: Exception) -> None:
    """Raises in place of ``error`` if arrays are committed to different devices."""
    home = home_of((state, batch))
    for path, leaf in jax.tree.leaves_with_path({"state": state, "batch": batch}):
        if is_put(leaf) and leaf.sharding.device_set != home.device_set:
            here, there = (", ".join(sorted(map(str, each.device_set))) for each in (leaf.sharding, home))
            place = "jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())"
            raise ValueError(
                "the state and the batch of a step must be on the same devices, got "
                f"{_tree.path_name(path)!r} put on {here} and others on {there}; write jax.device_put({path[0].key}, "
                f"{place if isinstance(home, NamedSharding) else 'device'}), or put the state on no device: a step "
                "moves it to the batch"
            ) from error


def microbatches(batch: Any, n: int) -> Any:
    """The batch as ``n`` microbatches: leaves (batch, …) as (n, batch / n, …), example i in i % n; scalars repeated.

    Raises:
      ValueError: leaves have other numbers of examples; ``n`` does not divide them; on axes of type Explicit, the
        devices do not divide a microbatch.
    """
    arrays = [(path, leaf) for path, leaf in jax.tree.leaves_with_path(batch) if jnp.ndim(leaf) and jnp.size(leaf)]
    lengths = [(path, len(leaf)) for path, leaf in arrays]
    for path, length in lengths:
        if length != lengths[0][1]:
            is_key = any(jnp.shape(leaf) == (2,) and getattr(leaf, "dtype", None) == np.uint32 for _, leaf in arrays)
            key = "; a raw key of random numbers is an array, of two numbers: pass jax.random.key(0) in its place"
            raise ValueError(
                "accumulate_steps splits each array of a batch along its first axis, which must be the examples, got "
                f"{lengths[0][1]} of them in {_tree.path_name(lengths[0][0])!r} and {length} in "
                f"{_tree.path_name(path)!r}; what all examples share goes into model_state, or the loss function "
                f"closes over it{key if is_key else ''}"
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
                f"the {devices} devices that a batch is split over on axes of type Explicit must divide each of its "
                f"microbatches, got accumulate_steps={n} for {examples} examples in {where}, {examples // n} in each; "
                f"use a batch of {parts * (examples // parts + 1)}, say, or fewer accumulate_steps"
            )
        return jnp.moveaxis(leaf.reshape(examples // n, n, *leaf.shape[1:]), 1, 0)

    return jax.tree.map_with_path(split, batch)


def _devices_along_rows(leaf: jax.Array) -> int:
    """How many devices axis 0 is split over by its type."""
    sharding = jax.typeof(leaf).sharding
    return math.prod(sharding.mesh.shape[name] for name in as_tuple(sharding.spec[0])) if sharding.spec else 1
