"""Decide which carries are half, and which loops have float32 products.

The carry of a stack of layers is a residual stream, and is half. Every other float32 carry stays float32, because a sum
in bfloat16 loses terms that are less than a 256th of the sum. In these bodies of loops, ``h`` is the carry::

    h + relu(h @ w)             # a stack of layers: each iteration reads a weight w of its own
    h + 0.1 * tanh(h @ p)       # an integrator: all iterations read the same weight p
    h + 0.001 * tanh(h @ w)     # an integrator too: half precision would round away most of the small term
    h - 0.1 * grad(f)(h, x)     # gradient descent: f and its derivative both read the minibatch x
    h + x                       # a running sum: no product

A *cycle* is a group of values in a loop that depend on each other through a carry. Two kinds of cycles are searched:

- Cycles through products decide which carries are half. In the first example, ``h``, the product, the relu and the sum
  are such a cycle. It goes through a stack of layers, because its product reads a new weight in each iteration.
- Cycles without products are *accumulations*: the values to which something is added in each iteration. In the second
  example, these are ``h`` and the sum. If one of their carries is float32, all of them are. The other operations of the
  body, such as the product and the ``tanh``, are decided by other rules.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxmp.base.graphs import cycles, reachable
from jaxmp.engine.graph_paths import constant_factor
from jaxmp.engine.nodes import Graph, Node, Step, shape_read
from jaxmp.engine.raised_states import States
from jaxmp.engine.states import HALF, INFER, JOIN, Rule, State
from jaxmp.program.primitives import PRODUCTS, SUMS, Trait, with_trait
from jaxmp.program.searches import is_search

_LOOKUPS = with_trait(Trait.LOOKS_UP)


def raise_in_loops(graph: Graph, states: States) -> None:
    """Keep carries and the products of searches in float32.

    A search is a loop that runs until a value converges. Only the carry of a loop over a stack of layers is half.
    """
    for step in graph.steps:
        if step.bodies is None or not step.bodies.is_loop:
            continue
        _decide_carries(graph, step, states)
        if is_search(step.bodies):
            _raise_products(graph, step, states)


def _raise_products(graph: Graph, step: Step, states: States) -> None:
    """Make the products in a search float32.

    With the rounding errors of half products, the search may never converge.
    """
    for node in _nodes_in(graph, step):
        if node.loop in step.loops and node.kind is HALF and node.name in PRODUCTS:
            states.raise_to(node, State.FLOAT32, Rule.SEARCH)


def _nodes_in(graph: Graph, step: Step) -> Sequence[Node]:
    """Return the nodes of the inputs and bodies of a step."""
    return graph.nodes[step.span.start : step.span.stop]


class _Loop(NamedTuple):
    """A loop of the graph.

    Attributes:
      step: the equation of the loop.
      carries: the joins of its carries.
      nodes: the carries, and all nodes inside of the loop.
    """

    step: Step
    carries: set[Node]
    nodes: Sequence[Node]

    def cycles(self, *, through_products: bool) -> list[list[Node]]:
        """Return the cycles of the loop, and of the loops inside of it.

        A cycle goes from one iteration to the next, so it has a carry of one of these loops.
        """
        members = set(self.nodes)  # without the initial values of the carries, which are outside of the loop

        def operands(node: Node) -> list[Node]:
            if node.name in PRODUCTS and not through_products:
                return []
            return [operand for operand in node.inputs if operand in members]

        return cycles(self.nodes, operands)


def _decide_carries(graph: Graph, step: Step, states: States) -> None:
    """Make the carry of a stack of layers half, and every other float32 carry float32.

    The accumulations of a float32 carry are float32 too.
    """
    carries = {join for join in step.joins if join is not None}
    if not carries:
        return
    nodes = [node for node in _nodes_in(graph, step) if node.loop in step.loops or node in carries]
    loop = _Loop(step, carries, nodes)
    accumulations = loop.cycles(through_products=False)
    half_carries = _half_carries(loop, accumulations)
    for carry in carries:
        states.raise_to(carry, State.HALF if carry in half_carries else State.FLOAT32, Rule.CARRY)
    float32_carries = carries - half_carries
    for cycle in accumulations:
        if not float32_carries.isdisjoint(cycle):
            for node in cycle:
                if node.kind in (INFER, JOIN):
                    states.raise_to(node, State.FLOAT32, Rule.CARRY)


def _half_carries(loop: _Loop, accumulations: Sequence[Sequence[Node]]) -> set[Node]:
    """Return the carries that are half.

    These are the carries of a stack of layers, and those that are half in the traced program. If a region or an
    override requests a dtype for a value of an accumulation, this request decides the carries of the accumulation.
    """
    layered = _in_stack_of_layers(loop, accumulations)
    requested_half = _with_level(accumulations, ["half"])
    requested_float32 = _with_level(accumulations, ["float32", "tensorfloat32"])
    half_carries = set[Node]()
    for carry in loop.carries:
        is_layer_carry = carry in layered and carry not in requested_float32
        if carry in requested_half or is_layer_carry or carry.original_dtype != np.float32:
            half_carries.add(carry)
    return half_carries


def _with_level(accumulations: Sequence[Sequence[Node]], levels: Collection[str]) -> set[Node]:
    """Return the nodes of accumulations for which a region or an override requests one of the levels."""
    nodes = set[Node]()
    for cycle in accumulations:
        if any(node.requested in levels for node in cycle):
            nodes.update(cycle)
    return nodes


# -- stacks of layers --------------------------------------------------------------------------------------------------


def _in_stack_of_layers(loop: _Loop, accumulations: Sequence[Sequence[Node]]) -> set[Node]:
    """Return the nodes on cycles through a stack of layers."""
    elements = _elements(loop)
    small_sums = {node for cycle in accumulations for node in cycle if _adds_small_term(node)}
    layered = set[Node]()
    for cycle in loop.cycles(through_products=True):
        has_carry = not loop.carries.isdisjoint(cycle)  # not only a carry of a loop inside
        if has_carry and small_sums.isdisjoint(cycle) and _goes_through_layers(frozenset(cycle), elements):
            layered.update(cycle)
    return layered


_SMALL_FACTOR = 2**-6
"""A term with a smaller constant factor keeps at most two of bfloat16's eight bits in the sum."""


def _adds_small_term(node: Node) -> bool:
    """Return whether a node is a sum that multiplies a term by a small constant, as an integrator does."""
    if node.name not in SUMS:
        return False
    factors = [constant_factor(operand) for operand in node.inputs]
    return min(factors) < _SMALL_FACTOR * max(factors)


def _elements(loop: _Loop) -> set[Node]:
    """Return the matrices that differ between iterations.

    These are the elements of scanned arrays, and the matrices that an index picks.
    """
    assert loop.step.bodies is not None
    scanned = loop.step.operands[loop.step.bodies.carries.stop :]
    # A scanned array and its elements are one node. It has the shape of the array, whose first axis is the iterations.
    elements = {node for node in scanned if node is not None and len(node.shape) > 2}
    picked = {node for node in loop.nodes if node.name in _LOOKUPS and len(node.shape) > 1}
    return elements | picked


def _goes_through_layers(cycle: Collection[Node], elements: Collection[Node]) -> bool:
    """Return whether a product on the cycle reads a new weight in each iteration."""
    for product in cycle:
        is_product = product.name in PRODUCTS and not (product.step is not None and product.step.is_sum)
        if is_product and any(_is_read_once(element, cycle) for element in _elements_read(product, cycle, elements)):
            return True
    return False


def _elements_read(product: Node, cycle: Collection[Node], elements: Collection[Node]) -> list[Node]:
    """Return the elements from which a weight of a product is computed, without values of the cycle.

    A weight is a matrix that is not on the cycle. The coefficients of a Runge-Kutta stage are not a matrix.
    """

    def operands(node: Node) -> Sequence[Node]:
        return () if node in elements else [operand for operand in node.inputs if operand not in cycle]

    weights = [operand for operand in product.inputs if operand not in cycle and _is_matrix(operand, product)]
    return [node for node in reachable(weights, operands) if node in elements]


def _is_matrix(operand: Node, product: Node) -> bool:
    """Return whether an operand has an axis that is neither contracted nor batched."""
    assert product.step is not None
    if product.name != "dot_general":  # the kernel of a convolution has an axis of output channels
        return True
    contracted, batch = product.step.eqn.params["dimension_numbers"]
    sides = zip(product.step.operands, contracted, batch, strict=True)
    return any(
        side is operand and len(shape_read(product, operand)) > len(contracted_axes) + len(batch_axes)
        for side, contracted_axes, batch_axes in sides
    )


def _is_read_once(element: Node, cycle: Collection[Node]) -> bool:
    """Return whether exactly one operation on the cycle reads ``element``.

    The weight of a layer is read once. The minibatch of a gradient descent is read twice: by the function, and by its
    derivative.
    """
    computed = reachable([element], lambda node: [user for user in node.users if user not in cycle])
    readers = {user for node in computed for user in node.users if user in cycle}
    return len(readers) == 1
