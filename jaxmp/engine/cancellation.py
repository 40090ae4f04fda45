"""Keep products in float32 if they cancel in a difference.

The distance ``|x|² + |y|² - 2xy`` is small compared with its terms. If the terms came from products in half precision,
the result would be mostly rounding error. The same holds for a constant minus any other product if a root, a logarithm
or a division magnifies small differences, as in ``sqrt(1 - p²)``. The same rule keeps a function that approaches 1 in
float32, such as the tanh in ``log(1 - tanh(x)²)``. The product before the function stays half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxmp.base.graphs import reachable
from jaxmp.engine.graph_paths import ROOTS, SCALES, SQUARES, multiple_of
from jaxmp.engine.nodes import Graph, Node, Step, shape_read
from jaxmp.engine.raised_states import States
from jaxmp.engine.states import CLEAR, HALF, INFER, JOIN, Rule, State
from jaxmp.program.equations import is_literal
from jaxmp.program.primitives import BOUNDS, LOGARITHMS, PRODUCTS, SUMS, Trait, with_trait

Vectors = tuple[Node, Node]

_POWERS = with_trait(Trait.POWER)
_MULTIPLICATIONS = with_trait(Trait.MULTIPLIES)
_SIGNED = with_trait(Trait.KEEPS_MAGNITUDE)
_BETWEEN = SCALES | _SIGNED | BOUNDS | {"select_n"}
_KEEP_DIGITS = _POWERS | (_BETWEEN - _MULTIPLICATIONS)
_ROUNDED = PRODUCTS | with_trait(Trait.SATURATES)
"""The operations whose half result would spoil a difference."""
_NO_EPSILON = 0.1
"""The constant from which a difference can cancel. Smaller constants are added to avoid a division by zero."""


def raise_cancelled(graph: Graph, states: States) -> None:
    """Make products and saturating functions float32 if they cancel in a difference."""
    if not any(node.kind is HALF and node.name in PRODUCTS for node in graph.nodes):
        return
    cancelled_in: dict[Node, Node] = {}  # the sum in which a value cancels
    for node in graph.nodes:
        if node.name in SUMS and not _is_part_of_sum(node):
            for product in _distances(node):
                cancelled_in.setdefault(product.same, node)
    for step in graph.steps:
        for difference in _magnified_differences(step):
            for value in _values_to_raise(difference):
                cancelled_in.setdefault(value.same, difference)
    for node in graph.nodes:  # also values that a loop or a derivative computes again
        if node.same in cancelled_in and (node.name in PRODUCTS or node.kind in (INFER, JOIN)):
            states.raise_to(node, State.FLOAT32, Rule.CANCELLATION, cancelled_in[node.same])


def _is_part_of_sum(node: Node) -> bool:
    """Return whether a sum is the only reader of a value or of a multiple of it."""
    while len(node.users) == 1:
        node = node.users[0]
        if node.name in SUMS:
            return True
        if multiple_of(node) is node:
            return False
    return False


def _terms(total: Node) -> list[Node]:
    """Return the terms of a sum without their constant factors.

    A repeated term is listed twice.
    """
    terms, stack = list[Node](), list(total.inputs)
    while stack:
        term = multiple_of(stack.pop())
        if term.name in SUMS and len(term.users) == 1:
            stack += term.inputs
        else:
            terms.append(term)
    return terms


def _vectors(value: Node) -> Vectors | None:
    """Return two vectors if ``value`` sums their elementwise products, else None.

    Constant factors are left out.
    """
    if value.name in PRODUCTS and len(value.inputs) == 2:
        return multiple_of(value.inputs[0]), multiple_of(value.inputs[1])
    if value.name == "reduce_sum":
        summed = multiple_of(value.inputs[0], SCALES | {"select_n"})
        return _vectors(summed) if summed.name in PRODUCTS else _factors(summed)  # the diagonal of a Gram matrix
    return None


def _factors(value: Node) -> Vectors | None:
    """Return the two factors of an elementwise product or a square, or None."""
    is_outer = value.name in PRODUCTS and value.kind is INFER
    if (value.name == "mul" or is_outer) and len(value.inputs) == 2:
        return multiple_of(value.inputs[0]), multiple_of(value.inputs[1])
    if value.name in _POWERS and value.inputs:
        base = multiple_of(value.inputs[0], SCALES | _SIGNED)
        return base, base
    return None


def _squared_vector(value: Node) -> Node | None:
    """Return a vector if ``value`` is the sum of its squares, else None.

    A Gram matrix does not count, because it also sums products of different vectors.
    """
    if value.name in SQUARES:  # the square of a norm
        root = value.inputs[0].origin
        return _squared_vector(multiple_of(root.inputs[0])) if root.name == "sqrt" else None
    vectors = _vectors(value)
    if vectors is None:
        return None
    first, second = vectors
    is_sum = value.name == "reduce_sum" or len(value.shape) < len(shape_read(value, value.inputs[0]))
    return first if first is second and is_sum else None


def _distances(total: Node) -> Iterator[Node]:
    """Yield the products that cancel as in a distance.

    Another term of the sum is the squared norm of a factor. Or the product is a Gram matrix, and its diagonal is
    another term.
    """
    terms = _terms(total)
    squared = {vector for term in terms if (vector := _squared_vector(term)) is not None}
    for term in terms:
        if term.name not in PRODUCTS:
            continue
        vectors = _vectors(term) or ()
        is_gram_and_diagonal = len(set(vectors)) == 1 and terms.count(term) > 1
        if is_gram_and_diagonal or not squared.isdisjoint(vectors):
            yield term


def _has_constant_term(total: Node) -> bool:
    """Return whether one of the terms of a sum is a constant number of at least ``_NO_EPSILON``."""
    constants = [term.origin for term in total.inputs if term.is_constant]
    if len(constants) != 1:
        return False
    (constant,) = constants
    return constant.shape == () and constant.const is not None and constant.const[1] >= _NO_EPSILON


def _magnified_differences(step: Step) -> list[Node]:
    """Return differences of a constant and a value whose small errors a step magnifies.

    Between the difference and the step may be scales, other factors, bounds and an epsilon, as in
    ``sqrt(max((1 - x) * (1 + x), 0) + 1e-6)``. A step that the user makes half rounds its operands itself.
    """
    if step.kind is HALF:
        return []
    if step.eqn.primitive.name == "log1p":  # log1p(-x) and log1p(-x + 1e-6) are logarithms of 1 - x
        operands = [operand.origin for operand in step.operands if operand is not None]
        return [operand for operand in operands if operand.name == "neg" or _is_negated_with_epsilon(operand)]
    values = reachable([operand.origin for operand in _magnified_operands(step)], _small_with)
    return [value for value in values if _is_difference(value) and _has_constant_term(value)]


def _is_difference(node: Node) -> bool:
    """Return whether a value is a difference, or a sum with a negated term."""
    return node.name == "sub" or (node.name in SUMS and any(term.origin.name == "neg" for term in node.inputs))


def _is_negated_with_epsilon(node: Node) -> bool:
    """Return whether a value is a negated value plus a constant."""
    variables = [term for term in node.inputs if not term.is_constant]
    if node.name not in SUMS or len(variables) != 1:
        return False
    return variables[0].origin.name == "neg" or (node.name == "sub" and node.inputs[0].is_constant)


def _small_with(node: Node) -> list[Node]:
    """Return the operands that make a value small if they are small."""
    variables = [operand.origin for operand in node.inputs if not operand.is_constant]
    if node.name in SUMS:
        return variables if len(variables) == 1 and not _is_difference(node) else []  # without the epsilon
    if node.name == "mul":
        return variables
    return variables if node.name in _BETWEEN and len(variables) == 1 else []


def _magnified_operands(step: Step) -> list[Node]:
    """Return the operand of a root or a logarithm, or the divisor of a division.

    A root may be a power with an exponent below 1.
    """
    operands = [operand for operand in step.operands if operand is not None]
    name = step.eqn.primitive.name
    if name == "div":
        return operands[1:]
    if name == "pow":
        exponent: Any = step.eqn.invars[1]
        return operands[:1] if is_literal(exponent) and np.ndim(exponent.val) == 0 and exponent.val < 1 else []
    return operands if name in ROOTS | LOGARITHMS else []


def _values_to_raise(total: Node) -> list[Node]:
    """Return the products and saturating functions in a sum, and the values in between.

    The values in between are scales, powers, magnitudes, bounds and selections.
    """
    values = [node for node in reachable([*total.inputs, *_terms(total)], _kept_from) if node.after_product]
    return values if any(node.name in _ROUNDED for node in values) else []


def _kept_from(node: Node) -> Sequence[Node]:
    """Return the operands whose digits a value keeps."""
    if node.kind in (CLEAR, JOIN):
        return node.inputs
    if node.name in _KEEP_DIGITS or _is_scaled(node):
        variables = {operand for operand in node.inputs if operand.after_product}
        return [*variables] if len(variables) == 1 else ()
    return ()


def _is_scaled(node: Node) -> bool:
    """Return whether a value is another value times a scale, or divided by it, or a square."""
    if node.name not in _MULTIPLICATIONS:
        return False
    first, second = (operand.is_constant or not operand.after_product for operand in node.inputs)
    is_square = node.name == "mul" and node.inputs[0] is node.inputs[1]
    return second or is_square or (node.name == "mul" and first)
