"""Find activations, residual streams, and values that are read in half."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from jaxmp.base.graphs import reachable
from jaxmp.engine.graph_paths import SQUARES, value_behind
from jaxmp.engine.nodes import Graph, Node, shape_read
from jaxmp.engine.raised_states import States
from jaxmp.engine.states import CLEAR, HALF, INFER, JOIN, Rule, State
from jaxmp.program.primitives import EXTREMES, MONOTONE, Class, Trait, of_class, with_trait
from jaxmp.program.values import CARRY

_ELEMENTWISE = of_class(Class.POINTWISE, Class.INFER, Class.WIDEST)
# A nonlinearity before a product reads a float32 activation in half. These operations are not nonlinearities.
_NO_NONLINEARITIES = with_trait(Trait.SUMS, Trait.MULTIPLIES) | {"select_n"}


def find_activations(nodes: Sequence[Node], states: States) -> dict[Node, int]:
    """Return the activations, each with the position of the last product before it.

    An activation is computed from a product of half operands by elementwise operations and moves of data. A value that
    a loop accumulates in float32 is not an activation. A difference of activations of two products is not an activation
    either, and neither is a square. So a sum with such a term is not a residual stream.
    """
    activations: dict[Node, int] = {}
    for number, node in enumerate(nodes):
        rule = states.rules.get(node)
        is_half_carry = rule is Rule.CARRY and node.name == CARRY
        operands: Sequence[Node] = ()
        is_half_product = node.kind is HALF and (states[node] is State.HALF or rule is Rule.MASK)
        if is_half_product or (is_half_carry and states[node] is State.HALF):
            activations[node] = number
        elif rule is Rule.CARRY:
            continue
        elif node.kind is JOIN or (node.kind is CLEAR and node.name not in EXTREMES):
            operands = node.inputs
        elif node.name in _ELEMENTWISE:
            operands = [operand for operand in node.inputs if shape_read(node, operand) == node.shape]
        products = {activations[operand] for operand in operands if operand in activations}
        if products and not _is_difference_of_activations(node, products) and not _is_square(node):
            activations[node] = max(products)
    return activations


def _is_difference_of_activations(node: Node, products: Collection[int]) -> bool:
    """Return whether a node subtracts activations of two products.

    ``products`` are the positions of the products from which its operands are computed.
    """
    return node.name == "sub" and len(products) > 1


def _is_square(node: Node) -> bool:
    """Return whether a node is a power of a value, as in a second moment or a modulus.

    A product of two slices of one array, as in a gated layer, is not.
    """
    if node.name == "mul":
        left, right = (value_behind(operand, has_moves=False) for operand in node.inputs)
        return left is right
    return node.name in SQUARES


def is_stream(node: Node, states: States, activations: Mapping[Node, int]) -> bool:
    """Return whether a node is a residual stream.

    A residual stream is a sum of activations of different products; rows of a table may be one of the terms. The terms
    of a softplus are activations of the same product, so their sum is not a stream. A half carry is a stream too.
    """
    if node.name == CARRY:
        return states[node] is State.HALF
    if node.name != "add" or not all([operand in activations or operand.is_looked_up for operand in node.inputs]):
        return False
    products = {activations.get(operand) for operand in node.inputs}  # None for rows of a table
    return len(products) > 1


def find_read_in_half(graph: Graph, states: States, activations: Collection[Node]) -> set[Node]:
    """Return values that some operations read in half, even if the values are float32."""
    read_in_half = list(graph.wanted)
    for node in graph.nodes:
        is_half_product = node.kind is HALF and (states[node] is State.HALF or states.has_float32_result(node))
        if is_half_product or node.is_cast_to_half:
            read_in_half += node.inputs

    def elements_of(node: Node) -> Sequence[Node]:
        return _moved_from(node) or [operand for operand in node.inputs if _is_elementwise(node, operand)]

    heading = reachable(read_in_half, elements_of)  # values that reach a product through elementwise operations
    starts = [
        operand
        for node in graph.nodes
        if node in heading and node.name not in _NO_NONLINEARITIES
        for operand in node.inputs
        if operand in activations and _is_elementwise(node, operand)
    ]
    return {*reachable([*read_in_half, *starts], _moved_from)}


def _moved_from(node: Node) -> Sequence[Node]:
    is_moved = node.kind is JOIN or (node.kind is CLEAR and node.name in MONOTONE)
    return node.inputs if is_moved else ()


def _is_elementwise(user: Node, operand: Node) -> bool:
    return user.kind is INFER and user.shape == shape_read(user, operand)
