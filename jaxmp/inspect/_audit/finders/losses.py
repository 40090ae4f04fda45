"""Find half losses, and float16 gradients without a loss scale.

"Half" means float16 or bfloat16. The backward pass begins with the cotangent of the loss, which is 1. If the program
multiplies the loss by a loss scale, the backward pass multiplies this 1 by the loss scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from jaxmp._internals.jax.sources import scopes_and_transforms
from jaxmp.engine.graph_paths import SCALES
from jaxmp.inspect._audit.evidence import Audited, Fault, Faults
from jaxmp.program.primitives import POWERS, SUMS, Trait, with_trait
from jaxmp.program.values import (
    ARGUMENT,
    CARRY,
    Value,
    computed_at,
    constant,
    depending_on,
    is_move_or_cast,
    leading_to,
    origins,
)

_FACTORS = with_trait(Trait.MULTIPLIES)
"""Multiplications and divisions."""
_EXPONENTIALS = with_trait(Trait.EXPONENTIAL)
_SCALING = SCALES | with_trait(Trait.CASTS, Trait.PERMUTES, Trait.REPEATS)
"""Operations whose result is a multiple of their operand."""


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
    products = _unscaled(_float16_backward(audited), audited)
    if products:
        count = f"{len(products)} products of the backward pass in float16"
        what = f"{count}, and the loss is not scaled: small gradients become 0"
        yield Fault(
            products[0].at,
            what,
            "scale the loss: jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale()) with jaxmp.value_and_grad, or for NNX "
            "jaxmp.nnx.Optimizer(model, tx, loss_scale=jaxmp.DynamicLossScale()), or use bfloat16",
        )


def _float16_backward(audited: Audited) -> list[Value]:
    """Return the float16 products of the backward pass."""
    return [
        value for value, product in audited.products if product.phase == "backward" and "float16" in product.operands
    ]


def never_unscaled(audited: Audited) -> Faults:
    """Find an update of params with gradients of a scaled loss that are never divided by the loss scale.

    A constant counts only if the backward pass has float16 products. Otherwise it is a weight of the loss.
    """
    scales = [seed for seed in _seeds(audited) if _is_loss_scale(seed, audited)]
    if not _float16_backward(audited):
        scales = [seed for seed in scales if not any(map(_is_constant_scale, _factors(seed)))]
    if not scales or any(_is_divided_by(_factors(seed), audited) for seed in scales):
        return
    scaled = depending_on(scales, audited.program.values)
    for value in audited.program.values:
        if value.name not in SUMS or value.equation is None or value.at.phase != "update":
            continue
        if any(
            update in scaled and _is_update(param, update) for param, update in itertools.permutations(value.inputs)
        ):
            what = "the loss is multiplied by a loss scale, and the gradients are never divided by it"
            remedy = "divide the gradients by the scale before the optimizer, or use jaxmp.loss_scaling, which does so"
            yield Fault(value.at, what, remedy)
            return  # the other params have the same fault


def _is_update(param: Value, update: Value) -> bool:
    """Return whether ``param`` is an argument or a carry on which ``update`` depends."""
    sources = list(origins(param, is_move_or_cast))
    if not sources or any(source.name not in (ARGUMENT, CARRY) for source in sources):
        return False
    return not leading_to([update]).isdisjoint(sources)


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

    A loss scale is a constant power of two of at least 8, a loss scale of jaxmp, or a scalar that also divides the
    gradients. Any other scalar, such as the weight of an example, is not.
    """
    factors = _factors(seed)
    if any(map(_is_constant_scale, factors)):
        return True
    for argument, _ in _scalar_sources(factors):
        if argument.name == ARGUMENT and audited.arguments[argument.position].is_loss_scale:
            return True
    return _is_divided_by(factors, audited)


def _factors(seed: Value) -> list[Value]:
    """Return the factors of a product of scalars; none for other values."""
    floats = [operand for operand in seed.inputs if operand.is_float]
    is_product = seed.name == "mul" and all(math.prod(operand.shape) == 1 for operand in floats)
    return floats if is_product else []


def _is_constant_scale(value: Value) -> bool:
    number = _number(value)
    return number is not None and abs(number) >= 8 and math.frexp(abs(number))[0] == 0.5


def _number(value: Value) -> float | None:
    """Return the number of a constant scalar; None for other values."""
    numbers = constant(value)
    return float(numbers.reshape(())) if numbers is not None and numbers.size == 1 else None


def _is_divided_by(factors: Sequence[Value], audited: Audited) -> bool:
    """Return whether the update divides the gradients by one of the scalar factors."""
    scales = [_number(factor) for factor in factors if _is_constant_scale(factor)]
    arguments = {argument for argument, _ in _scalar_sources(factors)}
    for value in audited.program.values:
        if value.equation is None or value.at.phase != "update" or value.name not in _FACTORS:
            continue
        for position, operand in enumerate(value.inputs):
            is_divisor = _inverts(value, position)
            if any(source in arguments and is_divisor != inverse for source, inverse in _scalar_sources([operand])):
                return True
            number = _number(operand)
            if number and (number if is_divisor else 1 / number) in scales:
                return True
    return False


def _scalar_sources(values: Iterable[Value]) -> set[tuple[Value, bool]]:
    """Return the arguments from which scalars are computed, and whether they are inverted on the way.

    Only paths through scalars count. In a loop over steps, a loss scale also depends on the gradients, but through
    whole arrays.
    """
    sources = set[tuple[Value, bool]]()
    visited = set[tuple[Value, bool]]()
    stack = [(value, False) for value in values]
    while stack:
        value, is_inverted = stack.pop()
        while is_move_or_cast(value) and len(value.inputs) == 1:
            (value,) = value.inputs
        if math.prod(value.shape) != 1 or (value, is_inverted) in visited:
            continue
        visited.add((value, is_inverted))
        if value.name == ARGUMENT:
            sources.add((value, is_inverted))
        for position, operand in enumerate(value.inputs):
            stack.append((operand, is_inverted != _inverts(value, position)))
    return sources


def _inverts(value: Value, position: int) -> bool:
    """Return whether an operand becomes a divisor, or a negative exponent as in ``2.0**-n``."""
    if value.name in _EXPONENTIALS or (value.name == "pow" and position == 1):
        return value.inputs[position].name == "neg"
    if value.name in POWERS:
        return bool(value.at.eqn.params.get("y", 1) < 0)
    return value.name == "div" and position == 1
