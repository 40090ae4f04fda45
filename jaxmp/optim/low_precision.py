"""Training without float32 params: bfloat16 ones that learn, and moments in 16 or 8 bits.

A bfloat16 param has 8 significant bits, so an update below half of the last one is lost when the sum is rounded to
nearest, step after step. Rounding up or down at random, in proportion, keeps it on average (Gupta et al. 2015,
arXiv:1502.02551; of bfloat16 language models Ozkara et al. 2025, arXiv:2502.20566); Kahan's compensation keeps it in
another 16 bits. Moments in 8 bits with a scale for each block: Dettmers et al. 2022, arXiv:2110.02861.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxmp.base.dtypes import nearest
from jaxmp.base.trees import is_float_array, path_name, widen
from jaxmp.optim.checks import as_optimizer
from jaxmp.optim.stochastic_rounding import LARGEST, SMALLEST, Draw, stochastic_bfloat16, stochastic_float8

Rounding = Literal["stochastic", "kahan", "nearest"]
Moments = Literal["float32", "bfloat16", "float8"]
_ROUNDINGS = ("stochastic", "kahan", "nearest")
_MOMENTS = ("float32", "bfloat16", "float8")

# Which fields of optax's states are moments. A largest second moment (AMSGrad's) is none: rounding at random raises it.
# Nor are those of a centred RMSProp, whose variance nu - mu² rounding would make negative, and its root NaN.
_SIGNED: dict[type, tuple[str, ...]] = {
    optax.ScaleByAdamState: ("mu",),
    optax.ScaleByAmsgradState: ("mu",),
    optax.ScaleByAdanState: ("m", "v"),
    optax.ScaleByBeliefState: ("mu",),
    optax.ScaleByLionState: ("mu",),
    optax.TraceState: ("trace",),
    optax.EmaState: ("ema",),
}
_SECOND: dict[type, tuple[str, ...]] = {
    optax.ScaleByAdamState: ("nu",),
    optax.ScaleByAmsgradState: ("nu",),
    optax.ScaleByAdanState: ("n",),
    optax.ScaleByBeliefState: ("nu",),
    optax.ScaleByRmsState: ("nu",),
    type(jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, {})): ("nu",),
    optax.ScaleByAdaDeltaState: ("e_g", "e_x"),
    optax.ScaleByRssState: ("sum_of_squares",),
}


class LowPrecisionState(NamedTuple):
    """State of :func:`low_precision`.

    Attributes:
      count: int32 scalar, the updates so far; with the seed it decides how the next one is rounded.
      inner_state: the state of the wrapped optimizer, its moments as they are stored.
      compensation: what rounding took from each bfloat16 param, bfloat16, None for others; None but for ``"kahan"``.
    """

    count: jax.Array  # type: ignore[assignment]  # as optax's states, which hide tuple's method too
    inner_state: Any
    compensation: Any


@flax.struct.dataclass
class Float8Blocks:
    """An array in 8 bits: a code for each number, and a scale for each block along the last axis.

    Attributes:
      codes: float8_e4m3fn, of the array's shape.
      scales: float32, the power of two above the largest size in each block; of the array's shape with the last axis
        divided by the block.
      squared: whether the codes are those of its root, as of second moments.
    """

    codes: jax.Array
    scales: jax.Array
    squared: bool = flax.struct.field(pytree_node=False, default=False)

    def decoded(self) -> jax.Array:
        """The array, float32. Of a positive second moment never 0, for an optimizer divides by its root."""
        shares = self.codes.astype(jnp.float32) / LARGEST
        scales = _spread(self.scales, shares)
        if not self.squared:
            return shares * scales
        tiny = jnp.float32(np.finfo(np.float32).tiny)
        return jnp.where(self.codes == 0, jnp.float32(0), jnp.maximum(shares * shares * scales, tiny))


def low_precision(
    inner: optax.GradientTransformation,
    *,
    rounding: Rounding = "stochastic",
    moments: Moments = "float32",
    seed: int = 0,
    block: int = 256,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that bfloat16 params learn without a float32 copy, and moments take fewer bits.

    ``inner`` sees float32 params, gradients and state, so that any optax optimizer works and weight decay is exact.
    What comes out is the float32 update that lands on the rounded param: ``optax.apply_updates`` gives that param, bit
    for bit (the error is at most 2^-24 of the old one where the new one is less than 2^-16 of it). Each param is
    treated by its own dtype: bfloat16 ones are rounded, float32 ones are left alone, so that norms and biases may stay
    in float32. Where a param does not change the update is -0.0.

    Put it outermost but for :func:`jaxmp.loss_scaling`: ``loss_scaling(low_precision(optax.adamw(1e-3)), …)``. A
    skipped step then advances nothing. Stochastic rounding draws its bits from a hash of the seed, the count of
    updates, the param's path and the position in the array: no key to thread, the same bits on any number of devices
    (under jit, not in ``shard_map``), after a resume, and for each member of a ``vmap``. Infinities and NaN stay what
    they are.

    Moments are known by optax's own types of state; ``print(tx)`` says how each is stored. ``"bfloat16"`` and
    ``"float8"`` round them stochastically: rounded to nearest, a second moment with a decay of 0.999 never falls.
    ``"float8"`` stores e4m3 codes with a float32 scale for each block, of second moments those of the root, and leaves
    in float32 what the block does not divide.

    Args:
      inner: any optax transform.
      rounding: how bfloat16 params are rounded: ``"stochastic"``; ``"kahan"``, with 16 bits more a param for what was
        lost; ``"nearest"``, which loses updates below half a unit in the last place.
      moments: how moments are stored between steps.
      seed: of the rounding.
      block: numbers along the last axis that share a scale.

    Raises:
      TypeError: ``inner`` is no optimizer.
      ValueError: another argument is none of those; ``init`` got float16 or float8 params, or moments were asked for of
        an optimizer that has none; ``update`` got no params, or the state of another optimizer.

    >>> tx = low_precision(optax.sgd(1e-3), seed=1)
    >>> weights = {"w": jnp.ones(10_000, jnp.bfloat16)}
    >>> updates, _ = tx.update({"w": jnp.ones(10_000)}, tx.init(weights), weights)
    >>> new = (weights["w"].astype("float32") + updates["w"]).astype("bfloat16")  # as optax.apply_updates does
    >>> new.dtype, round(float(1 - new.astype("float32").mean()), 4)  # to nearest it would be 0
    (dtype(bfloat16), 0.001)
    """
    for name, choice, known in (("rounding", rounding, _ROUNDINGS), ("moments", moments, _MOMENTS)):
        if choice not in known:
            raise ValueError(
                f"{name} must be one of {', '.join(map(repr, known))}, got {choice!r}; nearest: "
                f"{nearest(str(choice), known)}"
            )
    for name, number, least, usual in (("block", block, 1, 256), ("seed", seed, 0, 0)):
        if not _is_whole(number) or number < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {number!r}; {usual} is the usual")
    inner = as_optimizer(inner)

    def init(weights: optax.Params) -> LowPrecisionState:
        _require_dtypes(weights)
        state = inner.init(widen(weights))
        if rounds_params(state):
            raise ValueError(BEHIND_LOW_PRECISION)
        if moments != "float32" and not any(kind for _, kind in _kinds(state)):
            raise ValueError(
                f"moments={moments!r} stores an optimizer's moments in fewer bits, but the state of this one has none "
                f"that is known ({_names_of(state)}); leave moments out"
            )
        return wrap(state, weights)

    def wrap(inner_state: Any, weights: optax.Params, before: LowPrecisionState | None = None) -> LowPrecisionState:
        """A state around the optimizer's, that goes on from ``before``, whatever that kept."""
        count = jnp.zeros((), jnp.int32) if before is None else before.count
        compensation = None
        if rounding == "kahan":
            compensation = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if _is_rounded(leaf) else None, weights)
            if before is not None and before.compensation is not None:
                kept = lambda _, new, old: new if new is None or old is None else old  # noqa: E731
                compensation = jax.tree.map(kept, weights, compensation, before.compensation)
        return LowPrecisionState(count, encode(inner_state, inner_state, count), compensation)

    def encode(state: Any, old: Any, count: jax.Array, scales: Any = None) -> Any:
        """The optimizer's state, stored as the ``old`` one is; ``scales`` are those of its leaves, where known."""
        leaves, structure = jax.tree.flatten(state)
        each = zip(
            leaves, jax.tree.leaves(old, is_leaf=_is_blocks), _kinds(state), scales or [None] * len(leaves), strict=True
        )
        stored = [
            _stored(leaf, kind, moments, block, Draw(seed, count, name), known)
            if kind and moments != "float32"
            else in_dtype_of(leaf, old)  # which the optimizer saw in float32
            for leaf, old, (name, kind), known in each
        ]
        return jax.tree.unflatten(structure, stored)

    def update(
        updates: optax.Updates, state: LowPrecisionState, weights: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, LowPrecisionState]:
        if weights is None:
            raise ValueError("low_precision rounds params, got none; write tx.update(grads, opt_state, params)")
        if not isinstance(state, LowPrecisionState) or (state.compensation is None) != (rounding != "kahan"):
            raise ValueError(
                f"low_precision(…, rounding={rounding!r}) needs the state that its own init made, got one of another "
                f"optimizer ({type(state).__name__}); of a train state take state.with_tx(tx)"
            )
        _require_dtypes(weights)
        grads, wide = widen(updates), widen(weights)
        stored, scales = state.inner_state, None
        if moments == "float8":
            # Codes wait for their block's scale. New moments in float32 that wait are 8 bytes a param, written
            # once and read twice. Computed twice, from codes between which XLA sees no link, they never exist.
            _, once = inner.update(grads, decoded(stored), wide, **extra_args)
            stored, scales = _held(stored, once, block)
        changes, inner_state = inner.update(grads, decoded(stored), wide, **extra_args)
        landing = functools.partial(_landing, rounding, seed, state.count)
        lost = [state.compensation] if rounding == "kahan" else []
        both = jax.tree.map_with_path(landing, weights, changes, *lost)
        new_updates, compensation = (jax.tree.map(lambda _, pair, n=n: pair[n], weights, both) for n in (0, 1))
        count = optax.safe_int32_increment(state.count)
        inner_state = encode(inner_state, state.inner_state, count, scales)
        return new_updates, LowPrecisionState(count, inner_state, compensation if lost else None)

    tx = LowPrecision(init, update)
    tx.wrap, tx.shown = wrap, functools.partial(_shown, inner, rounding, moments, seed, block)
    return tx


class LowPrecision(optax.GradientTransformationExtraArgs):
    """The transform of :func:`low_precision`. It takes params in their own dtypes; ``str()`` says how all is stored."""

    wrap: Callable[..., LowPrecisionState]
    shown: Callable[[], str]

    def __str__(self) -> str:
        return self.shown()


BEHIND_LOW_PRECISION = (
    "low_precision rounds params, so nothing but loss_scaling may stand around it: what does changes its updates, or "
    "hands it params in float32; put it outside: jaxmp.loss_scaling(jaxmp.low_precision(optax.chain(…)), loss_scale)"
)


def rounds_params(opt_state: Any) -> bool:
    """Return whether an optimizer's state has one of :func:`jaxmp.low_precision` in it."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, LowPrecisionState))
    return any(isinstance(node, LowPrecisionState) for node in nodes)


def with_compensation(weights: Any, opt_state: Any) -> Any:
    """Return params with their compensation added where they are float32 now."""
    if not isinstance(opt_state, LowPrecisionState) or opt_state.compensation is None:
        return weights

    def whole(leaf: Any, lost: Any) -> Any:
        return leaf if lost is None or leaf.dtype != jnp.float32 else leaf + lost.astype(jnp.float32)

    return jax.tree.map(whole, weights, opt_state.compensation)


def _landing(rounding: str, seed: int, count: jax.Array, path: Any, weight: Any, change: Any, lost: Any = None) -> Any:
    """The update that brings a weight to its rounded sum, and what rounding takes from the sum."""
    if not _is_rounded(weight):
        return change, None
    old, change = weight.astype(jnp.float32), change.astype(jnp.float32)
    wanted = change if lost is None else change + lost.astype(jnp.float32)
    exact = old + wanted
    if rounding == "stochastic":
        new = stochastic_bfloat16(exact, Draw(seed, count, f"params/{path_name(path)}").bits(weight.shape)[0])
    else:
        new = exact.astype(jnp.bfloat16)
    new = new.astype(jnp.float32)
    update = jnp.where(new == old, jnp.float32(-0.0), jnp.where(jnp.isfinite(exact), new - old, change))
    return update, ((old - new) + wanted).astype(jnp.bfloat16) if rounding == "kahan" else None


def _stored(leaf: Any, kind: str, moments: str, block: int, draw: Draw, scales: Any = None) -> Any:
    """A moment as it is stored."""
    if not leaf.size:
        return leaf
    if moments == "bfloat16":
        new = stochastic_bfloat16(leaf, draw.bits(leaf.shape)[1])
        smallest = jnp.asarray(jnp.finfo(jnp.bfloat16).tiny, jnp.bfloat16)
        return jnp.where((leaf > 0) & (new == 0), smallest, new) if kind == "second" else new
    if leaf.ndim == 0 or leaf.shape[-1] % block:
        return leaf
    squared = kind == "second"
    values = jnp.sqrt(leaf) if squared else leaf
    scales = _scales(leaf, block) if scales is None else scales
    spread = _spread(scales, values)
    spread = (jnp.sqrt(spread) if squared else spread) / LARGEST
    scaled = jnp.where(spread > 0, values / spread, values)
    codes = stochastic_float8(scaled, draw.bits(leaf.shape)[1])
    if squared:
        codes = jnp.where((values > 0) & (codes == 0), jnp.float32(SMALLEST), codes)
    return Float8Blocks(codes.astype(jnp.float8_e4m3fn), scales, squared)


def _scales(leaf: jax.Array, block: int) -> jax.Array:
    """The power of two above the largest size of a number in each block; beside an infinity or a NaN, that.

    So it is the same on any number of devices: XLA may round a product and a sum once or twice, and does not do so
    alike in programs for one device and for several, which moves the largest size in its last bit.
    """
    largest = jnp.max(jnp.abs(_split(leaf, block)), axis=-1)
    exponents = jax.lax.bitcast_convert_type(largest, jnp.uint32) & jnp.uint32(0x7F800000)
    above = jnp.minimum(2 * jax.lax.bitcast_convert_type(exponents, jnp.float32), jnp.finfo(jnp.float32).max)
    return jnp.where(jnp.isfinite(largest), above, largest)


def _held(stored: Any, new: Any, block: int) -> tuple[Any, list[Any]]:
    """A stored state as it can be read once the scales of the new one are known, and those of each leaf."""
    old, structure = jax.tree.flatten(stored, is_leaf=_is_blocks)
    pairs = [
        jax.lax.optimization_barrier((leaf, _scales(moment, block))) if _is_blocks(leaf) else (leaf, None)
        for leaf, moment in zip(old, jax.tree.leaves(new), strict=True)
    ]
    return jax.tree.unflatten(structure, [leaf for leaf, _ in pairs]), [scales for _, scales in pairs]


def _spread(scales: jax.Array, like: jax.Array) -> jax.Array:
    """The scale of each number of an array, from those of its blocks."""
    block = like.shape[-1] // scales.shape[-1]
    return _merged(jnp.broadcast_to(scales[..., None], (*scales.shape, block)), like)


def _split(array: jax.Array, block: int) -> jax.Array:
    """``array`` with its last axis in blocks; on a mesh of explicit axes they are split over it as the axis was."""
    sizes = (*array.shape[:-1], array.shape[-1] // block, block)
    place = _place_in_blocks(array, sizes[-2])
    if place is None:
        return jax.lax.reshape(array, sizes)
    array = jax.sharding.reshard(array, place)
    return jax.lax.reshape(array, sizes, out_sharding=place.update(spec=PartitionSpec(*place.spec, None)))


def _merged(blocks: jax.Array, like: jax.Array) -> jax.Array:
    """The array of the shape and place of ``like`` of which these are the blocks."""
    place = _place_in_blocks(like, blocks.shape[-2])
    if place is None:
        return jax.lax.reshape(blocks, like.shape)
    return jax.sharding.reshard(jax.lax.reshape(blocks, like.shape, out_sharding=place), jax.typeof(like).sharding)


def _place_in_blocks(array: jax.Array, blocks: int) -> Any:
    """Where an array whose type says where it lies has only whole blocks on each device; None if it says nothing."""
    place = jax.typeof(array).sharding
    if not any(place.spec):
        return None
    spec: list[Any] = [*place.spec, *[None] * (array.ndim - len(place.spec))]
    *rest, last = spec
    names: tuple[str, ...] = (last,) if isinstance(last, str) else last or ()
    devices = math.prod(place.mesh.shape[name] for name in names)
    return place.update(spec=PartitionSpec(*rest, None if blocks % devices else last))


def decoded(state: Any) -> Any:
    """An optimizer's state in float32."""
    blocks = jax.tree.map(lambda leaf: leaf.decoded() if _is_blocks(leaf) else leaf, state, is_leaf=_is_blocks)
    return widen(blocks)


def _kinds(state: Any) -> list[tuple[str, str | None]]:
    """For each leaf of an optimizer's state its path, and ``"signed"`` or ``"second"`` if it is a moment."""

    def is_known(node: Any) -> bool:
        return type(node) in _SIGNED or type(node) in _SECOND

    found: list[tuple[str, str | None]] = []
    for path, node in jax.tree.leaves_with_path(state, is_leaf=is_known):
        for rest, leaf in jax.tree.leaves_with_path(node):
            kind = None
            if is_known(node) and leaf.dtype == jnp.float32:  # others are kept as the optimizer was told to
                field = path_name(rest[:1])
                kind = "signed" if field in _SIGNED.get(type(node), ()) else None
                kind = "second" if field in _SECOND.get(type(node), ()) else kind
            found.append((path_name((*path, *rest)), kind))
    return found


def _names_of(state: Any) -> str:
    """The types of an optimizer's states."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: hasattr(node, "_fields") and node is not state)
    return ", ".join(dict.fromkeys(type(node).__name__ for node in [state, *nodes] if hasattr(node, "_fields")))


def _shown(inner: Any, rounding: str, moments: str, seed: int, block: int) -> str:
    how = {"stochastic": f"rounded stochastically (seed {seed})", "kahan": "with Kahan's compensation in bfloat16"}
    lines = [f"bfloat16 params {how.get(rounding, 'rounded to nearest')}, others as they are"]
    stored = {"float32": "float32", "bfloat16": "bfloat16, rounded stochastically"}
    code = f"float8_e4m3fn, rounded stochastically, a scale for {block}; float32 where the last axis is no multiple"
    try:
        example = jax.eval_shape(inner.init, {"w": jax.ShapeDtypeStruct((block, block), jnp.float32)})
    except Exception:  # a mask or labels of other params
        return "\n".join([*lines, f"moments: {stored.get(moments, code)}; their names depend on the params"])
    for name, kind in _kinds(example):
        root = "root in " if kind == "second" and moments == "float8" else ""
        lines.append(f"{name}: {root}{stored.get(moments, code) if kind else 'as it is'}")
    return "\n".join(lines)


def _is_whole(number: Any) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def in_dtype_of(leaf: Any, other: Any) -> Any:
    """``leaf`` in the dtype of the other."""
    return leaf if jnp.result_type(leaf) == jnp.result_type(other) else leaf.astype(other.dtype)


def _is_rounded(leaf: Any) -> bool:
    return bool(leaf.dtype == jnp.bfloat16)


def _is_blocks(leaf: Any) -> bool:
    return isinstance(leaf, Float8Blocks)


def _require_dtypes(weights: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(weights):
        if is_float_array(leaf) and leaf.dtype.itemsize < 4 and not _is_rounded(leaf):
            raise ValueError(
                f"low_precision rounds bfloat16 params and leaves float32 ones alone, got {path_name(path)!r} of "
                f"{leaf.dtype}, whose range loses small weights; make the params bfloat16"
            )
