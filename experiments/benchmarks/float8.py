"""Measure products, layers, blocks and steps of GPT-2 in float8 and bfloat16.

python -m experiments.benchmarks.float8 --run-dir runs/float8

python -m experiments.benchmarks.float8 --device h200 --run-dir experiments/results/float8

python -m experiments.benchmarks.float8 --device tpu7x --parts block --sizes 2048 --run-dir runs/float8_tpu7x

- product: a product whose operands are already in float8, with fast and with precise accumulation in tensor cores.
- layer: a product with both its gradients, including the quantisation, in float8 at every width.
- block, step: two blocks and a train step of GPT-2, in float8 where both dimensions of a weight are at least 1,536.

A way is a format with a kind of accumulation. The way `float8` accumulates precisely only in the backward pass. All
parts have 16,384 tokens, or as many as --tokens says. Each way is compared with bfloat16 by the same route:

- jaxmp: a policy on the model.
- autocast: jaxmp.autocast, for blocks only.

A speed-up is the time in bfloat16 divided by the time of the way in the same round. The median over the rounds is
shown.

With --device all programs of jaxmp are compiled for a GPU or TPU that is not attached, and nothing is run. For a TPU,
the speed-up by cycles is that of the cycles that the compiler estimates for all kernels. The run folder keeps the
results, and the same command continues from there. It holds float8.md, .json and .png.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax

import jaxmp
from experiments.benchmarks.measure import programs
from experiments.benchmarks.measure.turns import Prepared, compared
from experiments.benchmarks.shared import measurements, records, scaled_steps
from experiments.benchmarks.shared.devices import require_gpu
from experiments.measure import memory, timing
from experiments.models import gpt2
from experiments.report import plots
from experiments.report.progress import Progress
from experiments.report.tables import Table, spread, titled
from experiments.training import cli
from experiments.training.environment import environment
from jaxmp import hardware
from jaxmp.inspect._roofline.roofline import of_program
from jaxmp.inspect.compiled import hlo

Part = Literal["product", "layer", "block", "step"]
Route = Literal["jaxmp", "autocast"]
HALF, DEFAULT, FAST, PRECISE = "bfloat16", "float8", "float8, fast", "float8, precise"
ALL, WIDTHS = (HALF, DEFAULT, FAST, PRECISE), (768, 1024, 2048, 4096, 8192)
WAYS = {"product": (HALF, FAST, PRECISE), "layer": ALL, "block": ALL, "step": (HALF, DEFAULT)}
ROUTES: dict[Part, tuple[Route, ...]] = {
    "product": ("jaxmp",),
    "layer": ("jaxmp",),
    "block": ("jaxmp", "autocast"),
    "step": ("jaxmp",),
}
SIZES = {"product": WIDTHS, "layer": WIDTHS, "block": (2048, 4096), "step": ("124M", "1.3B", "1.8B")}
TITLES = {
    "product": "A product with a K×4K matrix in float8",
    "layer": "A layer with a K×4K matrix, with its gradients and quantisation",
    "block": "Two blocks of GPT-2, K wide, with their gradients",
    "step": "A step of GPT-2 in a loop over its blocks, AdamW",
}
TOKENS = 16_384
"""The tokens of a part, unless a flag says otherwise."""
MIN_DIM = 1536
"""The minimum dimension of a float8 weight in blocks and steps: the default on GPUs."""
BY_CYCLES = "speed-up by cycles"
"""The speed-up on a TPU that is not attached."""
FIGURES = {
    "float8 of products": "", "kernels": ",", "GB moved": ".2f", "GB / bfloat16": ".3f", "peak MiB": ",.0f",
    "MiB / bfloat16": ".3f", "million cycles": ",.1f", BY_CYCLES: ".3f", "ms": ".4g", "speed-up": ".3f",
    "quartiles": ""}  # fmt: skip
ABOUT = (
    "Kernels: launched by a call. GB: moved in a call by kernels other than products and attention. "
    "Products in a loop count once. Million cycles: on a TPU, of all kernels of a call, with the bodies of loops "
    "repeated; estimated by the compiler, not run."
)
PICTURED = ("speed-up", BY_CYCLES, "GB / bfloat16", "MiB / bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Timed, records.Pieces, records.Small, records.Absent):
    """Flags of the benchmark."""

    parts: tuple[Part, ...] = get_args(Part)
    """Parts to measure."""
    routes: tuple[Route, ...] = get_args(Route)
    """jaxmp: a policy on the model. autocast: jaxmp.autocast."""
    sizes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = ()
    """Sizes to measure: widths of products, layers and blocks, and sizes of GPT-2, such as 2048 and 1.3B. (default:
    all)"""
    tokens: int = TOKENS
    """Tokens of each part: a multiple of 2048. Another number needs another run folder."""


def label(way: str, route: Route) -> str:
    """Return the name of a way in a table that has several routes."""
    return f"{way}, autocast" if route == "autocast" else way


class Blocks(nn.Module):
    """Two blocks of GPT-2 on (tokens, width).

    The result is the mean square of their output.
    """

    width: int
    batch: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = gpt2.Block(max(1, self.width // 128), self.width, "none", 2)(x, self.batch)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))


def model_of(size: Any) -> gpt2.GPT2:
    """Return GPT-2 in a named size, or a small one if ``size`` is not a name."""
    return gpt2.sized(size if isinstance(size, str) else None)


def case_of(
    part: Part, size: Any, way: str, tokens: int, route: Route = "jaxmp"
) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """Return the functions ``start`` and ``step`` of a case.

    ``start()`` returns ``(state, batch)``. ``step(state, batch)`` returns ``(state, result)`` and may donate the state.
    """
    least = {"min_dim": 1, "min_tokens": 1} if part == "layer" or tokens < 2048 else {"min_dim": MIN_DIM}
    recipe = jaxmp.Float8(accumulate={FAST: "fast", PRECISE: "precise"}.get(way, "fast_forward"), **least)
    policy = jaxmp.Policy("float32", "bfloat16", "float32", float8=None if way == HALF else recipe)
    stored = jnp.float8_e4m3fn if part == "product" and way != HALF else jnp.bfloat16

    def drawn(*shape: int) -> jax.Array:  # random numbers, because equal ones take less power and time
        return jax.random.normal(jax.random.key(len(shape)), shape, jnp.bfloat16).astype(stored)

    def multiplied(w: Any, x: Any) -> Any:
        half = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)  # the pattern that XLA rewrites to a float8 product
        precision = lax.Precision.HIGHEST if way == PRECISE else lax.Precision.DEFAULT
        return w, lax.dot_general(*half, (((1,), (1,)), ((), ())), precision, preferred_element_type=jnp.bfloat16)

    def with_gradients(w: Any, batch: Any) -> Any:
        y, gradients = jax.vjp(jaxmp.autocast(jnp.matmul, policy.with_output_dtype("bfloat16")), batch[0], w)
        return w, (y, *gradients(batch[1]))

    if part == "product":
        return lambda: (drawn(4 * size, size), drawn(tokens, size)), multiplied
    if part == "layer":
        batch_of = functools.partial(drawn, tokens)
        return lambda: (drawn(size, 4 * size).astype(jnp.float32), (batch_of(size), batch_of(4 * size))), with_gradients
    model: Any = Blocks(size, max(2, tokens // 2048)) if part == "block" else model_of(size).clone(loop=True)
    method, tx = (None, optax.sgd(0.1)) if part == "block" else ("loss", optax.adamw(3e-4, weight_decay=0.1))
    trained = (jaxmp.linen.autocast if route == "autocast" else jaxmp.linen.apply_policy)(model, policy)

    def batch() -> Any:
        if part == "block":
            return [drawn(tokens, size)]
        shape = (tokens // model.sequence, model.sequence)
        return 2 * [jax.random.randint(jax.random.key(0), shape, 0, model.vocabulary)]

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        return trained.apply({"params": params}, *batch, method=method), model_state

    def init(key: Any) -> Any:
        return model.init(key, *batch(), method=method)["params"], None

    start, step = scaled_steps.no_scaling(loss_fn, tx, init)
    return lambda: (start(), batch()), step


def ready(part: Part, size: Any, way: str, tokens: int, device: str | None, route: Route) -> Prepared:
    """Compile a way of jaxmp, and return it with the figures of its program."""
    start, step = case_of(part, size, way, tokens, route)
    compiled = memory.compiled(step, jax.eval_shape(start), device)
    program = hlo.HloProgram(compiled.as_text())
    facts = programs.facts(compiled, program)
    kinds_of_products = ("dot", "convolution")  # all products of a TPU are convolutions
    dots = {name: count for name, count in facts["products"].items() if name.startswith(kinds_of_products)}
    float8 = sum(count for name, count in dots.items() if "f8e" in name)
    about = {"float8 of products": f"{float8} of {sum(dots.values())}", "kernels": facts["launches"]}
    about |= {"GB moved": facts["traffic"] / 1e9, "peak MiB": facts["peak"] / 2**20}
    target = hardware.detect(device)
    if target.platform == "tpu":
        about["million cycles"] = sum(kernel.cycles or 0 for kernel in of_program(program, target).kernels) / 1e6
    turn = None if device else timing.turn(compiled, *jax.jit(start)())
    return Prepared(turn, about=about)


def measure(part: Part, size: Any, route: Route, config: Config, progress: Progress) -> dict[str, Any]:
    """Return the figures of each way, relative to bfloat16.

    A way that fails has an ``error`` instead.
    """
    tokens = 64 if config.smoke else config.tokens
    ways = WAYS[part][: 2 if config.device else None]  # the accumulation changes only the time
    make = {}
    for way in ways:
        make[label(way, route)] = functools.partial(ready, part, size, way, tokens, config.device, route)
    rounds = 0 if config.device else config.rounds
    rows = compared(make, rounds, config.block_ms, lambda _, text: progress.advance(0, text))
    base = next(iter(rows.values()), {})
    for row in rows.values():
        if "ratio" in row:
            low, middle, high = (1 / ratio for ratio in reversed(row.pop("ratio")))
            row |= {"ms": row["ms"][1], "speed-up": middle, "quartiles": spread((low, middle, high), ".3f")}
        row |= {f"{unit} / bfloat16": row[key] / base[key] for unit, key in (("GB", "GB moved"), ("MiB", "peak MiB"))
                if base.get(key) and key in row}  # fmt: skip
        if "million cycles" in row and "million cycles" in base:
            row[BY_CYCLES] = base["million cycles"] / row["million cycles"]
    return {"part": part, "size": size, "tokens": tokens, "rows": rows}


def tokens_of(case: dict[str, Any]) -> int:
    """Return the tokens of a recorded case."""
    return int(case.get("tokens", TOKENS))


def table(part: str, cases: list[dict[str, Any]], smoke: bool) -> Table:
    """Return a table with a row for each size and way."""
    cells = []
    for case in cases:
        model = model_of(case["size"])
        size = f"{model.layers} layers of {model.width}" if part == "step" else f"K = {case['size']}"
        tokens = tokens_of(case)
        if tokens != TOKENS and not smoke:
            size = f"{size}, {tokens:,} tokens"
        for way, row in case["rows"].items():
            row = {"float8 of products": row["error"]} if "error" in row else row
            cells.append((size, way, *(f"{row[key]:{form}}" if key in row else "" for key, form in FIGURES.items())))
    return Table(titled(TITLES[part], smoke), ("size", "way", *FIGURES), cells, 2)


def pictures(part: str, cases: list[dict[str, Any]]) -> list[plots.Panel]:
    """Draw the figures of every way relative to bfloat16.

    Figures that no way has are left out.
    """
    ways = {f"{case['size']}, {way}": row for case in cases for way, row in case["rows"].items() if HALF not in way}
    figures = [figure for figure in PICTURED if any(figure in row for row in ways.values())]
    bars = {figure: {name: row.get(figure) for name, row in ways.items()} for figure in figures}
    titles = dict.fromkeys(figures[:1], TITLES[part])
    return [plots.Panel(titles.get(figure, ""), figure, bars[figure], line=(1, HALF), form=".2f") for figure in figures]


def main(config: Config) -> list[dict[str, Any]]:
    if config.smoke and not config.device and jax.default_backend() != "gpu":
        os.environ.setdefault("JAXMP_FLOAT8", "emulate")
    cases = [(part, size, route) for part in get_args(Part) for size in ((64,) if config.smoke else SIZES[part])
             for route in ROUTES[part]]  # fmt: skip
    with cli.bad_values_end_it():
        sizes = cli.chosen("--sizes", config.sizes, {str(size): size for _, size, _ in cases})
        if config.tokens < 1 or config.tokens % 2048:
            raise ValueError(f"--tokens must be a multiple of 2048, got {config.tokens}")
        if not config.device:
            require_gpu(config.smoke)
        where = environment(target=config.device)
        folder = records.folder_of("float8", config, rounds=2)
        setting = {name: getattr(config, name) for name in ("smoke", "rounds", "block_ms")}
        if config.tokens != TOKENS and not config.smoke:
            setting["tokens"] = config.tokens
        saved = measurements.Measurements(folder, config.minutes, where, **setting)
        saved.require_alike("*-*-*.json")
    chosen = [case for case in cases if case[0] in config.parts and case[2] in config.routes and str(case[1]) in sizes]
    with Progress("float8", len(chosen)) as progress:
        for case in chosen:
            name = "-".join(map(str, case))
            saved.get(name, functools.partial(measure, *case, config, progress), progress)
    results = [record for case in cases if (record := saved.read("-".join(map(str, case))))]
    if results:
        where = measurements.joined([case.pop("environment") for case in results])
        parts = {part: [case for case in results if case["part"] == part] for part in get_args(Part)}
        tables = [table(part, cases_of_part, config.smoke) for part, cases_of_part in parts.items() if cases_of_part]
        panels = [panels for part, cases_of_part in parts.items() if (panels := pictures(part, cases_of_part))]
        data, shows = {"smoke": config.smoke, "results": results}, "float8 over bfloat16"
        records.record(folder, "float8", "Products in float8", where, tables, data, [ABOUT], shows, panels)
    saved.end()
    return results


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
