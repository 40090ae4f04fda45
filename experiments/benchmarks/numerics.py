"""Measure the cost of jaxmp.inspect.Watch on a train step of GPT-2.

python -m experiments.benchmarks.numerics --batch 2 --context 256

python -m experiments.benchmarks.numerics --policy mixed_bfloat16 --batch 16 --context 1024 --device h200

A plain step and a watched step are compiled and then take turns. A ratio is the time of a step divided by the time of
the plain step in the same round. The median over the rounds is shown. The watched step also trains, so it takes the
place of a plain step. The cost of watching is the additional time of the watched step and the time to read its counts.
`1 of 100 watched` is this cost in percent of the training time if one step in a hundred is watched.

With --device nothing is run. Both steps are compiled for a GPU that is not attached, and jaxmp.inspect.roofline
predicts their times. The prediction leaves out the time that counters on the GPU wait for each other. The run folder
holds numerics.md and numerics.json.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from experiments.benchmarks.shared import records
from experiments.measure import timing
from experiments.models.gpt2 import GPT2
from experiments.report.tables import Table, spread
from experiments.training import cli
from experiments.training.environment import environment
from jaxmp.inspect import Watch, roofline

COLUMNS = (
    "GPT-2", "plain ms", "watched ms", "ratio", "1 of 100 watched", "quartiles", "reading ms", "first plain s",
    "first watched s",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Absent):
    """Flags of the benchmark."""

    layers: int = 12
    """Blocks of GPT-2. The small GPT-2 has 12 blocks of width 768."""
    width: int = 768
    """Width of the residual stream. Heads are 64 wide."""
    vocabulary: int = 50257
    """Tokens in the vocabulary."""
    batch: int = 2
    """Sequences per batch."""
    context: int = 256
    """Tokens per sequence."""
    policy: str = "float32"
    """Policy of autocast."""
    rounds: int = 3
    """Rounds of timing."""


def measure(config: Config) -> dict[str, Any]:
    """Return the milliseconds and ratio of each step.

    The figures are measured, or predicted for ``config.device``.
    """
    model = GPT2(config.vocabulary, config.context, config.layers, max(1, config.width // 64), config.width)
    tokens = jax.ShapeDtypeStruct((config.batch, config.context + 1), jnp.int32)

    def loss_fn(params: Any, model_state: Any, tokens: Any, rng: Any) -> Any:
        return model.apply({"params": params}, tokens[:, :-1], tokens[:, 1:], method="loss"), model_state

    def create() -> Any:
        params = model.init(jax.random.key(0), jnp.zeros((1, config.context), jnp.int32))["params"]
        return jaxmp.TrainState.create(params=params, tx=optax.adamw(1e-4))

    step = jaxmp.make_train_step(loss_fn, policy=config.policy)
    watch = Watch(step, every=1)
    if config.device is not None:
        state = jax.eval_shape(create)
        steps = {"plain": step, "watched": watch.counting}
        times = {name: [roofline(fun, device=config.device)(state, tokens).milliseconds] for name, fun in steps.items()}
        return timing.against(times, "plain")
    return timed(step, watch, create(), np.random.default_rng(0).integers(0, config.vocabulary, tokens.shape, np.int32),
                 config.rounds)  # fmt: skip


def timed(step: Any, watch: Watch, state: Any, batch: Any, rounds: int) -> dict[str, Any]:
    """Time the plain step, the watched step, and the reading of counts.

    ``first`` in each row is the milliseconds of the first call, which compiles.
    """
    times: dict[str, list[float]] = {"plain": [], "watched": [], "reading": []}

    def took(name: str, run: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = jax.block_until_ready(run(*args))
        times[name].append(1000 * (time.perf_counter() - started))
        return result

    for _ in range(rounds + 1):
        state, _ = took("plain", step, state, batch)
        state, _ = took("watched", watch, 1, state, batch)
        took("reading", watch.steps.clear)
    first = {name: milliseconds.pop(0) for name, milliseconds in times.items()}
    both = [watched + reading for watched, reading in zip(times["watched"], times["reading"], strict=True)]
    ratios = timing.against({**times, "both": both}, "plain")
    return {name: {**row, "first": first.get(name)} for name, row in ratios.items()}


def main(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        jaxmp.get_policy(config.policy)  # raises if the policy is unknown
        where = environment(target=config.device)
        folder = records.folder_of("numerics", config, layers=1, width=64, vocabulary=2, batch=1, context=1)
    result = measure(config)
    plain, watched = result["plain"], result["watched"]
    label = f"{config.layers} layers of {config.width}, {config.batch}×{config.context} tokens, {config.policy}"
    cost = result.get("both", watched)["ratio"][1] - 1
    row = [label, f"{plain['ms'][1]:.1f}", f"{watched['ms'][1]:.1f}", f"{watched['ratio'][1]:.2f}", f"{cost:.2f}%"]
    title = f"A watched step{f', predicted on {config.device}' if config.device else ''}"
    if config.device is None:
        row += [spread(watched["ratio"], ".2f"), f"{result['reading']['ms'][1]:.0f}"]
        row += [f"{row_of['first'] / 1000:.0f}" for row_of in (plain, watched)]
    data = {"config": {name: str(value) for name, value in dataclasses.asdict(config).items()}, "steps": result}
    tables = [Table(title, COLUMNS[: len(row)], [tuple(row)])]
    records.record(folder, "numerics", "What an instrumented step costs", where, tables, data)
    return result


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
