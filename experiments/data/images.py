"""Read labelled images, and make batches of them on the device.

The images are shuffled, augmented, normalised and resized under jit.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.source import Columns, DataError, read

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Pixels:
    """How pixels are turned into inputs, in training and in evaluation.

    Attributes:
      size: height and width to resize to; 0 for no resizing.
      mean: the mean of each channel in [0, 1], which is subtracted. If it is empty, pixels are not normalised and stay
        in [0, 1].
      std: the standard deviation of each channel, by which pixels are divided.
      dtype: the dtype of the result. Everything is computed in float32 and rounded once at the end.
    """

    size: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    dtype: str = "float32"

    def shape(self, image: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the shape of the input for an image (height, width, channels)."""
        return (self.size, self.size, image[2]) if self.size else image


AS_STORED = Pixels()


def statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel in [0, 1].

    Both are computed from exact integer sums over uint8 (n, height, width, channel).
    """
    channels = images.shape[-1]
    total, squares = np.zeros(channels, np.int64), np.zeros(channels, np.int64)
    for start in range(0, len(images), 4096):
        part = images[start : start + 4096].reshape(-1, channels)
        total += part.sum(0, dtype=np.int64)
        squares += np.square(part, dtype=np.uint16).sum(0, dtype=np.int64)
    count = images.size / channels
    mean = total / count
    std = np.sqrt(squares / count - mean**2)
    return tuple((mean / 255).tolist()), tuple((np.where(std > 0, std, 255) / 255).tolist())


def as_input(images: jax.Array, pixels: Pixels) -> jax.Array:
    """Return images, uint8 (batch, height, width, channels), as the input of a model.

    Resizing is bilinear between pixel centres, with antialiasing if images become smaller. Images are normalised before
    they are resized, because resizing usually makes them larger. The result is the same, because the weights of the
    interpolation sum to 1.
    """
    x = images.astype(jnp.float32) / 255
    if pixels.mean:
        x = (x - jnp.asarray(pixels.mean, jnp.float32)) / jnp.asarray(pixels.std, jnp.float32)
    if pixels.size:
        x = jax.image.resize(x, (len(x), *pixels.shape(x.shape[1:])), "bilinear")
    return x.astype(pixels.dtype)


def shifted(images: jax.Array, key: jax.Array, shift: int) -> jax.Array:
    """Move each image by up to ``shift`` pixels along both axes.

    The border is filled with zeros.
    """

    def move(image: jax.Array, offset: jax.Array) -> jax.Array:
        padded = jnp.pad(image, ((shift, shift), (shift, shift), (0, 0)))
        return jax.lax.dynamic_slice(padded, (offset[0], offset[1], 0), image.shape)

    return jax.vmap(move)(images, jax.random.randint(key, (len(images), 2), 0, 2 * shift + 1))


def flipped(images: jax.Array, key: jax.Array) -> jax.Array:
    """Mirror each image left to right with probability 1/2."""
    chosen = jax.random.bernoulli(key, 0.5, (len(images), 1, 1, 1))
    return jnp.where(chosen, images[:, :, ::-1], images)


@functools.partial(jax.jit, static_argnames=("shift", "flip", "pixels"))
def augmented(
    images: jax.Array, key: jax.Array, step: int, shift: int = 0, flip: bool = False, pixels: Pixels = AS_STORED
) -> jax.Array:
    """Return images as input, shifted and mirrored at random.

    The images are uint8 (batch, height, width, channels). The random numbers depend on the key and the step.
    """
    key = jax.random.fold_in(key, step)
    if shift:
        images = shifted(images, key, shift)
    if flip:
        images = flipped(images, jax.random.fold_in(key, 1))
    return as_input(images, pixels)


plain = jax.jit(as_input, static_argnames="pixels")


class Images(NamedTuple):
    """A split on the device: ``image`` uint8 (n, height, width, channels) and ``label`` int32 (n,)."""

    image: jax.Array
    label: jax.Array


def on_device(columns: Columns) -> Images:
    """Put a split from :func:`experiments.data.source.read` on the device."""
    return Images(jnp.asarray(columns["image"]), jnp.asarray(columns["label"].astype(np.int32)))


def steps_per_epoch(images: Images, batch_size: int) -> int:
    """Return the number of whole batches in a split.

    Raises:
      DataError: the split is smaller than a batch.
    """
    if batch_size > len(images.label):
        raise DataError(f"a batch must fit in the set's {len(images.label)} examples, got --batch-size {batch_size}")
    return len(images.label) // batch_size


def epochs(
    images: Images,
    batch_size: int,
    seed: int,
    shift: int = 0,
    start: int = 0,
    flip: bool = False,
    pixels: Pixels = AS_STORED,
) -> Iterator[Batch]:
    """Yield batches without end, shuffled in every epoch.

    A batch depends only on the seed and on the batch's number.

    Args:
      images: the split.
      batch_size: the examples per batch. The examples left over at the end of an epoch are dropped.
      seed: the seed of the order, the shifts and the flips.
      shift: the largest number of pixels that each image is moved along both axes; 0 for no shift.
      start: the number of the first batch, counted from 0.
      flip: whether each image is mirrored left to right with probability 1/2.
      pixels: the normalisation and resizing of the images.

    Yields:
      ``image``: ``pixels.dtype`` (batch, height, width, channels); ``label``: int32 (batch,).
    """
    steps, key = steps_per_epoch(images, batch_size), jax.random.key(seed)

    first_epoch, first_step = divmod(start, steps)
    for epoch in itertools.count(first_epoch):
        order_key, shift_key = jax.random.split(jax.random.fold_in(key, epoch))
        order = _order(order_key, len(images.label))
        for step in range(first_step if epoch == first_epoch else 0, steps):
            image, label = _take(images, order, step * batch_size, batch_size)
            yield {"image": augmented(image, shift_key, step, shift, flip, pixels), "label": label}


def in_order(images: Images, batch_size: int, pixels: Pixels = AS_STORED) -> Iterator[Batch]:
    """Yield the batches of a split in order and once, for evaluation.

    The last batch may be smaller.
    """
    n = len(images.label)
    order = jnp.arange(n)
    for start in range(0, n, batch_size):
        image, label = _take(images, order, start, min(batch_size, n - start))
        yield {"image": plain(image, pixels=pixels), "label": label}


@functools.partial(jax.jit, static_argnums=1)
def _order(key: jax.Array, n: int) -> jax.Array:
    return jax.random.permutation(key, n)


@functools.partial(jax.jit, static_argnames="count")
def _take(images: Images, order: jax.Array, start: int, count: int) -> tuple[jax.Array, jax.Array]:
    rows = jax.lax.dynamic_slice(order, (start,), (count,))
    return images.image[rows], images.label[rows]


class Data(NamedTuple):
    """A data set of images, with its classes, statistics and origin.

    ``mean`` and ``std`` are those of each channel.
    """

    train: Images
    test: Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    origin: str

    def pixels(self, image_size: int, dtype: str) -> Pixels:
        """Return the resizing and the normalisation of the images."""
        return Pixels(image_size, self.mean, self.std, dtype)


@functools.cache
def load(dataset: str, data_dir: Path | None) -> Data:
    """Read the training and held-out images onto the device."""
    splits, origin = read(dataset, data_dir)
    # The digits are not normalised and stay in [0, 1].
    mean, std = ((), ()) if dataset == "digits" else statistics(splits["train"]["image"])
    classes = 1 + max(int(split["label"].max()) for split in splits.values())
    train, test = on_device(splits["train"]), on_device(splits["test"])
    return Data(train, test, classes, mean, std, origin)
