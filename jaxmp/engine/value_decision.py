"""The decision on one value: the dtypes in which it is computed and stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxmp.base.dtypes import is_half
from jaxmp.engine.nodes import Node
from jaxmp.engine.raised_states import States
from jaxmp.engine.states import CLEAR, HALF, KEPT, SOURCE, Rule, State

_FLOAT32 = np.dtype(np.float32)

Dtypes = tuple[np.dtype | None, np.dtype]
"""The first two fields of a :class:`Decision`."""


class Decision(NamedTuple):
    """The decision on a value and on the operation that computes it.

    Attributes:
      compute_dtype: the dtype in which the operation computes; None if it keeps its original dtypes or only moves data.
      stored_dtype: the dtype of the value in the rewritten program.
      state: the state of the value.
      rule: the rule that raised the state last; None if no rule raised it.
      cause: the node that triggered this rule, if there is one.
    """

    compute_dtype: np.dtype | None
    stored_dtype: np.dtype
    state: State
    rule: Rule | None = None
    cause: Node | None = None

    @property
    def has_float32_result(self) -> bool:
        """Return whether the operation computes in half and returns float32."""
        return is_half(self.compute_dtype) and self.stored_dtype == _FLOAT32


def original_dtypes(node: Node) -> Dtypes:
    """Return the dtypes of an operation that keeps its original dtypes."""
    dtype = node.argument_dtype or node.original_dtype
    return None, dtype


def decided_dtypes(node: Node, states: States, decision_of: Mapping[Node, Decision]) -> Dtypes:
    """Return the dtypes of an operation and of its result.

    Args:
      node: the operation.
      states: the states of all values, which no rule raises any more.
      decision_of: the decisions on its operands.
    """
    if node.kind is CLEAR and node.inputs:
        return None, decision_of[node.inputs[0]].stored_dtype
    if node.kind in (SOURCE, CLEAR, KEPT):
        return original_dtypes(node)
    is_half_originally = is_half(node.original_dtype)
    half = node.original_dtype if is_half_originally or node.half is None else node.half
    if states.has_float32_result(node):
        return half, _FLOAT32
    state = states[node]
    if state >= State.FLOAT32:
        return _FLOAT32, _FLOAT32
    if node.kind is HALF or (state is State.HALF and node.before_product):
        return half, half
    return original_dtypes(node)
