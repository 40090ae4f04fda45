"""The states of a graph's values while rules raise them."""

from __future__ import annotations

from collections.abc import Iterable

from jaxmp.engine.nodes import Node
from jaxmp.engine.overrides import FLOAT32_RESULT
from jaxmp.engine.states import KEPT, Rule, State


class States(dict[Node, State]):
    """The state of each value, at first its ``initial_state``.

    Attributes:
      rules: the rule that raised the state of a value last.
      causes: the node that triggered this rule, if there is one.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        super().__init__((node, node.initial_state) for node in nodes)
        self.rules: dict[Node, Rule] = {}
        self.causes: dict[Node, Node | None] = {}

    def raise_to(self, node: Node, state: State, rule: Rule, cause: Node | None = None) -> bool:
        """Raise the state of a value if it is lower, and return whether it was lower.

        The state does not change if a region or an override fixes it, or if the operation keeps its dtypes.

        Args:
          node: the value.
          state: the new state.
          rule: the rule that raises the state.
          cause: the node that triggered the rule.
        """
        if state <= self[node] or node.requested or node.kind is KEPT:
            return False
        self[node], self.rules[node], self.causes[node] = state, rule, cause
        return True

    def has_float32_result(self, node: Node) -> bool:
        """Return whether a value is the float32 result of a product with half operands."""
        return node.requested == FLOAT32_RESULT or self.rules.get(node) is Rule.MASK
