"""Measure the overhead of a call of a train step, beside plain JAX and Flax.

python -m experiments.benchmarks.call_cost --run-dir experiments/results/call_cost

A network of two layers on 16 examples, whose arithmetic is next to nothing: what is left is what users of small models
and of reinforcement learning pay for every step. Plain JAX is `jax.jit` of value_and_grad, Adam and apply_updates, with
its state donated; Flax is `flax.training.train_state.TrainState` in the same way. Each calls its step on the state that
the last call returned. Warm, waited for at the end of each turn, in turn; a ratio is one round's time over the same
round's time of plain JAX, and the median over the rounds counts, so that drift cancels. `arrays` are those that a call
takes and returns: each costs some time of its own.

All of it runs on one core. On two, XLA's threads fall asleep if the next call does not come at once, and to wake them
takes longer than what came between: any step with a little Python beside it, plain JAX's too, then costs more than that
Python. The run folder holds call_cost.md and call_cost.json.
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
from experiments.benchmarks.shared import records, scaled_steps
from experiments.measure import timing
from experiments.measure.environment import environment
from experiments.report.goals import Goal
from experiments.report.progress import Progress
from experiments.report.tables import Table, times
from experiments.training import cli

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
    """How long a turn should take, in milliseconds."""


def problem() -> tuple[Any, Any]:
    """Params of two layers, and a batch."""
    rng = np.random.default_rng(0)
    shapes = {"first": (8, 32), "second": (32, 2)}
    params = {
        name: {"kernel": jnp.asarray(rng.standard_normal(shape), jnp.float32), "bias": jnp.zeros(shape[1])}
        for name, shape in shapes.items()
    }
    return params, {"x": jnp.ones((16, 8)), "y": jnp.ones((16, 2))}


def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any = None) -> Any:
    """A mean square error."""
    hidden = jnp.tanh(batch["x"] @ params["first"]["kernel"] + params["first"]["bias"])
    error = hidden @ params["second"]["kernel"] + params["second"]["bias"] - batch["y"]
    return jnp.mean(error**2), model_state


def variants() -> dict[str, tuple[Any, Any]]:
    """Each step, and a state to begin with: the same params, which it may donate."""
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
    """Give the process one core, where the system can do that.

    XLA then starts one thread on it.
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
    """Times every variant, in turn."""
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
    """A row a variant, and the goal."""
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
    intro = "All on one core. A ratio is a round's time over the same round's time of plain JAX; the median counts."
    title = "What a call of a train step costs"
    records.record(folder, "call_cost", title, environment(), [table(rows)], {"results": rows}, [intro])
    return rows


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
