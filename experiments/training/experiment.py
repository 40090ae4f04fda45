"""The interface between training scripts, the training loop and `compare`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxmp
from experiments.training import mesh

Batch = dict[str, jax.Array]


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

    def examples(self, seed: int) -> str:
        """Return a hash of the first batch's labels or tokens, to recognise the data.

        Floats are left out, because a policy may round them.
        """
        leaves = jax.tree.leaves(mesh.on_host(next(self.train_batches(seed))))
        whole = [leaf.tobytes() for leaf in leaves if np.issubdtype(leaf.dtype, np.integer)]
        return hashlib.sha256(b"".join(whole)).hexdigest()[:12]

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
