"""Measure errors before and after tune in seven small models.

The time that `jaxmp.inspect.tune` takes is measured too.

python -m experiments.benchmarks.tune --run-dir experiments/results/tune

The models are small and untrained, with random data. The error is the one that tune uses: that of all gradients
together, relative to float32. Two errors without tune are measured for comparison:

- under autocast's rules
- with every operation in half precision

The run folder holds tune.md and tune.json.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from experiments.benchmarks.models.workloads import SMOKE, workload
from experiments.benchmarks.shared import records
from experiments.models.images import ResNet
from experiments.report.progress import Progress
from experiments.report.tables import Table, percent, titled
from experiments.training import cli
from experiments.training.environment import environment
from jaxmp.inspect._tune.measurement import Measurement, without_policies

MODELS = ("ResNet-18", "BERT", "GPT-2", "VQ-VAE", "GRU", "neural ODE", "Gaussian process")
POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
COLUMNS = (
    "model", "half", "all in half", "autocast", "tuned", "floor", "overrides", "FLOPs in half",
    "evaluations", "s",
)  # fmt: skip
NOTE = (
    "Errors of all gradients together, relative to float32. The floor is the error if only the operands of products "
    "are rounded to half; tune allows twice as much. The loss scale in float16 is the one that tune recommends."
)
Loss = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(records.Small):
    """Flags of the benchmark."""

    models: tuple[str, ...] = MODELS
    """Models to tune."""
    halves: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16", "float16")
    """Half formats."""


class VQVAE(nn.Module):
    """A VQ-VAE with a codebook of 32 vectors and a straight-through gradient.

    Its result is the loss.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        code = nn.Dense(8, name="to_code")(nn.gelu(nn.Dense(64, name="encoder")(x)))
        codebook = self.param("codebook", nn.initializers.normal(1.0), (32, 8))
        with jax.named_scope("distances"):
            distances = (code**2).sum(-1, keepdims=True) - 2 * code @ codebook.T + (codebook**2).sum(-1)
        nearest = codebook[distances.argmin(-1)]
        commitment = ((code - jax.lax.stop_gradient(nearest)) ** 2).mean() + ((code - nearest) ** 2).mean()
        straight = code + jax.lax.stop_gradient(nearest - code)
        decoded = nn.Dense(x.shape[-1], name="to_input")(nn.gelu(nn.Dense(64, name="decoder")(straight)))
        return ((decoded - x) ** 2).mean() + commitment


class GRU(nn.Module):
    """A recurrent layer and a head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(1, name="head")(nn.RNN(nn.GRUCell(32), name="rnn")(x))


class NeuralODE(nn.Module):
    """An encoder, ``steps`` unrolled steps of the midpoint rule, and a head."""

    steps: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        field_in, field_out = nn.Dense(64, name="field_in"), nn.Dense(32, name="field_out")
        x, step = nn.Dense(32, name="encoder")(x), 1 / self.steps
        with jax.named_scope("flow"):
            for _ in range(self.steps):
                middle = x + step / 2 * field_out(nn.tanh(field_in(x)))
                x = x + step * field_out(nn.tanh(field_in(middle)))
        return nn.Dense(1, name="head")(x)


class GaussianProcess(nn.Module):
    """The negative log-likelihood of targets under a Gaussian process.

    Its kernel is an RBF kernel of learned features.
    """

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        x = nn.Dense(8, name="features")(nn.tanh(nn.Dense(64, name="encoder")(x)))
        with jax.named_scope("kernel"):
            squares = (x**2).sum(-1)
            kernel = jnp.exp(-(squares[:, None] + squares[None, :] - 2 * x @ x.T) / 16)
        with jax.named_scope("likelihood"):
            factor = jnp.linalg.cholesky(kernel + 0.01 * jnp.eye(len(x)))
            solved = jax.scipy.linalg.cho_solve((factor, True), y)
            return (y * solved).mean() / 2 + jnp.log(jnp.diagonal(factor)).mean()


def problem(name: str, smoke: bool) -> tuple[Loss, tuple[Any, ...]]:
    """Return the loss function of a model, and its arguments.

    Raises:
      ValueError: there is no such model.
    """
    rng, key = np.random.default_rng(0), jax.random.key(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    if name in ("BERT", "GPT-2"):
        of_tokens = workload(name.lower().replace("-", ""), SMOKE["gpt2"], vocabulary=96)
        params, _ = of_tokens.init(key)
        loss_fn = of_tokens.loss_fn()
        return lambda params, batch: loss_fn(params, {}, batch)[0], (params, of_tokens.random_batch())
    if name == "ResNet-18":
        images, labels = normal(4, 16 if smoke else 32, 16 if smoke else 32, 3), rng.integers(0, 10, 4)
        net = ResNet((1,) * 4 if smoke else (2,) * 4, "basic", 10, 8, small_images=True)
        params, statistics = (net.init(key, images)[part] for part in ("params", "batch_stats"))

        def loss_of_images(params: Any, statistics: Any, images: Any, labels: Any) -> Any:
            variables = {"params": params, "batch_stats": statistics}
            logits, _ = net.apply(variables, images, train=True, mutable=["batch_stats"])
            return jaxmp.losses.cross_entropy(logits, labels).mean()

        return loss_of_images, (params, statistics, images, labels)
    if name in ("VQ-VAE", "Gaussian process"):
        model: Any = VQVAE() if name == "VQ-VAE" else GaussianProcess()
        inputs = (normal(64, 16),) if name == "VQ-VAE" else (normal(64, 16), normal(64))
        variables = model.init(key, *inputs)
        return lambda variables, *inputs: model.apply(variables, *inputs), (variables, *inputs)
    if name in ("GRU", "neural ODE"):
        steps = 4 if smoke else 16
        net = GRU() if name == "GRU" else NeuralODE(steps)
        x = normal(16, steps, 16) if name == "GRU" else normal(64, 16)
        variables = net.init(key, x)
        return lambda variables, x, y: ((net.apply(variables, x) - y) ** 2).mean(), (variables, x, x[..., :1])
    raise ValueError(f"a model must be one of {', '.join(MODELS)}, got {name!r}")


def measure(name: str, half: str, smoke: bool) -> dict[str, Any]:
    """Tune a model, and measure the errors that tune's error is compared with."""
    loss_fn, args = problem(name, smoke)
    start = time.perf_counter()
    tuned = jaxmp.inspect.tune(loss_fn, POLICIES[half])(*args)
    seconds = time.perf_counter() - start
    policy: Any = jaxmp.get_policy(POLICIES[half])
    measurement = Measurement(without_policies(loss_fn), [args], policy, tuned.loss_scale or 1.0)
    return {
        "model": name,
        "half": half,
        "all in half": measurement.error({"**": "half"}),
        "autocast": tuned.error_before,
        "tuned": tuned.error,
        "floor": tuned.floor,
        "met": tuned.met,
        "overrides": dict(tuned.overrides),
        "half flops": tuned.half_flops,
        "evaluations": tuned.evaluations,
        "seconds": seconds,
    }


def table(results: list[dict[str, Any]], title: str) -> Table:
    """Return a table with a row for each model and half format."""
    rows = []
    for result in results:
        errors = [percent(result[name]) for name in ("all in half", "autocast", "tuned", "floor")]
        needed = [path for path, level in result["overrides"].items() if level == "float32"]
        rows.append((
            result["model"], result["half"], *errors, str(len(needed)), f"{100 * result['half flops']:.0f} %",
            str(result["evaluations"]), f"{result['seconds']:.0f}",
        ))  # fmt: skip
    return Table(title, COLUMNS, rows, 2, (NOTE,))


def main(config: Config) -> list[dict[str, Any]]:
    with cli.bad_values_end_it():
        folder = records.folder_of("tune", config)
        for name in config.models:
            if name not in MODELS:
                raise ValueError(f"--models must be among {', '.join(MODELS)}, got {name!r}")
    where, results = environment(), []
    with Progress("tune", len(config.models) * len(config.halves)) as progress:
        for name in config.models:
            for half in config.halves:
                results.append(measure(name, half, config.smoke))
                progress.advance(1, name, half)
    data = {"smoke": config.smoke, "results": results}
    title = titled("Errors before and after tune", config.smoke)
    records.record(folder, "tune", "The exceptions that tune finds", where, [table(results, title)], data)
    return results


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
