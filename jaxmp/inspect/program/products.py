"""What is wrong with products: operands in float32 or of two dtypes, dimensions, what the compiler made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.walk import PRODUCTS
from jaxmp.engine.marks import region_of
from jaxmp.inspect.program.equations import Place
from jaxmp.inspect.program.evidence import Audited, Found
from jaxmp.inspect.program.values import JOIN, Value, Values, made_of, origins

_ASKED = frozenset({"float32", "tensorfloat32"})
_WEIGHT, _DATA, _UNTOLD, _PRODUCT = 1, 2, 4, 8


def float32_products(audited: Audited) -> Found:
    """Products of float32 operands where the policy asks for half, and nobody for float32."""
    mixed = {(place.path, place.source) for place, *_ in mixed_products(audited) if isinstance(place, Place)}
    for value, product in audited.products:
        place = value.at
        if set(product.operands) != {"float32"} or product.phase == "update" or _asks(audited, place):
            continue
        if product.phase == "backward" and (place.path, place.source) in mixed:  # the derivative of a mixed product
            continue
        half = _half_of(audited, place)
        if half is None or (value.name == "dot_general" and not place.eqn.params["dimension_numbers"][0][0]):
            continue
        cast = [each.dtype.name for operand in value.inputs[:2] if (each := _before_cast(operand)).is_half]
        how = f" of which JAX promoted {len(cast)} from {cast[0]}" if cast else ""
        yield (
            place,
            f"a product of float32 operands{how}, where the policy asks for {half}",
            f"cast both operands to {half}, or declare it: an override of this path, jaxmp.precision('float32') or "
            "precision='highest'",
        )


def mixed_products(audited: Audited) -> Found:
    """Products of operands of two dtypes."""
    for value, product in audited.products:
        dtypes = [np.dtype(name) for name in product.operands]
        if (
            len({*dtypes}) > 1
            and all(jnp.issubdtype(d, jnp.floating) for d in dtypes)
            and max(d.itemsize for d in dtypes) > 1
        ):  # float8 has one format for values and one for gradients
            yield (
                value.at,
                f"a product of {' and '.join(product.operands)}: it runs in the wider one",
                f"cast both operands to {min(dtypes, key=lambda d: d.itemsize).name}",
            )


def unaligned_products(audited: Audited) -> Found:
    """Half products of more than 1 % of the FLOPs, of which a dimension is no multiple of 16 bytes."""
    total = sum(work(product) for _, product in audited.products)
    for value, product in audited.products:
        size = min(np.dtype(name).itemsize for name in product.operands)
        dims = unaligned(value, audited.weights(value))
        if product.phase != "backward" and size <= 2 and dims and work(product) > 0.01 * total:
            step = 16 // size
            names = " and ".join(f"{name} {number}" for name, number in dims.items())
            yield (
                value.at,
                f"{names}: no multiple of {step}, as tensor cores want of {product.operands[0]}",
                f"pad to a multiple of {step} (jaxmp.hardware.align_dim)",
            )


def compiled_otherwise(audited: Audited) -> Found:
    """Half products that the compiler made wider."""
    for value, product in audited.products:
        written = max(np.dtype(name).itemsize for name in product.operands)
        if audited.on_cpu or product.ran is None or written > 2 or np.dtype(product.ran).itemsize <= written:
            continue
        yield (
            value.at,
            f"written in {product.operands[0]} and compiled to {product.ran}",
            "look at what the device's library has no kernel for (alignment, dtypes of operands and result, layout)",
        )


def unaligned(value: Value, weights: Sequence[int]) -> dict[str, int]:
    """The contracted and output-feature dimensions of a product that are no multiple of 16 bytes, by what they are.

    The batch is none of them: output features are those of the operand that is the weight, and where either of two may
    be (``weights``), those that are a multiple. A dimension of 1 is none either: that is no matrix product; nor are the
    few channels of a stem.
    """
    eqn, (left, right) = value.at.eqn, value.inputs[:2]
    step = max(16 // min(each.dtype.itemsize for each in (left, right)), 1)
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        if eqn.params["batch_group_count"] > 1:  # the derivative of a grouped one
            return {}
        found = {"channels in": left.shape[numbers.lhs_spec[1]], "channels out": right.shape[numbers.rhs_spec[0]]}
        if found["channels in"] <= 4:
            del found["channels in"]
    elif eqn.primitive.name == "dot_general":
        contracted, batch = eqn.params["dimension_numbers"]
        kept = [
            [size for axis, size in enumerate(value.inputs[n].shape) if axis not in (*contracted[n], *batch[n])]
            for n in weights
        ]
        found = {
            "contracted dimension": math.prod(left.shape[axis] for axis in contracted[0]),
            "output features": min(map(math.prod, kept), key=lambda size: size % step),
        }
    else:
        (_, contracted), (_, batch) = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        known_axes = {*contracted, *batch, *eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions}
        found = {
            "contracted dimension": math.prod(right.shape[axis] for axis in contracted),
            "output features": math.prod(size for n, size in enumerate(right.shape) if n not in known_axes),
        }
    return {name: size for name, size in found.items() if size % step and size > 1}


def weights_in(values: Values, kinds: Sequence[str | None]) -> Callable[[Value], list[int]]:
    """Tells which operands of a product may be its weight, 0 and 1 for left and right: one, or both where none tells.

    Args:
      values: of the program.
      kinds: as in :class:`Audited`.
    """

    def mark(value: Value) -> int:
        if value.name != "argument" or not value.shape or value.dtype == "V":  # a scalar or a random key is neither
            return _PRODUCT if value.name in PRODUCTS else 0
        kind = kinds[value.position]
        return _UNTOLD if kind is None else _WEIGHT if kind in ("params", "optimizer", "model_state") else _DATA

    made = made_of(values, mark)

    def side(value: Value) -> list[int]:
        found = [made.get(each, 0) for each in value.inputs[:2]]
        ranks = [2 if bits & _DATA else 0 if bits & _WEIGHT else 1 for bits in found]
        if ranks[0] != ranks[1]:
            return [int(ranks[1] < ranks[0])]
        are_plain = all(map(_is_plain, value.inputs[:2]))
        is_constant_first = found[1] & _UNTOLD > found[0] & _UNTOLD  # a weight with data, or data with params
        if ranks[0] != 1 or (are_plain and not is_constant_first):
            return [1]
        are_products = [bool(bits & _PRODUCT) for bits in found]
        if are_products[0] != are_products[1]:
            return [int(are_products[0])]
        return [1] if are_products[0] else [0, 1]

    return side


def _is_plain(value: Value) -> bool:
    """Whether a value is an argument or a constant, cast or moved maybe."""
    found = origins(value, lambda each: each.is_move or each.is_cast or each.name == JOIN)
    return all(each.name in ("argument", "constant") for each in found)


def work(product: Any) -> int:
    """The FLOPs of all times that a product runs; of one where only the run tells."""
    return int(product.flops * (product.count or 1))


def _before_cast(value: Value) -> Value:
    while (value.is_move or value.is_cast) and len(value.inputs) == 1:
        value = value.inputs[0]
        if value.is_half:
            break
    return value


def _asks(audited: Audited, place: Place) -> bool:
    """Whether somebody asked for a float32 product."""
    precision = place.eqn.params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    is_default = all(part is None or str(part).rpartition(".")[2] == "DEFAULT" for part in parts)
    return not is_default or region_of(place.names).level in _ASKED


def _half_of(audited: Audited, place: Place) -> str | None:
    """The half dtype that the policy asks for at a place; None where it asks for none."""
    if audited.policy is None:
        half = region_of(place.names).half
        return None if half is None else half.name
    dtypes = {each.compute_dtype for each in audited.policies_of(tuple(place.path.split("/")))}
    half = next((dtype for dtype in dtypes if dtype.itemsize == 2), None)
    return None if half is None or np.dtype(np.float32) in dtypes else half.name


def multiplied(operand: Value) -> str:
    """Return the dtype that a product multiplies in; scaled float8 values are float8."""
    factors = [each.inputs[0].dtype for each in operand.inputs if operand.name == "mul" and each.is_cast]
    return next((dtype.name for dtype in factors if dtype.name.startswith("float8")), operand.dtype.name)
