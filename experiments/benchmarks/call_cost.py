"""Measure the overhead of a call of a train step, beside plain JAX and Flax.

python -m experiments.benchmarks.call_cost --run-dir experiments/results/call_cost

The model has two layers and 16 examples, so its arithmetic takes almost no time. What remains is the overhead that
small models and reinforcement learning have in every step. Plain JAX is `jax.jit` of value_and_grad, Adam and
apply_updates, with its state donated. Flax is the same step with `flax.training.train_state.TrainState`. Each call
takes the state that the last call returned. The steps are warmed up and take turns, and each turn ends by waiting for
the last call. A ratio is the time in one round over the time of plain JAX in the same round, so that drift cancels. The
median over the rounds is reported. `arrays in` and `arrays out` count the arrays that a call takes and returns, because
each array costs time.

Everything runs on one core. On two cores, XLA's threads go to sleep between two calls, and waking them takes longer
than the Python code between the calls. The run folder holds call_cost.md and call_cost.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import jaxmp
from experiments.benchmarks.report.goals import Goal
from experiments.benchmarks.shared import records, scaled_steps
from experiments.measure import timing
from experiments.report.progress import Progress
from experiments.report.tables import Table, times
from experiments.training import cli
from experiments.training.environment import environment

REFERENCE = "plain JAX and optax"
COLUMNS = ("a call of", "arrays in", "arrays out", "µs", "quartiles", "ratio", "quartiles of the ratio")
GOAL = "jaxmp, dynamic scale"
GOAL_RATIO = 2.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Timed):
    """Flags of the benchmark."""

    rounds: int = 50
    """Rounds of timing."""
    block_ms: float = 20.0
    """Target duration of a turn in milliseconds."""


def problem() -> tuple[Any, Any]:
    """Return the params of two layers, and a batch."""
    rng = np.random.default_rng(0)
    shapes = {"first": (8, 32), "second": (32, 2)}
    params = {
        name: {"kernel": jnp.asarray(rng.standard_normal(shape), jnp.float32), "bias": jnp.zeros(shape[1])}
        for name, shape in shapes.items()
    }
    return params, {"x": jnp.ones((16, 8)), "y": jnp.ones((16, 2))}


def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any = None) -> Any:
    """Return the mean squared error."""
    hidden = jnp.tanh(batch["x"] @ params["first"]["kernel"] + params["first"]["bias"])
    error = hidden @ params["second"]["kernel"] + params["second"]["bias"] - batch["y"]
    return jnp.mean(error**2), model_state


def variants() -> dict[str, tuple[Any, Any]]:
    """Return each variant's step and initial state.

    The params are equal but not shared, so that steps may donate them.
    """
    adam = optax.adam(1e-3)
    start, plain = scaled_steps.no_scaling(loss_fn, adam, lambda _: (problem()[0], None))
    flax = train_state.TrainState.create(apply_fn=None, params=problem()[0], tx=adam)
    tx = jaxmp.loss_scaling(adam, jaxmp.DynamicLossScale())
    step, state = jaxmp.make_train_step(loss_fn), jaxmp.TrainState.create(params=problem()[0], tx=tx)

    def with_flax(state: Any, batch: Any) -> Any:  # after Flax's own examples
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, None, batch)
        return state.apply_gradients(grads=grads), loss

    return {
        REFERENCE: (jax.jit(plain, donate_argnums=0), start()),
        "Flax's TrainState": (jax.jit(with_flax, donate_argnums=0), jax.tree.map(jnp.asarray, flax)),
        GOAL: (step, state),
    }


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Restrict the process to one core if the system supports that.

    XLA then starts a single thread.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure(config: Config, progress: Progress) -> dict[str, Any]:
    """Time all variants, which take turns."""
    batch, turns, arrays = problem()[1], {}, {}
    for label, (step, state) in variants().items():
        inputs = len(jax.tree.leaves((state, batch)))
        state, told = step(state, batch)
        arrays[label] = (inputs, len(jax.tree.leaves((state, told))))
        turns[label] = timing.turn(step, state, batch)
    timed = timing.interleaved(
        turns, config.rounds, config.block_ms, lambda round_: progress.advance(int(round_ >= 0), "timing")
    )
    return {label: {"arrays": arrays[label], **row} for label, row in timing.against(timed, REFERENCE).items()}


def table(rows: dict[str, Any]) -> Table:
    """Return a table with a row for each variant, and the goal."""
    cells = []
    for label, row in rows.items():
        in_us = {"ms": [1000 * ms for ms in row["ms"]], "ratio": row["ratio"]}
        cells.append((label, *map(str, row["arrays"]), *times(in_us, ".1f", ".2f")))
    ratio = rows[GOAL]["ratio"][1]
    goal = Goal("", f"{GOAL} / {REFERENCE}", ratio, GOAL_RATIO, form=".2f").sentence()
    return Table("A step of two layers: µs a call", COLUMNS, cells, notes=(goal,))


def main(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        folder = records.folder_of("call_cost", config, rounds=2)
    with one_core(), Progress("call cost", config.rounds) as progress:
        rows = measure(config, progress)
    intro = (
        "Everything runs on one core. A ratio is the time divided by the time of plain JAX in the same round. The "
        "median over the rounds is shown."
    )
    title = "What a call of a train step costs"
    records.record(folder, "call_cost", title, environment(), [table(rows)], {"results": rows}, [intro])
    return rows


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
