"""The decision on one value."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxmp.engine.nodes import Node
from jaxmp.engine.states import Rule, State


class Decision(NamedTuple):
    """The decision on a value and on the operation that computes it.

    Attributes:
      dtype: the dtype of the value.
      compute: the dtype in which the operation computes; None if it keeps its original dtypes or only moves data.
      postponed_cast: the half dtype of the author's postponed cast, which each reader performs; None without one. The
        value itself is float32.
      state: the state of the value.
      rule: the rule that raised the state last; None if no rule raised it.
      cause: the node that triggered this rule, if there is one.
    """

    dtype: np.dtype
    compute: np.dtype | None
    postponed_cast: np.dtype | None
    state: State
    rule: Rule | None
    cause: Node | None

    @property
    def value_dtype(self) -> np.dtype:
        """Return the dtype in which readers see the value, after a postponed cast."""
        return self.postponed_cast or self.dtype
