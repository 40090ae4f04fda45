"""Keep products in float32 if they cancel in a difference.

Two files search for such products. The docstring of each has an example:

- ``distances.py``: a product that cancels with squared norms, as in ``|x|² + |y|² - 2 x·y``
- ``magnified_differences.py``: a product that cancels with a constant, if the small difference is magnified, as in
  ``sqrt(1 - p²)``
"""

from __future__ import annotations

from jaxmp.engine.distances import products_of_distances
from jaxmp.engine.magnified_differences import values_of_magnified_differences
from jaxmp.engine.nodes import Graph
from jaxmp.engine.raised_states import States
from jaxmp.engine.states import HALF, INFER, JOIN, Rule, State
from jaxmp.program.primitives import PRODUCTS


def raise_cancelled(graph: Graph, states: States) -> None:
    """Make products and saturating functions float32 if they cancel in a difference.

    Equal values elsewhere are float32 too, because a loop or a derivative may compute a value again.
    """
    if not any(node.kind is HALF and node.name in PRODUCTS for node in graph.nodes):
        return
    # For a product in both, the plan names the distance.
    cancelled_in = values_of_magnified_differences(graph) | products_of_distances(graph)
    for node in graph.nodes:
        is_decided_here = node.name in PRODUCTS or node.kind in (INFER, JOIN)  # moves follow their operands
        if is_decided_here and node.same in cancelled_in:
            states.raise_to(node, State.FLOAT32, Rule.CANCELLATION, cancelled_in[node.same])
