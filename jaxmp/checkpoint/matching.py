"""Find the saved array for each leaf of a new state, and note the differences that are converted."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp.base.trees import is_key
from jaxmp.checkpoint.named_leaves import (
    dtype_of,
    is_below,
    is_python_number,
    leaves_by_name,
    loss_scales,
    low_precision_paths,
)
from jaxmp.training.state import TrainState

_CONVERTIBLE = (jnp.integer, jnp.floating, jnp.complexfloating)  # kinds of dtypes with casts between their dtypes
_LIKE = "the state that you passed"
_REMEDY = "restore into the model and the optimizer that were saved"
_FIELDS = "<low_precision>"  # stands for ``low_precision`` in the names of its own fields


class Match(NamedTuple):
    """The saved array for each leaf of a new state.

    Attributes:
      sources: the name of the saved array for each leaf, by the leaf's name. Other leaves keep their values.
      changes: a text for each conversion.
    """

    sources: dict[str, str]
    changes: list[str]


def match(saved: Mapping[str, Any], record: Mapping[str, Any], like: Any, where: str) -> Match:
    """Find the saved array for each leaf of ``like``.

    A leaf and an array of the same name belong together. The levels of ``jaxmp.low_precision`` do not count in a name,
    so that an optimizer may gain or lose it. Arrays without elements are not saved.

    Args:
      saved: the shapes and dtypes of the saved arrays by name.
      record: the record of the checkpoint.
      like: the new state.
      where: the path of the checkpoint, for errors.

    Raises:
      ValueError: an array is missing on one side, or has another shape or an incompatible dtype; or the state has
        split master weights.
    """
    leaves = {name: leaf for name, leaf in leaves_by_name(like).items() if np.size(leaf)}
    before, now = record["low_precision"], low_precision_paths(like)
    saved_names = {_without_levels(name, before): name for name in saved}
    leaf_names = {_without_levels(name, now): name for name in leaves}
    _require_no_split_weights(saved, before, where)
    fresh, changes = _fresh_loss_scales(record["loss_scales"], loss_scales(like))
    optional = [*fresh, *loss_scales(like)]
    for path, part, start in _optional_parts(like, {*before, *now}):
        optional.append(path)
        was_saved, is_new = ({name for name in names if is_below(name, path)} for names in (saved_names, leaf_names))
        changes += [f"{part} {start}"] if is_new - was_saved else []
        changes += [f"{part} is dropped"] if was_saved - is_new else []
    sources: dict[str, str] = {}
    for name, leaf_name in leaf_names.items():
        is_of_new_average = "ema_params" in optional and is_below(name, "ema_params") and name not in saved_names
        source = "params" + name.removeprefix("ema_params") if is_of_new_average else name
        if source in saved_names and not _is_in(source, fresh):
            sources[leaf_name] = saved_names[source]
    not_saved = {leaf_names[name] for name in leaf_names if not _is_in(name, optional)} - sources.keys()
    not_used = {saved_names[name] for name in saved_names if not _is_in(name, optional)} - {*sources.values()}
    for name in sorted(not_saved | not_used, key=_params_first):
        leaf, has, lacks = (leaves[name], _LIKE, where) if name in not_saved else (saved[name], where, _LIKE)
        raise ValueError(f"{name!r} {_shown(leaf)} is in {has}, but not in {lacks};\n{_REMEDY}")
    return Match(sources, changes + _casts(saved, record["keys"], leaves, sources, where))


def _without_levels(name: str, paths: Iterable[str]) -> str:
    """Return a name without the levels of the states of low_precision with these paths."""
    for path in paths:
        if is_below(name, f"{path}/inner_state"):
            return path + name.removeprefix(f"{path}/inner_state")
        if is_below(name, path):
            return f"{path}/{_FIELDS}{name.removeprefix(path)}"
    return name


def _require_no_split_weights(saved: Mapping[str, Any], paths: Iterable[str], where: str) -> None:
    for name, array in saved.items():
        if _is_in(name, [f"{path}/compensation" for path in paths]) and array.dtype == jnp.int8:
            raise ValueError(
                f"{name!r} in {where} is a part of split master weights (rounding='split'), which this version of "
                "jaxmp does not have;\nrestore the checkpoint with the version that saved it"
            )


def _fresh_loss_scales(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the paths that start fresh because of another class of loss scale, and a text for each loss scale."""
    fresh: list[str] = []
    changes: list[str] = []
    for path, scale in now.items():
        saved_class, new_class = before.get(path, {}).get("class"), type(scale).__name__
        if saved_class not in (None, new_class):
            fresh += [path, path.removesuffix("loss_scale") + "consecutive_skipped"]  # it counts for a loss scale
            changes.append(f"the loss scale {saved_class} -> {new_class} starts fresh")
    return fresh, changes


def _optional_parts(like: Any, low_precision: Iterable[str]) -> Iterable[tuple[str, str, str]]:
    """Yield the path, a description and the start of the parts that only one of both states may have."""
    for path in sorted(low_precision):
        yield f"{path}/{_FIELDS}/count", "low_precision", "starts"
        yield f"{path}/{_FIELDS}/compensation", "the compensation of the params", "starts at 0"
    for path in loss_scales(like):
        yield path.removesuffix("loss_scale") + "grad_norm", "the norm of the gradients", "starts fresh"
    if isinstance(like, TrainState):
        yield "ema_params", "the moving average", "starts at the params"
        yield "rng", "the random key", "starts fresh"


def _casts(
    saved: Mapping[str, Any],
    keys: Mapping[str, str],
    leaves: Mapping[str, Any],
    sources: Mapping[str, str],
    where: str,
) -> list[str]:
    """Return a text for the arrays of each field that are cast.

    Raises:
      ValueError: an array has another shape or an incompatible dtype.
    """
    counts: collections.Counter[str] = collections.Counter()
    for name in sorted(sources, key=_params_first):
        leaf, array = leaves[name], saved[sources[name]]
        if not _is_convertible(array, leaf, is_saved_key=sources[name] in keys):
            raise ValueError(f"{name!r} is {_shown(array)} in {where}, but {_shown(leaf)} in {_LIKE};\n{_REMEDY}")
        if not is_key(leaf) and not is_python_number(leaf) and dtype_of(leaf) != array.dtype:
            counts[f"{name.split('/')[0]} {array.dtype} -> {dtype_of(leaf)}"] += 1
    return [f"{cast} ({count} arrays)" if count > 1 else cast for cast, count in sorted(counts.items())]


def _is_convertible(array: Any, leaf: Any, is_saved_key: bool) -> bool:
    """Return whether a saved array can become ``leaf``. Random keys are saved as their data."""
    if is_key(leaf):
        return is_saved_key and array.shape[:-1] == leaf.shape
    dtypes = array.dtype, dtype_of(leaf)
    is_cast = any(all(jnp.issubdtype(dtype, kind) for dtype in dtypes) for kind in _CONVERTIBLE)
    return array.shape == np.shape(leaf) and (is_cast or dtypes[0] == dtypes[1])


def _is_in(name: str, paths: Iterable[str]) -> bool:
    return any(is_below(name, path) for path in paths)


def _params_first(name: str) -> tuple[bool, str]:
    return not is_below(name, "params"), name


def _shown(leaf: Any) -> str:
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}"
