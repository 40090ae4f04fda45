"""Decide which values are in half precision, on the whole graph.

Each value has a state: undecided, half, float32, or beyond half (float32, because half precision cannot represent the
value). Rules raise states until no state rises any more. Then the undecided values between two products become half. A
state only rises, so the dtypes do not depend on the order of the rules. docs/autocast.md lists the rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxmp.base.graphs import reachable
from jaxmp.engine.activations import find_activations, find_half_copies, is_stream
from jaxmp.engine.amplifiers import raise_amplified
from jaxmp.engine.cancellation import raise_cancelled
from jaxmp.engine.casts import move_casts
from jaxmp.engine.graph_paths import readers_of
from jaxmp.engine.joins import raise_joins
from jaxmp.engine.loops import raise_in_loops
from jaxmp.engine.nodes import Graph, Node
from jaxmp.engine.raised_states import States
from jaxmp.engine.states import CLEAR, FULL, HALF, INFER, JOIN, KEPT, SOURCE, Rule, State
from jaxmp.engine.value_decision import Decision
from jaxmp.program.primitives import CAST

_FLOAT32 = np.dtype(np.float32)


def decide(graph: Graph) -> dict[Node, Decision]:
    """Return the decision on every value of a graph."""
    if not graph.changes:
        return {node: _as_written(node) for node in graph.nodes}
    states = States(graph.nodes)
    for raise_states in RAISERS:
        raise_states(graph, states)
    activations = find_activations(graph.nodes, states)
    neighbours = _Neighbours(states, activations, find_half_copies(graph, states, activations))
    neighbours.settle(graph.nodes)
    neighbours.lower(graph.nodes)
    decision_of: dict[Node, Decision] = {}
    for node in graph.nodes:
        compute, dtype = _dtypes(node, states[node], decision_of)
        rule, cause = states.rules.get(node), states.causes.get(node)
        decision_of[node] = Decision(dtype, compute, node.postponed_cast, states[node], rule, cause)
    move_casts(graph.nodes, decision_of)
    return decision_of


def _as_written(node: Node) -> Decision:
    """Return the decision on a value whose operation keeps its dtypes."""
    return Decision(node.arrives_in or node.written, None, None, node.initial_state, None, None)


RAISERS = (raise_joins, raise_amplified, raise_cancelled, raise_in_loops)
"""The rules that do not read the states of neighbours. Their order does not matter."""


class _Neighbours(NamedTuple):
    """The rules about neighbours.

    Attributes:
      states: the states that the rules raise.
      activations: the activations, each with the number of the last product before it.
      half_copies: the values that are also read in half.
    """

    states: States
    activations: Mapping[Node, int]
    half_copies: Collection[Node]

    def settle(self, nodes: Iterable[Node]) -> None:
        """Apply the rules until no state rises."""
        waiting = dict.fromkeys(nodes)
        while waiting:
            node, _ = waiting.popitem()
            if self._rises(node):
                waiting.update(dict.fromkeys(node.users))
                waiting.update(dict.fromkeys(_computed_from(node)))

    def _rises(self, node: Node) -> bool:
        """Apply the rules to a node; return whether its state rose."""
        states = self.states
        if node.kind is CLEAR:
            highest = max(node.inputs, key=states.__getitem__, default=None)
            return highest is not None and states.raise_to(node, states[highest], Rule.FOLLOWS, highest)
        if node.kind not in (INFER, JOIN) or self._is_stream(node):
            return False
        dragging = max(filter(self._drags, node.inputs), key=states.__getitem__, default=None)
        if dragging is not None:
            return states.raise_to(node, states[dragging], Rule.FOLLOWS, dragging)
        if node.kind is INFER and node.after_product:
            readers = readers_of(node)
            if readers and all(map(self._is_float32, readers)):
                return states.raise_to(node, State.FLOAT32, Rule.FEEDS, readers[0])
        return False

    def _is_stream(self, node: Node) -> bool:
        return is_stream(node, self.states, self.activations)

    def _drags(self, operand: Node) -> bool:
        """Return whether a float32 operand makes its reader float32.

        An operand with a half copy does not make its reader float32, because the reader may read the copy. An operand
        that half precision cannot represent always makes its reader float32.
        """
        state = self.states[operand]
        return state is State.BEYOND_HALF or (state is State.FLOAT32 and operand not in self.half_copies)

    def _is_float32(self, reader: Node) -> bool:
        """Return whether a reader computes in float32.

        A cast to float32 that the author wrote does not count as such a reader. Nor does a product that reads half and
        has a float32 result.
        """
        is_cast = reader.name == CAST and reader.kind is FULL
        return self.states[reader] >= State.FLOAT32 and not is_cast and not reader.has_float32_result

    def lower(self, nodes: Sequence[Node]) -> None:
        """Make undecided nodes half if they read a half value, directly or indirectly."""
        states = self.states
        starts = list[Node]()
        for node in nodes:
            if _is_half_as_written(node) or (node.kind is INFER and self._is_undecided_stream(node)):
                states[node] = State.HALF
            has_rounded_copy = states[node] is State.FLOAT32 and node in self.half_copies
            if states[node] is State.HALF or node.postponed_cast is not None or has_rounded_copy:
                starts.append(node)

        def lowered(node: Node) -> list[Node]:
            return [user for user in node.users if states[user] < State.FLOAT32 and user.kind in (INFER, CLEAR, JOIN)]

        for node in reachable(starts, lowered):
            if states[node] is State.UNDECIDED and node.kind in (INFER, JOIN):
                states[node] = State.HALF

    def _is_undecided_stream(self, node: Node) -> bool:
        return self.states[node] is State.UNDECIDED and self._is_stream(node)


def _computed_from(node: Node) -> list[Node]:
    """Return ``INFER`` operations that a node reads, directly or through moves."""
    below = reachable(node.inputs, lambda operand: operand.inputs if operand.kind is CLEAR else ())
    return [operand for operand in below if operand.kind is INFER]


def _is_half_as_written(node: Node) -> bool:
    """Return whether a value is a half argument, or a half result of an operation that keeps its dtypes."""
    dtype = node.arrives_in if node.kind is SOURCE else node.written
    return node.kind in (SOURCE, KEPT) and dtype is not None and dtype.itemsize == 2


def _dtypes(node: Node, state: State, decision_of: Mapping[Node, Decision]) -> tuple[np.dtype | None, np.dtype]:
    """Return the compute dtype of an operation, and the dtype of its result.

    The compute dtype is None if the operation keeps its original dtypes or only moves data.
    """
    if node.kind is SOURCE:
        return None, node.arrives_in or node.written
    if node.kind is CLEAR:
        if not node.inputs:
            return None, node.written
        below = decision_of[node.inputs[0]]
        # The node is a postponed cast, or a cast that the engine treats as a move.
        is_cast = node.postponed_cast is not None or node.name == CAST
        return None, below.dtype if is_cast else below.value_dtype
    if node.kind is KEPT:
        return None, node.written
    half = node.written if node.written.itemsize == 2 or node.half is None else node.half
    if node.has_float32_result:
        return half, _FLOAT32
    if state >= State.FLOAT32:
        return _FLOAT32, _FLOAT32
    if node.kind is HALF or (state is State.HALF and node.before_product):
        return half, half
    return None, node.written
