"""Train a convolutional network on images, under any policy.

python -m experiments.image_classification --policy mixed_float16

python -m experiments.image_classification --dataset cifar10 --model resnet18 --epochs 30 --batch-size 128
--optimizer sgd --learning-rate 0.1 --weight-decay 5e-4 --schedule cosine --flip --shift 4 --policy mixed_bfloat16

With the defaults (1,797 digits of 8×8 pixels, 20 epochs, AdamW) the first command takes about 10 s on two CPU cores and
classifies 99 % of the held-out digits correctly. The second command trains on CIFAR-10 with the usual settings.
Benchmarks of GPUs use --image-size 224 and resnet50.

The run folder holds config.json, metrics.csv, plan.json, memory.json, curves.png, checkpoints/ and summary.json.
--resume continues a run that was stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

if not __package__:  # started as a file, so add the folder with the packages to the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxmp
from experiments.data import IMAGES, images
from experiments.models.images import CNN, Functions, linen_functions, nnx_functions, resnet18, resnet50
from experiments.training import cli, loop, mesh
from experiments.training.experiment import Experiment, accuracy
from experiments.training.precision import read_low_precision, read_overrides, read_precision, require_matches

LINEN = {"resnet18": resnet18, "resnet50": resnet50}
NNX = ("cnn", "resnet18")
SMALL = 64
"""The largest height for which a ResNet has the stem for small images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFlags:
    """The images, the network and its training."""

    dataset: Literal[tuple(IMAGES)] = "digits"
    """The images. The digits are in scikit-learn. The others are read from a folder of images in --data-dir, or from
    tensorflow-datasets."""
    model: Literal["cnn", "resnet18", "resnet50"] = "cnn"
    """The network. A ResNet has its stem for small images if their height is at most 64 pixels, and otherwise its
    usual stem."""
    api: Literal["linen", "nnx"] = "linen"
    """The Flax API of the network. nnx has only cnn and resnet18."""
    epochs: int = 20
    """Passes over the training images."""
    steps: int = 0
    """Steps to train; 0 for as many as --epochs needs."""
    batch_size: cli.BatchSize = 64
    """Images per step."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """The optimizer. sgd has Nesterov momentum of 0.9."""
    learning_rate: float = 1e-3
    """Learning rate; with a schedule, the largest learning rate."""
    weight_decay: float = 1e-4
    """Weight decay of the optimizer."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Schedule of the learning rate. cosine rises for a twentieth of the steps and then falls to zero."""
    shift: int = 0
    """Augmentation on the device: the largest number of pixels that an image is moved in each direction. This is the
    padding of a random crop."""
    flip: tyro.conf.FlagCreatePairsOff[bool] = False
    """Augmentation on the device: mirror a random half of the images left to right."""
    image_size: int = 0
    """Height and width to which images are resized bilinearly on the device; 0 for no resizing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ImageFlags, cli.Training):
    """Flags of image classification."""


# --- data and flags ---------------------------------------------------------------------------------------------------


def check(config: Config) -> None:
    """Check the flags.

    Raises:
      ValueError: the value of a flag is out of range, or two flags do not go together.
    """
    cli.check(config)
    cli.require("--epochs", config.epochs, 1)
    cli.require("--steps", config.steps, 0)
    cli.require("--image-size", config.image_size, 0)
    cli.require("--weight-decay", config.weight_decay, 0)
    if config.model == "cnn" and config.image_size == 1:
        raise ValueError("--model cnn halves its images: --image-size must be at least 2, or 0 for their size, got 1")
    if config.api == "nnx" and config.model not in NNX:
        raise ValueError(f"--api nnx has {' and '.join(NNX)}, got --model {config.model}; use --api linen")
    if config.api == "nnx" and config.override and (config.autocast or config.opt_level == "O1"):
        raise ValueError(
            "under autocast --override matches names on JAX's name stack, and --api nnx puts no names there, got "
            f"{config.override[0]!r}; use --api linen"
        )


class Batches(NamedTuple):
    """The batches of a run.

    Attributes:
      train: ``train(seed, start=0)`` yields batches without end, from the batch with number ``start``.
      test: returns the held-out batches.
      shape: height, width and channels of an image.
      classes: the number of classes.
      steps: the number of steps to train.
      origin: the name and the source of the data set.
    """

    train: Callable[..., Iterator[images.Batch]]
    test: Callable[[], Iterator[images.Batch]]
    shape: tuple[int, int, int]
    classes: int
    steps: int
    origin: str


def batches(config: Config, dtype: str, devices: Any) -> Batches:
    """Return the batches that the flags describe.

    Images have the dtype ``dtype``. The batches are on the mesh ``devices``, or on one device if it is None.
    """
    dataset = images.load(config.dataset, config.data_dir)
    height, width, channels = dataset.train.image.shape[1:]
    cli.require("--shift", config.shift, 0, height)
    pixels = dataset.pixels(config.image_size, dtype)
    shape = pixels.shape((height, width, channels))
    size = config.batch_size
    return Batches(
        train=lambda seed, start=0: mesh.placed(
            devices, images.epochs(dataset.train, size, seed, config.shift, start, config.flip, pixels)
        ),
        test=lambda: mesh.placed(devices, images.in_order(dataset.test, 1024 if shape[0] <= SMALL else size, pixels)),
        shape=shape,
        classes=dataset.classes,
        steps=config.steps or config.epochs * images.steps_per_epoch(dataset.train, size),
        origin=dataset.origin,
    )


# --- model and optimizer ----------------------------------------------------------------------------------------------


def network(config: Config, policy: Any, shape: tuple[int, int, int], classes: int) -> Functions:
    """Return the network under its policy, or without one, as functions of arrays.

    Args:
      config: the flags.
      policy: the policy of the modules; None for no policy.
      shape: height, width and channels of an image.
      classes: the number of classes.
    """
    overrides, small = read_overrides(config.override), shape[0] <= SMALL
    if config.api == "linen":
        model = CNN(classes) if config.model == "cnn" else LINEN[config.model](classes, small_images=small)
        if policy is not None:
            model = jaxmp.linen.apply_policy(model, policy, overrides)
        return linen_functions(model, shape)

    from experiments.models import nnx as nnx_models

    def build(rngs: Any) -> Any:
        if config.model == "cnn":
            model: Any = nnx_models.CNN(shape, classes=classes, rngs=rngs)
        else:
            model = nnx_models.resnet18(shape[2], classes=classes, small_images=small, rngs=rngs)
        return model if policy is None else jaxmp.nnx.apply_policy(model, policy, overrides)

    return nnx_functions(build)


def optimizer(config: Config, steps: int) -> optax.GradientTransformation:
    """Return the optimizer that the flags describe, without loss scaling."""
    learning_rate: Any = config.learning_rate
    if config.schedule == "cosine":
        rise = max(1, steps // 20)
        learning_rate = optax.warmup_cosine_decay_schedule(0, learning_rate, rise, max(steps, rise + 1))
    if config.optimizer == "adamw":
        return optax.adamw(learning_rate, weight_decay=config.weight_decay)
    sgd = optax.sgd(learning_rate, momentum=0.9, nesterov=True)
    return optax.chain(optax.add_decayed_weights(config.weight_decay), sgd)


def loss_function(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss function of a network, ``loss_fn(params, state, batch, rng)``.

    ``apply`` is the function of the network.
    """

    def loss_fn(params: Any, model_state: Any, batch: images.Batch, rng: Any, train: bool = True) -> Any:
        logits, model_state = apply(params, model_state, batch["image"], train)
        logits = logits.astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, model_state, {"accuracy": accuracy(logits, batch["label"])}

    return loss_fn


def initial_states(config: Config, net: Functions, tx: Any, sharding: Any) -> tuple[Any, Any]:
    """Return two functions that make the initial state.

    The first function makes the state from params on one device. The second function makes the state from a seed on a
    mesh; it is None without a mesh.
    """

    def fields() -> dict[str, Any]:
        return {"apply_fn": net.apply, "model_state": net.init(0)[1], "ema": config.ema > 0}

    def create(params: Any) -> jaxmp.TrainState:
        return jaxmp.TrainState.create(params=params, tx=tx, **fields())

    def create_on_mesh(seed: int) -> jaxmp.TrainState:
        return jaxmp.TrainState.create_sharded(lambda: net.init(seed)[0], tx, sharding, **fields())

    return create, None if sharding is None else create_on_mesh


# --- the experiment, and its loop -------------------------------------------------------------------------------------


def prepare(config: Config) -> Experiment:
    """Make everything that training needs.

    Raises:
      ValueError: a flag has a value out of range.
      DataError: the data cannot be read, or a batch does not fit.
    """
    check(config)
    devices = mesh.read(config)
    mesh.require_no_tensor(devices, f"--model {config.model}")
    precision = read_precision(config)
    data = batches(config, precision.input_dtype(config), devices)
    net = network(config, precision.module_policy, data.shape, data.classes)
    tx = read_low_precision(optimizer(config, data.steps), config.low_precision, config.seed)
    tx = jaxmp.loss_scaling(tx, precision.loss_scale)
    sharding = mesh.sharding(devices, jax.eval_shape(net.init, 0)[0])  # an override that matches nothing is an error

    loss_fn = loss_function(net.apply)
    step = jaxmp.make_train_step(
        loss_fn,
        accumulate_steps=config.accumulate,
        ema_decay=config.ema or None,
        remat=None if config.remat == "none" else config.remat,
        sharding=sharding,
        **precision.autocast,
    )
    eval_fn = mesh.gathered(functools.partial(loss_fn, train=False), sharding)
    eval_step = jaxmp.make_eval_step(eval_fn, use_ema=config.ema > 0, **precision.autocast)
    create, create_on_mesh = initial_states(config, net, tx, sharding)
    experiment = Experiment(
        loss_fn=precision.under_autocast(loss_fn),
        step=step,
        eval_step=eval_step,
        init_params=lambda seed: net.init(seed)[0],
        create=create,
        create_on_mesh=create_on_mesh,
        train_batches=data.train,
        test_batches=data.test,
        steps=data.steps,
        batch_size=config.batch_size,
        precision=precision.description(data.origin),
        cast_plan=jaxmp.cast_plan(loss_fn, **precision.autocast) if precision.autocast else None,
    )
    if precision.autocast:
        require_matches(experiment)
    return experiment


def train(config: Config) -> dict[str, Any]:
    """Train as the flags say, and return the summary."""
    with loop.running("image_classification", config, prepare) as run:
        for batch in run.batches():
            run.state, metrics = run.experiment.step(run.state, batch)
            run.log(metrics)
    return run.summary


if __name__ == "__main__":
    cli.main(Config, train, __doc__)
