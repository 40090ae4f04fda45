"""The reason for an operation's dtypes: a rule or a neighbour."""

from __future__ import annotations

import numpy as np

from jaxmp.base.dtypes import is_half
from jaxmp.base.graphs import nearest_ends
from jaxmp.engine.decide import Decisions
from jaxmp.engine.marks import path_of
from jaxmp.engine.nodes import Node, Step
from jaxmp.engine.states import Kind, Rule, State
from jaxmp.program.primitives import Class, classify
from jaxmp.program.values import CARRY

_BY_RULE = {
    Rule.AMPLIFIED: "amplified by {}",
    Rule.CANCELLATION: "a term that others cancel in {}",
    Rule.SEARCH: "in a loop that runs until it converges",
    Rule.CARRY: "added to the state of a loop",
    Rule.UPDATED: "added to a value that no product computed",
    Rule.FEEDS: "feeds only float32: {}",
    Rule.FOLLOWS: "follows float32: {}",
    Rule.RANGE: "a constant beyond the largest half number",
}


class Reasons:
    """The reasons for the dtypes of one program."""

    def __init__(self, decisions: Decisions) -> None:
        graph = decisions.graph
        self.changes, self._decision_of = graph.changes, decisions.decision_of
        self.scopes = {node: step.names for step in graph.steps for node in step.nodes if node is not None}
        nodes, ends = graph.nodes, dict.fromkeys(graph.wanted)  # the end None stands for the function's result
        self.above = nearest_ends(nodes, lambda node: node.inputs, self._is_half)
        self.below = nearest_ends(nodes[::-1], lambda node: node.users, self._is_half, known=ends)

    def of(self, step: Step) -> str:
        """Return the reason for the dtypes of an equation."""
        node = step.node
        if step.bodies is not None:
            return self._of_bodies(step)
        if step.kind is Kind.KEPT:
            return step.reason
        if not self.changes:
            is_product = classify(step.eqn.primitive.name) is Class.HALF
            return step.reason if is_product else "no product in half: nothing changes"
        if node is None:
            return step.reason or "no floating result"
        return self._of_node(node, step)

    def _of_node(self, node: Node, step: Step) -> str:
        decision = self._decision_of[node]
        if node.kind is Kind.CLEAR:
            return "moves data that only half operations read" if decision.compute_dtype else "moves data"
        in_float32 = decision.compute_dtype == np.float32
        if in_float32 and decision.rule is not None:
            is_cast_to_integers = decision.rule is Rule.AMPLIFIED and decision.cause is None  # its result has no node
            cause = "a cast to integers" if is_cast_to_integers else self._name(decision.cause, step)
            return _BY_RULE[decision.rule].format(cause)
        if step.reason and (node.kind is not Kind.INFER or in_float32):
            return step.reason
        if decision.compute_dtype and not in_float32:
            return f"between {self._name(self.above.get(node), step)} and {self._name(self.below.get(node), step)}"
        return "leads to no product" if decision.state is State.HALF else "no product before it"

    def _name(self, node: Node | None, step: Step) -> str:
        if node is None:
            return "the result"
        if node.kind is Kind.SOURCE:
            return f"an argument in {self._decision_of[node].stored_dtype.name}"
        scopes = path_of(self.scopes.get(node, ()))
        return node.name if not scopes or scopes == path_of(step.names) else f"{node.name} of {'/'.join(scopes)}"

    def _of_bodies(self, step: Step) -> str:
        text = _place_of_decision(step)
        carries = [join for join in step.joins if join is not None and join.name == CARRY]
        states = [join for join in carries if self._is_float32(join) and self._decision_of[join].rule is Rule.CARRY]
        return f"{text}; a state in float32" if self.changes and states else text

    def _is_float32(self, node: Node) -> bool:
        """Return whether the operation of a value computes in float32."""
        return self._decision_of[node].compute_dtype == np.float32

    def _is_half(self, node: Node) -> bool:
        """Return whether a value is a half argument, or the result of an operation that is half on its own."""
        decision = self._decision_of[node]
        is_half_operation = node.kind is Kind.HALF and decision.state is State.HALF
        return is_half_operation or (node.kind is Kind.SOURCE and is_half(decision.stored_dtype))


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
