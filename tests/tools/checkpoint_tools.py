"""A small experiment with a complete state, and processes that tests can kill."""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from experiments.training import checkpoints, cli, loop, run_folders
from experiments.training.experiment import Experiment, accuracy
from experiments.training.precision import read_policy
from jaxmp.checkpoint import orbax_folders

NAME = "tiny"


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images and the labels of scikit-learn's digits."""
    from sklearn.datasets import load_digits  # its import takes two seconds

    read = load_digits()
    return (read.data / 16).astype(np.float32), read.target.astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(cli.Training):
    """Flags of the experiment, whose loss scale grows every 2 steps.

    So some steps are skipped.
    """

    policy: str = "mixed_float16"
    loss_scale: str = "dynamic:loss_scale=65536,period=2"
    dataset: str = "digits"
    steps: int = 8
    batch_size: int = 16
    learning_rate: float = 0.01
    width: int = 8
    ballast: int = 1
    flip: bool = False
    schedule: str = "constant"
    accumulate: int = 2
    ema: float = 0.9
    evaluate_every: int = 3
    checkpoint_every: int = 2


@functools.cache  # equal runs share one compilation
def _task(
    policy: str, loss_scale: str, learning_rate: float, width: int, ballast: int, accumulate: int, ema: float
) -> dict[str, Any]:
    """Return parts of an experiment, for a network with noise and running statistics.

    The model state also has ``ballast`` floats, which only make it larger and change at every step.
    """
    policy, loss_scale, rule = read_policy(policy, loss_scale)
    tx = jaxmp.loss_scaling(optax.adam(learning_rate), loss_scale)

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        weights, x = policy.cast_to_compute((params, batch["image"]))
        hidden = nn.relu(x @ weights["hidden"] + 0.1 * jax.random.normal(rng, (len(x), width), x.dtype))
        logits = (hidden @ weights["out"]).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        mean = hidden.mean(axis=0, dtype=jnp.float32)
        new = {"mean": 0.9 * model_state["mean"] + 0.1 * mean, "ballast": model_state["ballast"] + loss}
        return loss, new, {"accuracy": accuracy(logits, batch["label"])}

    def init_params(seed: int) -> Any:
        random = np.random.default_rng(seed)
        shapes = {"hidden": (64, width), "out": (width, 10)}
        drawn = {name: random.normal(0, 1 / 8, shape).astype(np.float32) for name, shape in shapes.items()}
        return jax.tree.map(jnp.asarray, policy.cast_to_param(drawn))

    def create(params: Any) -> jaxmp.TrainState:
        dead = np.random.default_rng(1).normal(size=ballast)
        model_state = {"mean": jnp.zeros(width), "ballast": jnp.asarray(dead, jnp.float32)}
        return jaxmp.TrainState.create(params=params, tx=tx, model_state=model_state, rng=3, ema=ema > 0)

    return {
        "loss_fn": loss_fn,
        "step": jaxmp.make_train_step(loss_fn, accumulate_steps=accumulate, ema_decay=ema or None),
        "eval_step": jaxmp.make_eval_step(loss_fn, use_ema=ema > 0),
        "init_params": init_params,
        "create": create,
        "precision": {"policy": str(policy), "loss_scale_rule": rule},
    }


def prepare(config: Config) -> Experiment:
    """Return the experiment on real digits.

    A batch depends only on the seed and the step.
    """
    cli.check(config)
    names = ("policy", "loss_scale", "learning_rate", "width", "ballast", "accumulate", "ema")
    image, label = map(jnp.asarray, digits())

    def train_batches(seed: int, start: int = 0) -> Iterator[Any]:
        for step in itertools.count(start):
            rows = np.random.default_rng((seed, step)).integers(0, len(label), config.batch_size)
            yield {"image": image[rows], "label": label[rows]}

    return Experiment(
        **_task(**{name: getattr(config, name) for name in names}),
        train_batches=train_batches,
        test_batches=lambda: [{"image": image[:8], "label": label[:8]}],
        steps=config.steps,
        batch_size=config.batch_size,
    )


def train(config: Config) -> dict[str, Any]:
    """Run the experiment with JAX's standard dtype promotion, for optax's Adam."""
    with jax.numpy_dtype_promotion("standard"):
        return loop.train(NAME, config, prepare)


def last(folder: Path) -> checkpoints.Checkpoint:
    return checkpoints.read_last(run_folders.checkpoints_folder(folder))


def leaves(checkpoint: checkpoints.Checkpoint) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint by name."""
    reading = orbax_folders.Reading(checkpoint.folder.parent, checkpoint.step)
    return reading.arrays(dict.fromkeys(reading.shapes))


def bits(checkpoint: checkpoints.Checkpoint) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(leaf.dtype), leaf.shape, leaf.tobytes()) for name, leaf in leaves(checkpoint).items()}


def rows(folder: Path) -> list[list[str]]:
    """Return the metrics without the columns that depend on time."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            [text for name, text in row.items() if name not in ("examples_per_s", "input_wait")]
            for row in csv.DictReader(file)
        ]


def processes() -> Any:
    """Return a context whose processes start with all modules imported."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the fork server imports this module from there
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["checkpoint_tools", "sklearn.datasets"])
    return context


def train_in_step(pipe: Connection, config: Config, cache: Path) -> None:
    """Run the experiment; before each step, send its number and wait for an answer.

    Compiled programs are stored in ``cache``.
    """
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

    def with_pipe(experiment: Experiment) -> Experiment:
        def train_batches(seed: int, start: int = 0) -> Iterator[Any]:
            for step, batch in enumerate(experiment.train_batches(seed, start), start + 1):
                pipe.send(step)
                pipe.recv()
                yield batch

        return dataclasses.replace(experiment, train_batches=train_batches)

    loop.train(NAME, config, lambda config: with_pipe(prepare(config)))
