"""Make batches of labelled images on the device.

The images are shuffled, augmented, normalised and resized under jit. ``place`` is a function that
:mod:`experiments.data.text` describes. With ``place``, a batch is on several devices, and each process sends only the
images for its devices.
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

DEVICE_SHARE = 0.25  # the share of the device's memory that a split may take; larger splits stay on the host


class Images(NamedTuple):
    """A split: ``image`` uint8 (n, height, width, channels) and ``label`` int32 (n,).

    Both arrays are on the device or both are on the host. From the host, each batch is sent while the device works on
    the previous batch. Batches from the host and from the device are equal, bit for bit.
    """

    image: jax.Array | np.ndarray
    label: jax.Array | np.ndarray

    @property
    def on_host(self) -> bool:
        return isinstance(self.image, np.ndarray)

    def from_host(self) -> Images:
        """Return the images and labels as arrays on the host."""
        return Images(np.asarray(self.image), np.asarray(self.label))


def hold(columns: Columns, share: float = DEVICE_SHARE) -> Images:
    """Put a split on the device if it takes at most a share of the device's memory.

    The split comes from :func:`experiments.data.read`.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", np.inf)
    images = Images(columns["image"], columns["label"].astype(np.int32))
    return images if images.image.nbytes > share * limit else on_device(columns)


def on_device(columns: Columns) -> Images:
    """Put a split from :func:`experiments.data.read` on the device."""
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
    place: Place | None = None,
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
    """Yield the batches of a split in order and once, for evaluation.

    The last batch may be smaller.
    """
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


# A separate function, so that the program of the augmentation is the same for images from the host.
@functools.partial(jax.jit, static_argnames="count")
def _take(images: Images, order: jax.Array, start: int, count: int) -> tuple[jax.Array, jax.Array]:
    rows = jax.lax.dynamic_slice(order, (start,), (count,))
    return images.image[rows], images.label[rows]


def _send(images: Images, rows: np.ndarray, place: Place | None) -> tuple[jax.Array, jax.Array]:
    if place is None:
        return jax.device_put((images.image[rows], images.label[rows]))
    return tuple(place((len(rows), *array.shape[1:]), lambda part, array=array: array[rows[part]]) for array in images)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items; before yielding an item, compute the next one."""
    ahead = next(items)
    for item in items:
        yield ahead
        ahead = item
    yield ahead
