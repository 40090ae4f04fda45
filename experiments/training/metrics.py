"""Metrics of a batch, and reading them from the device without making it wait."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import jax
import jax.numpy as jnp

# By then the device has them, and the next steps are queued behind.
_STEPS_LATE = 8


def accuracy(logits: jax.Array, labels: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """The share of examples whose label has the largest logit, a float32 scalar.

    A tie of n logits counts 1/n, the chance of guessing right: half logits tie more often than float32's, and argmax,
    which takes the first (among tokens the most frequent), would count that for or against them. It is faster, too.

    Args:
      logits: float32 (batch, classes).
      labels: int32 (batch,).
      where: bool (batch,), the examples that count; None for all. With none of them it is not a number.
    """
    largest = logits.max(axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    ties = (logits == largest).sum(axis=-1, dtype=jnp.float32)
    return jnp.where(chosen[:, 0] == largest[:, 0], 1 / ties, 0).mean(where=where)


class Late:
    """Step numbers and metrics on the device, handed out as floats some steps after they came in."""

    def __init__(self) -> None:
        self._pending: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()

    def push(self, step: int, metrics: dict[str, jax.Array]) -> Iterator[tuple[int, dict[str, float]]]:
        """Takes a step's metrics and yields those that are old enough."""
        self._pending.append((step, metrics))
        return self._pop(_STEPS_LATE)

    def drain(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields all that is left; waits for the device."""
        return self._pop(0)

    def _pop(self, leave: int) -> Iterator[tuple[int, dict[str, float]]]:
        while len(self._pending) > leave:
            step, metrics = self._pending.popleft()
            yield step, {name: float(value) for name, value in jax.device_get(metrics).items()}
