"""Restore states, and convert them to other dtypes and loss scales."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmp.base.trees import is_key, map_nodes_of_type
from jaxmp.checkpoint.matching import Match, match
from jaxmp.checkpoint.named_leaves import (
    as_tree,
    dtype_of,
    is_nnx_pair,
    is_python_number,
    key_impl,
    leaves_by_name,
)
from jaxmp.checkpoint.saving import orbax_folders, require_folder, wait
from jaxmp.nnx.training import take_state
from jaxmp.optim.loss_scale_state import ScaleState
from jaxmp.optim.scaling_state import LossScalingState

T = TypeVar("T")


def restore(folder: str | PathLike[str], like: T, *, step: int | None = None, donate: bool = False) -> T:
    """Return the state of the newest complete checkpoint, in the form of ``like``.

    The result has the structure, dtypes and shardings of ``like``, a fresh state of the new run. NNX models and
    optimizers in ``like`` are also changed in place. One line is printed, with the step and the folder. If the new run
    differs from the saved one, the state is converted, and the line also lists the conversions:

    - Floating arrays are cast to the dtypes of ``like``, and so are integers if their values fit. The line counts the
      numbers that become 0.
    - A loss scale of the same class continues with the saved value and counters, and with the settings of ``like``. If
      these do not allow a number, it moves to the nearest that they allow. A loss scale of another class starts fresh.
    - A moving average that was not saved starts at the restored params. A saved average that ``like`` does not have is
      dropped. The same holds for the random key, which starts fresh. (If ``like`` is a dict of NNX models and
      optimizers, both runs need the same ``ema``.)
    - The optimizer may gain or lose :func:`jaxmp.low_precision`.

    Args:
      folder: the folder of :func:`save`.
      like: a fresh state, of the kind that was saved. A pytree may have ``jax.ShapeDtypeStruct`` in place of arrays.
      step: the step of the checkpoint; None for the newest.
      donate: whether to delete the arrays of ``like`` before reading, so that the memory never has both states.
        If reading or a cast then fails, ``like`` stays deleted. An ``nnx.clone`` or ``nnx.state`` that you took from
        the model earlier may share this memory, and is then deleted. To keep it, copy its arrays, or pass False.

    Raises:
      FileNotFoundError: the folder has no complete checkpoint, or none of that step.
      TypeError: ``folder`` is not a path, for example because you swapped it with ``like``.
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
    require_folder("restore", folder, like)
    wait()
    tree = as_tree(like)
    reading = _reading(folder, step)
    empty = _empty_arrays(reading.record)
    with _note_on_damage(reading, folder):
        saved = {**reading.shapes, **empty}
    matched = match(saved, reading.record, tree, str(reading.path))
    leaves = leaves_by_name(tree)
    _require_values(leaves, matched)
    forms = {name: _Form(leaf) for name, leaf in leaves.items()}
    if donate:
        _delete(leaves[name] for name in (*matched.sources, *matched.derived))
    with _note_on_damage(reading, folder):
        arrays = {**reading.arrays(_places(matched, forms, saved, empty)), **empty}
    new_leaves = _convert(matched, forms, leaves, arrays, reading.record)
    new: Any = jax.tree.unflatten(jax.tree.structure(tree), [new_leaves[name] for name in leaves])
    new = map_nodes_of_type(lambda state: _within_bounds(state, matched.changes), new, LossScalingState)
    if jax.process_index() == 0:
        changes = f": {'; '.join(matched.changes)}" if matched.changes else ""
        print(f"restored step {reading.path.name} of {reading.path.parent}{changes}")
    if not is_nnx_pair(like):
        has_nnx_objects = any(map(_is_nnx_object, jax.tree.leaves(like, is_leaf=_is_nnx_object)))
        return jax.tree.map(_update_in_place, like, new, is_leaf=_is_nnx_object) if has_nnx_objects else new
    pair: Any = like
    take_state(pair[0], pair[1], new)
    return like


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


def _is_nnx_object(node: Any) -> bool:
    """Return whether ``node`` is an NNX model or optimizer."""
    return isinstance(node, nnx.Pytree)


def _update_in_place(old: Any, new: Any) -> Any:
    """Return a restored leaf. An NNX object takes the values of ``new`` and is returned itself."""
    if not _is_nnx_object(old):
        return new
    nnx.update(old, nnx.state(new))
    return old


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
    wait()
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
    """Open the checkpoint of a step, or the newest one."""
    steps = orbax_folders().steps_in(folder)
    if not steps:
        around, name = os.path.split(os.path.normpath(folder))
        if name.isdecimal() and int(name) in orbax_folders().steps_in(around):
            raise FileNotFoundError(
                f"{folder} is a checkpoint, not the folder of checkpoints; pass {around} and step={name}"
            )
        raise FileNotFoundError(f"{folder} has no complete checkpoint; write one with jaxmp.checkpoint.save")
    if step is not None and step not in steps:
        raise FileNotFoundError(f"{folder} has no complete checkpoint of step {step}, only of {steps}")
    return orbax_folders().Reading(folder, steps[-1] if step is None else step)


class _Form:
    """The dtype and the sharding of a leaf, which stay known when the leaf is deleted.

    The sharding of an uncommitted array is None, so that the restored array is uncommitted too.
    """

    def __init__(self, leaf: Any) -> None:
        self.kind = type(leaf)
        self.is_python_number = is_python_number(leaf)
        self.is_key = is_key(leaf)
        self.impl = key_impl(leaf) if self.is_key else None
        self.dtype = None if self.is_key else dtype_of(leaf)
        is_placed = isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and leaf.committed)
        self.sharding = leaf.sharding if is_placed else None


@contextlib.contextmanager
def _note_on_damage(reading: Any, folder: str | PathLike[str]) -> Iterator[None]:
    """Add the steps of the checkpoints to an error of Orbax."""
    try:
        yield
    except Exception as error:
        steps = orbax_folders().steps_in(folder)
        error.add_note(
            f"This error is from reading {reading.path}. If the checkpoint is damaged, restore an earlier one with "
            f"restore(folder, like, step=...); the folder has the steps {steps}"
        )
        raise


def _empty_arrays(record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays without elements, which Orbax does not write."""
    return {name: np.zeros(shape, jnp.dtype(dtype)) for name, (dtype, shape) in record["empty"].items()}


def _require_values(leaves: Mapping[str, Any], matched: Match) -> None:
    for name, leaf in leaves.items():
        keeps_value = name not in matched.sources and name not in matched.derived
        if keeps_value and isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{name!r} was not saved, so it needs a value, but the state that you passed has a ShapeDtypeStruct;\n"
                "put an array there, for example with like.replace(...)"
            )


def _delete(leaves: Any) -> None:
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


def _places(
    matched: Match, forms: Mapping[str, _Form], saved: Mapping[str, Any], empty: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the sharding of each array to read, or None to read a NumPy array."""
    places: dict[str, Any] = {}
    for sources in (matched.sources, matched.lost_parts):
        for name, source in sources.items():
            if source not in empty:
                dtype = saved[source].dtype
                is_wide = jax.dtypes.canonicalize_dtype(dtype) != dtype  # a jax.Array would not have its 64 bits
                places[source] = None if is_wide else forms[name].sharding
    return places


def _convert(
    matched: Match,
    forms: Mapping[str, _Form],
    leaves: Mapping[str, Any],
    arrays: Mapping[str, Any],
    record: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the leaves of the new state by name."""
    new: dict[str, Any] = {}
    zeros: dict[str, int] = {}
    for name, form in forms.items():
        if name in matched.derived:
            continue
        if name not in matched.sources:
            new[name] = leaves[name]
            continue
        source = matched.sources[name]
        array = arrays[source]
        if name in matched.lost_parts:
            array = array.astype(form.dtype)
            array = array + arrays[matched.lost_parts[name]].astype(form.dtype)
        new[name] = _in_form(name, array, form, record["keys"].get(source))
        cast = f"numbers of {name.split('/')[0]} become 0 in {form.dtype}"
        zeros[cast] = zeros.get(cast, 0) + _count_new_zeros(array, new[name])
    matched.changes += [f"{count} {cast}" for cast, count in zeros.items() if count]
    for name, param in matched.derived.items():
        form = forms[name]
        start = np.array(new[param]) if form.sharding is None else jnp.copy(new[param])  # a step donates both
        new[name] = _in_form(name, start, form)
    return new


def _in_form(name: str, array: Any, form: _Form, saved_impl: str | None = None) -> Any:
    """Return an array as a new leaf."""
    if form.is_python_number:
        return form.kind(np.asarray(array)[()])
    if not form.is_key and array.dtype != form.dtype:
        wide, array = array, _cast(array, form.dtype)
        _require_finite(name, wide, array)
        _require_fitting_integers(name, wide, form.dtype)
    if not issubclass(form.kind, (jax.Array, jax.ShapeDtypeStruct)):
        return array if form.kind is np.ndarray else form.kind(np.asarray(array)[()])
    if isinstance(array, np.ndarray):  # a copy, because a step that donates its state must not delete it
        array = jnp.array(array) if form.sharding is None else jax.device_put(array, form.sharding)
    elif form.sharding is not None:
        array = jax.device_put(array, form.sharding)
    return jax.random.wrap_key_data(array, impl=saved_impl or form.impl) if form.is_key else array


def _cast(array: Any, dtype: Any) -> Any:
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _require_finite(name: str, before: Any, after: Any) -> None:
    """Raise a ValueError if a cast has made a finite number non-finite."""
    if not jnp.issubdtype(after.dtype, jnp.inexact) or jnp.finfo(after.dtype).max >= jnp.finfo(before.dtype).max:
        return
    overflows = _overflows if isinstance(before, np.ndarray) else _jitted_overflows
    if bool(overflows(before, after)):
        raise ValueError(
            f"{name!r} has numbers above {float(jnp.finfo(after.dtype).max):g}, the largest number of {after.dtype};\n"
            f"restore it as {before.dtype}, for example with float32 params under a mixed policy"
        )


def _count_new_zeros(before: Any, after: Any) -> int:
    """Return how many numbers a cast to a dtype of a smaller range turns into 0."""
    dtypes = [getattr(array, "dtype", np.dtype(bool)) for array in (before, after)]
    if not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        return 0
    if jnp.finfo(dtypes[1]).tiny <= jnp.finfo(dtypes[0]).tiny:
        return 0
    return int(_jitted_new_zeros(before, after))


@jax.jit
def _jitted_new_zeros(before: Any, after: Any) -> Any:
    return ((before != 0) & (after == 0)).sum()


def _overflows(before: Any, after: Any) -> Any:
    """Return whether a number is finite before a cast, but not after it."""
    isfinite = np.isfinite if isinstance(before, np.ndarray) else jnp.isfinite
    return (isfinite(before) & ~isfinite(after)).any()


_jitted_overflows = jax.jit(_overflows)


def _require_fitting_integers(name: str, array: Any, dtype: Any) -> None:
    """Raise a ValueError if an integer is outside a new dtype."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return
    before, after = jnp.iinfo(array.dtype), jnp.iinfo(dtype)
    least, greatest = max(before.min, after.min), min(before.max, after.max)
    if bool(((array < least) | (array > greatest)).any()):
        raise ValueError(
            f"{name!r} has integers outside {dtype}, which has {after.min} to {after.max};\n"
            f"restore it as {array.dtype}, for example into a NumPy array"
        )
