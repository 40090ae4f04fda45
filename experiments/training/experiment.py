"""A task that is ready to train, its metrics, and the description of its step.

The training scripts make it, and the training loop and `compare` use it.
"""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxmp

Batch = dict[str, jax.Array]
# After this many steps, the device has computed the metrics, and further steps are in its queue.
_STEPS_LATE = 8


class Closing(NamedTuple):
    """Named numbers and texts that a run adds to its summary."""

    numbers: dict[str, float]
    texts: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A task under a policy, ready to train.

    Attributes:
      loss_fn: ``loss_fn(params, model_state, batch, rng) -> (loss, model_state, metrics)``.
      step: the train step, ``step(state, batch) -> (state, metrics)``.
      eval_step: ``eval_step(state, batch) -> metrics``.
      init_params: makes fresh params from a seed.
      create: makes the initial state from params. The params belong to the state then and must not be used again.
      train_batches: ``train_batches(seed, start=0)`` yields batches without end, from the batch with number ``start``.
        A batch depends only on the seed and on the batch's number, so a resumed run sees the same batches.
      test_batches: returns the held-out batches, the same every time.
      steps: the number of steps to train.
      batch_size: the examples per step, counted in ``unit``.
      precision: the policy and the loss scale as text, and under ``data`` the origin of the data, if known.
      unit: the unit of the speed, ``"examples"`` or ``"tokens"``.
      closing: makes further numbers and texts for the summary, such as a sample, from the trained state and its
        held-out metrics.
      create_on_mesh: makes the initial state from a seed on several devices; None for one device.
      cast_plan: makes autocast's plan from the arguments of the loss function; None without autocast.
    """

    loss_fn: Callable[..., Any]
    step: Any
    eval_step: Callable[[jaxmp.TrainState, Batch], dict[str, jax.Array]]
    init_params: Callable[[int], Any]
    create: Callable[[Any], jaxmp.TrainState]
    train_batches: Callable[..., Iterator[Batch]]
    test_batches: Callable[[], Iterable[Batch]]
    steps: int
    batch_size: int
    precision: dict[str, str]
    unit: str = "examples"
    closing: Callable[[jaxmp.TrainState, dict[str, float]], Closing] = lambda state, test: Closing({}, {})
    create_on_mesh: Callable[[int], jaxmp.TrainState] | None = None
    cast_plan: Callable[..., jaxmp.CastPlan] | None = None

    def init(self, seed: int) -> jaxmp.TrainState:
        """Return a fresh state."""
        if self.create_on_mesh is not None:
            return self.create_on_mesh(seed)
        return self.create(self.init_params(seed))

    def evaluate(self, state: jaxmp.TrainState) -> dict[str, float]:
        """Return the metrics of ``eval_step``, averaged over the held-out examples.

        The call waits for the device.
        """
        sizes, results = [], []
        for batch in self.test_batches():
            sizes.append(len(jax.tree.leaves(batch)[0]))
            results.append(self.eval_step(state, batch))
        results = jax.device_get(results)
        return {
            name: sum(size * float(metrics[name]) for size, metrics in zip(sizes, results, strict=True)) / sum(sizes)
            for name in results[0]
        }


def describe(experiment: Experiment, state: jaxmp.TrainState, batch: Batch, folder: Path) -> None:
    """Write ``plan.json`` and ``memory.json`` of a step that has run.

    The plan is autocast's cast plan, or else the audit of the step. The memory comes from the program that the step has
    already compiled. On a mesh the step would be compiled again, so there is no ``memory.json``. If a file cannot be
    made, there is only a warning.
    """

    def plan() -> str:
        if experiment.cast_plan is not None:
            return experiment.cast_plan(state.params, state.model_state, batch, None).to_json()
        return jaxmp.inspect.audit(experiment.step, compile=False)(state, batch).to_json()

    def memory() -> str:
        return jaxmp.inspect.memory(experiment.step)(state, batch).to_json()

    files = {"plan.json": plan} if experiment.create_on_mesh else {"plan.json": plan, "memory.json": memory}
    for name, text in files.items():
        try:
            (folder / name).write_text(text())
        except Exception as error:  # the run continues without this file
            warnings.warn(f"this run has no {name}: {error}", stacklevel=2)


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
