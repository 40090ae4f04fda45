"""Measure AdamW updates with params and moments stored in fewer bits.

The updates are compared with updates in float32.

python -m experiments.benchmarks.low_precision --device h200 --run-dir experiments/results/low_precision

The update is AdamW's update of a matrix with a float32 gradient; its state is donated. A ratio is the time of an update
divided by the time of the float32 update in the same round. The median over the rounds is shown. `step MiB` is the
peak memory of a train step of GPT-2, which is compiled on a GPU or for a GPU. The GPT-2 has 24 layers of width 2048 in
a loop and 8×2048 tokens, and the backward pass recomputes every layer. With --device nothing is run. The run folder
holds low_precision.md and low_precision.json.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmp
from experiments.benchmarks.measure import programs
from experiments.benchmarks.shared import records
from experiments.benchmarks.shared.goals import Goal
from experiments.measure import memory, timing
from experiments.models.gpt2 import GPT2
from experiments.report.tables import Table, titled
from experiments.training import cli
from experiments.training.environment import environment
from jaxmp.inspect.compiled import hlo

REFERENCE = ("float32", "float32")
ROUNDINGS = ("stochastic", "kahan")
VARIANTS = (REFERENCE, *itertools.product(ROUNDINGS, ("float32", "bfloat16", "float8")))
GOALS = {"bfloat16": 0.57, "float8": 0.47}
FIGURES = {"kept": ".2f", "moved": ".2f", "temporary": ".2f", "step": ",.0f", "of": ".3f", "ms": ".3g", "ratio": ".3f"}
COLUMNS = (
    "params", "moments", "stored B/param", "moved B/param", "temporary B/param", "step MiB", "/ float32", "ms",
    "ratio")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Timed, records.Small, records.Absent):
    """Flags of the benchmark."""

    rows: int = 8192
    """Rows of the matrix of 2048 columns."""


def optimizer(params: Any, moments: Any) -> optax.GradientTransformation:
    """Return AdamW, wrapped in ``low_precision`` unless params are float32."""
    inner = optax.adamw(3e-4, weight_decay=0.1)
    return inner if params == "float32" else jaxmp.low_precision(inner, rounding=params, moments=moments)


def update(config: Config, variant: tuple[str, str]) -> tuple[dict[str, float], Any]:
    """Return an update's bytes per param, and a function that runs the update.

    The function is None if nothing is run.
    """
    tx, dtype = optimizer(*variant), jnp.float32 if variant == REFERENCE else jnp.bfloat16

    def start() -> Any:
        params = jnp.full((config.rows, 2048), 0.02, dtype)
        return (params, tx.init(params)), jnp.ones(params.shape)

    def step(state: Any, grads: Any) -> Any:
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), None

    args = jax.eval_shape(start)
    compiled = memory.compiled(step, args, config.device)
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(args[0]))
    moved = programs.traffic(hlo.HloProgram(compiled.as_text()))[0]
    figures = {"kept": stored, "moved": moved, "temporary": compiled.memory_analysis().temp_size_in_bytes}
    turn = None if config.device else timing.turn(compiled, *jax.jit(start)())
    return {name: n / args[1].size for name, n in figures.items()}, turn


def step_mib(config: Config, variant: tuple[str, str]) -> float:
    """Return the peak memory of a train step in MiB."""
    length, layers, width, batch = (32, 2, 256, 2) if config.smoke else (2048, 24, 2048, 8)
    model = GPT2(50257, length, layers, width // 128, width, "full", loop=True)
    model = jaxmp.linen.apply_policy(model, "mixed_bfloat16" if variant == REFERENCE else "bfloat16_sr")

    def start() -> Any:
        params = model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32), method="hidden")["params"]
        return jaxmp.TrainState.create(params=params, tx=optimizer(*variant)), jnp.zeros((batch, length), jnp.int32)

    step = jaxmp.make_train_step(lambda p, state, x, rng: (model.apply({"params": p}, x, x, method="loss"), state))
    args = jax.eval_shape(start)
    return memory.of_step(step, args, config.device) / 2**20


def main(config: Config) -> dict[tuple[str, str], Any]:
    with cli.bad_values_end_it():
        where = environment(target=config.device)
        folder = records.folder_of("low_precision", config, rows=1, rounds=2)
    figures = {variant: update(config, variant) for variant in VARIANTS}
    rows: dict[tuple[str, str], Any] = {variant: row for variant, (row, _) in figures.items()}
    if not config.device:
        times = timing.interleaved({name: turn for name, (_, turn) in figures.items()}, config.rounds, config.block_ms)
        for variant, row in timing.against(times, REFERENCE).items():
            rows[variant] |= {"ms": row["ms"][1], "ratio": row["ratio"][1], "quartiles": row["ratio"]}
    goals = list[str]()
    for variant in VARIANTS[:4] if config.smoke or config.device or jax.default_backend() == "gpu" else ():
        rows[variant]["step"] = step_mib(config, variant)
        rows[variant]["of"] = of = rows[variant]["step"] / rows[REFERENCE]["step"]
        if variant[1] in GOALS and not config.smoke:
            goals.append(Goal("", f"step MiB, {', '.join(variant)} / float32", of, GOALS[variant[1]]).sentence())
    cells = [
        (*variant, *(f"{row[key]:{form}}" if key in row else "" for key, form in FIGURES.items()))
        for variant, row in rows.items()
    ]
    title = titled(f"AdamW of {config.rows}×2048, and a step of GPT-2", config.smoke)
    data = {"smoke": config.smoke, "variants": {" ".join(v): row for v, row in rows.items()}}
    tables = [Table(title, COLUMNS, cells, 2, tuple(goals))]
    records.record(folder, "low_precision", "An update in low precision", where, tables, data)
    return rows


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
