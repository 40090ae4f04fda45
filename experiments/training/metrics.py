"""Compute metrics of a batch, and read them without making the device wait."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import jax
import jax.numpy as jnp

# After this many steps, the device has computed the metrics, and further steps are in its queue.
_STEPS_LATE = 8


def accuracy(logits: jax.Array, labels: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Return the share of examples whose label has the largest logit.

    The result is a float32 scalar. If n logits are tied for the largest, the example counts 1/n, the chance of a
    correct guess. Logits are tied more often in half precision than in float32. argmax takes the first of the tied
    logits, which would bias the result.

    Args:
      logits: float32 (batch, classes).
      labels: int32 (batch,).
      where: bool (batch,), the examples that count; None for all. If none counts, the result is nan.
    """
    largest = logits.max(axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    ties = (logits == largest).sum(axis=-1, dtype=jnp.float32)
    return jnp.where(chosen[:, 0] == largest[:, 0], 1 / ties, 0).mean(where=where)


class PendingMetrics:
    """A queue of metrics on the device, which are read as floats some steps later."""

    def __init__(self) -> None:
        self._pending: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()

    def push(self, step: int, metrics: dict[str, jax.Array]) -> Iterator[tuple[int, dict[str, float]]]:
        """Add a step's metrics, and yield the metrics that are old enough."""
        self._pending.append((step, metrics))
        return self._pop(_STEPS_LATE)

    def drain(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield all remaining metrics, after the device has computed them."""
        return self._pop(0)

    def _pop(self, leave: int) -> Iterator[tuple[int, dict[str, float]]]:
        while len(self._pending) > leave:
            step, metrics = self._pending.popleft()
            yield step, {name: float(value) for name, value in jax.device_get(metrics).items()}
