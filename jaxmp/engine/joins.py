"""Keep joins in float32 if half precision cannot represent one of their constants.

An example of such a constant is the ``finfo.min`` of a mask.
"""

from __future__ import annotations

from jaxmp.base.dtypes import range_of
from jaxmp.engine.nodes import Graph
from jaxmp.engine.raised_states import States
from jaxmp.engine.states import JOIN, Rule, State


def raise_joins(graph: Graph, states: States) -> None:
    """Make joins of constants beyond half's range float32."""
    for node in graph.nodes:
        if node.kind is JOIN and node.half is not None:
            largest = max((operand.const[1] for operand in node.inputs if operand.const), default=0.0)
            if largest > range_of(node.half)[1]:
                states.raise_to(node, State.BEYOND_HALF, Rule.RANGE)
