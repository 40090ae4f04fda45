"""Labelled images in batches: shuffled, augmented, normalised and resized on the device, under jit.

Where ``place`` is given, a batch lies on several devices, and each process sends the images of its own: see
:mod:`experiments.data.text`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.errors import DataError
from experiments.data.pixels import AS_STORED, augmented, plain
from experiments.data.pixels import Pixels as Pixels
from experiments.data.pixels import statistics as statistics
from experiments.data.source import Columns
from experiments.data.text import Place

Batch = dict[str, jax.Array]
T = TypeVar("T")

DEVICE_SHARE = 0.25  # of the device's memory that a split may take; a larger one stays on the host


class Images(NamedTuple):
    """A split: ``image`` uint8 (n, height, width, channels) and ``label`` int32 (n,).

    Both on the device, or both on the host, from where every batch is sent to the device while it works on the one
    before. The batches are the same, bit for bit.
    """

    image: jax.Array | np.ndarray
    label: jax.Array | np.ndarray

    @property
    def on_host(self) -> bool:
        return isinstance(self.image, np.ndarray)

    def from_host(self) -> Images:
        """These on the host."""
        return Images(np.asarray(self.image), np.asarray(self.label))


def hold(columns: Columns, share: float = DEVICE_SHARE) -> Images:
    """Put a split on the device if it takes no more than a share of it.

    :func:`experiments.data.read` returns the split.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", np.inf)
    images = Images(columns["image"], columns["label"].astype(np.int32))
    return images if images.image.nbytes > share * limit else on_device(columns)


def on_device(columns: Columns) -> Images:
    """Puts a split that :func:`experiments.data.read` returned on the device."""
    return Images(jnp.asarray(columns["image"]), jnp.asarray(columns["label"].astype(np.int32)))


def steps_per_epoch(images: Images, batch_size: int) -> int:
    """Return the number of whole batches in a split.

    Raises:
      DataError: not one.
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
    place: Place | None = None,
) -> Iterator[Batch]:
    """Yield batches for ever; every epoch shuffles the set anew.

    A batch depends on the seed and its number only.

    Args:
      images: the split.
      batch_size: examples a batch; what is left of an epoch is dropped.
      seed: of the order, the shifts and the flips.
      shift: largest number of pixels that each image is moved, up or down and left or right; 0 for none.
      start: number of the first batch, counted from 0.
      flip: whether every image is mirrored, left to right, with probability a half.
      pixels: what is made of them.
      place: puts a batch on several devices.

    Yields:
      ``image``: ``pixels.dtype`` (batch, height, width, channels); ``label``: int32 (batch,).
    """
    steps, key = steps_per_epoch(images, batch_size), jax.random.key(seed)
    images = images if place is None else images.from_host()

    def raw() -> Iterator[tuple[jax.Array, jax.Array, jax.Array, int]]:
        first_epoch, first_step = divmod(start, steps)
        for epoch in itertools.count(first_epoch):
            order_key, shift_key = jax.random.split(jax.random.fold_in(key, epoch))
            order = _order(order_key, len(images.label))
            order = np.asarray(order) if images.on_host else order
            for step in range(first_step if epoch == first_epoch else 0, steps):
                if images.on_host:
                    taken = _send(images, order[step * batch_size : (step + 1) * batch_size], place)
                else:
                    taken = _take(images, order, step * batch_size, batch_size)
                yield *taken, shift_key, step

    for image, label, shift_key, step in _ahead(raw()) if images.on_host else raw():
        yield {"image": augmented(image, shift_key, step, shift, flip, pixels), "label": label}


def in_order(
    images: Images, batch_size: int, pixels: Pixels = AS_STORED, place: Place | None = None
) -> Iterator[Batch]:
    """One pass over a split as it is, for evaluation; the last batch may be smaller."""
    images = images if place is None else images.from_host()
    n = len(images.label)
    parts = (slice(start, min(start + batch_size, n)) for start in range(0, n, batch_size))
    if images.on_host:
        raw = _ahead(_send(images, np.arange(n)[part], place) for part in parts)
    else:
        order = jnp.arange(n)
        raw = (_take(images, order, part.start, part.stop - part.start) for part in parts)
    for image, label in raw:
        yield {"image": plain(image, pixels=pixels), "label": label}


@functools.partial(jax.jit, static_argnums=1)
def _order(key: jax.Array, n: int) -> jax.Array:
    return jax.random.permutation(key, n)


# Apart from what is made of the pixels, so that this is the same program wherever the images come from.
@functools.partial(jax.jit, static_argnames="count")
def _take(images: Images, order: jax.Array, start: int, count: int) -> tuple[jax.Array, jax.Array]:
    rows = jax.lax.dynamic_slice(order, (start,), (count,))
    return images.image[rows], images.label[rows]


def _send(images: Images, rows: np.ndarray, place: Place | None) -> tuple[jax.Array, jax.Array]:
    if place is None:
        return jax.device_put((images.image[rows], images.label[rows]))
    return tuple(place((len(rows), *array.shape[1:]), lambda part, array=array: array[rows[part]]) for array in images)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items, each computed one earlier than it is needed."""
    ahead = next(items)
    for item in items:
        yield ahead
        ahead = item
    yield ahead
