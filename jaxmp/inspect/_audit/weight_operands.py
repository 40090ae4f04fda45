"""Find the weights of products, and dimensions not aligned for tensor cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jaxmp.inspect.program.argument_kinds import Leaf
from jaxmp.program.values import Program, Value, depending_on


def weights_in(program: Program, arguments: Sequence[Leaf]) -> Callable[[Value], int]:
    """Return a function that says which operand of a product is its weight, 0 or 1.

    The weight is the operand that does not depend on data. If this is true of both operands or of neither, the second
    operand counts as the weight.

    Args:
      program: the program.
      arguments: the arrays among the arguments, with their kinds.
    """

    def is_data(argument: Value) -> bool:
        if not argument.shape or argument.dtype == "V":  # scalars and random keys are not data
            return False
        return arguments[argument.position].kind not in ("params", "optimizer", "model_state")

    of_data = depending_on(filter(is_data, program.arguments), program.values)

    def weight(product: Value) -> int:
        left, right = (operand in of_data for operand in product.inputs[:2])
        return 0 if right and not left else 1

    return weight


def unaligned(product: Value, weight: int) -> dict[str, int]:
    """Return the dimensions of a product that are not multiples of 16 bytes, by name.

    Only the contracted dimension and the output features of the weight (operand ``weight``) are checked, not the batch
    dimensions. A dimension of 1 is ignored, because such a product is not a matrix product. Up to four input channels
    of a convolution are ignored too, because the first convolution of a model often has so few.
    """
    left, right = product.inputs[:2]
    step = max(16 // min(left.dtype.itemsize, right.dtype.itemsize), 1)
    if product.name == "conv_general_dilated":
        dims = _dims_of_convolution(product)
    elif product.name == "dot_general":
        dims = _dims_of_dot(product, weight)
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


def _dims_of_dot(product: Value, weight: int) -> dict[str, int]:
    contracted, batch = product.at.eqn.params["dimension_numbers"]
    shape, used = product.inputs[weight].shape, (*contracted[weight], *batch[weight])
    return {
        "contracted dimension": math.prod(shape[axis] for axis in contracted[weight]),
        "output features": math.prod(size for axis, size in enumerate(shape) if axis not in used),
    }


def _dims_of_ragged_dot(product: Value) -> dict[str, int]:
    numbers, shape = product.at.eqn.params["ragged_dot_dimension_numbers"], product.inputs[1].shape
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    used = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return {
        "contracted dimension": math.prod(shape[axis] for axis in contracted),
        "output features": math.prod(size for axis, size in enumerate(shape) if axis not in used),
    }
