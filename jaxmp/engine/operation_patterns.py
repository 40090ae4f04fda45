"""The float32 patterns that a plan names, such as softmax or normalisation. They affect no decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxmp.base.graphs import reachable
from jaxmp.engine.graph_paths import OFFSETS, ROOTS, SCALES, SQUARES, readers_of, value_behind
from jaxmp.engine.nodes import Graph, Node
from jaxmp.engine.states import Rule
from jaxmp.engine.value_decision import Decision
from jaxmp.program.primitives import CHOICES, LOGARITHMS, PRODUCTS, Trait, with_trait

_EXPONENTIALS = with_trait(Trait.EXPONENTIAL)
_PASSED = OFFSETS | CHOICES  # jnp.var has a select_n, because jnp.var may divide by 0
_MASKING = (SCALES - {"div"}) | {"select_n"}
_RULES_OF_PRODUCTS = (Rule.AMPLIFIED, Rule.CANCELLATION, Rule.SEARCH)


@dataclasses.dataclass(frozen=True)
class OperationPattern:
    """Operations that belong together; ``nodes[0]`` identifies the pattern."""

    name: str
    nodes: tuple[Node, ...]


def find_patterns(graph: Graph, decision_of: Mapping[Node, Decision]) -> list[OperationPattern]:
    """Return the patterns of a graph, in whatever dtypes they compute."""
    patterns = list[OperationPattern]()
    for node in graph.nodes:
        decision = decision_of[node]
        pattern = _pattern_of(node) if node.inputs else None
        if pattern is not None:
            patterns.append(pattern)
        elif node.name in PRODUCTS and decision.rule in _RULES_OF_PRODUCTS:
            patterns.append(OperationPattern(str(decision.rule), (node,)))
    return patterns


def _pattern_of(node: Node) -> OperationPattern | None:
    """Return the pattern that a node identifies, or None."""
    if node.name == "div":
        return _softmax(node)
    if node.name == "reduce_sum":
        return _normalisation(node)
    return _logsumexp(node) if node.name in LOGARITHMS else None


def _exponential(value: Node) -> Node | None:
    """Return the exponential in ``value``, or None.

    ``value`` may be the exponential after a mask or a multiplication.
    """
    value = value.origin
    operands = [operand.origin for operand in value.inputs] if value.name in _MASKING else [value]
    return next((operand for operand in operands if operand.name in _EXPONENTIALS), None)


def _softmax(node: Node) -> OperationPattern | None:
    above, below = (operand.origin for operand in node.inputs)
    exponential = _exponential(above)
    summed = below.inputs if below.name == "reduce_sum" or below.name in PRODUCTS else ()
    if exponential is None or exponential not in [_exponential(operand) for operand in summed]:
        return None
    return OperationPattern("softmax", (node, below, exponential, *_differences(exponential)))


def _differences(value: Node) -> list[Node]:
    """Return a list of the first operand if it is a difference, else an empty list."""
    base = value.inputs[0].origin
    return [base] if base.name == "sub" else []


def _logsumexp(node: Node) -> OperationPattern | None:
    total = value_behind(node.inputs[0], OFFSETS | {"abs"})
    exponential = _exponential(total.inputs[0]) if total.name == "reduce_sum" else None
    if exponential is None:
        return None
    return OperationPattern("logsumexp", (node, total, exponential, *_differences(exponential)))


def _normalisation(node: Node) -> OperationPattern | None:
    square = value_behind(node.inputs[0], OFFSETS)
    is_product_with_itself = square.name == "mul" and len({factor.origin for factor in square.inputs}) == 1
    if not is_product_with_itself and square.name not in SQUARES:
        return None
    roots = [reader for reader in _readers_past_offsets(node) if reader.name in ROOTS]
    if not roots or not any(reader.name in SCALES for reader in readers_of(roots[0])):
        return None
    return OperationPattern("normalisation", (node, square, *_differences(square), *roots))


def _readers_past_offsets(node: Node) -> list[Node]:
    """Return readers of a value, also those after offsets, scales, bounds or masks."""
    return [*reachable(readers_of(node), lambda reader: readers_of(reader) if reader.name in _PASSED else ())]
