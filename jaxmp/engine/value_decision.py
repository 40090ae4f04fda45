"""The decision on one value: the dtypes in which it is computed, stored and read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxmp.base.dtypes import is_half
from jaxmp.engine.nodes import Node
from jaxmp.engine.raised_states import States
from jaxmp.engine.states import CLEAR, HALF, KEPT, SOURCE, Rule, State
from jaxmp.program.primitives import CAST

_FLOAT32 = np.dtype(np.float32)

Dtypes = tuple[np.dtype | None, np.dtype, np.dtype]
"""The first three fields of a :class:`Decision`."""
Casts = tuple[np.dtype, ...]
"""The dtypes to which a reader casts a value, one after the other; empty for no cast.

A cast to the dtype in which the value is stored does nothing.
"""


class Decision(NamedTuple):
    """The decision on a value and on the operation that computes it.

    Attributes:
      compute_dtype: the dtype in which the operation computes; None if it keeps its original dtypes or only moves data.
      stored_dtype: the dtype of the value in the rewritten program.
      value_dtype: the dtype in which all readers see the value. It differs from the stored dtype if each reader
        performs the author's cast to half (see ``postponed_casts.py``).
      state: the state of the value.
      rule: the rule that raised the state last; None if no rule raised it.
      cause: the node that triggered this rule, if there is one.
    """

    compute_dtype: np.dtype | None
    stored_dtype: np.dtype
    value_dtype: np.dtype
    state: State
    rule: Rule | None = None
    cause: Node | None = None

    @property
    def has_float32_result(self) -> bool:
        """Return whether the operation computes in half and returns float32."""
        return is_half(self.compute_dtype) and self.stored_dtype == _FLOAT32

    @property
    def is_cast_by_readers(self) -> bool:
        """Return whether each reader casts the value in the author's place."""
        return self.value_dtype != self.stored_dtype

    def casts_for(self, dtype: np.dtype | None = None) -> Casts:
        """Return the casts with which a reader reads the value.

        ``dtype`` is the dtype in which the reader computes; None if it reads any dtype.
        """
        casts = (self.value_dtype,) if self.is_cast_by_readers else ()
        return casts if dtype is None or dtype in casts else (*casts, dtype)


def original_dtypes(node: Node) -> Dtypes:
    """Return the dtypes of an operation that keeps its original dtypes."""
    dtype = node.argument_dtype or node.original_dtype
    return None, dtype, dtype


def decided_dtypes(node: Node, states: States, decision_of: Mapping[Node, Decision]) -> Dtypes:
    """Return the dtypes of an operation and of its result.

    Args:
      node: the operation.
      states: the states of all values, which no rule raises any more.
      decision_of: the decisions on its operands.
    """
    if node.kind is CLEAR and node.inputs:
        return _dtypes_of_move(node, decision_of[node.inputs[0]])
    if node.kind in (SOURCE, CLEAR, KEPT):
        return original_dtypes(node)
    is_half_originally = is_half(node.original_dtype)
    half = node.original_dtype if is_half_originally or node.half is None else node.half
    if states.has_float32_result(node):
        return half, _FLOAT32, _FLOAT32
    state = states[node]
    if state >= State.FLOAT32:
        return _FLOAT32, _FLOAT32, _FLOAT32
    if node.kind is HALF or (state is State.HALF and node.before_product):
        return half, half, half
    return original_dtypes(node)


def _dtypes_of_move(node: Node, operand: Decision) -> Dtypes:
    """Return the dtypes of a move of data, which computes nothing."""
    if node.is_cast_by_readers:
        return None, operand.stored_dtype, node.original_dtype
    if node.name == CAST:  # jaxmp's own cast to float32, or a cast to the same dtype
        return None, operand.stored_dtype, operand.stored_dtype
    return None, operand.value_dtype, operand.value_dtype
