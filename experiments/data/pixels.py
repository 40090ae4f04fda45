"""Shift, mirror, normalise and resize stored pixels for a model, under jit."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np


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
