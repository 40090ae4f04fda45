"""Measure the time to trace, lower and compile a train step of GPT-2 under jaxmp.

The time is compared with the time of the same step with Flax's `dtype=` set by hand.

python -m experiments.benchmarks.first_step
python -m experiments.benchmarks.first_step --target h200    # compile for a GPU that need not be attached

The model by hand has Flax's `dtype=bfloat16` on every module and float32 params. The model by hand is compared with the
float32 model under `apply_policy`, and with the loss of the float32 model under `jaxmp.autocast`. All have the same
train step: value and gradients, then optax's Adam. Each measurement has a new process, where nothing is cached. In each
round, every model is measured once. The ratio of a model in a round is its time divided by the time of the model by
hand. The median of the ratios over the rounds is reported.

The reported seconds are processor time, summed over all threads, so that other processes on the machine hardly matter.
first_step.json has the wall-clock seconds too. The run folder holds first_step.md and first_step.json.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

import jaxmp
from experiments.benchmarks.measure import processes
from experiments.benchmarks.models import by_hand
from experiments.benchmarks.models.nnx_gpt2 import GPT2 as NNXGPT2
from experiments.benchmarks.report.goals import Goal
from experiments.benchmarks.shared import records
from experiments.measure import timing
from experiments.report.progress import Progress
from experiments.report.tables import Table, spread
from experiments.training import cli
from experiments.training.environment import environment
from jaxmp.inspect.compiled import targets

Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]
"""The loss as a function of params, tokens and labels."""
Stages = dict[str, float]
"""The seconds that each stage takes, by the stage's name."""
BY_HAND, POLICY, AUTOCAST = "by hand", "apply_policy", "autocast"
WAYS = (BY_HAND, POLICY, AUTOCAST)
STAGES = ("trace", "lower", "compile")
GOAL = 1.05
VOCABULARY, WIDTH, LENGTH = 512, 64, 32
TOKENS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
COLUMNS = ("GPT-2", *(f"{stage}, s" for stage in STAGES), "total, s", "ratio", "quartiles of the ratio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Config):
    """Flags of the benchmark."""

    layers: int = 12
    """Layers of GPT-2. The width is always 64, because the sizes of arrays hardly matter here."""
    rounds: int = 7
    """Rounds of timing."""
    target: str = ""
    """GPU to compile for, as in jaxmp/inspect/compiled/targets.py. Nothing is autotuned. (default: the attached
    device)"""
    policy: str = "mixed_bfloat16"
    """Policy of the model and of autocast. The model by hand has the policy's compute dtype."""
    alone: Annotated[str, tyro.conf.arg(metavar="API:WAY", help_behavior_hint="")] = ""
    """Measure a single model and print JSON. The benchmark calls itself with this flag for each model."""


def linen_loss(way: str, layers: int, policy: str) -> tuple[Loss, Any]:
    """Return the loss of the Linen model, and abstract params."""
    dtype = jaxmp.get_policy(policy).compute_dtype if way == BY_HAND else None
    model: Any = by_hand.GPT2(VOCABULARY, LENGTH, layers, 1, WIDTH, dtype)
    if way == POLICY:
        model = jaxmp.linen.apply_policy(model, policy)
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, tokens), labels)

    return loss, params


def nnx_loss(way: str, layers: int, policy: str) -> tuple[Loss, Any]:
    """Return the loss of the NNX model, and abstract params."""
    dtype = jaxmp.get_policy(policy).compute_dtype if way == BY_HAND else None
    model = nnx.eval_shape(lambda: NNXGPT2(VOCABULARY, LENGTH, layers, WIDTH, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(jaxmp.nnx.apply_policy(model, policy) if way == POLICY else model)

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graphdef, params)(tokens), labels)

    return loss, params


APIS: dict[str, Callable[[str, int, str], tuple[Loss, Any]]] = {"Linen": linen_loss, "NNX": nnx_loss}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross-entropy in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def train_step(api: str, way: str, layers: int, policy: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a train step and its abstract arguments."""
    loss, params = APIS[api](way, layers, policy)
    loss = jaxmp.autocast(loss, policy) if way == AUTOCAST else loss
    optimizer = optax.adam(1e-3)

    def step(params: Any, opt_state: Any, tokens: jax.Array, labels: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step, (params, jax.eval_shape(optimizer.init, params), TOKENS, TOKENS)


def seconds(step: Callable[..., Any], args: tuple[Any, ...], target: str = "") -> dict[str, Stages]:
    """Trace, lower and compile a step for the attached device or for ``target``.

    Return the seconds of each stage on two clocks.
    """
    scalar: Any = jax.ShapeDtypeStruct((), jnp.float32)
    if target:
        device = targets.target_of(target).devices()[0]
        scalar, args = targets.on(device, (scalar, args))
    jax.jit(lambda x: x + 1).lower(scalar).compile()  # initialise the device and its compiler
    clocks = {"processor": _processor_seconds, "wall": time.perf_counter}
    readings = [{name: clock() for name, clock in clocks.items()}]
    stage: Any = jax.jit(step)
    for advance in (lambda jitted: jitted.trace(*args), lambda traced: traced.lower(), lambda low: low.compile()):
        stage = advance(stage)
        readings.append({name: clock() for name, clock in clocks.items()})
    return {name: {STAGES[n]: readings[n + 1][name] - readings[n][name] for n in range(len(STAGES))} for name in clocks}


def _processor_seconds() -> float:
    """Return the processor time of this process and of the compilers that it has run."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def alone(name: str, config: Config) -> dict[str, Any]:
    """Measure one model in this process."""
    api, way = name.split(":")
    step, args = train_step(api, way, config.layers, config.policy)
    return seconds(step, args, config.target)


def measure(config: Config, progress: Progress) -> dict[str, list[dict[str, Stages]]]:
    """Measure each model in a new process in each round.

    Return a list for each model, with one entry per round.
    """
    names = [f"{api}:{way}" for api in APIS for way in WAYS]
    program = [sys.executable, "-m", "experiments.benchmarks.first_step"]
    program += ["--layers", str(config.layers), "--policy", config.policy, "--target", config.target]
    runs: dict[str, list[dict[str, Stages]]] = {name: [] for name in names}
    for round_ in range(config.rounds):
        first = round_ % len(names)
        order = [*names[first:], *names[:first]]
        for name, run in processes.in_processes({name: [*program, "--alone", name] for name in order}):
            progress.advance(0, name)
            result = run()
            if "error" in result:
                raise RuntimeError(f"{name}: {result['error']}")
            runs[name].append(result)
            progress.advance(1, name)
    return runs


def rows_of(runs: dict[str, list[dict[str, Stages]]]) -> list[dict[str, Any]]:
    """Return a row for each model.

    A row has the quartiles of the seconds of each stage, and of the ratio to the model by hand.
    """
    rows = []
    for name, times in runs.items():
        api, way = name.split(":")
        stages = {stage: timing.quartiles([run["processor"][stage] for run in times]) for stage in STAGES}
        totals, by_hands = (_totals(runs[f"{api}:{which}"], "processor") for which in (way, BY_HAND))
        walls, by_hands_walls = (_totals(runs[f"{api}:{which}"], "wall") for which in (way, BY_HAND))
        rows.append(
            {
                "model": f"{api}, {way}",
                "stages": stages,
                "total": timing.quartiles(totals),
                "ratio": timing.ratio(totals, by_hands),
                "wall": timing.quartiles(walls),
                "wall_ratio": timing.ratio(walls, by_hands_walls),
                "runs": times,
            }
        )
    return rows


def _totals(runs: list[dict[str, Stages]], clock: str) -> list[float]:
    return [sum(run[clock].values()) for run in runs]


def table(rows: list[dict[str, Any]], layers: int) -> Table:
    """Return the table of all models, with the goals."""
    cells, verdicts = [], []
    for row in rows:
        parts = [f"{row['stages'][stage][1]:.2f}" for stage in STAGES]
        ratio = row["ratio"]
        cells.append((row["model"], *parts, f"{row['total'][1]:.2f}", f"{ratio[1]:.3f}", spread(ratio, ".3f")))
        if BY_HAND not in row["model"]:
            verdicts.append(Goal("", f"{row['model']} / {BY_HAND}", ratio[1], GOAL).sentence())
    return Table(f"GPT-2 of {layers} layers", COLUMNS, cells, notes=tuple(verdicts))


def main(config: Config) -> list[dict[str, Any]]:
    if config.alone:
        processes.answer(functools.partial(alone, config.alone, config))
        return []
    with cli.bad_values_end_it():
        jaxmp.get_policy(config.policy)
        if config.target:
            targets.target_of(config.target).devices()
        folder = records.folder_of("first_step", config, layers=1)
    with Progress("first step", config.rounds * len(APIS) * len(WAYS)) as progress:
        rows = rows_of(measure(config, progress))
    where = {**environment(target=config.target), "policy": config.policy}
    title = "The time before the first train step"
    records.record(folder, "first_step", title, where, [table(rows, config.layers)], {"models": rows})
    return rows


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
