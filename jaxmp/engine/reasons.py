"""The reason for an operation's dtypes: a rule, a neighbour or a pattern."""

from __future__ import annotations

import numpy as np

from jaxmp.base.graphs import nearest_ends
from jaxmp.engine.decisions import Decisions
from jaxmp.engine.graph import Node, Step
from jaxmp.engine.marks import path_of
from jaxmp.engine.states import Kind, Rule, State
from jaxmp.program.primitives import Class, classify

_BY_RULE = {
    Rule.AMPLIFIED: "amplified by {}",
    Rule.CANCELLATION: "a term that others cancel in {}",
    Rule.SEARCH: "in a loop that runs until it converges",
    Rule.CARRY: "added to the state of a loop",
    Rule.FEEDS: "feeds only float32: {}",
    Rule.FOLLOWS: "follows float32: {}",
    Rule.RANGE: "a constant beyond the largest half number",
}


class Reasons:
    """The reasons for the dtypes of one program.

    Attributes:
      groups: the names of the float32 patterns.
    """

    def __init__(self, decisions: Decisions) -> None:
        graph, self.changed = decisions.graph, decisions.changes
        self.scopes = {node: step.names for step in graph.steps for node in step.nodes if node is not None}
        patterns = [pattern for pattern in decisions.patterns if pattern.nodes[0].compute == np.float32]
        self.groups = [pattern.name for pattern in patterns]
        self.group_of = {node.same: pattern.name for pattern in patterns for node in pattern.nodes}
        nodes, ends = graph.nodes, dict.fromkeys(decisions.wanted)  # the end None stands for the function's result
        self.above = nearest_ends(nodes, lambda node: node.inputs, _is_half_value)
        self.below = nearest_ends(nodes[::-1], lambda node: node.users, _is_half_value, known=ends)

    def of(self, step: Step) -> str:
        """Return the reason for the dtypes of an equation."""
        node = step.node
        if step.bodies is not None:
            return self._of_bodies(step)
        if step.kind is Kind.KEPT:
            return (
                step.reason if node is None or node.deferred_cast is None else "put off to each operation that reads it"
            )
        if not self.changed:
            is_product = classify(step.eqn.primitive.name) is Class.HALF
            return step.reason if is_product else "no product in half: nothing changes"
        if node is None:
            return step.reason or "no floating result"
        pattern = self.pattern_of(step)
        return f"{pattern}: {self._of_node(node, step)}" if pattern else self._of_node(node, step)

    def pattern_of(self, step: Step) -> str:
        """Return the name of the pattern of an equation, or an empty text."""
        node = step.node
        is_float32 = node is not None and node.compute == np.float32 and step.kind is not Kind.KEPT
        return self.group_of.get(node.same, "") if node is not None and is_float32 and step.bodies is None else ""

    def _of_node(self, node: Node, step: Step) -> str:
        if node.kind is Kind.CLEAR:
            return "moves data that only half operations read" if node.compute else "moves data"
        in_float32 = node.compute == np.float32
        if in_float32 and node.rule is not None:
            return _BY_RULE[node.rule].format(self._name(node.cause, step))
        if step.reason and (node.kind is not Kind.INFER or in_float32):
            return step.reason
        if node.compute and not in_float32:
            return f"between {self._name(self.above.get(node), step)} and {self._name(self.below.get(node), step)}"
        return "leads to no product" if node.state is State.HALF else "no product before it"

    def _name(self, node: Node | None, step: Step) -> str:
        if node is None:
            return "the result"
        if node.kind is Kind.SOURCE:
            return f"an argument in {node.dtype.name}"
        scopes = path_of(self.scopes.get(node, ()))
        return node.name if not scopes or scopes == path_of(step.names) else f"{node.name} of {'/'.join(scopes)}"

    def _of_bodies(self, step: Step) -> str:
        text = _place_of_decision(step)
        carries = [join for join in step.joins if join is not None and join.name == "carry" and join.compute]
        states = [join for join in carries if join.compute == np.float32 and join.rule is Rule.CARRY]
        return f"{text}; a state in float32" if self.changed and states else text


def _place_of_decision(step: Step) -> str:
    """Return where and when the operations in the bodies of a step are decided."""
    bodies = step.bodies
    if bodies is None or bodies.is_call:
        has_rules = bodies is not None and bodies.has_backward_rule
        rule = "; its derivative rules when they run" if has_rules else "; its derivative rule when that runs"
        return f"decided inside{rule if bodies is not None and bodies.has_rule else ''}"
    if bodies.is_conditional:
        return "decided inside each branch; all branches are counted"
    if bodies.length is None:
        return "a loop of unknown trips, decided inside; one trip is counted"
    return f"a loop of {bodies.length} trips, decided inside"


def _is_half_value(node: Node) -> bool:
    return (node.kind is Kind.HALF and node.state is State.HALF) or (
        node.kind is Kind.SOURCE and node.dtype.itemsize == 2
    )
