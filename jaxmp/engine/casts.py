"""Decide where casts go: after repetitions of a weight, and before moves of data.

*Half* is half precision: float16 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxmp.base.graphs import reachable
from jaxmp.engine.graph import Node
from jaxmp.engine.states import CLEAR, JOIN, KEPT, SOURCE
from jaxmp.program.primitives import MEETS, MONOTONE, PICKS, Trait, with_trait

_FLOAT32, _JOINED = np.dtype(np.float32), with_trait(Trait.JOINS)


def read_in(user: Node, operand: Node) -> np.dtype | None:
    """Return the dtype in which an operation reads an operand.

    The result is None if the operand needs no cast.
    """
    if user.compute is not None:
        return user.compute
    if user.kind in (CLEAR, JOIN):
        return None if user.deferred_cast else operand.deferred_cast
    return operand.written


def put_casts_off(nodes: Sequence[Node]) -> list[Node]:
    """Postpone the author's casts of weights to half: each reader casts instead.

    Moves of data are not readers. If a weight is broadcast, looked up or used several times, the backward pass sums its
    cotangents. After one early cast, this sum would be in half precision. With a cast in each reader, the sum is in
    float32.

    Returns:
      The operands of all casts to half in the author's code, including operands that are not weights.
    """
    cast: list[Node] = []
    for node in nodes:
        if node.name == "convert_element_type" and node.kind is KEPT and node.written.itemsize == 2:
            cast += node.inputs
            are_weights = all(operand.written == _FLOAT32 and not operand.is_cast_once for operand in node.inputs)
            if are_weights and _depends_on_arguments(node) and not node.in_rule:
                node.kind, node.deferred_cast = CLEAR, node.written
        elif node.kind is CLEAR and node.name in PICKS and len(node.inputs) == 1:
            node.deferred_cast = node.inputs[0].deferred_cast
        elif node.name in _JOINED:
            dtypes = {operand.deferred_cast for operand in node.inputs}
            if len(dtypes) == 1 and None not in dtypes:
                node.kind, node.deferred_cast = CLEAR, dtypes.pop()
    return cast


def _depends_on_arguments(node: Node) -> bool:
    def follow(node: Node) -> Sequence[Node]:
        if node.const is not None:
            return ()
        return node.inputs[:1] if node.name == "carry" else node.inputs

    return any(node.kind is SOURCE and node.const is None for node in reachable([node], follow))


def move_casts(nodes: Sequence[Node]) -> None:
    """Cast before a move of data if all readers of the move want one half dtype.

    XLA then fuses a transposition with the product that reads it. If several readers, a loop or a broadcast repeat a
    weight, each reader casts the weight instead.
    """
    for node in reversed(nodes):
        is_moved = node.kind is CLEAR and node.name in MONOTONE and len(node.inputs) == 1 and not node.needs_float32
        if not is_moved or node.dtype != _FLOAT32:
            continue
        wanted = {read_in(user, node) for user in node.users}
        dtype = wanted.pop() if len(wanted) == 1 else None
        if dtype is None or dtype.itemsize != 2 or node.deferred_cast not in (None, dtype):
            continue
        if node.is_cast_once or not _is_repeated(node):
            node.compute, node.dtype, node.deferred_cast = dtype, dtype, None


def _is_repeated(node: Node) -> bool:
    """Return whether a weight has several readers, or a reader that may repeat it."""
    return len(node.users) > 1 or any(user.loop != node.loop or user.name in MEETS for user in node.users)
