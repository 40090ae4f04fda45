"""Find the saved array for each leaf of a new state, and note the differences that are converted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.trees import is_key
from jaxmp.checkpoint.named_leaves import (
    dtype_of,
    is_below,
    is_python_number,
    key_impl,
    leaves_by_name,
    loss_scales,
    low_precision_paths,
    scaling_states,
    settings_of,
)
from jaxmp.training.state import TrainState

_CONVERTIBLE = (jnp.integer, jnp.floating, jnp.complexfloating)  # kinds of dtypes with casts between their dtypes


_LIKE = "the state that you passed"


@dataclasses.dataclass
class Match:
    """The saved array for each leaf of a new state.

    Attributes:
      sources: the name of the saved array for each leaf, by the leaf's name. Other leaves keep their values.
      lost_parts: the name of the saved rounding error of a param, by the param's name.
      derived: the name of the param at which a leaf of a new moving average starts, by the leaf's name.
      changes: a text for each conversion.
    """

    sources: dict[str, str]
    lost_parts: dict[str, str]
    derived: dict[str, str]
    changes: list[str]


def match(saved: Mapping[str, Any], record: Mapping[str, Any], like: Any, where: str) -> Match:
    """Find the saved array for each leaf of ``like``.

    Args:
      saved: the shapes and dtypes of the saved arrays by name.
      record: the record of the checkpoint.
      like: the new state.
      where: the path of the checkpoint, for errors.

    Raises:
      ValueError: an array is missing on one side, or has another shape or an incompatible dtype.
    """
    matching = _Matching(saved, record, like, where)
    matching.match_low_precision()
    matching.match_loss_scales()
    if isinstance(like, TrainState):
        matching.match_average()
        matching.match_rng()
    matching.require_complete()
    for name in sorted(matching.sources, key=_params_first):
        matching.compare(name, matching.sources[name])
    matching.note_casts()
    return Match(matching.sources, matching.lost_parts, matching.derived, matching.changes)


class _Matching:
    def __init__(self, saved: Mapping[str, Any], record: Mapping[str, Any], like: Any, where: str) -> None:
        self._saved, self._record, self._like, self._where = saved, record, like, where
        self._leaves = leaves_by_name(like)
        self.sources = {name: name for name in self._leaves if name in saved}
        self.lost_parts: dict[str, str] = {}
        self.derived: dict[str, str] = {}
        self.changes: list[str] = []
        self._may_keep_value: set[str] = set()  # leaves that need no saved array
        self._may_be_dropped: set[str] = set()  # saved arrays that need no leaf
        self._casts: dict[str, int] = {}

    def match_low_precision(self) -> None:
        """Match the optimizer's state if one side has ``jaxmp.low_precision`` around it, or another rounding.

        Raises:
          ValueError: the compensation is not Kahan's, but the int8 part of split master weights.
        """
        new_paths, old_paths = low_precision_paths(self._like), self._record["low_precision"]
        for path in old_paths:
            self._require_no_split_weights(f"{path}/compensation")
        for path in new_paths:
            if path not in old_paths:
                self._move_below(path, source=path, target=f"{path}/inner_state")
                self._keep_values_below(f"{path}/count")
                self.changes.append("the optimizer becomes low_precision")
            self._keep_values_below(f"{path}/compensation")
        for path in old_paths:
            if path not in new_paths:
                self._move_below(path, source=f"{path}/inner_state", target=path)
                self._drop_below(f"{path}/count")
                self.changes.append("the optimizer is no longer low_precision")
            self._drop_below(f"{path}/compensation")
            self._add_lost_parts(f"{path}/compensation")
            used = {*self.sources.values(), *self.lost_parts.values()}
            if any(is_below(name, f"{path}/compensation") for name in self._saved.keys() - used):
                self.changes.append("the compensation of the params is dropped")

    def _move_below(self, path: str, *, source: str, target: str) -> None:
        """Use the saved arrays below ``source`` for the leaves below ``target``, and no others below ``path``."""
        self._forget(path)
        for name in [name for name in self._leaves if is_below(name, target)]:
            self._use(name, source + name.removeprefix(target))

    def _require_no_split_weights(self, compensation: str) -> None:
        for name, array in self._saved.items():
            if is_below(name, compensation) and array.dtype == jnp.int8:
                raise ValueError(
                    f"{name!r} in {self._where} is a part of split master weights (rounding='split'), which this "
                    "version of jaxmp does not have;\nrestore the checkpoint with the version that saved it"
                )

    def _add_lost_parts(self, compensation: str) -> None:
        """Add the saved rounding errors to float32 params."""
        for name, leaf in self._leaves.items():
            lost_part = compensation + name.removeprefix("params")
            is_wide = is_below(name, "params") and not is_key(leaf) and dtype_of(leaf) == jnp.float32
            if is_wide and lost_part in self._saved:
                self.lost_parts[name] = lost_part

    def match_loss_scales(self) -> None:
        """Continue with the saved values of loss scales of the same class."""
        for path in scaling_states(self._like):
            measured = f"{path}/grad_norm".lstrip("/")
            self._keep_values_below(measured)
            self._drop_below(measured)
        for path, scale in loss_scales(self._like).items():
            before = self._record["loss_scales"].get(path)
            if before is None:
                continue
            self._keep_values_below(path)
            self._drop_below(path)
            if before["class"] == type(scale).__name__:
                self._note_settings(before["settings"], settings_of(scale))
                continue
            skips = path.removesuffix("loss_scale") + "consecutive_skipped"  # they belong to the old loss scale
            self._forget(path)
            self._forget(skips)
            self._keep_values_below(skips)
            self._drop_below(skips)
            self.changes.append(f"the loss scale {before['class']} -> {type(scale).__name__} starts fresh")

    def _note_settings(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        for name, value in now.items():
            if before.get(name, value) != value:
                self.changes.append(f"the loss scale's {name} {before[name]} -> {value}")

    def match_average(self) -> None:
        """Start a new moving average at the params, or drop the saved average."""
        average = "ema_params"
        is_new, was_saved = (any(is_below(name, average) for name in names) for names in (self._leaves, self._saved))
        if is_new and not was_saved:
            for name in [name for name in self._leaves if is_below(name, average)]:
                param = "params" + name.removeprefix(average)
                if param in self._leaves and np.shape(self._leaves[param]) == np.shape(self._leaves[name]):
                    self.derived[name] = param
            self.changes.append("the moving average starts at the params")
        if was_saved and not is_new:
            self._drop_below(average)
            self.changes.append("the moving average is dropped")

    def match_rng(self) -> None:
        """Keep a new random key, or drop the saved key."""
        is_new, was_saved = "rng" in self._leaves, "rng" in self._saved
        if is_new and not was_saved:
            self._keep_values_below("rng")
            self.changes.append("the random key starts fresh")
        if was_saved and not is_new:
            self._drop_below("rng")
            self.changes.append("the random key is dropped")

    def _use(self, name: str, source: str) -> None:
        if source in self._saved:
            self.sources[name] = source

    def _forget(self, path: str) -> None:
        self.sources = {name: source for name, source in self.sources.items() if not is_below(name, path)}

    def _keep_values_below(self, path: str) -> None:
        self._may_keep_value |= {name for name in self._leaves if is_below(name, path)}

    def _drop_below(self, path: str) -> None:
        self._may_be_dropped |= {name for name in self._saved if is_below(name, path)}

    def require_complete(self) -> None:
        """Raise a ValueError if an array is missing on one side."""
        used = {*self.sources.values(), *self.lost_parts.values()}
        not_saved = self._leaves.keys() - self.sources.keys() - self.derived.keys() - self._may_keep_value
        not_used = self._saved.keys() - used - self._may_be_dropped
        names = sorted(not_saved | not_used, key=_params_first)
        if not names:
            return
        first = names[0]
        shapes = self._leaves if first in not_saved else self._saved
        has, lacks = (_LIKE, self._where) if first in not_saved else (self._where, _LIKE)
        raise ValueError(
            f"{first!r} {_shown(shapes[first])} is in {has}, but not in {lacks};\n"
            "restore into the model and the optimizer that were saved"
        )

    def compare(self, name: str, source: str) -> None:
        """Compare the shape and the dtype of a leaf with those of its saved array."""
        leaf, saved = self._leaves[name], self._saved[source]
        saved_impl = self._record["keys"].get(source)
        shape = np.shape(leaf)
        if is_key(leaf):
            width = saved.shape[-1:] if saved_impl else jax.eval_shape(jax.random.key_data, leaf).shape[len(shape) :]
            if (*shape, *width) == saved.shape and saved.dtype == jnp.uint32:
                impl = key_impl(leaf)
                if saved_impl not in (None, impl):
                    self.changes.append(f"{name!r} stays a key of {saved_impl}, not of {impl}")
                return
        elif shape == saved.shape:
            dtype = dtype_of(leaf)
            if dtype == saved.dtype:
                return
            if any(jnp.issubdtype(dtype, kind) and jnp.issubdtype(saved.dtype, kind) for kind in _CONVERTIBLE):
                if not is_python_number(leaf):
                    cast = f"{name.split('/')[0]} {saved.dtype} -> {dtype}"
                    self._casts[cast] = self._casts.get(cast, 0) + 1
                return
        raise ValueError(
            f"{name!r} is {_shown(saved)} in {self._where}, but {_shown(leaf)} in {_LIKE};\n"
            "restore into the model and the optimizer that were saved"
        )

    def note_casts(self) -> None:
        """Note the casts, together for the arrays of a field that share their dtypes."""
        for cast, count in sorted(self._casts.items()):
            self.changes.append(f"{cast} ({count} arrays)" if count > 1 else cast)


def _params_first(name: str) -> tuple[bool, str]:
    return not is_below(name, "params"), name


def _shown(leaf: Any) -> str:
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}"
