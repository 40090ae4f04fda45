"""Turn stored pixels into a model's input, under jit.

Bytes are cropped and mirrored, floats normalised and resized.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Pixels:
    """Turn pixels into inputs, for training and evaluation alike.

    Attributes:
      size: height and width of the result; 0 leaves them as they are.
      mean: of each channel, which is subtracted, in [0, 1]; empty for values in [0, 1] as they are.
      std: of each channel, by which is divided.
      dtype: of the result. All is computed in float32 and rounded once, at the end.
    """

    size: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    dtype: str = "float32"

    def shape(self, image: tuple[int, int, int]) -> tuple[int, int, int]:
        """The shape that an image of shape (height, width, channels) gets."""
        return (self.size, self.size, image[2]) if self.size else image


AS_STORED = Pixels()


def statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel in [0, 1].

    They come from exact sums over uint8 (n, height, width, channel).
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
    """Images uint8 (batch, height, width, channels) as a model takes them.

    The resizing is bilinear, between pixel centres, with antialiasing where it makes images smaller. It comes last but
    for the rounding: normalising a small image costs less, and weights that sum to 1 change no mean.
    """
    x = images.astype(jnp.float32) / 255
    if pixels.mean:
        x = (x - jnp.asarray(pixels.mean, jnp.float32)) / jnp.asarray(pixels.std, jnp.float32)
    if pixels.size:
        x = jax.image.resize(x, (len(x), *pixels.shape(x.shape[1:])), "bilinear")
    return x.astype(pixels.dtype)


def shifted(images: jax.Array, key: jax.Array, shift: int) -> jax.Array:
    """Move each image by up to ``shift`` pixels along both axes.

    Zeros fill the border.
    """

    def move(image: jax.Array, offset: jax.Array) -> jax.Array:
        padded = jnp.pad(image, ((shift, shift), (shift, shift), (0, 0)))
        return jax.lax.dynamic_slice(padded, (offset[0], offset[1], 0), image.shape)

    return jax.vmap(move)(images, jax.random.randint(key, (len(images), 2), 0, 2 * shift + 1))


def flipped(images: jax.Array, key: jax.Array) -> jax.Array:
    """Each image mirrored, left to right, with probability a half."""
    chosen = jax.random.bernoulli(key, 0.5, (len(images), 1, 1, 1))
    return jnp.where(chosen, images[:, :, ::-1], images)


@functools.partial(jax.jit, static_argnames=("shift", "flip", "pixels"))
def augmented(
    images: jax.Array, key: jax.Array, step: int, shift: int = 0, flip: bool = False, pixels: Pixels = AS_STORED
) -> jax.Array:
    """Return images as input, moved and mirrored by the key and the step.

    The images are uint8 (batch, height, width, channels).
    """
    key = jax.random.fold_in(key, step)
    if shift:
        images = shifted(images, key, shift)
    if flip:
        images = flipped(images, jax.random.fold_in(key, 1))
    return as_input(images, pixels)


plain = jax.jit(as_input, static_argnames="pixels")
