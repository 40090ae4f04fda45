"""Products in float8: the recipe, the product with its derivatives, and which products it is for.

Each tensor has one scale, from its own largest magnitude ("current scaling"): there is no state. What is multiplied is
written as XLA's rewriter wants it, float8 values converted to bfloat16 times a scalar; elsewhere it is computed so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from jaxmp._internals.jax.cast_with_transpose import cast_with_transpose
from jaxmp._internals.jax.sources import names_of
from jaxmp._internals.jax.traces import manual_axes, may_be_skipped
from jaxmp.base import hardware
from jaxmp.base.dtypes import canonical_dtype, nearest

RESIDUALS = "jaxmp_float8"
"""The name of what the backward pass keeps in float8, for ``jax.checkpoint_policies.save_only_these_names``."""

_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"
_CHOICES = {
    "forward": (_E4M3,),
    "gradient": (_E4M3, _E5M2),
    "weight_gradient": ("float8", "compute"),
    "accumulate": ("fast", "precise", "fast_forward"),
    "keep": ("float8", "compute"),
}
_COMPUTE = np.dtype(jnp.bfloat16)
_DIVISOR = 16  # of each dimension of a float8 product: XLA pads others, by a copy
_VARIABLE = "JAXMP_FLOAT8"
_warned: list[str] = []


@dataclasses.dataclass(frozen=True)
class Float8:
    """How a policy's float8 products are computed, and which products are: ``Policy(..., float8=Float8())``.

    The formats are those of Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433, where forward and
    gradient are these. Frozen and hashable.

    Attributes:
      forward: the format of both operands in the forward pass: float8_e4m3fn, which GPUs multiply by itself.
      gradient: that of the results' gradients: float8_e5m2 for its range, or float8_e4m3fn.
      weight_gradient: ``"float8"``, or ``"compute"`` for the policy's compute dtype.
      accumulate: how Hopper's tensor cores sum: ``"fast"`` (about 14 bits), ``"precise"`` (float32), or
        ``"fast_forward"``, precise in the backward pass only.
      min_dim: the least size of both dimensions of a weight.
      min_tokens: the least number of rows that it is multiplied by.
      keep: what the backward pass keeps of the operands: ``"float8"``, or ``"compute"`` to quantise them again.

    Raises:
      ValueError: a format or a choice is none of these, or a size is no positive integer.

    >>> str(jaxmp.Float8(min_dim=1024))
    'float8(min_dim=1024)'
    """

    forward: str = _E4M3
    gradient: str = _E5M2
    weight_gradient: str = "float8"
    accumulate: str = "fast_forward"
    min_dim: int = 1536
    min_tokens: int = 1024
    keep: str = "float8"

    def __post_init__(self) -> None:
        for name in ("forward", "gradient"):
            with contextlib.suppress(ValueError):
                object.__setattr__(self, name, canonical_dtype(getattr(self, name)).name)
        if self.forward == _E5M2:
            raise ValueError(
                f"one operand of a float8 product must be {_E4M3}, for no GPU multiplies two of {_E5M2}, and forward "
                f"is the format of both; got forward={_E5M2!r}; leave it {_E4M3!r}, and take {_E5M2!r} for gradient"
            )
        for name, known in _CHOICES.items():
            if (given := getattr(self, name)) not in known:
                raise ValueError(
                    f"{name} of a Float8 must be {' or '.join(map(repr, known))}, got {given!r}; "
                    f"nearest: {nearest(str(given), known, 1)}"
                )
        for name in ("min_dim", "min_tokens"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise ValueError(
                    f"{name} of a Float8 must be a positive integer, the least size of a product that is float8, got "
                    f"{size!r}; 1 takes every size"
                )
            object.__setattr__(self, name, int(size))

    def __str__(self) -> str:
        given = {each.name: value for each in dataclasses.fields(self)
                 if (value := getattr(self, each.name)) != each.default}  # fmt: skip
        return f"float8({','.join(f'{name}={value}' for name, value in given.items())})" if given else "float8"


def get_recipe(recipe: Any) -> Float8 | None:
    """Reads a recipe from itself, from what ``str`` makes of one, or from None or ``"none"``.

    Raises:
      ValueError: the text is none, or a value is not allowed.
      TypeError: it is something else.

    >>> str(get_recipe("float8(gradient=e4m3, min_dim=1024)"))
    'float8(gradient=float8_e4m3fn,min_dim=1024)'
    """
    if recipe is None or isinstance(recipe, Float8):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"float8 of a policy must be a jaxmp.Float8, a text such as 'float8(min_dim=1024)' or None, got {recipe!r}"
        )
    text = "".join(recipe.split()).lower()
    if text == "none":
        return None
    found = re.fullmatch(r"float8(?:\(([^()]*)\))?", text)
    if found is None:
        raise ValueError(
            f"float8 products are named 'float8' or 'float8(FIELD=VALUE,…)', got {recipe!r}; write e.g. "
            "'float8(min_dim=1024)'"
        )
    names = [each.name for each in dataclasses.fields(Float8)]
    given: dict[str, Any] = {}
    for part in filter(None, (found[1] or "").split(",")):
        name, _, value = part.partition("=")
        if name not in names or name in given or not value:
            raise ValueError(
                f"between the parentheses of float8 there must be FIELD=VALUE, each field once, got {part!r} in "
                f"{recipe!r}; write e.g. min_dim=1024; fields, nearest first: {nearest(name, names)}"
            )
        given[name] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return Float8(**given)


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    recipe: Float8,
    *,
    preferred_element_type: Any = None,
    weight: str | None = None,
    is_fused: bool = False,
) -> jax.Array:
    """``jax.lax.dot_general`` of operands in float8, and its derivatives likewise, under every transformation.

    The members of a ``jax.vmap`` have one scale, and so have the shards of an array, but for those of a ``shard_map``
    that may not all compute it: in a branch, a ``while_loop`` or a ``fori_loop``. A NaN makes its row NaN, an infinity
    the whole result. To derivatives the quantisation is the identity. What the backward pass keeps is float8
    and named :data:`RESIDUALS`; differentiated without ``jax.jit``, the operands are kept too.

    Args:
      lhs: a floating array, bfloat16 under a policy.
      rhs: the other operand.
      dimension_numbers: as ``jax.lax.dot_general`` takes them, batch dimensions too.
      recipe: the formats, the sums, and what is kept.
      preferred_element_type: the dtype of the result; by default that of the operands.
      weight: ``"lhs"`` or ``"rhs"``, whose gradient ``recipe.weight_gradient`` is about; None for neither.
      is_fused: whether XLA may add to the result in the product's own kernel. It dies of a bfloat16 GELU of the tanh
        form there, so that nobody who does not know what reads the result should say so.

    >>> x, w = jax.numpy.full((16, 32), 0.4375), jax.numpy.full((32, 16), 0.875)  # 448 times a power of two: exact
    >>> float(dot_general(x, w, (((1,), (0,)), ((), ())), jaxmp.Float8())[0, 0])
    12.25
    """
    contracting, batch = dimension_numbers
    dimensions = tuple(map(tuple, contracting)), tuple(map(tuple, batch))
    dtype = jnp.result_type(lhs, rhs) if preferred_element_type is None else preferred_element_type
    with jax.named_scope(f"jaxmp.float8({recipe})"):
        # Outside of the product, so that what is a weight's can be computed once for many products.
        is_own = may_be_skipped()
        operands = quantised(lhs, recipe.forward, is_own), quantised(rhs, recipe.forward, is_own)
        return _product(dimensions, recipe, np.dtype(dtype), weight, is_fused, is_own)(*operands)


def recipe_of(eqn: Any) -> Float8 | None:
    """The recipe of a product in a program, whose operands are those of :func:`quantised`; None if it is none."""
    names = names_of(eqn) if eqn.primitive.name == "custom_jvp_call" else ()
    found = re.fullmatch(r"jaxmp\.float8\((.*)\)", names[-1]) if names else None
    return get_recipe(found[1]) if found else None


@functools.cache
def _product(
    dimensions: Any, recipe: Float8, dtype: np.dtype, weight: str | None, is_fused: bool, is_own: bool
) -> Callable[[Any, Any], Any]:
    """The product of quantised operands for those arguments of :func:`dot_general`: JAX traces one function once."""

    def dot(lhs: Any, rhs: Any, is_precise: bool, out: Any = _COMPUTE) -> Any:
        precision = jax.lax.Precision.HIGHEST if is_precise else jax.lax.Precision.DEFAULT
        return jax.lax.dot_general(lhs, rhs, dimensions, precision=precision, preferred_element_type=out)

    def forward(lhs: Any, rhs: Any) -> Any:
        out = _COMPUTE if dtype == _COMPUTE else jnp.float32
        result = dot(_dequantised(*lhs), _dequantised(*rhs), recipe.accumulate == "precise", out)
        # Without it XLA fuses a GELU into the product, and dies of the float8 GELU_AUX that it made.
        return (result if is_fused else jax.lax.optimization_barrier(result)).astype(dtype)

    def transpose(cotangent: Any) -> Any:
        return dequantised(quantised(cotangent, recipe.gradient, is_own), recipe.gradient)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # what goes in is kept, and not what it is dequantised to
    def tangent(tangents: Any, operands: Any) -> Any:
        in_float8: list[Any] = []
        in_compute: list[Any] = []
        for side, given in enumerate(tangents):
            if given is None:  # it is zero
                continue
            value, quantised, scale = operands[1 - side]
            is_exact = recipe.weight_gradient == "compute" and weight == ("lhs", "rhs")[side]
            if is_exact:
                other = value.astype(_COMPUTE)
            else:
                quantised = _cast(value, scale, recipe.forward) if quantised is None else quantised
                other = _dequantised(value, quantised, scale)
            lhs, rhs = (given.astype(_COMPUTE), other) if side == 0 else (other, given.astype(_COMPUTE))
            part = dot(lhs, rhs, not is_exact and recipe.accumulate != "fast")
            (in_compute if is_exact else in_float8).append(part)
        parts = [functools.reduce(jnp.add, each) for each in (in_float8, in_compute) if each]
        if in_float8:
            parts[0] = cast_with_transpose(parts[0], dtype, transpose)
        return functools.reduce(jnp.add, [part.astype(dtype) for part in parts])

    @jax.custom_jvp
    def product(*operands: Any) -> Any:
        return forward(*(_opened(each, recipe.forward) for each in operands))

    def rule(operands: Any, tangents: Any) -> Any:
        operands = [_opened(each, recipe.forward) for each in operands]
        result = forward(*operands)
        if recipe.keep == "compute":
            operands = [(value, None, scale) for value, _, scale in operands]
        given = [None if isinstance(each, SymbolicZero) else each for each, _, _ in tangents]
        read = [operands[side] if given[1 - side] is not None else None for side in (0, 1)]
        return result, jnp.zeros_like(result) if given == [None, None] else tangent(given, read)

    product.defjvp(rule, symbolic_zeros=True)
    return product


def quantised(value: Any, dtype: str, is_own: bool = False) -> tuple[Any, Any, Any]:
    """A value, the bits of the value in float8, and the scale of that: one for all shards, or each shard's own."""
    scale = checkpoint_name(_scale(value, dtype, is_own), RESIDUALS)
    # What is kept by its name JAX rounds once more, as if e4m3fn had infinities: 256 would become one. Bits it leaves.
    bits = jax.lax.bitcast_convert_type(_cast(value, scale, dtype), jnp.uint8)
    return value, checkpoint_name(bits, RESIDUALS), scale


def _opened(operand: tuple[Any, Any, Any], dtype: str) -> tuple[Any, Any, Any]:
    """Return the result of :func:`quantised` with its bits as float8 values."""
    value, bits, scale = operand
    return value, jax.lax.bitcast_convert_type(bits, dtype), scale


def dequantised(operand: tuple[Any, Any, Any], dtype: str) -> Any:
    """Return the operand of a product that the result of :func:`quantised` stands for."""
    return _dequantised(*_opened(operand, dtype))


def _scale(value: Any, dtype: str, is_own: bool = False) -> Any:
    """Return the scale that maps the largest magnitude to the largest of ``dtype``; of zeros or NaN, 1."""
    largest = _largest(jax.lax.stop_gradient(value))
    if not is_own and (axes := manual_axes(value)):
        largest = jax.lax.pmax(largest, axes)
    scale = jax.lax.max(largest * np.float32(1 / float(jnp.finfo(dtype).max)), np.finfo(np.float32).tiny)
    scale = jax.lax.select(largest > 0, scale, jnp.ones_like(scale))
    # Rounded up to a bfloat16 number, but for what may be float32's own rounding: what dequantises in bfloat16 is then
    # what quantised.
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) + np.uint32(0xFFF0)
    return jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFF0000), jnp.float32)


@custom_vmap
def _largest(value: Any) -> Any:
    """Return the largest magnitude in ``value``, in float32: one for all members of a ``jax.vmap``."""
    # Columns first, then one number: XLA computes the first stage in the kernel that computes `value`, but would merge
    # the two stages into a kernel that reads `value` again.
    columns = jax.lax.reduce_max(jnp.abs(value), tuple(range(value.ndim - 1)))
    return jax.lax.reduce_max(jax.lax.optimization_barrier(columns), tuple(range(columns.ndim))).astype(jnp.float32)


@_largest.def_vmap
def _largest_of_all(axis_size: int, in_batched: Any, value: Any) -> Any:
    return _largest(value), False  # a scale for each member would be a vector, which XLA multiplies in bfloat16


def _cast(value: Any, scale: Any, dtype: str) -> Any:
    largest = np.float32(jnp.finfo(dtype).max)
    # Else XLA takes the float32 numbers that were rounded to `value`: it writes them, or computes them twice.
    format = jnp.finfo(value.dtype)
    rounded = jax.lax.reduce_precision(jax.lax.stop_gradient(value), format.nexp, format.nmant)
    scaled = rounded.astype(jnp.float32) / scale
    return jax.lax.clamp(-largest, scaled, largest).astype(dtype)


@jax.custom_jvp
def _dequantised(value: Any, quantised: Any, scale: Any) -> Any:
    """Return a stand-in with the tangents of ``value``; XLA drops ``value`` itself."""
    return quantised.astype(_COMPUTE) * scale.astype(_COMPUTE)


@functools.partial(_dequantised.defjvp, symbolic_zeros=True)
def _straight_through(primals: Any, tangents: Any) -> Any:
    result = _dequantised(*primals)
    is_zero = isinstance(tangents[0], SymbolicZero)
    return result, jnp.zeros_like(result) if is_zero else tangents[0].astype(_COMPUTE)


def refusal(lhs: Any, rhs: Any, dimension_numbers: Any, recipe: Float8, *, weight: str = "rhs") -> str | None:
    """Why a product of these shapes is not float8: ``"768 < 1536"``, ``"50257 % 16"``, ``"batched"``, …; None if it is.

    Args:
      lhs: an array, or what has a shape.
      rhs: the same.
      dimension_numbers: as ``jax.lax.dot_general`` takes them.
      recipe: the least sizes.
      weight: which operand is the weight; the free dimensions of the other are the tokens.

    >>> lhs, rhs = jax.ShapeDtypeStruct((8, 512, 768), "bfloat16"), jax.ShapeDtypeStruct((768, 3072), "bfloat16")
    >>> refusal(lhs, rhs, (((2,), (0,)), ((), ())), jaxmp.Float8())
    '768 < 1536'
    """
    contracting, batch = dimension_numbers
    if any(batch):
        return "batched"
    inner, left, right = (
        math.prod(lhs.shape[axis] for axis in contracting[0]),
        *(math.prod(size for axis, size in enumerate(each.shape) if axis not in axes)
          for each, axes in zip((lhs, rhs), contracting, strict=True)),
    )  # fmt: skip
    tokens, outer = (left, right) if weight == "rhs" else (right, left)
    if not all(isinstance(size, int) for size in (inner, outer, tokens)):
        return "a dimension that jax.export leaves open"
    if min(inner, outer) < recipe.min_dim:
        return f"{min(inner, outer)} < {recipe.min_dim}"
    if tokens < recipe.min_tokens:
        return f"{tokens} tokens < {recipe.min_tokens}"
    return next((f"{size} % {_DIVISOR}" for size in (inner, outer, tokens) if size % _DIVISOR), None)


def available() -> str:
    """Return how the traced program will compute float8: ``"native"``, ``"emulate"`` or ``"no"``.

    ``JAXMP_FLOAT8=emulate`` asks for the same numbers by casts on any device. The device is the first local one, or
    that of :func:`jaxmp.hardware.assumed`. The first one without float8 products is warned of, once a process.

    Raises:
      ValueError: ``JAXMP_FLOAT8`` is something else.
    """
    asked = os.environ.get(_VARIABLE, "")
    if asked not in ("", "emulate"):
        raise ValueError(
            f"{_VARIABLE} must be 'emulate', which computes float8 products by casts on any device, or unset, got "
            f"{asked!r}; unset it, or {_VARIABLE}=emulate"
        )
    if asked:
        return asked
    device = hardware.detect()
    if _E4M3 in device.tensor_cores:
        return "native"
    if not _warned:
        _warned.append(device.name)
        warnings.warn(
            f"float8 products are computed by GPUs of compute capability 8.9 or more, and {device.name} has none: they "
            f"are bfloat16 here; {_VARIABLE}=emulate computes their numbers by casts, and to compile for another "
            "device, trace in jaxmp.hardware.assumed('h200')",
            stacklevel=2,
        )
    return "no"
