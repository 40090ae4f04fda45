"""Decide which carries are half, and which loops have float32 products.

The carry of a loop over a stack of layers is a residual stream, and is half. Every other carry stays float32:
recurrent states, integrators, optimizers, running sums. A sum in bfloat16 would lose terms that are less than a 256th
of the sum. A cycle is a group of values in a loop that depend on each other through a carry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxmp.base.graphs import cycles, reachable
from jaxmp.engine.nodes import Graph, Node, Step, shape_read
from jaxmp.engine.raised_states import States
from jaxmp.engine.states import HALF, INFER, JOIN, Rule, State
from jaxmp.program.primitives import PRODUCTS, Trait, with_trait
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
            for node in graph.nodes:
                if node.loop in step.loops and node.kind is HALF and node.name in PRODUCTS:
                    states.raise_to(node, State.FLOAT32, Rule.SEARCH)


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
        """Return the cycles of the loop. A cycle goes from one iteration to the next, so it has a carry."""
        members = set(self.nodes)

        def operands(node: Node) -> list[Node]:
            if node.name in PRODUCTS and not through_products:
                return []
            in_loop = node.inputs[1:] if node in self.carries else node.inputs  # without the initial value of a carry
            return [operand for operand in in_loop if operand in members]

        return cycles(self.nodes, operands)


def _decide_carries(graph: Graph, step: Step, states: States) -> None:
    """Make the carry of a stack of layers half, and every other carry float32.

    The values on the cycles of a float32 carry are float32 too.
    """
    carries = {join for join in step.joins if join is not None}
    if not carries:
        return
    loop = _Loop(step, carries, [node for node in graph.nodes if node.loop in step.loops or node in carries])
    layered = _in_stack_of_layers(loop)
    sums = loop.cycles(through_products=False)
    requested_half = _with_level(sums, ["half"])
    requested_float32 = _with_level(sums, ["float32", "tensorfloat32"])
    float32_carries = set[Node]()
    for carry in carries:
        is_half = carry in requested_half or (carry in layered and carry not in requested_float32)
        if carry.original_dtype == np.float32 and not is_half:
            float32_carries.add(carry)
            states.raise_to(carry, State.FLOAT32, Rule.CARRY)
        else:
            states.raise_to(carry, State.HALF, Rule.CARRY)
    for cycle in sums:
        if not float32_carries.isdisjoint(cycle):
            for node in cycle:
                if node.kind in (INFER, JOIN):
                    states.raise_to(node, State.FLOAT32, Rule.CARRY)


def _in_stack_of_layers(loop: _Loop) -> set[Node]:
    """Return the nodes on cycles through a stack of layers."""
    elements = _elements_of_turns(loop.step, loop.nodes)
    layered = set[Node]()
    for cycle in loop.cycles(through_products=True):
        if not loop.carries.isdisjoint(cycle) and _goes_through_layers(frozenset(cycle), elements):
            layered.update(cycle)
    return layered


def _with_level(cycles: Iterable[Collection[Node]], levels: Collection[str]) -> set[Node]:
    """Return the nodes on cycles for which a region or an override requests one of the levels."""
    nodes = set[Node]()
    for cycle in cycles:
        if any(node.requested in levels for node in cycle):
            nodes.update(cycle)
    return nodes


def _elements_of_turns(step: Step, inside: Iterable[Node]) -> set[Node]:
    """Return the matrices that differ between the iterations of a loop.

    These are the elements of scanned arrays, and the matrices that an index picks.
    """
    assert step.bodies is not None
    scanned = step.operands[step.bodies.start + step.bodies.carry :]
    elements = {node for node in scanned if node is not None and len(node.shape) > 2}
    return elements | {node for node in inside if node.name in _LOOKUPS and len(node.shape) > 1}


def _goes_through_layers(cycle: Collection[Node], elements: Collection[Node]) -> bool:
    """Return whether a product on the cycle reads a new weight in each iteration.

    A layer's weight is a matrix that is read once per iteration. The minibatch of a gradient descent is not a weight,
    because the model and its derivative both read the minibatch. The coefficients of a Runge-Kutta stage are not a
    matrix.
    """

    def outside(nodes: Iterable[Node]) -> list[Node]:
        return [node for node in nodes if node not in cycle]

    for product in cycle:
        if product.name not in PRODUCTS or (product.step is not None and product.step.is_sum):
            continue
        matrices = [operand for operand in product.inputs if _is_matrix(operand, product)]
        for weight in outside(matrices):
            made_of = reachable([weight], lambda node: () if node in elements else outside(node.inputs))
            if any(_is_read_once(node, cycle) for node in made_of if node in elements):
                return True
    return False


def _is_matrix(operand: Node, product: Node) -> bool:
    """Return whether an operand has an axis that is neither contracted nor batched."""
    assert product.step is not None
    if product.name != "dot_general":
        return True
    contracted, batch = product.step.eqn.params["dimension_numbers"]
    sides = zip(product.step.operands, contracted, batch, strict=True)
    return any(
        side is operand and len(shape_read(product, operand)) > len(contracted_axes) + len(batch_axes)
        for side, contracted_axes, batch_axes in sides
    )


def _is_read_once(element: Node, cycle: Collection[Node]) -> bool:
    """Return whether exactly one operation on the cycle reads ``element``."""
    computed = reachable([element], lambda node: [user for user in node.users if user not in cycle])
    readers = {user for node in computed for user in node.users if user in cycle}
    return len(readers) == 1
