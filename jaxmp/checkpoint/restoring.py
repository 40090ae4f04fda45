"""Restore states, and convert them to other dtypes and loss scales."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.trees import is_key, map_nodes_of_type
from jaxmp.checkpoint.matching import match
from jaxmp.checkpoint.named_leaves import as_tree, dtype_of, is_nnx_pair, leaves_by_name
from jaxmp.checkpoint.saving import orbax_folders, wait
from jaxmp.nnx.training import take_state
from jaxmp.optim.loss_scale_state import ScaleState
from jaxmp.optim.scaling_state import LossScalingState

T = TypeVar("T")


def restore(folder: str | PathLike[str], like: T, *, step: int | None = None) -> T:
    """Return the state of the newest complete checkpoint, in the form of ``like``.

    The result has the structure, dtypes and shardings of ``like``, a fresh state of the new run. An NNX model and its
    optimizer are changed in place. One line is printed, with the step and the folder. If the new run differs from the
    saved one, the state is converted, and the line also lists the conversions:

    - Floating arrays are cast to the dtypes of ``like``, and so are integers if their values fit. The line counts the
      numbers that become 0.
    - A loss scale of the same class continues with the saved value and counters, and with the settings of ``like``. If
      these do not allow a number, it moves to the nearest that they allow. A loss scale of another class starts fresh.
    - A moving average that was not saved starts at the saved params. A saved average that ``like`` does not have is
      dropped. The same holds for the random key, which starts fresh.
    - The optimizer may gain or lose :func:`jaxmp.low_precision`. The compensation of the params starts at zero, or is
      dropped.

    Args:
      folder: the folder of :func:`save`.
      like: a fresh state, of the kind that was saved. A pytree may have ``jax.ShapeDtypeStruct`` in place of arrays, so
        that the memory never has both states.
      step: the step of the checkpoint; None for the newest.

    Raises:
      FileNotFoundError: the folder has no complete checkpoint, or none of that step.
      ValueError: an array is missing on one side, or has another shape; or a finite number is not finite in its new
        dtype, or an integer does not fit.
      ModuleNotFoundError: Orbax is not installed.

    >>> folder = tempfile.mkdtemp()
    >>> create = jaxmp.TrainState.create
    >>> state = create(params={"w": jnp.ones(2)}, tx=jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale()))
    >>> jaxmp.checkpoint.save(folder, state)
    >>> like = create(params={"w": jnp.zeros(2)}, tx=optax.sgd(0.1), ema=True)
    >>> state = jaxmp.checkpoint.restore(folder, like)
    restored step 0 of /...: the loss scale DynamicLossScale -> NoOpLossScale starts fresh; the moving average starts
    at the params
    >>> state.ema_params["w"]
    Array([1., 1.], dtype=float32)
    """
    tree = as_tree(like)
    leaves = leaves_by_name(tree)
    reading = _reading(folder, step)
    with _note_on_damage(folder, reading.path.name):
        saved = reading.shapes
    sources, changes = match(saved, reading.record, tree, str(reading.path))
    places: dict[str, Any] = {}
    for name, source in sources.items():
        dtype = saved[source].dtype
        is_wide = jax.dtypes.canonicalize_dtype(dtype) != dtype  # a jax.Array would not have its 64 bits
        places[source] = None if is_wide else _place_of(leaves[name])
    with _note_on_damage(folder, reading.path.name):
        arrays = reading.arrays(places)
    new_leaves, losses = _new_leaves(leaves, sources, arrays, reading.record["keys"])
    changes += losses
    new: Any = jax.tree.unflatten(jax.tree.structure(tree), new_leaves)
    new = map_nodes_of_type(lambda state: _within_bounds(state, changes), new, LossScalingState)
    if jax.process_index() == 0:
        listed = f": {'; '.join(changes)}" if changes else ""
        print(f"restored step {reading.path.name} of {reading.path.parent}{listed}")
    if not is_nnx_pair(like):
        return new
    pair: Any = like
    take_state(pair[0], pair[1], new)
    return like


def read_metadata(folder: str | PathLike[str], *, step: int | None = None) -> dict[str, Any]:
    """Return the metadata that :func:`save` wrote to the newest complete checkpoint.

    Args:
      folder: the folder of :func:`save`.
      step: the step of the checkpoint; None for the newest.

    Raises:
      FileNotFoundError: the folder has no complete checkpoint, or none of that step.
      ModuleNotFoundError: Orbax is not installed.

    >>> folder = tempfile.mkdtemp()
    >>> jaxmp.checkpoint.save(folder, {"w": jnp.ones(2)}, step=7, metadata={"policy": "mixed_float16"})
    >>> jaxmp.checkpoint.read_metadata(folder)
    {'policy': 'mixed_float16'}
    """
    metadata: dict[str, Any] = _reading(folder, step).record["metadata"]
    return metadata


def list_steps(folder: str | PathLike[str]) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in order.

    The list is empty if the folder does not exist, as in the first run of a program or if its name is misspelt. So
    print a line if your program then starts at step 0. The list does not have the checkpoint that is still being
    written.

    Raises:
      ModuleNotFoundError: Orbax is not installed.

    >>> jaxmp.checkpoint.list_steps("no/such/folder")
    []
    """
    steps: list[int] = orbax_folders().steps_in(folder)
    return steps


def _reading(folder: str | PathLike[str], step: int | None) -> Any:
    """Open the checkpoint of a step, or the newest one, when the last write is complete."""
    wait()
    steps = list_steps(folder)
    if not steps:
        raise FileNotFoundError(f"{folder} has no complete checkpoint; pass the folder that jaxmp.checkpoint.save got")
    if step is not None and step not in steps:
        raise FileNotFoundError(f"{folder} has no complete checkpoint of step {step}, only of {steps}")
    step = steps[-1] if step is None else step
    with _note_on_damage(folder, step):
        return orbax_folders().Reading(folder, step)


@contextlib.contextmanager
def _note_on_damage(folder: str | PathLike[str], step: Any) -> Iterator[None]:
    """Add the steps of the checkpoints to an error of Orbax."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"This error is from reading step {step} in {folder}. If the checkpoint is damaged, restore an earlier one "
            f"with restore(folder, like, step=...); the folder has the steps {list_steps(folder)}"
        )
        raise


def _place_of(leaf: Any) -> Any:
    """Return the sharding of a leaf, or None for an uncommitted array or an array of NumPy."""
    is_placed = isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and leaf.committed)
    return leaf.sharding if is_placed else None


def _new_leaves(
    leaves: Mapping[str, Any], sources: Mapping[str, str], arrays: Mapping[str, Any], keys: Mapping[str, str]
) -> tuple[list[Any], list[str]]:
    """Return the new leaves, and a text for each field in which numbers become 0."""
    new_leaves: list[Any] = []
    zeros: collections.Counter[str] = collections.Counter()
    used: set[str] = set()
    for name, leaf in leaves.items():
        source = sources.get(name)
        if source is None:
            new_leaves.append(_unsaved(name, leaf))
            continue
        array = arrays[source].copy() if source in used else arrays[source]  # a step may donate both leaves
        used.add(source)
        if hasattr(leaf, "dtype") and not is_key(leaf) and array.dtype != dtype_of(leaf):
            array, count = _cast(name, array, dtype_of(leaf))
            zeros[f"numbers of {name.split('/')[0]} become 0 in {dtype_of(leaf)}"] += count
        new_leaves.append(_like_leaf(leaf, array, keys.get(source)))
    return new_leaves, [f"{count} {cast}" for cast, count in zeros.items() if count]


def _unsaved(name: str, leaf: Any) -> Any:
    """Return the value of a leaf that was not saved."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if leaf.size == 0:
        return jnp.zeros(leaf.shape, leaf.dtype)
    raise ValueError(
        f"{name!r} was not saved, so it needs a value, but the state that you passed has a ShapeDtypeStruct;\n"
        "put an array there, for example with like.replace(...)"
    )


def _like_leaf(leaf: Any, array: Any, impl: str | None) -> Any:
    """Return an array of the dtype of ``leaf`` with its type and its sharding."""
    if isinstance(leaf, np.ndarray):
        return np.asarray(array)
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return type(leaf)(np.asarray(array)[()])
    place = _place_of(leaf)
    # Copy a NumPy array, because a step that donates its state must not delete it.
    array = jnp.array(np.asarray(array)) if place is None else jax.device_put(array, place)
    return array if impl is None or not is_key(leaf) else jax.random.wrap_key_data(array, impl=impl)


def _cast(name: str, array: Any, dtype: Any) -> tuple[Any, int]:
    """Return a cast array, and how many of its numbers become 0.

    Raises:
      ValueError: a finite number is not finite in the new dtype, or an integer does not fit.
    """
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    overflows, zeros = (_lost_numbers if isinstance(array, np.ndarray) else _jitted_lost_numbers)(array, cast)
    if not overflows:
        return cast, int(zeros)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        raise ValueError(
            f"{name!r} has integers outside {dtype}, which has {limits.min} to {limits.max};\n"
            f"restore it as {array.dtype}, for example into a NumPy array"
        )
    raise ValueError(
        f"{name!r} has numbers above {float(jnp.finfo(dtype).max):g}, the largest number of {dtype};\n"
        f"restore it as {array.dtype}, for example with float32 params under a mixed policy"
    )


def _lost_numbers(before: Any, after: Any) -> tuple[Any, Any]:
    """Return whether a cast has lost a finite number or an integer, and how many numbers it has turned into 0."""
    if jnp.issubdtype(after.dtype, jnp.integer):
        return ((after.astype(before.dtype) != before) | ((after < 0) != (before < 0))).any(), 0
    isfinite = np.isfinite if isinstance(before, np.ndarray) else jnp.isfinite
    return (isfinite(before) & ~isfinite(after)).any(), ((before != 0) & (after == 0)).sum()


_jitted_lost_numbers = jax.jit(_lost_numbers)


def _within_bounds(state: LossScalingState, changes: list[str]) -> LossScalingState:
    """Move the numbers of a loss scale into the bounds of the new run, and record each change."""
    scale = state.loss_scale
    if not isinstance(scale, ScaleState):
        return state
    bounded, has_moved = scale.within_bounds(), False
    for name, number in vars(bounded).items():
        before, after = np.asarray(getattr(scale, name)), np.asarray(number)
        if not np.array_equal(before, after):
            has_moved = True
            changes.append(f"the loss scale's {name} {before} -> {after}, within the bounds of the new run")
    return state._replace(loss_scale=bounded) if has_moved else state
