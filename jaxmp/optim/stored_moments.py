"""Find the moments in an optimizer's state, and store them in 16 or 8 bits.

Moments in 8 bits have a scale for each block, as in Dettmers et al. 2022, arXiv:2110.02861.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.tree_util import KeyPath

from jaxmp.base.trees import map_nodes_of_type, path_name, widen
from jaxmp.optim.stochastic_rounding import LARGEST, SMALLEST, Draw, stochastic_bfloat16, stochastic_float8

# The fields with moments in optax's states. AMSGrad's maximum of the second moments is left out, because stochastic
# rounding would raise it. The moments of a centred RMSProp are left out, because stochastic rounding could make the
# variance nu - mu² negative.
_SIGNED: dict[type, tuple[str, ...]] = {
    optax.ScaleByAdamState: ("mu",),
    optax.ScaleByAmsgradState: ("mu",),
    optax.ScaleByAdanState: ("m", "v"),
    optax.ScaleByBeliefState: ("mu",),
    optax.ScaleByLionState: ("mu",),
    optax.TraceState: ("trace",),
    optax.contrib.MuonState: ("mu",),
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


@flax.struct.dataclass
class MomentFormat:
    """The format in which a state stores its moments, as a static part of the state.

    Attributes:
      name: ``"float32"``, ``"bfloat16"`` or ``"float8"``.
    """

    name: str = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Float8Blocks:
    """An array in float8, with a scale for each block along the last axis.

    Attributes:
      codes: float8_e4m3fn, of the array's shape.
      scales: float32, the power of two above the largest magnitude in each block. The shape is that of the array with
        the last axis divided by the block size.
      squared: whether the codes store the square root of the array, as for second moments.
    """

    codes: jax.Array
    scales: jax.Array
    squared: bool = flax.struct.field(pytree_node=False, default=False)

    def decoded(self) -> jax.Array:
        """Return the array in float32; stored positive second moments stay positive."""
        shares = self.codes.astype(jnp.float32) / LARGEST
        scales = _scale_of_each_number(self.scales, shares)
        if not self.squared:
            return shares * scales
        tiny = jnp.float32(np.finfo(np.float32).tiny)
        return jnp.where(self.codes == 0, jnp.float32(0), jnp.maximum(shares * shares * scales, tiny))


def in_bfloat16(leaf: jax.Array, draw: Draw) -> jax.Array:
    """Return a moment in bfloat16, which has the exponents of float32: a normal number does not become 0."""
    return stochastic_bfloat16(leaf, draw.bits(leaf.shape)[1])


def as_float8_blocks(leaf: jax.Array, squared: bool, block: int, draw: Draw, scales: Any = None) -> Any:
    """Return a moment in float8 blocks.

    If the block size does not divide the last axis of ``leaf``, return ``leaf``.

    Args:
      leaf: the moment, float32.
      squared: whether ``leaf`` is a second moment, whose square root is stored.
      block: the number of values that share a scale.
      draw: the random bits.
      scales: the scales of the blocks, if known.
    """
    if leaf.ndim == 0 or leaf.shape[-1] % block:
        return leaf
    values = jnp.sqrt(leaf) if squared else leaf
    scales = _block_scales(leaf, block) if scales is None else scales
    spread = _scale_of_each_number(scales, values)
    spread = (jnp.sqrt(spread) if squared else spread) / LARGEST
    scaled = jnp.where(spread > 0, values / spread, values)
    codes = stochastic_float8(scaled, draw.bits(leaf.shape)[1])
    if squared:
        codes = jnp.where((values > 0) & (codes == 0), jnp.float32(SMALLEST), codes)
    return Float8Blocks(codes.astype(jnp.float8_e4m3fn), scales, squared)


def _block_scales(leaf: jax.Array, block: int) -> jax.Array:
    """Return the power of two above the largest magnitude in each block.

    If the largest magnitude is infinite or NaN, return that magnitude. The scale must be the same on any number of
    devices, but the largest magnitude may differ in its last bit. (Depending on the program, XLA rounds a product and a
    sum once or twice.) So the scale is a power of two.
    """
    largest = jnp.max(jnp.abs(leaf.reshape(*leaf.shape[:-1], -1, block)), axis=-1)
    exponents = jax.lax.bitcast_convert_type(largest, jnp.uint32) & jnp.uint32(0x7F800000)
    above = jnp.minimum(2 * jax.lax.bitcast_convert_type(exponents, jnp.float32), jnp.finfo(jnp.float32).max)
    return jnp.where(jnp.isfinite(largest), above, largest)


def readable_with_scales(stored: Any, new: Any, block: int) -> tuple[Any, list[Any]]:
    """Return the stored state behind a barrier, and the scales of the new state.

    Because of the barrier, XLA reads the stored codes only after it has computed the scales. The scales of leaves
    without blocks are None.
    """
    old, structure = jax.tree.flatten(stored, is_leaf=is_blocks)
    pairs = [
        jax.lax.optimization_barrier((leaf, _block_scales(moment, block))) if is_blocks(leaf) else (leaf, None)
        for leaf, moment in zip(old, jax.tree.leaves(new), strict=True)
    ]
    return jax.tree.unflatten(structure, [leaf for leaf, _ in pairs]), [scales for _, scales in pairs]


def _scale_of_each_number(scales: jax.Array, like: jax.Array) -> jax.Array:
    """Return the scale of each value of an array, from the scales of its blocks."""
    block = like.shape[-1] // scales.shape[-1]
    return jnp.broadcast_to(scales[..., None], (*scales.shape, block)).reshape(like.shape)


def decoded(state: Any) -> Any:
    """Return an optimizer's state in float32."""
    return widen(map_nodes_of_type(Float8Blocks.decoded, state, Float8Blocks))


class StateLeaf(NamedTuple):
    """A leaf of a state: its path, and whether it is a moment or a second moment."""

    path: str
    is_moment: bool
    is_second: bool


def leaves_of_state(state: Any) -> list[StateLeaf]:
    """Return the path of each leaf of a state, and whether the leaf is a moment to store in another format."""
    leaves = []
    for path, field, node, leaf in _leaves_with_fields(state):
        # A moment in another dtype than float32 stays as it is: the user chose the dtype, for example by mu_dtype.
        is_moment = field in _moments_of(node) and leaf.dtype == jnp.float32
        is_second = is_moment and field in _SECOND.get(type(node), ())
        leaves.append(StateLeaf(path_name(path), is_moment, is_second))
    return leaves


def paths_of_moments(state: Any) -> list[KeyPath]:
    """Return the paths of the moments in a state, in any dtype."""
    return [path for path, field, node, _ in _leaves_with_fields(state) if field in _moments_of(node)]


def _leaves_with_fields(state: Any) -> Iterator[tuple[KeyPath, str | None, Any, Any]]:
    """Yield the path of each leaf, the field and the state of optax that have it, and the leaf.

    Outside of the states with known moments, the field is None, and the state is the leaf.
    """
    for path, node in jax.tree.leaves_with_path(state, is_leaf=lambda node: bool(_moments_of(node))):
        for inner_path, leaf in jax.tree.leaves_with_path(node):
            field = path_name(inner_path[:1]) if inner_path else None
            yield (*path, *inner_path), field, node, leaf


def _moments_of(node: Any) -> tuple[str, ...]:
    """Return the names of the fields with moments of a state of optax, empty for anything else."""
    return (*_SIGNED.get(type(node), ()), *_SECOND.get(type(node), ()))


def is_blocks(leaf: Any) -> bool:
    """Return whether a leaf is stored in float8 blocks."""
    return isinstance(leaf, Float8Blocks)
