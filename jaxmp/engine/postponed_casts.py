"""Postpone the author's casts of weights to half precision: each reader casts instead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxmp.base.dtypes import is_half
from jaxmp.base.graphs import reachable
from jaxmp.engine.nodes import Node
from jaxmp.engine.states import CLEAR, KEPT, SOURCE
from jaxmp.program.primitives import CAST, PICKS, Trait, with_trait
from jaxmp.program.values import CARRY

_FLOAT32, _JOINED = np.dtype(np.float32), with_trait(Trait.JOINS)


def postpone_casts(nodes: Sequence[Node]) -> None:
    """Turn the author's casts of weights to half into moves, and note their dtypes.

    Moves of data are not readers. If a weight is broadcast, looked up or used several times, the backward pass sums its
    cotangents. After one early cast, this sum would be in half precision. With a cast in each reader, the sum is in
    float32.
    """
    for node in nodes:
        if is_cast_to_half(node):
            are_weights = all(
                operand.original_dtype == _FLOAT32 and not operand.is_cast_once for operand in node.inputs
            )
            if are_weights and _depends_on_arguments(node) and not node.in_rule:
                node.kind, node.postponed_cast = CLEAR, node.original_dtype
        elif node.kind is CLEAR and node.name in PICKS and len(node.inputs) == 1:
            node.postponed_cast = node.inputs[0].postponed_cast
        elif node.name in _JOINED:
            dtypes = {operand.postponed_cast for operand in node.inputs}
            if len(dtypes) == 1 and None not in dtypes:
                node.kind, node.postponed_cast = CLEAR, dtypes.pop()


def is_cast_to_half(node: Node) -> bool:
    """Return whether a node is a cast to half that the author wrote."""
    is_cast = node.name == CAST and node.step is not None and node.step.kind is KEPT
    return is_cast and is_half(node.original_dtype)


def _depends_on_arguments(node: Node) -> bool:
    def follow(node: Node) -> Sequence[Node]:
        if node.const is not None:
            return ()
        return node.inputs[:1] if node.name == CARRY else node.inputs

    return any(node.kind is SOURCE and node.const is None for node in reachable([node], follow))
