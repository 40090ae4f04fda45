"""Postpone the author's casts of weights to half precision: each reader casts instead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxmp.base.graphs import reachable
from jaxmp.engine.nodes import Node
from jaxmp.engine.states import CLEAR, SOURCE, State
from jaxmp.program.primitives import PICKS, Trait, with_trait
from jaxmp.program.values import CARRY

_FLOAT32, _CONCATENATIONS = np.dtype(np.float32), with_trait(Trait.CONCATENATES)


def postpone_casts(nodes: Sequence[Node]) -> None:
    """Turn the author's casts of weights to half into moves, and mark the values that their readers cast.

    Moves of data are not readers. If a weight is broadcast, looked up or used several times, the backward pass sums its
    cotangents. After one early cast, this sum would be in half precision. With a cast in each reader, the sum is in
    float32.
    """
    for node in nodes:
        if node.is_cast_to_half:
            are_weights = all(
                operand.original_dtype == _FLOAT32 and not operand.is_cast_once for operand in node.inputs
            )
            if are_weights and _depends_on_arguments(node) and not node.in_rule:
                node.kind, node.initial_state = CLEAR, State.HALF
                node.is_cast_by_readers = True
        elif node.kind is CLEAR and node.name in PICKS and len(node.inputs) == 1:
            node.is_cast_by_readers = node.inputs[0].is_cast_by_readers
        elif node.name in _CONCATENATIONS and all(operand.is_cast_by_readers for operand in node.inputs):
            node.kind, node.is_cast_by_readers = CLEAR, True


def _depends_on_arguments(node: Node) -> bool:
    def follow(node: Node) -> Sequence[Node]:
        if node.const is not None:
            return ()
        return node.inputs[:1] if node.name == CARRY else node.inputs

    return any(node.kind is SOURCE and node.const is None for node in reachable([node], follow))
