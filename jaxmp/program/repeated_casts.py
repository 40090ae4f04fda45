"""Cast and broadcast values so that their cotangents are summed in float32.

A bias is added to every row, and its derivative sums over the rows. If the cast to half precision (float16 or bfloat16)
comes before the broadcast, the sum is in half precision. If the cast comes after the broadcast, XLA does not recognise
the bias of a matrix product, and writes the product's result twice. So this module has a linear operation that casts
and broadcasts. In the backward pass, the operation casts the cotangents to float32 and sums them. Under ``jax.vmap``, a
weight is also repeated for each example of the activations with which it is combined. So the activations are operands
of the operation, although they do not change its result.

In the backward pass, the operation first rounds the cotangent to half precision. Otherwise XLA would remove the cast to
half precision and the cast back to float32, and would store the unrounded cotangent in float32. The additional rounding
is free, because the kernel that computes the cotangent also computes the sum.

The operation also broadcasts a half-precision activation, if half precision cannot represent the sum of its many
cotangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import jet
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp.base.dtypes import is_castable, is_half, may_sum_half
from jaxmp.program.binding import bind_equation
from jaxmp.program.equations import aval_of, has_explicit_axes, is_literal, size_of
from jaxmp.program.primitives import BROADCAST, Trait, with_trait
from jaxmp.program.vmap_sharing import Examples

_cast = Primitive("cast_repeated")
MAX_TERMS = 64
"""The maximum number of terms in a half-precision sum, if JAX allows such sums at all.

In bfloat16, a sum of 64 terms has an error of about 1 %, and 256 + 1 is rounded to 256.
"""
REPEATS = with_trait(Trait.REPEATS, Trait.LOOKS_UP)
"""Primitives that repeat an operand or look up its rows."""
_ADDS_UP = BROADCAST | REPEATS


def must_widen(eqn: JaxprEqn, atom: Any, value: Any, examples: Examples) -> bool:
    """Return whether the cotangents of an operand must be summed in float32.

    The sum has many terms if the value is repeated or looked up often. The same is true if all examples of a
    ``jax.vmap`` read the value together with values that differ between examples. A literal has no cotangents.
    """
    if is_literal(atom):
        return False
    return _is_long(eqn, value.shape) or examples.meets_batched(atom, value)


def sums_half(eqn: JaxprEqn) -> bool:
    """Return whether a half-precision operand needs a float32 gradient sum.

    The dtypes are those in ``eqn``, before autocast changes them.
    """
    avals = [aval_of(atom) for atom in eqn.invars if not is_literal(atom)]
    return any([is_castable(aval) and is_half(aval.dtype) and _is_long(eqn, aval.shape) for aval in avals])


def has_too_many_terms(terms: float) -> bool:
    """Return whether a sum with this number of terms must be float32."""
    return terms > (MAX_TERMS if may_sum_half() else 1)


def _repeats(eqn: JaxprEqn, shape: Any) -> float:
    """Return the maximum number of times that an equation reads one element.

    The equation has a primitive of ``_ADDS_UP``.
    """
    if eqn.primitive.name == "gather":
        batch = eqn.params["dimension_numbers"].start_indices_batching_dims
        return size_of([size for axis, size in enumerate(aval_of(eqn.invars[1]).shape[:-1]) if axis not in batch])
    return size_of(aval_of(eqn.outvars[0]).shape) / max(size_of(shape), 1)


def _is_long(eqn: JaxprEqn, shape: Any) -> bool:
    """Return whether more cotangents are summed in an element than may be half.

    ``shape`` is the shape of the operand.
    """
    return eqn.primitive.name in _ADDS_UP and has_too_many_terms(_repeats(eqn, shape))


def summed_in_float32(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Bind an equation of ``REPEATS``, and sum the cotangents in float32."""
    value, float32 = operands[0], np.dtype(np.float32)
    if not is_half(value.dtype):
        return bind_equation(eqn, operands, eqn.params)
    if eqn.primitive.name == "broadcast_in_dim" and not has_explicit_axes(value):
        params = {"dtype": value.dtype, "axes": eqn.params["broadcast_dimensions"], "shape": eqn.params["shape"]}
        return [_cast.bind(value, **params, sharding=None)]
    (result,) = bind_equation(eqn, [jax.lax.convert_element_type(value, float32), *operands[1:]], eqn.params)
    return [jax.lax.convert_element_type(result, value.dtype)]


def cast_repeated(value: Any, dtype: np.dtype, aval: Any, like: Sequence[Any]) -> Any:
    """Return ``value`` in ``dtype``, broadcast to the shape of ``aval``.

    Args:
      value: a floating array.
      dtype: a floating dtype.
      aval: a type with the shape of the result, and its sharding on a mesh with Explicit axes.
      like: the other operands of the equation that reads the result. If a ``jax.vmap`` maps over one of them, the
        result is repeated for each example.
    """
    axes = tuple(range(aval.ndim - value.ndim, aval.ndim))
    sharding = aval.sharding if has_explicit_axes(value) else None
    return _cast.bind(value, *like, dtype=dtype, shape=aval.shape, axes=axes, sharding=sharding)


def _forward(value: Any, *_: Any, dtype: np.dtype, shape: Any, axes: Any, sharding: Any, **__: Any) -> Any:
    return jax.lax.broadcast_in_dim(value.astype(dtype), shape, axes, out_sharding=sharding)


def _derivative(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    value, *like = primals
    out, tangent = _cast.bind(value, *like, **params), tangents[0]
    if type(tangent) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, _cast.bind(tangent, *like, **params)


def _backward(
    cotangent: Any,
    value: Any,
    *like: Any,
    dtype: np.dtype,
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    sharding: Any,
) -> list[Any]:
    none_for_like = [None] * len(like)
    if type(cotangent) is ad.Zero:
        return [ad.Zero(value.aval), *none_for_like]
    old = dict(zip(axes, value.aval.shape, strict=True))
    summed = tuple(axis for axis, size in enumerate(shape) if old.get(axis) != size)
    info = jnp.finfo(dtype)
    cotangent = jax.lax.reduce_precision(cotangent, info.nexp, info.nmant)
    total = jnp.sum(cotangent.astype(value.aval.dtype), summed)
    ones = [n for n, axis in enumerate(axes) if axis in summed]
    return [jnp.expand_dims(total, ones) if ones else total, *none_for_like]


def _batch(operands: Any, batched: Any, *, shape: Any, axes: Any, sharding: Any, **params: Any) -> Any:
    size = next(x.shape[axis] for x, axis in zip(operands, batched, strict=True) if axis is not None)
    value, *like = (x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, batched, strict=True))
    first = () if batched[0] is None else (0,)
    axes = (*first, *(axis + 1 for axis in axes))
    sharding = sharding and sharding.update(spec=jax.sharding.PartitionSpec(None, *sharding.spec))
    return _cast.bind(value, *like, shape=(size, *shape), axes=axes, sharding=sharding, **params), 0


def _series(operands: Any, series: Any, **params: Any) -> tuple[Any, list[Any]]:
    """Return the result and the terms of its Taylor series. The operation is linear in the value."""
    value, *like = operands
    terms = [_cast.bind(term, *like, **params) for term in series[0]]
    return _cast.bind(value, *like, **params), terms


def _result_type(aval: Any, *_: Any, dtype: np.dtype, shape: Any, sharding: Any, **__: Any) -> Any:
    there = {} if sharding is None else {"sharding": sharding}
    return aval.update(dtype=dtype, shape=shape, weak_type=False, **there)


_cast.def_impl(_forward)
_cast.def_abstract_eval(_result_type)
ad.primitive_jvps[_cast] = _derivative
ad.primitive_transposes[_cast] = _backward
mlir.register_lowering(_cast, mlir.lower_fun(_forward, multiple_results=False))
batching.primitive_batchers[_cast] = _batch
_jet_rules: Any = jet.jet_rules
_jet_rules[_cast] = _series
