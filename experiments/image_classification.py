"""Trains a convolutional network on images, under any policy.

python -m experiments.image_classification --policy mixed_float16

python -m experiments.image_classification --dataset cifar10 --model resnet18 --epochs 30 --batch-size 128
--optimizer sgd --learning-rate 0.1 --weight-decay 5e-4 --schedule cosine --flip --shift 4 --policy mixed_bfloat16

With the defaults (1,797 real digits of 8×8 pixels, 20 epochs, AdamW) this takes about 10 s on two CPU cores and reads
99 % of the held-out digits right. The second trains CIFAR-10 as it is usually done; with --image-size 224 and resnet50
it is what GPUs are measured with. The run folder holds config.json, metrics.csv, curves.png, checkpoints/,
summary.json and summary.md; --resume goes on with a run that was stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

if not __package__:  # started as a file: the folder above this one has the packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxmp
from experiments import data, models
from experiments.data import images
from experiments.training import batch_size, cli, loop, mesh
from experiments.training.experiment import Experiment
from experiments.training.metrics import accuracy
from experiments.training.precision import (
    compute_dtype,
    read_autocast,
    read_low_precision,
    read_overrides,
    read_policy,
    require_matches,
)
from jaxmp.sharding import Sharding

LINEN = {
    "cnn": lambda classes, small_images: models.CNN(classes),
    "resnet18": models.resnet18,
    "resnet50": models.resnet50,
}
SMALL = 64  # up to this height a residual network has the stem for small images


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(cli.Training):
    """Flags of image classification."""

    dataset: Literal[tuple(data.IMAGES)] = "digits"
    """The images. All but the digits are downloaded, or built from files below --data-dir."""
    model: Literal["cnn", "resnet18", "resnet50"] = "cnn"
    """The network. Residual ones have a stem for small images, or that for large ones from 65 pixels on."""
    api: Literal["linen", "nnx"] = "linen"
    """Flax's API that the network is written in; nnx has cnn and resnet18."""
    epochs: int = 20
    """Passes over the training images."""
    steps: int = 0
    """Steps to train; 0 trains --epochs."""
    batch_size: cli.BatchSize = 64
    """Images a step; auto for the most that fit in the device's memory."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """sgd has Nesterov's momentum of 0.9."""
    learning_rate: float = 1e-3
    """The optimizer's, or the largest one of the schedule."""
    weight_decay: float = 1e-4
    """The optimizer's."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Of the learning rate; cosine rises for a twentieth of the steps and then falls to zero."""
    shift: int = 0
    """Augmentation: largest number of pixels that an image is moved each way, on the device; as many as random crops
    have for padding."""
    flip: tyro.conf.FlagCreatePairsOff[bool] = False
    """Augmentation: mirror half of the images, at random, left to right, on the device."""
    image_size: int = 0
    """Height and width to which images are resized on the device, bilinearly; 0 leaves them as they are."""


class Data(NamedTuple):
    """A set, held where it fits, with its classes, each channel's mean and standard deviation, and its origin."""

    train: images.Images
    test: images.Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    origin: str


@functools.cache
def load(dataset: str, data_dir: Path | None) -> Data:
    """The training and the held-out images."""
    splits = data.read(dataset, data_dir)
    # The digits stay in [0, 1].
    mean, std = ((), ()) if dataset == "digits" else images.statistics(splits["train"]["image"])
    classes = 1 + max(int(split["label"].max()) for split in splits.values())
    train, test = images.hold(splits["train"]), images.hold(splits["test"])
    return Data(train, test, classes, mean, std, data.origin(dataset, data_dir))


def functions(config: Config, policy: Any, shape: tuple[int, int, int], classes: int) -> models.Functions:
    """The network under its policy, or without one, for images of that shape and that many classes."""
    overrides, small = read_overrides(config.override), shape[0] <= SMALL
    if config.api == "linen":
        model = LINEN[config.model](classes, small_images=small)
        model = model if policy is None else jaxmp.linen.apply_policy(model, policy, overrides)
        return models.linen_functions(model, shape)

    from experiments.models import nnx
    from jaxmp.nnx import apply_policy

    def build(rngs: Any) -> Any:
        if config.model == "cnn":
            model: Any = nnx.CNN(shape, classes=classes, rngs=rngs)
        else:
            model = nnx.resnet18(shape[2], classes=classes, small_images=small, rngs=rngs)
        return model if policy is None else apply_policy(model, policy, overrides)

    return models.nnx_functions(build)


def optimizer(config: Config, steps: int) -> optax.GradientTransformation:
    """The optimizer that the flags describe, for so many steps."""
    learning_rate: Any = config.learning_rate
    if config.schedule == "cosine":
        rise = max(1, steps // 20)
        learning_rate = optax.warmup_cosine_decay_schedule(0, learning_rate, rise, max(steps, rise + 1))
    if config.optimizer == "adamw":
        return optax.adamw(learning_rate, weight_decay=config.weight_decay)
    sgd = optax.sgd(learning_rate, momentum=0.9, nesterov=True)
    return optax.chain(optax.add_decayed_weights(config.weight_decay), sgd)


def check(config: Config) -> None:
    """Checks the flags.

    Raises:
      ValueError: one has a value that cannot be, or two do not go together.
    """
    cli.check(config)
    cli.require("--epochs", config.epochs, 1)
    cli.require("--steps", config.steps, 0)
    cli.require("--image-size", config.image_size, 0)
    cli.require("--weight-decay", config.weight_decay, 0)
    if config.model == "cnn" and config.image_size == 1:
        raise ValueError("--model cnn halves its images: --image-size must be at least 2, or 0 for theirs, got 1")
    if config.api == "nnx" and config.model == "resnet50":
        raise ValueError("--api nnx has cnn and resnet18, got --model resnet50; use --api linen")
    if config.api == "nnx" and config.override and (config.autocast or config.opt_level == "O1"):
        raise ValueError(
            "under autocast --override matches the names on JAX's name stack, where --api nnx puts none, got "
            f"{config.override[0]!r}; use --api linen"
        )


def prepare(config: Config) -> Experiment:
    """Everything that training needs.

    Raises:
      ValueError: a flag has a value that cannot be.
      DataError: the data cannot be had, or a batch does not fit.
    """
    check(config)
    devices = mesh.read(config.mesh)
    mesh.require_rows(devices, config.batch_size, config.accumulate)
    mesh.require_no_tensor(devices, f"--model {config.model}")
    place = None if devices is None else functools.partial(mesh.spread, devices)
    policy, loss_scale, loss_scale_name = read_policy(config.policy, config.loss_scale, config.opt_level)
    autocast = read_autocast(config.autocast, config.opt_level, policy, config.override)

    train, test, classes, mean, std, origin = load(config.dataset, config.data_dir)
    cli.require("--shift", config.shift, 0, train.image.shape[1])
    epoch = images.steps_per_epoch(train, config.batch_size)
    steps = config.steps or config.epochs * epoch
    # The first module would round its input anyway, unless an override says otherwise.
    dtype = "float32" if config.override or autocast else compute_dtype(policy).name
    pixels = images.Pixels(config.image_size, mean, std, dtype)
    shape = pixels.shape(train.image.shape[1:])

    init, apply = functions(config, None if autocast else policy, shape, classes)
    tx = jaxmp.loss_scaling(read_low_precision(optimizer(config, steps), config.low_precision, config.seed), loss_scale)

    def loss_fn(params: Any, model_state: Any, batch: images.Batch, rng: Any, train: bool = True) -> Any:
        logits, model_state = apply(params, model_state, batch["image"], train)
        logits = logits.astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, model_state, {"accuracy": accuracy(logits, batch["label"])}

    def fields() -> dict[str, Any]:
        return {"apply_fn": apply, "model_state": init(0)[1], "ema": config.ema > 0}

    def create(params: Any) -> jaxmp.TrainState:
        return jaxmp.TrainState.create(params=params, tx=tx, **fields())

    params = jax.eval_shape(init, 0)[0]  # a pattern that matches nothing is an error here, not after the folder is made
    specs = sharding = create_on_mesh = None
    if devices is not None:
        specs = jaxmp.sharding.fsdp_specs(params, devices)
        sharding = Sharding(devices, specs)

        def create_on_mesh(seed: int) -> jaxmp.TrainState:
            return jaxmp.TrainState.create_sharded(lambda: init(seed)[0], tx, sharding, **fields())

    experiment = Experiment(
        loss_fn=jaxmp.autocast(loss_fn, **autocast) if autocast else loss_fn,
        step=jaxmp.make_train_step(
            loss_fn,
            accumulate_steps=config.accumulate,
            ema_decay=config.ema or None,
            remat=None if config.remat == "none" else config.remat,  # on a mesh weights are gathered again
            sharding=sharding,
            **autocast,
        ),
        eval_step=jaxmp.make_eval_step(
            mesh.gathered(functools.partial(loss_fn, train=False), devices, specs), use_ema=config.ema > 0, **autocast
        ),
        init_params=lambda seed: init(seed)[0],
        create=create,
        train_batches=lambda seed, start=0: images.epochs(
            train, config.batch_size, seed, config.shift, start, config.flip, pixels, place
        ),
        test_batches=lambda: images.in_order(test, 1024 if shape[0] <= SMALL else config.batch_size, pixels, place),
        steps=steps,
        batch_size=config.batch_size,
        precision={
            "policy": str(policy),
            "loss_scale_rule": loss_scale_name,
            "data": origin,
            "autocast": "yes" if autocast else "no",
        },
        create_on_mesh=create_on_mesh,
    )
    if autocast:
        require_matches(experiment)
    return experiment


def most(config: Config) -> int:
    """The largest batch that makes sense: the whole set."""
    return len(load(config.dataset, config.data_dir).train.label)


def train(config: Config) -> dict[str, Any]:
    with cli.bad_values_end_it():
        config = batch_size.settled("image_classification", config, prepare, most)
    with loop.running("image_classification", config, prepare) as run:
        for batch in run.batches():
            run.state, metrics = run.experiment.step(run.state, batch)
            run.log(metrics)
    return run.summary


if __name__ == "__main__":
    cli.main(Config, train, __doc__)
