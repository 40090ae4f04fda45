"""The rules by which neighbours decide the precision of a value.

An operation that reads float32 computes in float32, and so does an operation whose result only float32 operations read.
The undecided operations between two half values become half.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxmp.base.dtypes import is_half
from jaxmp.base.graphs import reachable
from jaxmp.engine.activations import is_stream
from jaxmp.engine.graph_paths import readers_of
from jaxmp.engine.nodes import Node
from jaxmp.engine.raised_states import States
from jaxmp.engine.states import CLEAR, INFER, JOIN, KEPT, SOURCE, Rule, State


class Neighbours(NamedTuple):
    """The rules about neighbours.

    Attributes:
      states: the states that the rules raise.
      activations: the activations, each with the number of the last product before it.
      read_in_half: the values that some operations read in half, even if the values are float32.
    """

    states: States
    activations: Mapping[Node, int]
    read_in_half: Collection[Node]

    def settle(self, nodes: Iterable[Node]) -> None:
        """Apply the rules until no state rises."""
        waiting = dict.fromkeys(nodes)
        while waiting:
            node, _ = waiting.popitem()
            if self._rises(node):
                # A reader may now follow this node, and an operand may now feed only float32.
                waiting.update(dict.fromkeys(node.users))
                waiting.update(dict.fromkeys(_computed_from(node)))

    def _rises(self, node: Node) -> bool:
        """Apply the rules to a node; return whether its state rose."""
        states = self.states
        if node.kind is CLEAR:
            highest = max(node.inputs, key=states.__getitem__, default=None)
            return highest is not None and states.raise_to(node, states[highest], Rule.FOLLOWS, highest)
        if node.kind not in (INFER, JOIN):
            return False
        dragging = max(filter(self._drags, node.inputs), key=states.__getitem__, default=None)
        is_stream = self._is_stream(node)
        if dragging is not None and (not is_stream or states[dragging] is State.BEYOND_HALF):
            return states.raise_to(node, states[dragging], Rule.FOLLOWS, dragging)
        if is_stream:
            return False
        if node.kind is INFER and node.after_product:
            readers = readers_of(node)
            if readers and all(map(self._is_float32, readers)):
                return states.raise_to(node, State.FLOAT32, Rule.FEEDS, readers[0])
        return False

    def _is_stream(self, node: Node) -> bool:
        return is_stream(node, self.states, self.activations)

    def _drags(self, operand: Node) -> bool:
        """Return whether a float32 operand makes its reader float32.

        An operand that is also read in half does not, because this reader may read it in half too. An operand that half
        precision cannot represent always makes its reader float32.
        """
        state = self.states[operand]
        return state is State.BEYOND_HALF or (state is State.FLOAT32 and operand not in self.read_in_half)

    def _is_float32(self, reader: Node) -> bool:
        """Return whether a reader computes in float32.

        A cast to float32 that the author wrote does not count as such a reader. Nor does a product that reads half and
        has a float32 result.
        """
        is_float32 = self.states[reader] >= State.FLOAT32
        return is_float32 and not reader.is_cast_to_float32 and not self.states.has_float32_result(reader)

    def lower(self, nodes: Sequence[Node]) -> None:
        """Make undecided nodes half if they read a half value, directly or indirectly.

        A float32 value that is also read in half counts as a half value, and so does an undecided residual stream.
        """
        states = self.states
        starts = list[Node]()
        for node in nodes:
            if _is_half_originally(node) or (node.kind is INFER and self._is_undecided_stream(node)):
                states[node] = State.HALF
            is_read_in_half = states[node] is State.FLOAT32 and node in self.read_in_half
            if states[node] is State.HALF or is_read_in_half:
                starts.append(node)

        def lowered(node: Node) -> list[Node]:
            return [user for user in node.users if states[user] < State.FLOAT32 and user.kind in (INFER, CLEAR, JOIN)]

        for node in reachable(starts, lowered):
            if states[node] is State.UNDECIDED and node.kind in (INFER, JOIN):
                states[node] = State.HALF

    def _is_undecided_stream(self, node: Node) -> bool:
        return self.states[node] is State.UNDECIDED and self._is_stream(node)


def _computed_from(node: Node) -> list[Node]:
    """Return the operands of the kind ``INFER`` that a node reads, directly or through moves."""
    operands = reachable(node.inputs, lambda operand: operand.inputs if operand.kind is CLEAR else ())
    return [operand for operand in operands if operand.kind is INFER]


def _is_half_originally(node: Node) -> bool:
    """Return whether a value is a half argument, or a half result of an operation that keeps its dtypes."""
    dtype = node.argument_dtype if node.kind is SOURCE else node.original_dtype
    return node.kind in (SOURCE, KEPT) and is_half(dtype)
