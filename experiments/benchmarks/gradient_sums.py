"""How exact the gradients of params are that hundreds of rows, tokens, pixels or turns share, against float64.

python -m experiments.benchmarks.gradient_sums --run-dir experiments/results/gradient_sums

The gradient of a bias is a sum over all rows, that of an embedding over all tokens that are equal. A sum in half
precision stops growing where its next term is less than half a unit of its last place: in bfloat16 after 256 equal
terms, in float16 after 2048. Each case is a layer whose result a product reads; the weights of the loss are positive,
1/8 on average, and the tokens follow Zipf's law, so that sums grow as those of real data do. The tied embedding has a
cross-entropy. Ways: jaxmp's policies (Linen, NNX), jaxmp.autocast, Flax with `dtype=` by hand, and PyTorch under its
autocast where it is installed.

The error is the relative L2 error of one param's gradient to float64 with unrounded operands. "Rounding alone" is the
same in float64 throughout, but for operands, results and cotangents, each rounded to the half format before it is
summed: what no way of summing can better. Every program runs compiled, without excess precision, and operation by
operation. XLA's CPU adds some half arrays up in float32 by itself (sums over one axis), so the cases sum over several;
a GPU rounds its own way. The run folder holds gradient_sums.md, gradient_sums.json and gradient_sums.png.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import tyro
from flax import nnx
from jax import lax

import jaxmp
from experiments.measure.environment import environment
from experiments.report import plots
from experiments.report.progress import Progress
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.runs import run_folder, write_json

POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
LINEN, NNX, AUTOCAST = "jaxmp, Linen policy", "jaxmp, NNX policy", "jaxmp.autocast"
BY_HAND, TORCH, ROUNDING = "Flax, dtype= by hand", "PyTorch autocast", "rounding alone"
WAYS = (LINEN, NNX, AUTOCAST, BY_HAND, TORCH)
NOTE = (
    "Relative L2 error to float64, the larger of what the compiled program and its operations one by one give; in "
    "brackets what was computed over what is right, at the entry that is most wrong."
)
# Every rounding of the program is done. From JAX 0.12 on XLA's CPU has kernels for products that add up in half: that
# is not what is measured here.
compiled = functools.partial(
    jax.jit, compiler_options={"xla_allow_excess_precision": False, "xla_cpu_experimental_ynn_fusion_type": ""}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the benchmark."""

    halves: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    """Half formats."""
    smoke: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small cases: to see that everything runs. Its figures mean nothing."""
    run_dir: cli.Folder = None
    """Folder to write to. (default: runs/gradient_sums-TIME)"""


# --- the cases --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, and the param whose gradient is measured.

    Attributes:
      name: of the case.
      text: what is summed.
      param: the name of the param.
      x: the input.
      params: by name; each name is a part of its path in every model.
      fun: ``fun(r, x, **params)``, where ``r`` stands around all that half precision rounds, forwards and backwards.
      linen: makes the layer with a ``dtype``, None for what people write themselves, without one.
      nnx: the same in NNX.
      torch: ``torch(x, **params)``.
      targets: labels of a cross-entropy; None for a weighted sum of the results.
    """

    name: str
    text: str
    param: str
    x: np.ndarray
    params: dict[str, np.ndarray]
    fun: Callable[..., Any]
    torch: Callable[..., Any]
    linen: Callable[..., Any] | None = None
    nnx: Callable[..., Any] | None = None
    targets: np.ndarray | None = None


def cases(smoke: bool) -> list[Case]:
    """All of them."""
    rng = np.random.default_rng(0)
    few = 16 if smoke else 1

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def tokens(*shape: int) -> np.ndarray:  # Zipf's law
        shares = 1 / np.arange(1, 1025)
        return rng.choice(1024, shape, p=shares / shares.sum()).astype(np.int32)

    rows, images = normal(64, 1024 // few, 8), normal(16, 64 // few, 64 // few, 3)
    square, ones = normal(8, 8) / np.float32(8**0.5), np.ones(8, np.float32)
    ids, text = tokens(16, 1024 // few), tokens(16, 256 // few + 1)
    turns = normal(4096 // few, 4, 8)
    return [
        Case(
            "bias", f"nn.Dense, {rows.size // 8:,} rows", "bias", rows, {"kernel": square, "bias": ones}, _dense,
            lambda x, kernel, bias: _torch_nn().functional.linear(x, kernel.T, bias),
            lambda dtype: nn.Dense(8, dtype=dtype), lambda dtype: nnx.Linear(8, 8, dtype=dtype, rngs=nnx.Rngs(0)),
        ),
        Case(
            "convolution's bias", f"nn.Conv, {images.size // 3:,} pixels", "bias", images,
            {"kernel": normal(3, 3, 3, 8) / np.float32(27**0.5), "bias": ones}, _convolution,
            lambda x, kernel, bias: _torch_nn().functional.conv2d(
                x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), bias, padding=1
            ).permute(0, 2, 3, 1),
            lambda dtype: nn.Conv(8, (3, 3), dtype=dtype),
            lambda dtype: nnx.Conv(3, 8, (3, 3), dtype=dtype, rngs=nnx.Rngs(0)),
        ),
        Case(
            "embedding", f"nn.Embed, {ids.size:,} tokens of Zipf's law", "embedding", ids,
            {"embedding": normal(1024, 8)}, lambda r, x, embedding: r(embedding[x]),
            lambda x, embedding: _torch_nn().functional.embedding(x, embedding),
            lambda dtype: nn.Embed(1024, 8, dtype=dtype),
            lambda dtype: nnx.Embed(1024, 8, dtype=dtype, rngs=nnx.Rngs(0)),
        ),
        Case(
            "tied embedding", f"lookup and output layer, {text[:, 1:].size:,} tokens", "embedding", text[:, :-1],
            {"embedding": normal(1024, 8), "kernel": square}, _tied,
            lambda x, embedding, kernel: (_torch_nn().functional.embedding(x, embedding) @ kernel) @ embedding.T,
            lambda dtype: Tied(dtype), lambda dtype: NNXTied(dtype), targets=text[:, 1:],
        ),
        Case(
            "norm's scale", f"nn.LayerNorm, {rows.size // 8:,} rows", "scale", rows, {"scale": ones, "bias": ones},
            lambda r, x, scale, bias: r(_normalised(r(x)) * scale + bias),
            lambda x, scale, bias: _torch_nn().functional.layer_norm(x, (8,), scale, bias, 1e-6),
            lambda dtype: nn.LayerNorm(dtype=dtype), lambda dtype: nnx.LayerNorm(8, dtype=dtype, rngs=nnx.Rngs(0)),
        ),
        Case(
            "scale of a norm by hand", f"{rows.size // 8:,} rows", "scale", rows, {"scale": ones, "kernel": square},
            lambda r, x, scale, kernel: r(
                r(_normalised(r(r(x) @ r(kernel)), lambda y: r(y))) * r(jnp.broadcast_to(scale, x.shape))
            ),
            lambda x, scale, kernel: _torch_normalised(x @ kernel) * scale,
        ),
        Case(
            "position table", f"{rows.size // 64:,} frames of 64 films", "positions", rows.reshape(64, -1, 8, 8),
            {"positions": normal(8, 8), "kernel": square},
            lambda r, x, positions, kernel: r(r(r(x) @ r(kernel)) + r(jnp.broadcast_to(positions, x.shape))),
            lambda x, positions, kernel: x @ kernel + positions,
        ),
        Case(
            "weight in a loop", f"{len(turns):,} turns", "recurrent", turns, {"recurrent": square / 4}, _loop,
            _torch_loop,
        ),
    ]  # fmt: skip


def _repeated(value: Any, like: Any) -> Any:
    return jnp.broadcast_to(value, like.shape)


def _dense(r: Any, x: Any, kernel: Any, bias: Any) -> Any:
    y = r(r(x) @ r(kernel))
    return r(y + r(_repeated(bias, y)))


def _convolution(r: Any, x: Any, kernel: Any, bias: Any) -> Any:
    y = r(lax.conv_general_dilated(r(x), r(kernel), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return r(y + r(_repeated(bias, y)))


def _tied(r: Any, x: Any, embedding: Any, kernel: Any) -> Any:
    return r(r(r(embedding[x]) @ r(kernel)) @ r(embedding.T))


def _normalised(x: Any, r: Any = lambda y: y) -> Any:
    centred = r(x - r(x.mean(-1, keepdims=True)))
    return r(centred * r(lax.rsqrt(jnp.mean(r(centred**2), -1, keepdims=True) + 1e-6)))


def _loop(r: Any, x: Any, recurrent: Any) -> Any:
    def turn(state: Any, x: Any) -> Any:
        state = r(jnp.tanh(r(r(state @ r(recurrent)) + r(x))))
        return state, state

    return lax.scan(turn, jnp.zeros_like(x[0]), x)[1]


class Tied(nn.Module):
    """Embeddings that are also the output layer."""

    dtype: Any

    def setup(self) -> None:
        self.table = nn.Embed(1024, 8, dtype=self.dtype)
        self.dense = nn.Dense(8, use_bias=False, dtype=self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.table.attend(self.dense(self.table(x)))


class NNXTied(nnx.Module):
    """The same in NNX."""

    def __init__(self, dtype: Any) -> None:
        self.table = nnx.Embed(1024, 8, dtype=dtype, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(8, 8, use_bias=False, dtype=dtype, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.table.attend(self.dense(self.table(x)))


class Written(nn.Module):
    """A layer without a ``dtype`` field; with one by hand it casts at its head, as people do."""

    case: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        params = {name: self.param(name, lambda _, v=value: jnp.asarray(v)) for name, value in self.case.params.items()}
        return _written(self.case, self.dtype, x, params)


class NNXWritten(nnx.Module):
    """The same in NNX."""

    def __init__(self, case: Case, dtype: Any) -> None:
        self.case, self.dtype = case, dtype
        self.params = nnx.Dict({name: nnx.Param(jnp.asarray(value)) for name, value in case.params.items()})

    def __call__(self, x: jax.Array) -> jax.Array:
        return _written(self.case, self.dtype, x, {name: param[...] for name, param in self.params.items()})


def _written(case: Case, dtype: Any, x: Any, params: dict[str, Any]) -> Any:
    if dtype is not None:
        x, params = jax.tree.map(lambda value: value.astype(dtype), (x, params))
    return case.fun(lambda value: value, x, **params)


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def _torch() -> Any:
    import torch

    return torch


def _torch_nn() -> Any:
    return _torch().nn


def _torch_normalised(x: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred * _torch().rsqrt((centred**2).mean(-1, keepdim=True) + 1e-6)


def _torch_loop(x: Any, recurrent: Any) -> Any:
    torch, states = _torch(), []
    state = torch.zeros_like(x[0])
    for each in x:
        state = torch.tanh(state @ recurrent + each)
        states.append(state)
    return torch.stack(states)


def torch_gradient(case: Case, half: str) -> np.ndarray:
    """What PyTorch's autocast makes of the gradient."""
    torch = _torch()
    params = {name: torch.tensor(value, requires_grad=True) for name, value in case.params.items()}
    with torch.autocast("cpu", getattr(torch, half)):
        y = case.torch(torch.tensor(case.x), **params)
        if case.targets is None:
            y = y @ torch.eye(y.shape[-1]).flip(0)
    y = y.float()
    if case.targets is None:
        loss = (y * torch.tensor(weights(y.shape))).sum()
    else:
        loss = torch.nn.functional.cross_entropy(y.flatten(0, -2), torch.tensor(case.targets).long().flatten())
        loss = loss * case.targets.size / 16
    loss.backward()
    return params[case.param].grad.double().numpy()


# --- the measurement --------------------------------------------------------------------------------------------------


def weights(shape: tuple[int, ...]) -> np.ndarray:
    """The weights of a loss: positive, 1/8 on average."""
    return np.random.default_rng(1).uniform(0, 0.25, shape).astype(np.float32)


def loss_of(case: Case, y: Any) -> Any:
    """The loss; its sum over the batch, and not its mean, is what a loss scale makes of it."""
    if case.targets is not None:
        logits = y.astype(jnp.promote_types(y.dtype, jnp.float32))
        rows = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(case.targets)[..., None], -1)
        return -rows.sum() / 16
    y = y @ jnp.eye(y.shape[-1], dtype=y.dtype)[::-1]  # the product of the next layer
    return jnp.sum(y * jnp.asarray(weights(y.shape), jnp.promote_types(y.dtype, jnp.float32)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(half: str, value: Any) -> Any:
    return value.astype(half).astype(value.dtype)


_rounded.defvjp(lambda half, value: (_rounded(half, value), None), lambda half, _, ct: (_rounded(half, ct),))


def float64_gradient(case: Case, half: str | None) -> np.ndarray:
    """The gradient in float64: with unrounded operands, or with all rounded to ``half`` that is not a sum."""
    rounded = (lambda value: value) if half is None else functools.partial(_rounded, half)
    with jax.enable_x64(True):
        x, params = jax.tree.map(lambda leaf: leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf,
                                 (case.x, case.params))  # fmt: skip
        gradient = compiled(jax.grad(lambda params, x: loss_of(case, case.fun(rounded, x, **params))))(params, x)
        return np.asarray(gradient[case.param])


def half_gradient(case: Case, way: str, half: str) -> tuple[Callable[..., Any], Any]:
    """A way's gradients as a function of params and input, and the params."""
    dtype = half if way == BY_HAND else None
    if way == NNX:
        model = case.nnx(dtype) if case.nnx else NNXWritten(case, dtype)
        graph, params = nnx.split(jaxmp.nnx.apply_policy(model, POLICIES[half]))

        def apply(params: Any, x: Any) -> Any:
            return nnx.merge(graph, params)(x)

    else:
        module: Any = case.linen(dtype) if case.linen else Written(case, dtype)
        params = jax.eval_shape(module.init, jax.random.key(0), case.x)["params"]
        module = jaxmp.linen.apply_policy(module, POLICIES[half]) if way == LINEN else module

        def apply(params: Any, x: Any) -> Any:
            return module.apply({"params": params}, x)

    def loss(params: Any, x: Any) -> Any:
        return loss_of(case, apply(params, x))

    fun = jaxmp.autocast(loss, POLICIES[half]) if way == AUTOCAST else loss
    numbers = jax.tree_util.tree_map_with_path(lambda path, _: jnp.asarray(case.params[_name(case, path)]), params)
    return jax.grad(fun), numbers


def _name(case: Case, path: Any) -> str:
    return next(name for name in case.params if f"'{name}'" in jax.tree_util.keystr(path))


def measured(case: Case, gradient: Any) -> np.ndarray:
    """The gradient of the case's param, from a tree of all."""
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    return next(np.asarray(leaf, np.float64) for path, leaf in leaves if _name(case, path) == case.param)


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The relative L2 error."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def worst(got: np.ndarray, want: np.ndarray) -> float:
    """The entry that is most wrong, over what it should be."""
    at = np.unravel_index(np.argmax(np.nan_to_num(np.abs(got - want), nan=np.inf)), want.shape)
    return float(got[at] / want[at])


def measure(case: Case, half: str) -> dict[str, Any]:
    """The errors of every way that there is."""
    want = float64_gradient(case, None)
    ways: dict[str, dict[str, float]] = {}
    for way in WAYS:
        if way != TORCH:
            gradient, params = half_gradient(case, way, half)
            got = {name: measured(case, run(params, case.x)) for name, run in
                   (("compiled", compiled(gradient)), ("by operation", gradient))}  # fmt: skip
        elif importlib.util.find_spec("torch"):
            got = {"by operation": torch_gradient(case, half)}
        else:
            continue
        errors = {name: error(own, want) for name, own in got.items()}
        larger = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
        ways[way] = {"error": errors[larger], "worst": worst(got[larger], want), **errors}
    rounding = error(float64_gradient(case, half), want)
    return {"case": case.name, "text": case.text, "half": half, "rounding": rounding, "ways": ways}


# --- the report -------------------------------------------------------------------------------------------------------


def percent(value: float) -> str:
    """An error in words."""
    if value < 1e-5:
        return "< 0.001 %"
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"


def table(results: list[dict[str, Any]], half: str) -> Table:
    """A row a case, a column a way."""
    own = [result for result in results if result["half"] == half]
    ways = [way for way in WAYS if any(way in result["ways"] for result in own)]
    rows = []
    for result in own:
        found = [result["ways"][way] for way in ways]
        cells = [f"{percent(each['error'])} (× {each['worst']:.3g})" for each in found]
        rows.append((result["case"], result["text"], *cells, percent(result["rounding"])))
    return Table(half, ("gradient of", "summed over", *ways, ROUNDING), rows, 2, (NOTE,))


def sentence(run: dict[str, Any]) -> str:
    """What the README says of it, with its number: the embedding in bfloat16."""
    found = next(each for each in run["results"] if (each["case"], each["half"]) == ("embedding", "bfloat16"))
    ours = max(found["ways"][way]["error"] for way in (LINEN, NNX, AUTOCAST))
    return (
        f"Gradients of params are summed in float32: that of an embedding ({found['text']}) is off by "
        f"{percent(found['ways'][BY_HAND]['error'])} in bfloat16 with Flax's `dtype=` by hand, and by {percent(ours)} "
        "with jaxmp."
    )


@plots.drawn
def picture(results: list[dict[str, Any]], path: Path, caption: str) -> None:
    """A panel a half format, a row a case: each way's error on a log axis; grey: what rounding alone explains."""
    from matplotlib import ticker

    halves = list(dict.fromkeys(result["half"] for result in results))
    ways = dict(zip(dict.fromkeys(way for result in results for way in result["ways"]), plots.COLORS[1:], strict=False))
    figure = plots.figure(2.2 + 3.9 * len(halves), 4.8)
    for i, (axes, half) in enumerate(zip(figure.subplots(1, len(halves), squeeze=False)[0], halves, strict=True)):
        own = [result for result in results if result["half"] == half]
        plots.style(axes, half, "relative error of the gradient, %")
        axes.set_xscale("log")
        for y, result in enumerate(own):
            axes.barh(y, 100 * result["rounding"], height=0.86, color=plots.LIGHT)
            for n, (way, color) in enumerate(ways.items()):
                if way in result["ways"]:
                    place = y + 0.15 * (n - (len(ways) - 1) / 2)
                    axes.plot([100 * result["ways"][way]["error"]], [place], "o", color=color, markersize=6, label=way)
        plots.row_axis(axes, [result["case"] for result in own], named=i == 0)
        axes.set_xlim(1e-4, 200)
        axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=8.5)
    plots.save(figure, path, f"grey: what rounding alone explains. {caption}")


def main(config: Config) -> list[dict[str, Any]]:
    with cli.bad_values_end_it():
        folder = run_folder("gradient_sums", config.run_dir)
    own = ("torch",) if importlib.util.find_spec("torch") else ()
    where, results = environment(own), []
    each_case = cases(config.smoke)
    with Progress("gradient_sums", len(each_case) * len(config.halves)) as progress:
        for half in config.halves:
            for case in each_case:
                results.append(measure(case, half))
                progress.advance(1, case.name, half)
    run = {"environment": where, "smoke": config.smoke, "results": results}
    tables = [table(results, half) for half in config.halves]
    facts = [f"- {name}: {value}" for name, value in where.items()]
    notes = ["![errors by case and way](gradient_sums.png)", ""]
    if not own:
        notes = ["PyTorch is not installed here: its rows are missing.", "", *notes]
    lines = ["# Errors of the gradients of params", "", *facts, "", *notes]
    (folder / "gradient_sums.md").write_text("\n".join([*lines, *(each.markdown() for each in tables)]))
    write_json(folder / "gradient_sums.json", run)
    picture(results, folder / "gradient_sums.png", f"{where['device']}, {where['date'][:10]}")
    console = rich.console.Console()
    for each in tables:
        each.show(console if console.is_terminal else rich.console.Console(width=140))
    console.print("\n".join(facts), markup=False, highlight=False)
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)
    return results


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
