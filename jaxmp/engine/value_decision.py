"""The decision on one value."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxmp.engine.nodes import Node
from jaxmp.engine.states import Rule, State

Casts = tuple[np.dtype, ...]
"""The dtypes to which a reader casts a value, one after the other; empty for no cast."""


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
    rule: Rule | None
    cause: Node | None

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
