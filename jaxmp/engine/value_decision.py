"""The decision on one value."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxmp.engine.nodes import Node
from jaxmp.engine.states import Rule, State


class Decision(NamedTuple):
    """The decision on a value and on the operation that computes it.

    Attributes:
      compute_dtype: the dtype in which the operation computes; None if it keeps its original dtypes or only moves data.
      stored_dtype: the dtype of the value in the rewritten program.
      value_dtype: the dtype in which all readers see the value. It is half, and the stored dtype is float32, if each
        reader performs the author's cast to half instead (see ``postponed_casts.py``).
      state: the state of the value.
      rule: the rule that raised the state last; None if no rule raised it.
      cause: the node that triggered this rule, if there is one.
    """

    compute_dtype: np.dtype | None
    stored_dtype: np.dtype
    value_dtype: np.dtype
    state: State
    rule: Rule | None
    cause: Node | None

    @property
    def postponed_cast(self) -> np.dtype | None:
        """Return the half dtype to which each reader casts the value in the author's place, or None."""
        return None if self.value_dtype == self.stored_dtype else self.value_dtype
