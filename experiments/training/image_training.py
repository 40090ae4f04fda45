"""The data of image classification, and the checks of its flags."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments import data
from experiments.data import images
from experiments.training import cli

SMALL = 64
"""The largest height for which a ResNet has the stem for small images."""


class Data(NamedTuple):
    """A data set of images, with its classes, statistics and origin.

    ``mean`` and ``std`` are those of each channel.
    """

    train: images.Images
    test: images.Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    origin: str

    def pixels(self, image_size: int, dtype: str) -> images.Pixels:
        """Return the resizing and the normalisation of the images."""
        return images.Pixels(image_size, self.mean, self.std, dtype)


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


def batches(config: Any, dtype: str, place: Any) -> Batches:
    """Return the batches that the flags describe.

    Images have the dtype ``dtype``, and ``place`` puts each batch on the devices.
    """
    dataset = load(config.dataset, config.data_dir)
    height, width, channels = dataset.train.image.shape[1:]
    cli.require("--shift", config.shift, 0, height)
    pixels = dataset.pixels(config.image_size, dtype)
    shape = pixels.shape((height, width, channels))
    size = config.batch_size
    return Batches(
        train=lambda seed, start=0: images.epochs(
            dataset.train, size, seed, config.shift, start, config.flip, pixels, place
        ),
        test=lambda: images.in_order(dataset.test, 1024 if shape[0] <= SMALL else size, pixels, place),
        shape=shape,
        classes=dataset.classes,
        steps=config.steps or config.epochs * images.steps_per_epoch(dataset.train, size),
        origin=dataset.origin,
    )


@functools.cache
def load(dataset: str, data_dir: Path | None) -> Data:
    """Read the training and held-out images. They are kept on the device if they fit."""
    splits = data.read(dataset, data_dir)
    # The digits are not normalised and stay in [0, 1].
    mean, std = ((), ()) if dataset == "digits" else images.statistics(splits["train"]["image"])
    classes = 1 + max(int(split["label"].max()) for split in splits.values())
    train, test = images.hold(splits["train"]), images.hold(splits["test"])
    return Data(train, test, classes, mean, std, data.origin(dataset, data_dir))


def check(config: Any) -> None:
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
    if config.api == "nnx" and config.model == "resnet50":
        raise ValueError("--api nnx has cnn and resnet18, got --model resnet50; use --api linen")
    if config.api == "nnx" and config.override and (config.autocast or config.opt_level == "O1"):
        raise ValueError(
            "under autocast --override matches names on JAX's name stack, and --api nnx puts no names there, got "
            f"{config.override[0]!r}; use --api linen"
        )
