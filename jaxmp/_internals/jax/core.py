"""Private functions and classes of JAX's core, under public names."""

from __future__ import annotations

import collections
from typing import Any

from jax._src.core import Tracer as Tracer
from jax._src.core import eval_jaxpr as eval_jaxpr
from jax._src.core import trace_state_clean as trace_state_clean
from jax._src.interpreters.partial_eval import partial_eval_jaxpr_custom as partial_eval_jaxpr_custom


def evaluate_dimension(dimension: Any, value: int) -> int:
    """Return a symbolic dimension of ``jax.export``, with ``value`` for each symbol."""
    return int(dimension._evaluate(collections.defaultdict(lambda: value)))
