"""Decide where casts go: at each reader, or before moves of data.

*Half* is half precision: float16 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxmp.base.dtypes import is_half
from jaxmp.engine.nodes import Node
from jaxmp.engine.states import CLEAR, JOIN
from jaxmp.engine.value_decision import Decision
from jaxmp.program.primitives import MEETS, MONOTONE

_FLOAT32 = np.dtype(np.float32)


def dtype_read_by(user: Node, operand: Node, decision_of: Mapping[Node, Decision]) -> np.dtype | None:
    """Return the dtype in which an operation reads an operand; None if it reads any dtype."""
    if (compute_dtype := decision_of[user].compute_dtype) is not None:
        return compute_dtype
    return None if user.kind in (CLEAR, JOIN) else operand.original_dtype


def move_casts(nodes: Sequence[Node], decision_of: dict[Node, Decision]) -> None:
    """Cast before a move of data if all readers of the move want one half dtype.

    So ``jax.checkpoint`` saves a value with a ``checkpoint_name`` in half. If several readers, a loop or a broadcast
    repeat a weight, each reader casts the weight instead.

    Args:
      nodes: the nodes of the graph.
      decision_of: the decisions on all nodes. Those on moves are replaced.
    """
    for node in reversed(nodes):
        decision = decision_of[node]
        is_moved = node.kind is CLEAR and node.name in MONOTONE and len(node.inputs) == 1 and not node.needs_float32
        if not is_moved or decision.stored_dtype != _FLOAT32:
            continue
        wanted = {dtype_read_by(user, node, decision_of) for user in node.users}
        dtype = wanted.pop() if len(wanted) == 1 else None
        if dtype is not None and is_half(dtype) and (node.is_cast_once or not _is_repeated(node)):
            decision_of[node] = decision._replace(compute_dtype=dtype, stored_dtype=dtype)


def _is_repeated(node: Node) -> bool:
    """Return whether a weight has several readers, or a reader that may repeat it."""
    return len(node.users) > 1 or any(user.loop != node.loop or user.name in MEETS for user in node.users)
