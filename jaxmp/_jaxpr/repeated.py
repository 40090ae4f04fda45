"""A cast to half of a weight that is repeated: the weight's cotangents are summed before they are half.

A bias is added to every row, and the derivative adds up what comes back. Where the cast stands before the broadcast,
that sum is in half precision; where it stands behind it, XLA no longer finds the bias of a matrix product, and writes
its result twice. So this is one linear operation: forwards it casts and repeats, backwards it widens and sums. Under
``jax.vmap`` a weight takes on the batch of the activation that it meets, which repeats it as well.

On its way to float32 the cotangent is rounded to the precision that it has, or XLA would drop both casts, sum what it
was before it became half, and write all of that in float32. A rounding that changes nothing costs nothing: the sum is
made in the kernel that computes the cotangent, beside its half copy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._jaxpr.reading import is_batched

_cast = Primitive("cast_repeated")
_cast_like = Primitive("cast_repeated_like")  # only where something is batched


def cast_repeated(
    value: Any, dtype: np.dtype, shape: tuple[int, ...], like: Any = None, is_normalised: bool = False
) -> Any:
    """``value`` in ``dtype``, repeated along leading axes and those of size 1 up to ``shape``.

    Args:
      value: a floating array.
      dtype: a floating dtype.
      shape: that of the result.
      is_normalised: whether its cotangents come from a normalisation, the kernel of which sums those of a scale and a
        bias: XLA finds no room there for a third sum in float32, which gets a kernel of its own.
    """
    axes = tuple(range(len(shape) - value.ndim, len(shape)))
    return _bind(value, like, dtype=dtype, shape=shape, axes=axes, is_normalised=is_normalised)


def _bind(value: Any, like: Any, **params: Any) -> Any:
    return _cast_like.bind(value, like, **params) if is_batched(like) else _cast.bind(value, **params)


def _forward(value: Any, *, dtype: np.dtype, shape: tuple[int, ...], axes: tuple[int, ...], is_normalised: bool) -> Any:
    return jax.lax.broadcast_in_dim(value.astype(dtype), shape, axes)


def _backward(
    cotangent: Any, value: Any, *, dtype: np.dtype, shape: tuple[int, ...], axes: tuple[int, ...], is_normalised: bool
) -> Any:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(value.aval)]
    if is_normalised:
        cotangent = jax.lax.optimization_barrier(cotangent)
    else:
        info = jnp.finfo(dtype)
        cotangent = jax.lax.reduce_precision(cotangent, info.nexp, info.nmant)
    old = dict(zip(axes, value.aval.shape, strict=True))
    summed = tuple(axis for axis, size in enumerate(shape) if old.get(axis) != size)
    return [jnp.sum(cotangent.astype(value.aval.dtype), summed).reshape(value.aval.shape)]


def _batch(operands: Any, batched: Any, *, shape: tuple[int, ...], axes: tuple[int, ...], **params: Any) -> Any:
    (value, *like), value_axis = operands, batched[0]
    size = next(x.shape[axis] for x, axis in zip(operands, batched, strict=True) if axis is not None)
    moved = tuple(axis + 1 for axis in axes)
    if value_axis is not None:
        value, moved = jnp.moveaxis(value, value_axis, 0), (0, *moved)
    return _bind(value, like[0] if like else None, shape=(size, *shape), axes=moved, **params), 0


_cast.def_impl(_forward)
_cast.def_abstract_eval(lambda aval, *, dtype, shape, **_: aval.update(dtype=dtype, shape=shape, weak_type=False))
ad.deflinear2(_cast, _backward)
mlir.register_lowering(_cast, mlir.lower_fun(_forward, multiple_results=False))
batching.primitive_batchers[_cast] = batching.primitive_batchers[_cast_like] = _batch
