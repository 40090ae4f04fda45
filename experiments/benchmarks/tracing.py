"""What policies and autocast add to tracing and to eager calls: a transformer, and graphs of up to 100,000 equations.

python -m experiments.benchmarks.tracing

Tracing is what jax.jit does once before it compiles: running the Python function, here the loss of a GPT-2 and its
value and gradients (nothing is computed, so a machine of any size does). Linen's is that of benchmarks.by_hand, NNX's
computes the same. In every round the model is made anew with another vocabulary, so that no cache answers, and has its
turns bare, under `apply_policy` and under `jaxmp.autocast`; a ratio is of one round's times, and the median over the
rounds counts. An eager call is one without jax.jit, of shapes that were seen before. Goals: tracing takes at most 1.6
times as long as bare under a policy and 1.5 times under autocast, an eager call at most 2 times. Deep graphs are
chains, wide ones have each product read the same value; under autocast the time per equation should not grow with their
number. The run folder holds tracing.md and tracing.json.
"""

from __future__ import annotations

import cProfile
import dataclasses
import functools
import gc
import io
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import rich.console
import tyro
from flax import nnx

import jaxmp
from experiments.benchmarks.shared import by_hand
from experiments.measure import timing
from experiments.measure.environment import environment
from experiments.report.progress import Progress
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.runs import run_folder, write_json

Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its abstract arguments."""
GOALS = {"apply_policy": 1.6, "autocast": 1.5}
EAGER_GOAL = 2.0
WIDTH, LENGTH = 64, 32
TOKENS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
MODEL_COLUMNS = ("GPT-2", "float32 ms", "ms", "ratio", "quartiles of the ratio")
GRAPH_COLUMNS = ("graph", "equations", "float32 ms", "autocast ms", "ratio", "µs an equation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the benchmark."""

    layers: int = 12
    """Layers of GPT-2, 64 wide; the sizes of arrays make no difference to tracing."""
    rounds: int = 7
    """Rounds of timing; of the graphs of 10,000 equations and more, one."""
    equations: tuple[int, ...] = (1000, 10_000, 100_000)
    """Sizes of the deep and wide graphs."""
    policy: str = "mixed_bfloat16"
    """Policy of the models and of autocast."""
    profile: tyro.conf.FlagCreatePairsOff[bool] = False
    """Also write profile.txt: where the time of tracing the loss goes, under each."""
    run_dir: cli.Folder = None
    """Folder to write to. (default: runs/tracing-TIME)"""


class Block(nnx.Module):
    """A layer of :class:`experiments.benchmarks.shared.by_hand.GPT2` in NNX."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, rngs=rngs)
        self.norm1, self.norm2 = _norm(rngs), _norm(rngs)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(self.norm1(x))[:, :, None], 3, axis=-1)  # one head
        x = x + self.out(by_hand.attend(q, k, v, causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT2(nnx.Module):
    """:class:`experiments.benchmarks.shared.by_hand.GPT2` in NNX, in float32."""

    def __init__(self, layers: int, vocabulary: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocabulary, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = _norm(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def _norm(rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)


class Api(NamedTuple):
    """How models are made and run in Linen or in NNX.

    Attributes:
      build: from the layers and the vocabulary to a bare model.
      apply_policy: jaxmp's.
      functional: from a model to ``forward(params, tokens) -> logits`` and its abstract params.
      eager: from a model and params to a call of it by the tokens.
    """

    build: Callable[[int, int], Any]
    apply_policy: Callable[[Any, str], Any]
    functional: Callable[[Any], tuple[Callable[[Any, Any], jax.Array], Any]]
    eager: Callable[[Any, Any], Callable[[jax.Array], jax.Array]]


def _linen_functional(model: Any) -> tuple[Callable[[Any, Any], jax.Array], Any]:
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    return lambda params, tokens: model.apply({"params": params}, tokens), params


def _nnx_functional(model: Any) -> tuple[Callable[[Any, Any], jax.Array], Any]:
    graphdef, params = nnx.split(model)
    return lambda params, tokens: nnx.merge(graphdef, params)(tokens), params


APIS = {
    "Linen": Api(
        lambda layers, vocabulary: by_hand.GPT2(vocabulary, LENGTH, layers, 1, WIDTH),
        jaxmp.linen.apply_policy,
        _linen_functional,
        lambda model, params: functools.partial(model.apply, {"params": params}),
    ),
    "NNX": Api(
        lambda layers, vocabulary: nnx.eval_shape(lambda: GPT2(layers, vocabulary, nnx.Rngs(0))),
        jaxmp.nnx.apply_policy,
        _nnx_functional,
        lambda model, params: nnx.merge(nnx.graphdef(model), params),
    ),
}


def milliseconds(fun: Callable[..., Any], *args: Any) -> float:
    """The thread's time to trace ``fun``, which must be new to JAX; what other processes do does not count."""
    gc.collect()
    started = time.thread_time()
    jax.make_jaxpr(fun)(*args)
    return 1000 * (time.thread_time() - started)


def losses(api: Api, layers: int, policy: str, round_: int) -> dict[str, Program]:
    """The loss of a model that no other round has: bare, under ``apply_policy`` and under autocast."""

    def loss_of(model: Any) -> Program:
        forward, params = api.functional(model)

        def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
            logits = forward(params, tokens).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return loss, (params, TOKENS, TOKENS)

    bare = api.build(layers, 512 + 64 * round_)
    loss, args = loss_of(bare)
    return {
        "float32": loss_of(bare),
        "apply_policy": loss_of(api.apply_policy(bare, policy)),
        "autocast": (jaxmp.autocast(loss, policy), args),
    }


def graph(make: Callable[[int], Program], equations: int, policy: str, _: int) -> dict[str, Program]:
    """A large graph, made anew for a round: bare and under autocast."""
    fun, args = make(equations)
    return {"float32": make(equations), "autocast": (jaxmp.autocast(fun, policy), args)}


def traces(make: Callable[[int], dict[str, Program]], rounds: int, grad: bool = False) -> dict[str, list[float]]:
    """Times of tracing what ``make`` makes of the number of the round, in turn, after one round to warm up."""
    wrap = jax.value_and_grad if grad else lambda each: each
    times: dict[str, list[float]] = {}
    for round_ in range(-1, rounds):
        programs = list(make(round_).items())
        for name, (fun, args) in programs[:: 1 if round_ % 2 else -1]:
            taken = milliseconds(wrap(fun), *args)
            if round_ >= 0:
                times.setdefault(name, []).append(taken)
    return times


def calls(api: Api, layers: int, policy: str, rounds: int) -> dict[str, list[float]]:
    """Times of eager calls, bare and under ``apply_policy``, in turn, after two to warm up."""
    bare = api.build(layers, 512)
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.02, leaf.dtype), api.functional(bare)[1])
    tokens = jnp.zeros(TOKENS.shape, TOKENS.dtype)
    models = {"float32": bare, "apply_policy": api.apply_policy(bare, policy)}
    own = {name: functools.partial(api.eager(model, params), tokens) for name, model in models.items()}
    return timing.interleaved(own, rounds)


def measured(times: dict[str, list[float]], name: str, **about: Any) -> dict[str, Any]:
    """A row: the times of ``name`` beside the bare ones, and the quartiles of their ratio."""
    ratios = [a / b for a, b in zip(times[name], times["float32"], strict=True)]
    return {**about, "milliseconds": {key: times[key] for key in ("float32", name)}, "ratio": timing.quartiles(ratios)}


def deep(equations: int) -> Program:
    """A chain: of every four equations one is a product."""

    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(equations // 4):
            x = jax.lax.add(x, jax.lax.tanh(jax.lax.mul(jax.lax.dot(x, w), x)))
        return x

    return fun, (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2


def wide(equations: int) -> Program:
    """Products and exponentials that all read one value, and one sum over them all."""

    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        branches = [jax.lax.exp(jax.lax.tanh(jax.lax.dot(x, w))) for _ in range(equations // 4)]
        total = branches[0]
        for branch in branches[1:]:
            total = jax.lax.add(total, branch)
        return total

    return fun, (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2


def models(config: Config, advance: Callable[[int, str], None]) -> list[dict[str, Any]]:
    """A row for what is measured of a model with either API, each with its goal."""
    rows = []
    for title, api in APIS.items():
        make = functools.partial(losses, api, config.layers, config.policy)
        for what, grad in (("tracing the loss", False), ("tracing value and gradients", True)):
            advance(0, f"{title}, {what}")
            times = traces(make, config.rounds, grad)
            rows += [measured(times, name, model=f"{title}, {name}: {what}", goal=goal) for name, goal in GOALS.items()]
            advance(1, f"{title}, {what}")
        advance(0, f"{title}, an eager call")
        times = calls(api, config.layers, config.policy, config.rounds)
        rows.append(measured(times, "apply_policy", model=f"{title}, apply_policy: an eager call", goal=EAGER_GOAL))
        advance(1, f"{title}, an eager call")
    return rows


def profile(config: Config) -> str:
    """Where the time of tracing the loss goes, by own time and with what it calls."""
    out = io.StringIO()
    for title, api in APIS.items():
        for name, (fun, args) in losses(api, config.layers, config.policy, 0).items():
            profiler = cProfile.Profile()
            profiler.runcall(jax.make_jaxpr(fun), *args)
            out.write(f"{title}, {name}\n")
            stats = pstats.Stats(profiler, stream=out).strip_dirs()
            stats.sort_stats("tottime").print_stats(40)
            stats.sort_stats("cumulative").print_stats(60)
    return out.getvalue()


def model_table(results: list[dict[str, Any]], layers: int) -> Table:
    """A row for each measure, and the goals."""
    rows, notes = [], []
    for result in results:
        (low, ratio, high), goal = result["ratio"], result["goal"]
        times = (f"{statistics.median(each):.1f}" for each in result["milliseconds"].values())
        rows.append((result["model"], *times, f"{ratio:.2f}", f"{low:.2f} to {high:.2f}"))
        verdict = "met" if ratio <= goal else "NOT MET"
        notes.append(f"{verdict}: {result['model']} takes {ratio:.2f}×, the goal at most {goal}")
    return Table(f"GPT-2 of {layers} layers", MODEL_COLUMNS, rows, notes=tuple(notes))


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
        jaxmp.autocast(deep, config.policy)
        folder = run_folder("tracing", config.run_dir)
    where = environment()
    graphs = []
    with Progress("tracing", 3 * len(APIS) + 2 * len(config.equations)) as progress:
        rows = models(config, progress.advance)
        for kind, make in (("deep", deep), ("wide", wide)):
            for count in config.equations:
                progress.advance(0, f"{kind}, {count} equations")
                own = functools.partial(graph, make, count, config.policy)
                times = traces(own, config.rounds if count < 10_000 else 1)
                graphs.append(measured(times, "autocast", graph=kind, equations=count))
                progress.advance(1, f"{kind}, {count} equations")
    tables = [model_table(rows, config.layers), graph_table(graphs)]
    facts = [f"- {name}: {value}" for name, value in {**where, "policy": config.policy}.items()]
    lines = ["# What policies and autocast add to tracing", "", *facts, "", *(each.markdown() for each in tables)]
    (folder / "tracing.md").write_text("\n".join(lines))
    write_json(folder / "tracing.json", {"environment": where, "models": rows, "graphs": graphs})
    if config.profile:
        (folder / "profile.txt").write_text(profile(config))
    console = rich.console.Console()
    for each in tables:
        each.show(console if console.is_terminal else rich.console.Console(width=120))
    console.print("\n".join(facts), markup=False, highlight=False)
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)
    return {"models": rows, "graphs": graphs}


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
