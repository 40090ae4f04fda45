"""Why an operation has the dtypes that it has, in words: the rule, the neighbour or the island that decided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxmp.engine.classes import Class, classify
from jaxmp.engine.decide import Colour
from jaxmp.engine.graph import Body, Graph, Node, Step
from jaxmp.engine.kinds import Kind, State
from jaxmp.engine.patterns import Island

_FULL = (Kind.FULL, Kind.STRICT)


class Reasons:
    """Answers for one coloured graph.

    Args:
      graph: the graph after colouring.
      changed: what :func:`jaxmp.engine.decide.colour` returned.
      wanted: nodes of results that are wanted in half.
      islands: the islands that have names.
    """

    def __init__(self, graph: Graph, changed: bool, wanted: Iterable[Node], islands: Sequence[Island]) -> None:
        self.changed = changed
        self.scopes = {node: step.names for step in _leaves(graph.body) for node in step.nodes if node is not None}
        self.islands = {node: island.name for island in islands for node in island.nodes}
        self.above: dict[Node, Node] = {}
        self.below: dict[Node, Node | None] = {node: None for node in wanted}  # None: the result of the function
        self.cause: dict[Node, Node] = {}
        for _ in range(2):  # once more for what comes round a loop
            for node in graph.nodes:
                self._look_up(node)
            for node in reversed(graph.nodes):
                self._look_down(node)

    def _look_up(self, node: Node) -> None:
        for operand in node.inputs:
            if node not in self.above and (_is_half(operand) or operand in self.above):
                self.above[node] = operand if _is_half(operand) else self.above[operand]
            drags = operand.state >= State.FULL and not (operand.state is State.FULL and operand.has_half_copy)
            if node not in self.cause and drags and (operand.kind in _FULL or operand in self.cause):
                self.cause[node] = operand if operand.kind in _FULL else self.cause[operand]

    def _look_down(self, node: Node) -> None:
        if node in self.below:
            return
        for user in node.users:
            if user.kind is Kind.HALF or user in self.below:
                self.below[node] = user if user.kind is Kind.HALF else self.below[user]
                return

    def of(self, step: Step) -> str:
        """Why the operation of an equation without bodies is computed as it is."""
        node = step.node
        if step.kind is Kind.KEPT:
            return step.reason
        if not self.changed:
            is_product = classify(step.eqn.primitive.name) is Class.HALF
            return step.reason if is_product else "no product in half: nothing changes"
        if node is None:
            return step.reason or "no floating result"
        reason = self._of_node(node, step)
        island = self.islands.get(node)
        return reason if island is None or node.colour not in (Colour.FULL, Colour.ROUND) else f"{island}: {reason}"

    def _of_node(self, node: Node, step: Step) -> str:
        if node.colour == Colour.ROUND:
            return "computed in float32, rounded once for the half operations that read it"
        if node.kind is Kind.CLEAR:
            return "moves data that only half operations read" if node.colour == Colour.HALF else "moves data"
        if node.reason and (node.kind is not Kind.INFER or node.colour == Colour.FULL):
            return node.reason
        if node.colour == Colour.HALF:
            return f"between {self._name(self.above.get(node), step)} and {self._name(self.below.get(node), step)}"
        if node.colour == Colour.FULL:
            return f"goes on in float32 after {self._name(self.cause.get(node), step)}"
        return "leads to no product" if node.state is State.HALF else "no product before it"

    def _name(self, node: Node | None, step: Step) -> str:
        if node is None:
            return "the result"
        if node.kind is Kind.SOURCE:
            return f"an argument in {node.dtype.name}"
        scope = "/".join(self.scopes.get(node, ()))
        return node.name if scope == "/".join(step.names) or not scope else f"{node.name} of {scope}"

    def of_bodies(self, step: Step) -> str:
        """What is decided of an equation with bodies as a whole."""
        name, params = step.eqn.primitive.name, step.eqn.params
        text = {
            "scan": f"a loop of {params.get('length')} trips, decided inside",
            "while": "a loop of unknown trips, decided inside; one is counted",
            "cond": "decided inside each branch; all are counted",
            "custom_jvp_call": "decided inside; its derivative rule when that runs",
            "custom_vjp_call": "decided inside; its derivative rules when they run",
        }.get(name, "decided inside")
        held = {join.reason: None for join in step.joins if join is not None and join.kind in _FULL and join.reason}
        return "; ".join([text, *(f"float32: {reason}" for reason in held)]) if self.changed else text


def _is_half(node: Node) -> bool:
    return node.kind is Kind.HALF or (node.kind is Kind.SOURCE and node.dtype.itemsize == 2)


def _leaves(body: Body) -> Iterator[Step]:
    for step in body.steps:
        if step.bodies is None:
            yield step
        for inner in step.inner:
            yield from _leaves(inner)


def trips_of(eqn: Any) -> int | None:
    """How often the bodies of an equation run; None if that is known only when they do."""
    if eqn.primitive.name == "while":
        return None
    return int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
