"""Trains a little next-token model on the standard library's own sources, under any policy.

python -m experiments.language_modeling --policy mixed_float16 --loss-scale none

A real task on which float16 needs its loss scale: the gradient of a logit is (p - y) / N, and with a mean over
N = 8,192 tokens every p below 2.4e-4 becomes 0 in float16, so that nothing pushes wrong tokens down. A run takes about
30 s on two CPU cores. The run folder holds config.json, metrics.csv, curves.png, checkpoints/, summary.json and
summary.md; --resume goes on with a run that was stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any, Literal

if not __package__:  # started as a file: the folder above this one has the packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp
import optax

import jaxmp
from experiments import cli, data, training
from experiments.data import text
from experiments.experiment import Experiment
from experiments.metrics import accuracy
from experiments.models import NextToken
from experiments.precision import read_autocast, read_overrides, read_policy, require_matches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(cli.Training):
    """Flags of language modeling."""

    dataset: Literal["pysource"] = "pysource"
    """The text."""
    vocabulary: int = 2048
    """Tokens: the most frequent pairs of bytes."""
    context: int = 4
    """Tokens that the model sees."""
    steps: int = 150
    """Steps to train."""
    batch_size: int = 8192
    """Tokens a step."""
    test_batches: int = 8
    """Batches of windows, spread over the held-out text, to evaluate on."""
    learning_rate: float = 3e-3
    """Adam's."""


@functools.cache
def load(dataset: str, data_dir: Path | None, vocabulary: int) -> tuple[text.Tokens, str]:
    """The training and the held-out text, on the device, and where it comes from."""
    return text.on_device(data.read(dataset, data_dir), vocabulary), data.origin(dataset, data_dir)


def prepare(config: Config) -> Experiment:
    """Everything that training needs.

    Raises:
      ValueError: a flag has a value that cannot be.
      DataError: the data cannot be had, or a window does not fit.
    """
    cli.check(config)
    cli.require("--steps", config.steps, 1)
    cli.require("--context", config.context, 1)
    policy, loss_scale, loss_scale_name = read_policy(config.policy, config.loss_scale, config.opt_level)
    autocast = read_autocast(config.autocast, config.opt_level, policy, config.override)

    tokens, origin = load(config.dataset, config.data_dir, config.vocabulary)
    if config.batch_size > len(tokens.test):
        raise ValueError(
            f"--batch-size must be at most the {len(tokens.test)} tokens that are held out, got {config.batch_size}"
        )
    cli.require("--test-batches", config.test_batches, 1, len(tokens.test) // config.batch_size + 1)

    model = NextToken(config.vocabulary)
    if not autocast:
        model = jaxmp.linen.apply_policy(model, policy, read_overrides(config.override))
    tx = jaxmp.loss_scaling(optax.adam(config.learning_rate), loss_scale)

    def loss_fn(params: Any, model_state: Any, batch: text.Batch, rng: Any) -> Any:
        logits = model.apply({"params": params}, batch["context"]).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"]).mean()
        return loss, model_state, {"accuracy": accuracy(logits, batch["target"])}

    def init_params(seed: int) -> Any:
        return model.init(jax.random.key(seed), jnp.zeros((1, config.context), jnp.int32))["params"]

    def create(params: Any) -> jaxmp.TrainState:
        return jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx, ema=config.ema > 0)

    experiment = Experiment(
        loss_fn=jaxmp.autocast(loss_fn, **autocast) if autocast else loss_fn,
        step=jaxmp.make_train_step(
            loss_fn,
            accumulate_steps=config.accumulate,
            ema_decay=config.ema or None,
            remat=config.remat,
            **autocast,
        ),
        eval_step=jaxmp.make_eval_step(loss_fn, use_ema=config.ema > 0, **autocast),
        init_params=init_params,
        create=create,
        train_batches=functools.partial(text.windows, tokens.train, config.context, config.batch_size),
        test_batches=lambda: text.spread(tokens.test, config.context, config.batch_size, config.test_batches),
        steps=config.steps,
        batch_size=config.batch_size,
        precision={
            "policy": str(policy),
            "loss_scale_rule": loss_scale_name,
            "data": origin,
            "autocast": "yes" if autocast else "no",
        },
    )
    jax.eval_shape(init_params, 0)  # a pattern that matches nothing is an error here, not after the folder is made
    if autocast:
        require_matches(experiment)
    return experiment


def train(config: Config) -> dict[str, Any]:
    return training.train("language_modeling", config, prepare)


if __name__ == "__main__":
    cli.main(Config, train, __doc__)
