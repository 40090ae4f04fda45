"""Measure the errors of the gradients of shared params, compared with float64.

A shared param is used by thousands of rows, tokens or pixels, and its gradient is the sum over all of them.

python -m experiments.benchmarks.gradient_sums --run-dir experiments/results/gradient_sums

A sum in half precision stops growing when the next term is less than half a unit in the last place. With equal terms
this happens after 256 terms in bfloat16, and after 2048 terms in float16. The weights of the loss are positive, and the
tokens follow Zipf's law, so that sums grow as they do with real data. Three ways are compared: a policy of jaxmp,
jaxmp.autocast, and Flax with `dtype=` by hand. The error is the relative L2 error of one param's gradient. The programs
are compiled without excess precision. The cases sum over several axes, because XLA's CPU backend sums half arrays over
a single axis in float32. The run folder holds gradient_sums.md, .json and .png.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from experiments.benchmarks.shared import records
from experiments.report import plots
from experiments.report.tables import Table, percent
from experiments.training import cli
from experiments.training.environment import environment

WAYS = ("jaxmp's policy", "jaxmp.autocast", "Flax, dtype= by hand")
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


class Tied(nn.Module):
    """An embedding that is also the output layer."""

    dtype: Any = None

    def setup(self) -> None:
        self.table = nn.Embed(1024, 8, dtype=self.dtype)
        self.dense = nn.Dense(8, use_bias=False, dtype=self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.table.attend(self.dense(self.table(x)))


class Case(NamedTuple):
    """A layer, and the param whose gradient is measured.

    Attributes:
      name: the name of the case.
      text: the values that the gradient is summed over, in words.
      param: the name of the param.
      x: the input.
      layer: makes the Linen layer from its ``dtype=``.
    """

    name: str
    text: str
    param: str
    x: np.ndarray
    layer: Callable[..., nn.Module]


def cases(smoke: bool) -> list[Case]:
    """Return all cases, small ones for a smoke test."""
    rng = np.random.default_rng(0)
    few = 16 if smoke else 1

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    shares = 1 / np.arange(1, 1025)  # Zipf's law
    tokens = rng.choice(1024, (16, 1024 // few), p=shares / shares.sum()).astype(np.int32)
    text = tokens[:, : 256 // few]
    rows, images = normal(64, 1024 // few, 8), normal(16, 64 // few, 64 // few, 3)
    return [
        Case("bias", f"nn.Dense, {rows.size // 8:,} rows", "bias", rows, partial(nn.Dense, 8)),
        Case("convolution's bias", f"nn.Conv, {images.size // 3:,} pixels", "bias", images,
             partial(nn.Conv, 8, (3, 3))),
        Case("embedding", f"nn.Embed, {tokens.size:,} tokens of Zipf's law", "embedding", tokens,
             partial(nn.Embed, 1024, 8)),
        Case("tied embedding", f"lookup and output layer, {text.size:,} tokens", "embedding", text, Tied),
        Case("norm's scale", f"nn.LayerNorm, {rows.size // 8:,} rows", "scale", rows, nn.LayerNorm),
    ]  # fmt: skip


def weights(shape: tuple[int, ...]) -> np.ndarray:
    """Return the positive weights of a loss. Their mean is 1/8."""
    return np.random.default_rng(1).uniform(0, 0.25, shape).astype(np.float32)


def gradient(case: Case, half: str, way: str) -> np.ndarray:
    """Return the gradient of the case's param, in float64 if ``way`` is "float64"."""
    policy, exact = f"mixed_{half}", way == "float64"
    layer = case.layer(dtype=half if way == WAYS[2] else None)
    params = layer.init(jax.random.key(0), case.x)["params"]
    module = jaxmp.linen.apply_policy(layer, policy) if way == WAYS[0] else layer

    def loss_fn(params: Any, x: Any) -> jax.Array:
        y = module.apply({"params": params}, x)
        y = y @ jnp.eye(y.shape[-1], dtype=y.dtype)[::-1]  # the product of the next layer
        wide = "float64" if exact else "float32"
        return jnp.sum(y.astype(wide) * jnp.asarray(weights(y.shape), wide))

    with jax.enable_x64(exact):
        args = params, case.x
        if exact:
            args = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) if leaf.dtype == np.float32 else leaf, args)
        grads = compiled(jax.grad(jaxmp.autocast(loss_fn, policy) if way == WAYS[1] else loss_fn))(*args)
    leaves = {path[-1].key: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(grads)}
    return np.asarray(leaves[case.param], np.float64)


def measure(case: Case, half: str) -> dict[str, Any]:
    """Return the error of every way."""
    want = gradient(case, half, "float64")
    errors = {way: float(np.linalg.norm(gradient(case, half, way) - want) / np.linalg.norm(want)) for way in WAYS}
    return {"case": case.name, "text": case.text, "half": half, "errors": errors}


def main(config: Config) -> list[dict[str, Any]]:
    with cli.bad_values_end_it():
        folder = records.folder_of("gradient_sums", config)
    results = [measure(case, half) for half in config.halves for case in cases(config.smoke)]
    tables, panels = [], []
    for half in config.halves:
        rows = [row for row in results if row["half"] == half]
        cells = [(row["case"], row["text"], *(percent(row["errors"][way]) for way in WAYS)) for row in rows]
        tables.append(Table(half, ("gradient of", "summed over", *WAYS), cells, 2))
        dots = {way: {row["case"]: 100 * row["errors"][way] for row in rows} for way in WAYS}
        panels.append(plots.Panel(half, "relative error of the gradient, %", dots=dots, form="", log=True))
    title, data = "Errors of the gradients of params", {"smoke": config.smoke, "results": results}
    records.record(
        folder, "gradient_sums", title, environment(), tables, data, picture="errors by case and way", panels=[panels]
    )
    return results


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
