"""The interface between a script, the loop that trains it, and `compare`."""

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
    """Numbers and texts, by name, that a run adds to its metrics when it ends."""

    numbers: dict[str, float]
    texts: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One task under one policy, ready to train.

    Attributes:
      loss_fn: ``loss_fn(params, model_state, batch, rng) -> (loss, model_state, metrics)``.
      step: the train step, ``step(state, batch) -> (state, metrics)``.
      eval_step: ``eval_step(state, batch) -> metrics``.
      init_params: seed to fresh params.
      create: params, which it takes over, to the state that training starts from.
      train_batches: seed, and number of the first batch if not 0, to batches for ever; the n-th depends on the seed
        and n only, so that a resumed run sees what it would have seen.
      test_batches: the held-out batches, the same every time.
      steps: how many steps to train.
      batch_size: examples a step, of whatever ``unit`` counts.
      precision: what the policy and the loss scale are, as text, and under ``data`` what the examples are, if known.
      unit: what is counted a second, ``"examples"`` or ``"tokens"``.
      closing: the trained state and its held-out metrics to what the summary says too, a sample say.
      create_on_mesh: seed to the state that training starts from, on several devices; None for one device.
      cast_plan: arguments of the loss function to autocast's plan; None where the modules have the policy.
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
        """A fresh state."""
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
        """The metrics of ``eval_step`` on the held-out examples, averaged over examples; waits for the device."""
        sizes, results = [], []
        for batch in self.test_batches():
            sizes.append(len(jax.tree.leaves(batch)[0]))
            results.append(self.eval_step(state, batch))
        results = jax.device_get(results)
        return {
            name: sum(size * float(metrics[name]) for size, metrics in zip(sizes, results, strict=True)) / sum(sizes)
            for name in results[0]
        }
