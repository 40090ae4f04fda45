"""Find the weights of products, and dimensions that tensor cores need aligned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jaxmp._internals.jax.walk import PRODUCTS
from jaxmp.inspect.memory_kinds import Leaf
from jaxmp.inspect.program.values import JOIN, Value, Values, is_move_or_cast, made_of, origins

# Marks of a value that depends on params or other state, on the batch, on arguments of unknown kind, or on a product.
_WEIGHT, _DATA, _UNKNOWN, _PRODUCT = 1, 2, 4, 8


def weights_in(values: Values, arguments: Sequence[Leaf]) -> Callable[[Value], list[int]]:
    """Return a function that says which operands of a product may be its weight.

    The returned function returns ``[0]``, ``[1]``, or ``[0, 1]`` if either operand may be the weight.

    Args:
      values: the values of the program.
      arguments: the arrays among the arguments, with their kinds.
    """

    def mark(value: Value) -> int:
        if value.name in PRODUCTS:
            return _PRODUCT
        if value.name != "argument" or not value.shape or value.dtype == "V":  # a scalar or a random key gets no mark
            return 0
        kind = arguments[value.position].kind
        if kind == "unknown":
            return _UNKNOWN
        return _WEIGHT if kind in ("params", "optimizer", "model_state") else _DATA

    marks = made_of(values, mark)

    def weights(product: Value) -> list[int]:
        left, right = product.inputs[:2]
        return _weights(product, marks.get(left, 0), marks.get(right, 0))

    return weights


def _weights(product: Value, left: int, right: int) -> list[int]:
    """Return the positions of the operands that may be the weight.

    ``left`` and ``right`` are the marks of the operands.
    """
    ranks = _rank(left), _rank(right)
    if ranks[0] != ranks[1]:
        return [1] if ranks[1] < ranks[0] else [0]
    are_plain = all(map(_is_stored, product.inputs[:2]))
    # The left operand is a constant, and the right one an argument of unknown kind. Either may be the weight.
    is_constant_first = right & _UNKNOWN > left & _UNKNOWN
    if ranks[0] != 1 or (are_plain and not is_constant_first):
        return [1]
    if left & _PRODUCT != right & _PRODUCT:
        return [1] if left & _PRODUCT else [0]
    return [1] if left & _PRODUCT else [0, 1]


def _rank(marks: int) -> int:
    """Return the rank of an operand; the operand with the lower rank is the weight.

    An operand that depends on the batch has rank 2. Other operands have rank 0 if they depend on params or other state,
    else rank 1.
    """
    if marks & _DATA:
        return 2
    return 0 if marks & _WEIGHT else 1


def _is_stored(value: Value) -> bool:
    """Return whether a value is an argument or a constant, possibly moved or cast."""

    def goes_on(source: Value) -> bool:
        return is_move_or_cast(source) or source.name == JOIN

    return all(origin.name in ("argument", "constant") for origin in origins(value, goes_on))


def unaligned(product: Value, weights: Sequence[int]) -> dict[str, int]:
    """Return the dimensions of a product that are not multiples of 16 bytes, by name.

    Only the contracted dimension and the output features of the weight are checked, not the batch dimensions. If either
    operand may be the weight (``weights`` has both), the output features that are better aligned are checked. A
    dimension of 1 is ignored, because such a product is not a matrix product. Up to four input channels of a
    convolution are ignored too, because the first convolution of a model often has so few.
    """
    left, right = product.inputs[:2]
    step = max(16 // min(left.dtype.itemsize, right.dtype.itemsize), 1)
    if product.name == "conv_general_dilated":
        dims = _dims_of_convolution(product)
    elif product.name == "dot_general":
        dims = _dims_of_dot(product, weights, step)
    else:
        dims = _dims_of_ragged_dot(product)
    return {name: size for name, size in dims.items() if size % step and size > 1}


def _dims_of_convolution(product: Value) -> dict[str, int]:
    params, (left, right) = product.at.eqn.params, product.inputs[:2]
    if params["batch_group_count"] > 1:  # the derivative of a grouped convolution
        return {}
    numbers = params["dimension_numbers"]
    dims = {"channels in": left.shape[numbers.lhs_spec[1]], "channels out": right.shape[numbers.rhs_spec[0]]}
    if dims["channels in"] <= 4:
        del dims["channels in"]
    return dims


def _dims_of_dot(product: Value, weights: Sequence[int], step: int) -> dict[str, int]:
    contracted, batch = product.at.eqn.params["dimension_numbers"]
    features = []
    for operand in weights:
        shape, used = product.inputs[operand].shape, (*contracted[operand], *batch[operand])
        features.append(math.prod(size for axis, size in enumerate(shape) if axis not in used))

    def remainder(size: int) -> int:
        return size % step

    return {
        "contracted dimension": math.prod(product.inputs[0].shape[axis] for axis in contracted[0]),
        "output features": min(features, key=remainder),
    }


def _dims_of_ragged_dot(product: Value) -> dict[str, int]:
    numbers, shape = product.at.eqn.params["ragged_dot_dimension_numbers"], product.inputs[1].shape
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    used = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return {
        "contracted dimension": math.prod(shape[axis] for axis in contracted),
        "output features": math.prod(size for axis, size in enumerate(shape) if axis not in used),
    }
