"""Keep the operands of amplifiers in float32.

An amplifier turns a small error of an operand into a large error of the result. In bfloat16 a coordinate of 301.4
becomes 302, which is another pixel, and a phase of 301.4 becomes noise. A search back from each amplifier finds the
values that must be float32:

- In general, the search goes back through moves, casts, scales, offsets, bounds, selections, concatenations,
  products and sums over an axis, because these operations keep the low digits. The search ends at an activation.
- From a factorisation or a solver, the search goes back to the nearest products, which are float32 too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxmp.base.graphs import reachable
from jaxmp.engine.graph_paths import SCALES, TOTALS, readers_of
from jaxmp.engine.nodes import Graph, Node, Step
from jaxmp.engine.raised_states import States
from jaxmp.engine.states import CLEAR, HALF, INFER, JOIN, Rule, State
from jaxmp.program.equations import aval_of
from jaxmp.program.primitives import (
    AMPLIFIERS,
    CAST,
    CHOICES,
    EXTREMES,
    PRODUCTS,
    SOLVERS,
    SUMS,
    Trait,
    with_trait,
)

_QUANTISED = frozenset({"int8", "int4", "int2", "uint8", "uint4", "uint2"})
"""The integers of quantised networks. A cast to one of them is not an amplifier."""
_CHOICES = CHOICES | with_trait(Trait.CONCATENATES)


def raise_amplified(graph: Graph, states: States) -> None:
    """Make values float32 if a search back from an amplifier finds them.

    If a product is found, equal products elsewhere are float32 too, such as those that a derivative computes again.
    """
    amplifier_of: dict[Node, Node | None] = {}  # for the products, by the first equal product
    for step in graph.steps:
        for node in _amplified_values(step):
            if not node.after_product:
                continue
            if node.name in PRODUCTS:
                amplifier_of.setdefault(node.same, step.node)
            elif node.kind in (INFER, JOIN):
                states.raise_to(node, State.FLOAT32, Rule.AMPLIFIED, step.node)
    for node in graph.nodes:
        if node.name in PRODUCTS and node.same in amplifier_of:
            states.raise_to(node, State.FLOAT32, Rule.AMPLIFIED, amplifier_of[node.same])


def _amplified_values(step: Step) -> Iterable[Node]:
    """Return the values whose low digits become high digits of the results of a step.

    A step that the user makes half rounds its operands itself, so it has no such values.
    """
    if step.kind is HALF:
        return ()
    if step.eqn.primitive.name in SOLVERS:
        return reachable(_floats(step), _back_to_products)
    return reachable(_amplified_operands(step), _keepers_of_digits)


def _floats(step: Step) -> list[Node]:
    return [node for node in step.operands if node is not None]


def _amplified_operands(step: Step) -> Sequence[Node]:
    """Return the operands whose low digits affect the result of a step."""
    name = step.eqn.primitive.name
    if name in AMPLIFIERS:
        return _floats(step)[: AMPLIFIERS[name]]
    if name == CAST:
        dtype = aval_of(step.eqn.outvars[0]).dtype
        is_index = dtype.kind in "iu" and dtype.name not in _QUANTISED
        return _floats(step) if is_index else ()
    return ()


def _back_to_products(node: Node) -> Sequence[Node]:
    return () if node.name in PRODUCTS else node.inputs


def _keepers_of_digits(node: Node) -> Sequence[Node]:
    """Return the operands whose low digits the result of ``node`` keeps."""
    if node.name in EXTREMES or not node.after_product:
        return ()
    if node.kind in (CLEAR, JOIN) or node.name in TOTALS or node.name == CAST:
        return node.inputs
    computed = [operand for operand in node.inputs if operand.after_product]
    if node.name in PRODUCTS or node.name in SCALES:
        return computed if len(computed) == 1 else ()
    is_choice = node.name in _CHOICES
    if is_choice or node.name in SUMS:
        # The search ends at a choice or a sum that one of these readers reads: an activation, or a residual stream.
        # A concatenation counts as a choice: the angles of rotary embeddings, and points beside shifted points.
        # (A sum over an axis of selected elements is usually a sum over a mask.)
        is_activation = is_choice or len(computed) > 1
        reads = PRODUCTS if node.name == "select_n" else PRODUCTS | TOTALS
        is_read = any(reader.name in reads for reader in readers_of(node))
        return () if is_activation and is_read else computed
    return ()
