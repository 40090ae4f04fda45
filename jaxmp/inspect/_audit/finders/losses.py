"""Find half losses, and float16 gradients without a loss scale.

"Half" means float16 or bfloat16. The backward pass begins with the cotangent of the loss, which is 1. If the program
multiplies the loss by a loss scale, the backward pass multiplies this 1 by the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jaxmp._internals.jax.sources import scopes_and_transforms
from jaxmp.engine.graph_paths import SCALES
from jaxmp.inspect._audit.evidence import Audited, Fault, Faults
from jaxmp.program.primitives import Trait, with_trait
from jaxmp.program.values import Value, computed_at, constant, depending_on, leading_to

_SCALING = SCALES | with_trait(Trait.CASTS, Trait.PERMUTES, Trait.REPEATS)
"""The two bits of a mark.

The first bit means that the value depends on the cotangent of the loss. The second bit means that the value depends on
this cotangent times a loss scale.
"""


def half_losses(audited: Audited) -> Faults:
    """Find a half loss.

    A loss is the only floating scalar among the results, or a scalar that the program differentiates.
    """
    remedy = "compute the loss in float32: cast the model's results before it"
    scalars = [value for value in audited.program.results if value.is_float and not value.shape]
    if len(scalars) == 1 and scalars[0].is_half:
        what = f"the only scalar among the results is {scalars[0].dtype.name}"
        yield Fault(computed_at(scalars[0]), what, remedy)
    for value in _differentiated_scalars(audited):
        if value.is_half:
            yield Fault(value.at, f"the scalar that is differentiated is {value.dtype.name}", remedy)


def _differentiated_scalars(audited: Audited) -> Iterator[Value]:
    """Yield the scalars of the forward pass that are differentiated.

    The source line of such a scalar is a line at which the backward pass begins.
    """
    starts = set[tuple[str, str]]()
    for seed in _seeds(audited):
        if not any(operand.shape for operand in seed.inputs):
            starts.add((seed.at.path, seed.at.source))
    for value in audited.program.values:
        equation = value.equation
        if equation is None or equation.phase != "forward" or (equation.path, equation.source) not in starts:
            continue
        if not value.shape and "jvp" in scopes_and_transforms(equation.eqn)[1]:
            yield value


def unscaled_float16(audited: Audited) -> Faults:
    """Find float16 products in a backward pass without a loss scale.

    A program scales the loss if its backward pass multiplies the cotangent of the loss by a loss scale. It is not
    enough that the optimizer has a loss scale, because the user may have forgotten ``jaxmp.value_and_grad``.
    """
    products = [
        value for value, product in audited.products if product.phase == "backward" and "float16" in product.operands
    ]
    products = _unscaled(products, audited)
    if products:
        count = f"{len(products)} products of the backward pass in float16"
        what = f"{count}, and the loss is not scaled: small gradients become 0"
        yield Fault(
            products[0].at,
            what,
            "scale the loss: jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale()) with jaxmp.value_and_grad, or for NNX "
            "jaxmp.nnx.Optimizer(model, tx, loss_scale=jaxmp.DynamicLossScale()), or use bfloat16",
        )


def _unscaled(products: Sequence[Value], audited: Audited) -> list[Value]:
    """Return the products that depend on the cotangent of a loss, but not on a scaled one."""
    seeds = _seeds(audited)
    of_seeds = depending_on(seeds, audited.program.values)
    scaled = depending_on([seed for seed in seeds if _is_loss_scale(seed, audited)], audited.program.values)
    return [product for product in products if product in of_seeds and product not in scaled]


def _seeds(audited: Audited) -> list[Value]:
    """Return the first values of the backward pass: multiples of the cotangent 1."""
    seeds: dict[Value, None] = {}
    for value in audited.program.values:
        if value.equation is None or value.equation.phase != "backward" or value.name not in _SCALING:
            continue
        floats = [operand for operand in value.inputs if operand.is_float]
        is_first = not any(operand.shape for operand in floats) and any(map(_is_one, floats))
        if is_first or any(operand in seeds for operand in floats):
            seeds[value] = None
    return list(seeds)


def _is_one(value: Value) -> bool:
    number = constant(value)
    return number is not None and number.shape == () and abs(float(number)) == 1


def _is_loss_scale(seed: Value, audited: Audited) -> bool:
    """Return whether ``seed`` is a scalar cotangent times a loss scale.

    A loss scale is a constant power of two of at least 8, or is computed from a scalar argument that is not a param.
    """
    floats = [operand for operand in seed.inputs if operand.is_float]
    if seed.name != "mul" or any(math.prod(operand.shape) != 1 for operand in floats):
        return False
    return any(_is_constant_scale(factor) or _is_scale_of_arguments(factor, audited) for factor in floats)


def _is_constant_scale(value: Value) -> bool:
    number = constant(value)
    if number is None:
        return False
    factor = abs(float(number.reshape(())))
    return factor >= 8 and math.frexp(factor)[0] == 0.5


def _is_scale_of_arguments(value: Value, audited: Audited) -> bool:
    """Return whether a scalar argument that is not a param is among the sources of ``value``.

    In a loop over steps, a loss scale also depends on params, because it shrinks if their gradients overflow.
    """
    if constant(value) is not None:
        return False
    arguments = [source for source in leading_to([value]) if source.name == "argument"]
    scalars = [argument for argument in arguments if math.prod(argument.shape) == 1]
    return any(audited.arguments[scalar.position].kind != "params" for scalar in scalars)
