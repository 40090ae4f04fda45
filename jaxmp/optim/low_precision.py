"""Train with bfloat16 params, and store moments in 16 or 8 bits.

A bfloat16 param has 8 significant bits. Rounding to nearest loses every update below half a unit in the last place.
Stochastic rounding goes up or down at random, so that the average is the exact update (Gupta et al. 2015,
arXiv:1502.02551; for bfloat16 language models, Ozkara et al. 2025, arXiv:2502.20566). Kahan's compensation stores the
rounding error in another 16 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey, KeyPath
from jax.typing import DTypeLike

from jaxmp._internals.jax.traces import manual_axes, shows_what_varies
from jaxmp.base.arguments import require_whole_number
from jaxmp.base.dtypes import closest_names, dtype_among
from jaxmp.base.trees import is_float_array, path_name, require_no_raw_bytes, widen
from jaxmp.base.user_warnings import warn_user
from jaxmp.optim.checked_params import are_params_checked
from jaxmp.optim.checks import as_optimizer
from jaxmp.optim.stochastic_rounding import Draw, stochastic_bfloat16
from jaxmp.optim.stored_moments import (
    MomentFormat,
    as_float8_blocks,
    decoded,
    in_bfloat16,
    is_blocks,
    leaves_of_state,
    paths_of_moments,
    readable_with_scales,
)

Rounding = Literal["stochastic", "kahan"]
Moments = Literal["float32", "bfloat16", "float8"] | DTypeLike
_ROUNDINGS = ("stochastic", "kahan")
_MOMENTS = ("float32", "bfloat16", "float8")


class LowPrecisionState(NamedTuple):
    """State of :func:`low_precision`.

    Attributes:
      count: the number of updates so far, an int32 scalar. The random bits of an update depend on the count.
      inner_state: the state of the wrapped optimizer, with the moments in their storage format.
      compensation: with ``"kahan"``, the rounding error of each bfloat16 param, in bfloat16, and None for other params.
        With ``"stochastic"``, ``compensation`` is None.
      moments: the storage format of the moments.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in the states of optax
    inner_state: Any
    compensation: Any
    moments: MomentFormat


def low_precision(
    inner: optax.GradientTransformation,
    *,
    rounding: Rounding | None = None,
    moments: Moments = "float32",
    seed: int = 0,
    block: int = 256,
    axis_name: Hashable | Sequence[Hashable] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Train bfloat16 params without a float32 copy, and store moments in fewer bits.

    ``inner`` gets float32 params, gradients and state, so any optax optimizer works. The new param is rounded to
    bfloat16, and the update is the float32 difference between the new and the old param. So ``optax.apply_updates``
    gives exactly the rounded param. float32 params are not rounded, so norms and biases may stay float32. If no param
    is bfloat16, ``init`` warns, unless you left out ``rounding`` and store the moments in fewer bits.

    The only transform that you may put around ``low_precision`` is :func:`jaxmp.loss_scaling`. The random bits of
    stochastic rounding are a hash of the seed, the count of updates, the param's path and the position in the array. So
    no PRNG key is needed, and the bits are the same on any number of devices and after a resume. Inside of
    ``shard_map``, the position in the whole array is unknown: there, each device draws other bits for its part, and
    ``axis_name`` must say which mesh axes split the params.

    Moments are recognised by the types of optax's states, and the dtypes in the state show how each moment is stored.
    With ``moments="bfloat16"`` or ``"float8"``, moments are rounded stochastically. (With rounding to nearest, a second
    moment with a decay of 0.999 would never fall.) ``"float8"`` stores float8_e4m3fn numbers with one float32 scale
    for each block of ``block`` values. It stores the square roots of second moments. If the block size does not divide
    a moment's last axis, the moment stays float32.

    Args:
      inner: any optax transform.
      rounding: the rounding of bfloat16 params: ``"stochastic"``; or ``"kahan"``, which rounds to nearest and stores
        the rounding error in 16 more bits per param. None means ``"stochastic"``.
      moments: the format in which moments are stored between steps: ``"float32"``, ``"bfloat16"`` or ``"float8"``. An
        alias (``"bf16"``) or a dtype will do, too.
      seed: the seed of stochastic rounding.
      block: the number of values along the last axis that share one scale in ``"float8"``.
      axis_name: the mesh axes over which a ``shard_map`` around ``update`` splits the params, and ``()`` if all devices
        hold the same params. Params that do not vary over these axes get the same bits on all devices.

    Raises:
      TypeError: ``inner`` is not an optimizer.
      ValueError: another argument has a value that is not allowed; ``init`` got float16 or float8 params; ``moments``
        is set for an optimizer without moments; ``update`` got no params, params in other dtypes than those of
        ``init``, or the state of another optimizer; or ``update`` is called inside of ``shard_map``, and it is unknown
        which params are split.

    >>> tx = low_precision(optax.sgd(1e-3), seed=1)
    >>> weights = {"w": jnp.ones(10_000, jnp.bfloat16)}
    >>> updates, _ = tx.update({"w": jnp.ones(10_000)}, tx.init(weights), weights)
    >>> new = (weights["w"].astype("float32") + updates["w"]).astype("bfloat16")  # as optax.apply_updates does
    >>> new.dtype, round(float(1 - new.astype("float32").mean()), 4)  # rounding to nearest would give 0
    (dtype(bfloat16), 0.001)
    """
    if rounding not in (None, *_ROUNDINGS):
        raise ValueError(
            f"rounding must be one of {', '.join(map(repr, _ROUNDINGS))}, got {rounding!r}; nearest: "
            f"{closest_names(str(rounding), _ROUNDINGS)}"
        )
    moments = dtype_among("moments", moments, _MOMENTS)
    require_whole_number("block", block)
    require_whole_number("seed", seed, least=0)
    transform = _LowPrecisionTransform(as_optimizer(inner), rounding, moments, seed, block, _as_axes(axis_name))
    tx = LowPrecision(transform.init, transform.update)
    tx.transform = transform
    return tx


class LowPrecision(optax.GradientTransformationExtraArgs):
    """The transform of :func:`low_precision`."""

    transform: _LowPrecisionTransform


@dataclasses.dataclass(frozen=True)
class _LowPrecisionTransform:
    """The arguments and the methods of the transform :func:`low_precision`."""

    inner: optax.GradientTransformationExtraArgs
    rounding: Rounding | None
    moments: str
    seed: int
    block: int
    axes: tuple[Hashable, ...] | None

    def init(self, weights: optax.Params) -> LowPrecisionState:
        require_no_raw_bytes(weights)
        _require_dtypes(weights)
        state = self.inner.init(widen(weights))
        if rounds_params(state):
            raise ValueError(BEHIND_LOW_PRECISION)
        if jax.tree.leaves(weights):  # optax.tree_map_params calls init with a placeholder, which has no params
            self.warn_if_nothing_is_rounded(weights)
            self._require_moments(state)
        return self.wrap(state, weights)

    def _require_moments(self, state: Any) -> None:
        """Raise a ValueError if ``moments`` has no effect on the state of ``inner``."""
        if self.moments != "float32" and not any(leaf.is_moment for leaf in leaves_of_state(state)):
            raise ValueError(
                f"moments={self.moments!r} needs an optimizer with known moments, such as optax.adam, and found none; "
                "leave moments out"
            )

    def warn_if_nothing_is_rounded(self, weights: Any) -> None:
        """Warn if no param is bfloat16, but the user chose a rounding, or no moment is stored in fewer bits."""
        if are_params_checked() or any(_is_bfloat16(leaf) for leaf in jax.tree.leaves(weights)):
            return
        if self.rounding is not None or self.moments == "float32":
            warn_user(
                "low_precision rounds bfloat16 params, but no param is bfloat16; use a policy with bfloat16 params, "
                "such as 'bfloat16_sr', or leave rounding= out and store the moments with moments='bfloat16'"
            )

    @property
    def _is_compensated(self) -> bool:
        """Return whether bfloat16 params have a compensation."""
        return self.rounding == "kahan"

    def wrap(
        self, inner_state: Any, weights: optax.Params, before: LowPrecisionState | None = None
    ) -> LowPrecisionState:
        """Wrap the state of the inner optimizer in a state of ``low_precision``.

        If ``before`` is not None, its count and compensation are kept.
        """
        count = jnp.zeros((), jnp.int32) if before is None else before.count
        compensation = None
        if self._is_compensated:
            stored = [] if before is None or before.compensation is None else [before.compensation]

            def lost(weight: Any, old: Any = None) -> Any:
                if not _is_bfloat16(weight):
                    return None
                return jnp.zeros_like(weight) if old is None else old

            compensation = jax.tree.map(lost, weights, *stored)
        encoded = self._encoded(inner_state, inner_state, count)
        return LowPrecisionState(count, encoded, compensation, MomentFormat(self.moments))

    def update(
        self, updates: optax.Updates, state: LowPrecisionState, weights: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, LowPrecisionState]:
        self._check_arguments(state, weights)
        grads, wide = widen(updates), widen(weights)
        stored, scales = state.inner_state, None
        if self.moments == "float8":
            # A float8 code depends on the scale of its whole block. Storing the new float32 moments until the scales
            # are known would cost 8 bytes per param. So the moments are computed twice: first for the scales, then for
            # the codes. The barrier in readable_with_scales keeps XLA from merging the two computations.
            _, new_state = self.inner.update(grads, decoded(stored), wide, **extra_args)
            stored, scales = readable_with_scales(stored, new_state, self.block)
        changes, inner_state = self.inner.update(grads, decoded(stored), wide, **extra_args)
        new_updates, compensation = self._rounded_updates(changes, state, weights)
        count = optax.safe_int32_increment(state.count)
        inner_state = self._encoded(inner_state, state.inner_state, count, scales)
        return new_updates, LowPrecisionState(count, inner_state, compensation, state.moments)

    def _check_arguments(self, state: Any, weights: Any) -> None:
        if weights is None:
            raise ValueError("low_precision rounds params, got none; write tx.update(grads, opt_state, params)")
        _require_dtypes(weights)
        compensated = None
        if self._is_compensated:
            compensated = jax.tree.map(lambda leaf: leaf if _is_bfloat16(leaf) else None, weights)
        is_own = isinstance(state, LowPrecisionState) and state.moments.name == self.moments
        structure: Any = jax.tree.structure(compensated)
        if is_own and jax.tree.structure(state.compensation) == structure:
            return
        raise ValueError(
            f"low_precision(…, rounding={self.rounding or 'stochastic'!r}, moments={self.moments!r}) needs the state "
            "of its own init, and params in the dtypes of init; for a train state use state.with_tx(tx)"
        )

    def _rounded_updates(self, changes: Any, state: LowPrecisionState, weights: Any) -> tuple[Any, Any]:
        """Return the updates to the rounded new params, and the compensation."""

        def rounded(path: Any, weight: Any, change: Any, lost: Any = None) -> Any:
            if not _is_bfloat16(weight):
                return change, None
            draw = None if self._is_compensated else self._draw(weight, state.count, f"params/{path_name(path)}")
            update, remainder = _rounded_update(weight, change, lost, draw)
            return update, None if lost is None else remainder

        lost = [state.compensation] if self._is_compensated else []
        pairs = jax.tree.map_with_path(rounded, weights, changes, *lost)
        new_updates = jax.tree.map(lambda _, pair: pair[0], weights, pairs)
        compensation = jax.tree.map(lambda _, pair: pair[1], weights, pairs)
        return new_updates, compensation if self._is_compensated else None

    def _encoded(self, state: Any, old: Any, count: jax.Array, scales: list[Any] | None = None) -> Any:
        """Return the optimizer's state in the storage format of ``old``.

        Args:
          state: the state in float32.
          old: the stored state before this update.
          count: the number of updates so far.
          scales: a list with the scales of each leaf's blocks, or None for a leaf without blocks. If ``scales`` is
            None, the scales are computed here.
        """
        leaves, structure = jax.tree.flatten(state)
        old_leaves = jax.tree.leaves(old, is_leaf=is_blocks)
        scales = scales or [None] * len(leaves)
        encoded = []
        for leaf, old_leaf, (path, is_moment, is_second), scale in zip(
            leaves, old_leaves, leaves_of_state(state), scales, strict=True
        ):
            if not is_moment or self.moments == "float32":
                encoded.append(in_dtype_of(leaf, old_leaf))  # the update computed it in float32
            elif not leaf.size:
                encoded.append(leaf)
            elif self.moments == "bfloat16":
                encoded.append(in_bfloat16(leaf, self._draw(leaf, count, path)))
            else:
                draw = self._draw(leaf, count, path)
                encoded.append(as_float8_blocks(leaf, is_second, self.block, draw, scale))
        return jax.tree.unflatten(structure, encoded)

    def _draw(self, array: Any, count: jax.Array, name: str) -> Draw:
        """Return the random bits of an array.

        Raises:
          ValueError: the code runs in a ``shard_map``, and it is unknown whether the array is split.
        """
        varying = manual_axes(array)
        if varying and self.axes is None:
            raise ValueError(
                f"inside of shard_map, low_precision must know whether the axes {varying} split {name!r}; write "
                f"low_precision(…, axis_name={varying}), or axis_name=() if all devices hold the same values"
            )
        split = tuple(axis for axis in varying if axis in (self.axes or ()))
        if split and not shows_what_varies():
            raise ValueError(
                f"low_precision(…, axis_name={self.axes}) must know which params vary, but shard_map(…, "
                "check_vma=False) and pmap hide it; write shard_map(…, check_vma=True)"
            )
        return Draw(self.seed, count, name, jax.lax.axis_index(split) if split else None)


BEHIND_LOW_PRECISION = (
    "low_precision must be directly inside loss_scaling, because any other transform around it changes its updates or "
    "passes it float32 params; write jaxmp.loss_scaling(jaxmp.low_precision(optax.chain(…)), loss_scale)"
)


def rounds_params(opt_state: Any) -> bool:
    """Return whether an optimizer's state has a :class:`LowPrecisionState` in it."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, LowPrecisionState))
    return any(isinstance(node, LowPrecisionState) for node in nodes)


def paths_in_bfloat16(state: LowPrecisionState) -> set[KeyPath]:
    """Return the paths of the moments and compensations that a state stores in bfloat16.

    A leaf that was cast to bfloat16 outside of the optimizer is not among them.
    """
    paths = []
    if state.moments.name == "bfloat16":
        paths += [(GetAttrKey("inner_state"), *path) for path in paths_of_moments(state.inner_state)]
    compensations = jax.tree.leaves_with_path(state.compensation)
    paths += [(GetAttrKey("compensation"), *path) for path, _ in compensations]
    return set(paths)


def with_compensation(weights: Any, opt_state: Any) -> Any:
    """Add the compensation to the params that were cast to float32."""
    if not isinstance(opt_state, LowPrecisionState) or opt_state.compensation is None:
        return weights

    def whole(leaf: Any, lost: Any) -> Any:
        return leaf if lost is None or leaf.dtype != jnp.float32 else leaf + lost.astype(jnp.float32)

    return jax.tree.map(whole, weights, opt_state.compensation)


def _rounded_update(weight: Any, change: Any, lost: Any, draw: Draw | None) -> tuple[Any, Any]:
    """Return the update that gives the rounded weight, and the compensation.

    Args:
      weight: the bfloat16 param.
      change: the optimizer's update.
      lost: the compensation of the param, or None.
      draw: the random bits of stochastic rounding; None to round to nearest.
    """
    old, change = weight.astype(jnp.float32), change.astype(jnp.float32)
    wanted = change if lost is None else change + lost.astype(jnp.float32)
    exact = old + wanted
    rounded = exact.astype(jnp.bfloat16) if draw is None else stochastic_bfloat16(exact, draw.bits(weight.shape)[0])
    new = rounded.astype(jnp.float32)
    update = jnp.where(new == old, jnp.float32(-0.0), jnp.where(jnp.isfinite(exact), new - old, change))
    return update, ((old - new) + wanted).astype(jnp.bfloat16)  # `exact` is rounded to float32, so this is nearer


def _as_axes(axis_name: Hashable | Sequence[Hashable] | None) -> tuple[Hashable, ...] | None:
    """Return the names of axes as a tuple, or None."""
    if axis_name is None:
        return None
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def in_dtype_of(leaf: Any, other: Any) -> Any:
    """Return ``leaf`` in the dtype of ``other``."""
    return leaf if jnp.result_type(leaf) == jnp.result_type(other) else leaf.astype(other.dtype)


def _is_bfloat16(leaf: Any) -> bool:
    return bool(leaf.dtype == jnp.bfloat16)


def _require_dtypes(weights: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(weights):
        if is_float_array(leaf) and leaf.dtype.itemsize < 4 and not _is_bfloat16(leaf):
            raise ValueError(
                f"low_precision takes bfloat16 and float32 params, got {path_name(path)!r} of {leaf.dtype}, which "
                "loses small weights; make the params bfloat16"
            )
