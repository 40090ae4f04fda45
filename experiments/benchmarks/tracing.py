"""What policies and autocast add to tracing a GPT-2, and to eager calls of it.

python -m experiments.benchmarks.tracing

Tracing is what jax.jit does once before it compiles. In every round the model is made anew with another vocabulary, so
that no cache answers, and has its turns bare, under `apply_policy` and under `jaxmp.autocast`; a ratio is of one
round's times, and the median over the rounds counts. An eager call is one without jax.jit, of shapes that were seen
before. The run folder holds tracing.md and tracing.json.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxmp
from experiments.benchmarks.shared import records
from experiments.measure import timing
from experiments.measure.environment import environment
from experiments.models import by_hand
from experiments.models import nnx as nnx_models
from experiments.report.goals import Goal
from experiments.report.progress import Progress
from experiments.report.tables import Table, spread
from experiments.training import cli

Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its abstract arguments."""
Model = tuple[Any, Callable[[Any], Callable[[jax.Array], jax.Array]]]
"""Abstract params, and what makes of params a call by the tokens."""
GOALS, EAGER_GOAL = {"apply_policy": 1.6, "autocast": 1.5}, 2.0
WIDTH, LENGTH = 64, 32
TOKENS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
COLUMNS = ("GPT-2", "float32 ms", "ms", "ratio", "quartiles of the ratio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Config):
    """Flags of the benchmark."""

    layers: int = 12
    """Layers of GPT-2, 64 wide; the sizes of arrays make no difference to tracing."""
    rounds: int = 7
    """Rounds of timing."""
    policy: str = "mixed_bfloat16"
    """Policy of the models and of autocast."""


def _linen(vocabulary: int, layers: int, policy: str | None = None) -> Model:
    model: Any = by_hand.GPT2(vocabulary, LENGTH, layers, 1, WIDTH)
    model = model if policy is None else jaxmp.linen.apply_policy(model, policy)
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    return params, lambda params: functools.partial(model.apply, {"params": params})


def _nnx(vocabulary: int, layers: int, policy: str | None = None) -> Model:
    model = nnx.eval_shape(lambda: nnx_models.GPT2(vocabulary, LENGTH, layers, WIDTH, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model if policy is None else jaxmp.nnx.apply_policy(model, policy))
    return params, functools.partial(nnx.merge, graphdef)


APIS: dict[str, Callable[..., Model]] = {"Linen": _linen, "NNX": _nnx}


def losses(api: Callable[..., Model], layers: int, policy: str, round_: int) -> dict[str, Program]:
    """The loss of a model that no other round has: bare, under ``apply_policy`` and under autocast."""

    def loss_of(own: str | None = None) -> Program:
        params, bound = api(512 + 64 * round_, layers, own)

        def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
            logits = bound(params)(tokens).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return loss, (params, TOKENS, TOKENS)

    loss, args = loss_of()
    return {"float32": loss_of(), "apply_policy": loss_of(policy), "autocast": (jaxmp.autocast(loss, policy), args)}


def traces(make: Callable[[int], dict[str, Program]], rounds: int, grad: bool) -> dict[str, list[float]]:
    """Milliseconds to trace what ``make`` makes of the number of the round, in turn, after one round to warm up.

    They are the thread's: what other processes do does not count.
    """
    times: dict[str, list[float]] = {}
    for round_ in range(-1, rounds):
        programs = list(make(round_).items())
        for name, (fun, args) in programs[:: 1 if round_ % 2 else -1]:
            own = times.setdefault(name, [])
            gc.collect()
            started = time.thread_time()
            jax.make_jaxpr(jax.value_and_grad(fun) if grad else fun)(*args)
            if round_ >= 0:
                own.append(1000 * (time.thread_time() - started))
    return times


def calls(api: Callable[..., Model], layers: int, policy: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of eager calls, bare and under ``apply_policy``, in turn."""
    models = {"float32": api(512, layers), "apply_policy": api(512, layers, policy)}
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.02, leaf.dtype), models["float32"][0])
    tokens = jnp.zeros(TOKENS.shape, TOKENS.dtype)
    return timing.interleaved(
        {name: functools.partial(own(params), tokens) for name, (_, own) in models.items()}, rounds
    )


def measure(config: Config, progress: Progress) -> list[dict[str, Any]]:
    """A row for what is measured of a model with either API, each with its goal."""
    rows = []
    for title, api in APIS.items():
        make = functools.partial(losses, api, config.layers, config.policy)
        found = {
            "tracing the loss": lambda make=make: traces(make, config.rounds, grad=False),
            "tracing value and gradients": lambda make=make: traces(make, config.rounds, grad=True),
            "an eager call": lambda api=api: calls(api, config.layers, config.policy, config.rounds),
        }
        for what, times_of in found.items():
            progress.advance(0, f"{title}, {what}")
            times = timing.against(times_of(), "float32")
            bare = times.pop("float32")
            for name, row in times.items():
                goal = EAGER_GOAL if what == "an eager call" else GOALS[name]
                milliseconds = {"float32": bare["milliseconds"], name: row["milliseconds"]}
                about = {"model": f"{title}, {name}: {what}", "goal": goal, "milliseconds": milliseconds}
                rows.append({**about, "ms": (bare["ms"][1], row["ms"][1]), "ratio": row["ratio"]})
            progress.advance(1, f"{title}, {what}")
    return rows


def table(results: list[dict[str, Any]], layers: int) -> Table:
    """A row for each measure, and the goals."""
    rows, notes = [], []
    for result in results:
        ratio, goal = result["ratio"][1], result["goal"]
        times = (f"{ms:.1f}" for ms in result["ms"])
        rows.append((result["model"], *times, f"{ratio:.2f}", spread(result["ratio"], ".2f")))
        notes.append(Goal("", f"{result['model']} / bare", ratio, goal, form=".2f").sentence())
    return Table(f"GPT-2 of {layers} layers", COLUMNS, rows, notes=tuple(notes))


def main(config: Config) -> list[dict[str, Any]]:
    with cli.bad_values_end_it():
        jaxmp.autocast(measure, config.policy)
        folder = records.folder_of("tracing", config, layers=1)
    with Progress("tracing", 3 * len(APIS)) as progress:
        rows = measure(config, progress)
    where = {**environment(), "policy": config.policy}
    title, tables = "What policies and autocast add to tracing", [table(rows, config.layers)]
    records.record(folder, "tracing", title, where, tables, {"models": rows})
    return rows


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
