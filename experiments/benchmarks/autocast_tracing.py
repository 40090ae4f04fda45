"""What autocast adds to tracing: GPT-2 with and without it, and graphs of 1,000 to 100,000 equations.

python -m experiments.benchmarks.autocast_tracing

Tracing is what jax.jit does once before it compiles: running the Python function, here the loss of GPT-2 and its value
and gradients (nothing is computed, so a machine of any size does). Every call traces a function that JAX has not seen,
so that no cache answers; with and without autocast have their turns in every round, and the ratio is the median over
the rounds. The goal is at most 1.5. Deep graphs are chains, wide ones have each product read the same value; with
autocast the time per equation should not grow with their number. The run folder holds autocast_tracing.md and .json.
"""

from __future__ import annotations

import cProfile
import dataclasses
import gc
import io
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: the folder two above this one has the packages
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import jax
import jax.numpy as jnp
import rich.console
import tyro

import jaxmp
from experiments import cli, timing
from experiments.benchmarks import autocast_models
from experiments.environment import environment
from experiments.progress import Progress
from experiments.report import Table
from experiments.runs import run_folder, write_json

GOAL = 1.5
MODEL_COLUMNS = ("GPT-2", "float32 ms", "autocast ms", "ratio", "quartiles of the ratio")
GRAPH_COLUMNS = ("graph", "equations", "float32 ms", "autocast ms", "ratio", "µs an equation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the benchmark."""

    layers: int = 12
    """Layers of GPT-2, 768 wide; the sizes of arrays make no difference to tracing."""
    rounds: int = 7
    """Rounds of timing; of the graphs of 10,000 equations and more, one."""
    equations: tuple[int, ...] = (1000, 10_000, 100_000)
    """Sizes of the deep and wide graphs."""
    policy: str = "mixed_bfloat16"
    """Policy of autocast."""
    profile: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also write profile.txt: where the time of tracing the loss under autocast goes."""
    run_dir: cli.Folder = None
    """Folder to write to. (default: runs/autocast_tracing-TIME)"""


def milliseconds(fun: Callable[..., Any], *args: Any) -> float:
    """The thread's time to trace ``fun``, which must be new to JAX; what other processes do does not count."""
    gc.collect()
    started = time.thread_time()
    jax.make_jaxpr(fun)(*args)
    return 1000 * (time.thread_time() - started)


def renewed(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function that JAX has not seen before and that computes the same."""
    return lambda *args: fun(*args)


def gpt2(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """GPT-2's loss and its abstract arguments: params and a batch."""
    case = autocast_models.build("gpt2", autocast_models.Sizes(2, 128, layers, 768, 1024, 0))
    params, state = jax.eval_shape(case.init, jax.random.key(0))
    loss_fn = case.loss(None)
    return lambda params, batch: loss_fn(params, state, batch)[0], (params, case.batch)


def deep(equations: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A chain: of every four equations one is a product."""

    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(equations // 4):
            x = jax.lax.add(x, jax.lax.tanh(jax.lax.mul(jax.lax.dot(x, w), x)))
        return x

    return fun, (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2


def wide(equations: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Products and exponentials that all read one value, and one sum over them all."""

    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        branches = [jax.lax.exp(jax.lax.tanh(jax.lax.dot(x, w))) for _ in range(equations // 4)]
        total = branches[0]
        for branch in branches[1:]:
            total = jax.lax.add(total, branch)
        return total

    return fun, (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2


def compare(fun: Callable[..., Any], args: tuple[Any, ...], policy: str, rounds: int, grad: bool) -> dict[str, Any]:
    """Times of tracing with and without autocast, in turn, after one round to warm up."""
    wrap = jax.value_and_grad if grad else lambda each: each
    times: dict[str, list[float]] = {"float32": [], "autocast": []}
    for round_ in range(-1, rounds):
        for name in list(times)[:: 1 if round_ % 2 else -1]:
            new = renewed(fun)
            taken = milliseconds(wrap(jaxmp.autocast(new, policy) if name == "autocast" else new), *args)
            if round_ >= 0:
                times[name].append(taken)
    ratios = [a / b for a, b in zip(times["autocast"], times["float32"], strict=True)]
    return {"milliseconds": times, "ratio": timing.quartiles(ratios)}


def profile(fun: Callable[..., Any], args: tuple[Any, ...], policy: str) -> str:
    """Where the time of tracing ``fun`` under autocast goes, by own time and with what it calls."""
    profiler = cProfile.Profile()
    profiler.runcall(jax.make_jaxpr(jaxmp.autocast(renewed(fun), policy)), *args)
    out = io.StringIO()
    stats = pstats.Stats(profiler, stream=out).strip_dirs()
    stats.sort_stats("tottime").print_stats(40)
    stats.sort_stats("cumulative").print_stats(60)
    return out.getvalue()


def model_table(results: dict[str, dict[str, Any]], layers: int) -> Table:
    """A row for the loss, one for its value and gradients; and the goal."""
    rows, notes = [], []
    for name, result in results.items():
        low, ratio, high = result["ratio"]
        plain, auto = (statistics.median(result["milliseconds"][key]) for key in ("float32", "autocast"))
        rows.append((name, f"{plain:.1f}", f"{auto:.1f}", f"{ratio:.2f}", f"{low:.2f} to {high:.2f}"))
        notes.append(f"{'met' if ratio <= GOAL else 'NOT MET'}: {name} takes {ratio:.2f}×, the goal at most {GOAL}")
    return Table(f"Tracing GPT-2 of {layers} layers", MODEL_COLUMNS, rows, notes=tuple(notes))


def graph_table(results: list[dict[str, Any]]) -> Table:
    """A row a graph."""
    rows = []
    for result in results:
        plain, auto = (statistics.median(result["milliseconds"][key]) for key in ("float32", "autocast"))
        per_equation = 1000 * auto / result["equations"]
        cells = (f"{result['equations']:,}", f"{plain:.1f}", f"{auto:.1f}", f"{result['ratio'][1]:.2f}")
        rows.append((result["graph"], *cells, f"{per_equation:.1f}"))
    return Table("Tracing large graphs", GRAPH_COLUMNS, rows, notes=tuple(growth(results)))


def growth(results: list[dict[str, Any]]) -> list[str]:
    """How the time per equation grows from the smallest to the largest graph of a kind, in words."""
    lines = []
    for kind in dict.fromkeys(result["graph"] for result in results):
        own = [result for result in results if result["graph"] == kind]
        costs = [statistics.median(result["milliseconds"]["autocast"]) / result["equations"] for result in own]
        if len(own) > 1:
            sizes = f"from {own[0]['equations']:,} to {own[-1]['equations']:,} equations"
            lines.append(f"{kind}: the time per equation under autocast changes {costs[-1] / costs[0]:.2f}× {sizes}")
    return lines


def main(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        cli.require("--layers", config.layers, 1)
        cli.require("--rounds", config.rounds, 1)
        for count in config.equations:
            cli.require("--equations", count, 8)
        jaxmp.autocast(gpt2, config.policy)
        folder = run_folder("autocast_tracing", config.run_dir)
    where = environment()
    fun, args = gpt2(config.layers)
    models, graphs = {}, []
    with Progress("tracing", 2 + 2 * len(config.equations)) as progress:
        for name, grad in (("loss", False), ("value and gradients", True)):
            progress.advance(0, name)
            models[name] = compare(fun, args, config.policy, config.rounds, grad)
            progress.advance(1, name)
        for kind, make in (("deep", deep), ("wide", wide)):
            for count in config.equations:
                progress.advance(0, f"{kind}, {count} equations")
                rounds = config.rounds if count < 10_000 else 1
                result = compare(*make(count), config.policy, rounds, grad=False)
                graphs.append({"graph": kind, "equations": count, **result})
                progress.advance(1, f"{kind}, {count} equations")
    tables = [model_table(models, config.layers), graph_table(graphs)]
    facts = [f"- {name}: {value}" for name, value in where.items()]
    lines = ["# What autocast adds to tracing", "", *facts, "", *(each.markdown() for each in tables)]
    (folder / "autocast_tracing.md").write_text("\n".join(lines))
    write_json(folder / "autocast_tracing.json", {"environment": where, "models": models, "graphs": graphs})
    if config.profile:
        (folder / "profile.txt").write_text(profile(fun, args, config.policy))
    console = rich.console.Console()
    for each in tables:
        each.show(console if console.is_terminal else rich.console.Console(width=120))
    console.print("\n".join(facts), markup=False, highlight=False)
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)
    return {"models": models, "graphs": graphs}


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
