"""Measure the errors of the gradients of shared params, compared with float64.

A shared param is used by hundreds of rows, tokens, pixels or iterations, and its gradient is the sum over all of them.

python -m experiments.benchmarks.gradient_sums --run-dir experiments/results/gradient_sums

A sum in half precision stops growing when the next term is less than half a unit in the last place. With equal terms
this happens after 256 terms in bfloat16, and after 2048 terms in float16. In each case a product reads the output of a
layer. The weights of the loss are positive, and the tokens follow Zipf's law, so that sums grow as they do with real
data. Four ways are compared:

- jaxmp's policies, in Linen and in NNX
- jaxmp.autocast
- Flax with `dtype=` by hand
- PyTorch under its autocast, if PyTorch is installed

The error is the relative L2 error of one param's gradient. The reference is the gradient in float64 with unrounded
operands. "Rounding alone" is the error of a gradient that is summed in float64. Before the sum, its operands, results
and cotangents are rounded to half precision. No way of summing can have a smaller error. Every JAX program runs twice:
compiled without excess precision, and operation by operation. The cases sum over several axes, because XLA's CPU
backend sums half arrays over a single axis in float32. The run folder holds gradient_sums.md, .json and .png.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jaxmp
from experiments.benchmarks.shared import records
from experiments.report import plots
from experiments.report.progress import Progress
from experiments.report.tables import Table
from experiments.training import cli
from experiments.training.environment import environment

POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
LINEN, NNX, AUTOCAST = "jaxmp, Linen policy", "jaxmp, NNX policy", "jaxmp.autocast"
BY_HAND, TORCH, ROUNDING = "Flax, dtype= by hand", "PyTorch autocast", "rounding alone"
WAYS = (LINEN, NNX, AUTOCAST, BY_HAND, TORCH)
NOTE = (
    "Relative L2 error compared with float64: the larger of the errors of the compiled program and of its operations "
    "run one by one. In brackets: the computed value over the correct value, at the entry with the largest error."
)
# XLA may not leave out a rounding of the program. Its CPU kernels that accumulate products in half precision (from JAX
# 0.12 on) are turned off, because this benchmark does not measure them.
compiled = partial(
    jax.jit, compiler_options={"xla_allow_excess_precision": False, "xla_cpu_experimental_ynn_fusion_type": ""}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Small):
    """Flags of the benchmark."""

    halves: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    """Half formats."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, and the param whose gradient is measured.

    Attributes:
      name: the name of the case.
      text: the values that the gradient is summed over, in words.
      param: the name of the param whose gradient is measured.
      x: the input.
      params: the params by name. The path of a param in every model contains its name.
      fun: the layer as ``fun(r, x, **params)``. It calls ``r`` on every value that half precision rounds, forward and
        backward.
      torch: the layer as ``torch(torch, x, **params)``. The first argument is the package.
      linen: makes the layer with ``dtype=`` in Linen; None for a layer that users write without a ``dtype`` field.
      nnx: like ``linen``, in NNX.
      targets: the labels of a cross-entropy; None if the loss is a weighted sum of the results.
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
    """Return all cases, small ones for a smoke test."""
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
    turns, rngs = normal(4096 // few, 4, 8), nnx.Rngs(0)
    return [
        Case(
            "bias", f"nn.Dense, {rows.size // 8:,} rows", "bias", rows, {"kernel": square, "bias": ones}, _dense,
            lambda torch, x, kernel, bias: torch.nn.functional.linear(x, kernel.T, bias),
            partial(nn.Dense, 8), partial(nnx.Linear, 8, 8, rngs=rngs),
        ),
        Case(
            "convolution's bias", f"nn.Conv, {images.size // 3:,} pixels", "bias", images,
            {"kernel": normal(3, 3, 3, 8) / np.float32(27**0.5), "bias": ones}, _convolution,
            lambda torch, x, kernel, bias: torch.nn.functional.conv2d(
                x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), bias, padding=1
            ).permute(0, 2, 3, 1),
            partial(nn.Conv, 8, (3, 3)), partial(nnx.Conv, 3, 8, (3, 3), rngs=rngs),
        ),
        Case(
            "embedding", f"nn.Embed, {ids.size:,} tokens of Zipf's law", "embedding", ids,
            {"embedding": normal(1024, 8)}, lambda r, x, embedding: r(embedding[x]),
            lambda torch, x, embedding: torch.nn.functional.embedding(x, embedding),
            partial(nn.Embed, 1024, 8), partial(nnx.Embed, 1024, 8, rngs=rngs),
        ),
        Case(
            "tied embedding", f"lookup and output layer, {text[:, 1:].size:,} tokens", "embedding", text[:, :-1],
            {"embedding": normal(1024, 8), "kernel": square}, _tied,
            lambda torch, x, embedding, kernel: (torch.nn.functional.embedding(x, embedding) @ kernel) @ embedding.T,
            Tied, NNXTied, targets=text[:, 1:],
        ),
        Case(
            "norm's scale", f"nn.LayerNorm, {rows.size // 8:,} rows", "scale", rows, {"scale": ones, "bias": ones},
            lambda r, x, scale, bias: r(_normalised(r(x)) * scale + bias),
            lambda torch, x, scale, bias: torch.nn.functional.layer_norm(x, (8,), scale, bias, 1e-6),
            nn.LayerNorm, partial(nnx.LayerNorm, 8, rngs=rngs),
        ),
        Case(
            "scale of a norm by hand", f"{rows.size // 8:,} rows", "scale", rows, {"scale": ones, "kernel": square},
            lambda r, x, scale, kernel: r(
                r(_normalised(r(r(x) @ r(kernel)), lambda y: r(y))) * r(jnp.broadcast_to(scale, x.shape))
            ),
            lambda torch, x, scale, kernel: _torch_normalised(torch, x @ kernel) * scale,
        ),
        Case(
            "position table", f"{rows.size // 64:,} frames of 64 films", "positions", rows.reshape(64, -1, 8, 8),
            {"positions": normal(8, 8), "kernel": square},
            lambda r, x, positions, kernel: r(r(r(x) @ r(kernel)) + r(jnp.broadcast_to(positions, x.shape))),
            lambda torch, x, positions, kernel: x @ kernel + positions,
        ),
        Case(
            "weight in a loop", f"{len(turns):,} turns", "recurrent", turns, {"recurrent": square / 4}, _loop,
            _torch_loop,
        ),
    ]  # fmt: skip


def _dense(r: Any, x: Any, kernel: Any, bias: Any) -> Any:
    y = r(r(x) @ r(kernel))
    return r(y + r(jnp.broadcast_to(bias, y.shape)))


def _convolution(r: Any, x: Any, kernel: Any, bias: Any) -> Any:
    y = r(lax.conv_general_dilated(r(x), r(kernel), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return r(y + r(jnp.broadcast_to(bias, y.shape)))


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
    """An embedding that is also the output layer."""

    dtype: Any

    def setup(self) -> None:
        self.table = nn.Embed(1024, 8, dtype=self.dtype)
        self.dense = nn.Dense(8, use_bias=False, dtype=self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.table.attend(self.dense(self.table(x)))


class NNXTied(nnx.Module):
    """An embedding in NNX that is also the output layer."""

    def __init__(self, dtype: Any) -> None:
        self.table = nnx.Embed(1024, 8, dtype=dtype, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(8, 8, use_bias=False, dtype=dtype, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.table.attend(self.dense(self.table(x)))


class Written(nn.Module):
    """A Linen layer by hand.

    If ``dtype`` is not None, the layer first casts its input and params, as users do.
    """

    case: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        params = {name: self.param(name, lambda _, v=value: jnp.asarray(v)) for name, value in self.case.params.items()}
        return _written(self.case, self.dtype, x, params)


class NNXWritten(nnx.Module):
    """An NNX layer by hand.

    If ``dtype`` is not None, the layer first casts its input and params, as users do.
    """

    def __init__(self, case: Case, dtype: Any) -> None:
        self.case, self.dtype = case, dtype
        self.params = nnx.Dict({name: nnx.Param(jnp.asarray(value)) for name, value in case.params.items()})

    def __call__(self, x: jax.Array) -> jax.Array:
        return _written(self.case, self.dtype, x, {name: param[...] for name, param in self.params.items()})


def _written(case: Case, dtype: Any, x: Any, params: dict[str, Any]) -> Any:
    if dtype is not None:
        x, params = jax.tree.map(lambda value: value.astype(dtype), (x, params))
    return case.fun(lambda value: value, x, **params)


def _torch_normalised(torch: Any, x: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred**2).mean(-1, keepdim=True) + 1e-6)


def _torch_loop(torch: Any, x: Any, recurrent: Any) -> Any:
    states = [torch.zeros_like(x[0])]
    for row in x:
        states.append(torch.tanh(states[-1] @ recurrent + row))
    return torch.stack(states[1:])


def torch_gradient(case: Case, half: str) -> np.ndarray:
    """Return the gradient under PyTorch's autocast."""
    import torch

    params = {name: torch.tensor(value, requires_grad=True) for name, value in case.params.items()}
    with torch.autocast("cpu", getattr(torch, half)):
        y = case.torch(torch, torch.tensor(case.x), **params)
        if case.targets is None:
            y = y @ torch.eye(y.shape[-1]).flip(0)
    y = y.float()
    if case.targets is None:
        loss = (y * torch.tensor(weights(y.shape))).sum()
    else:
        labels = torch.tensor(case.targets).long().flatten()
        loss = torch.nn.functional.cross_entropy(y.flatten(0, -2), labels, reduction="sum") / 16
    loss.backward()
    return params[case.param].grad.double().numpy()


def weights(shape: tuple[int, ...]) -> np.ndarray:
    """Return the positive weights of a loss. Their mean is 1/8."""
    return np.random.default_rng(1).uniform(0, 0.25, shape).astype(np.float32)


def loss_of(case: Case, y: Any) -> Any:
    """Return the loss, summed over the batch.

    A mean would make the gradients as small as those of a loss without a loss scale.
    """
    if case.targets is not None:
        logits = y.astype(jnp.promote_types(y.dtype, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(case.targets)).sum() / 16
    y = y @ jnp.eye(y.shape[-1], dtype=y.dtype)[::-1]  # the product of the next layer
    return jnp.sum(y * jnp.asarray(weights(y.shape), jnp.promote_types(y.dtype, jnp.float32)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(half: str, value: Any) -> Any:
    return value.astype(half).astype(value.dtype)


_rounded.defvjp(lambda half, value: (_rounded(half, value), None), lambda half, _, ct: (_rounded(half, ct),))


def float64_gradient(case: Case, half: str | None) -> np.ndarray:
    """Return the gradient in float64.

    If ``half`` is given, all values but sums are rounded to it.
    """
    rounded = (lambda value: value) if half is None else partial(_rounded, half)
    with jax.enable_x64(True):
        x, params = jax.tree.map(lambda leaf: leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf,
                                 (case.x, case.params))  # fmt: skip
        gradient = compiled(jax.grad(lambda params, x: loss_of(case, case.fun(rounded, x, **params))))(params, x)
        return np.asarray(gradient[case.param])


def half_gradient(case: Case, way: str, half: str) -> tuple[Callable[..., Any], Any]:
    """Return a way's gradient as a function of params and input, and the params."""
    dtype = half if way == BY_HAND else None
    if way == NNX:
        model = case.nnx(dtype=dtype) if case.nnx else NNXWritten(case, dtype)
        graph, params = nnx.split(jaxmp.nnx.apply_policy(model, POLICIES[half]))
    else:
        module: Any = case.linen(dtype=dtype) if case.linen else Written(case, dtype)
        params = jax.eval_shape(module.init, jax.random.key(0), case.x)["params"]
        module = jaxmp.linen.apply_policy(module, POLICIES[half]) if way == LINEN else module

    def loss(params: Any, x: Any) -> Any:
        return loss_of(case, nnx.merge(graph, params)(x) if way == NNX else module.apply({"params": params}, x))

    fun = jaxmp.autocast(loss, POLICIES[half]) if way == AUTOCAST else loss
    numbers = jax.tree_util.tree_map_with_path(lambda path, _: jnp.asarray(case.params[_name(case, path)]), params)
    return jax.grad(fun), numbers


def _name(case: Case, path: Any) -> str:
    return next(name for name in case.params if f"'{name}'" in jax.tree_util.keystr(path))


def measured(case: Case, gradient: Any) -> np.ndarray:
    """Return the gradient of the case's param, from a tree of all gradients."""
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    return next(np.asarray(leaf, np.float64) for path, leaf in leaves if _name(case, path) == case.param)


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the relative L2 error."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def worst(got: np.ndarray, want: np.ndarray) -> float:
    """Return computed value over correct value, at the entry with the largest error."""
    at = np.unravel_index(np.argmax(np.nan_to_num(np.abs(got - want), nan=np.inf)), want.shape)
    return float(got[at] / want[at])


def measure(case: Case, half: str) -> dict[str, Any]:
    """Return the errors of every way that is installed."""
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
        errors = {name: error(gradient, want) for name, gradient in got.items()}
        larger = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
        ways[way] = {"error": errors[larger], "worst": worst(got[larger], want), **errors}
    rounding = error(float64_gradient(case, half), want)
    return {"case": case.name, "text": case.text, "half": half, "rounding": rounding, "ways": ways}


def percent(value: float) -> str:
    """Format an error in percent."""
    if value < 1e-5:
        return "< 0.001 %"
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"


def table(results: list[dict[str, Any]], half: str) -> Table:
    """Return a table with a row for each case and a column for each way."""
    of_dtype = [result for result in results if result["half"] == half]
    ways = [way for way in WAYS if any(way in result["ways"] for result in of_dtype)]
    rows = []
    for result in of_dtype:
        errors = [result["ways"][way] for way in ways]
        cells = [f"{percent(result['error'])} (× {result['worst']:.3g})" for result in errors]
        rows.append((result["case"], result["text"], *cells, percent(result["rounding"])))
    return Table(half, ("gradient of", "summed over", *ways, ROUNDING), rows, 2, (NOTE,))


def sentence(run: dict[str, Any]) -> str:
    """Return the README's sentence: the error of an embedding in bfloat16."""
    embedding = next(
        result for result in run["results"] if (result["case"], result["half"]) == ("embedding", "bfloat16")
    )
    ours = max(embedding["ways"][way]["error"] for way in (LINEN, NNX, AUTOCAST))
    return (
        f"jaxmp sums the gradients of params in float32. The gradient of an embedding ({embedding['text']}) has an "
        f"error of {percent(embedding['ways'][BY_HAND]['error'])} in bfloat16 with Flax's `dtype=`, and of "
        f"{percent(ours)} with jaxmp."
    )


def picture(results: list[dict[str, Any]], half: str) -> plots.Panel:
    """Draw each way's error by case, over a bar with the error of rounding alone."""
    of_dtype = [result for result in results if result["half"] == half]
    bars = {result["case"]: 100 * result["rounding"] for result in of_dtype}
    dots: dict[str, dict[str, float]] = {}
    for result in of_dtype:
        for way, result_of_way in result["ways"].items():
            dots.setdefault(way, {})[result["case"]] = 100 * result_of_way["error"]
    grey = [plots.LIGHT] * len(of_dtype)
    return plots.Panel(half, "relative error of the gradient, %", bars, dots, grey, form="", log=True)


def main(config: Config) -> list[dict[str, Any]]:
    with cli.bad_values_end_it():
        folder = records.folder_of("gradient_sums", config)
    where, results = environment(("torch",)), []
    each_case = cases(config.smoke)
    with Progress("gradient_sums", len(each_case) * len(config.halves)) as progress:
        for half in config.halves:
            for case in each_case:
                results.append(measure(case, half))
                progress.advance(1, case.name, half)
    title, grey = "Errors of the gradients of params", "grey: the error of rounding alone. "
    tables, panels = ([make(results, half) for half in config.halves] for make in (table, picture))
    data, missing = (
        {"smoke": config.smoke, "results": results},
        "PyTorch is not installed here, so its columns are missing.",
    )
    text, shows = () if "torch " in where["versions"] else [missing], "errors by case and way"
    records.record(folder, "gradient_sums", title, where, tables, data, text, shows, [panels], grey)
    return results


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
