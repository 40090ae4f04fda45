"""Labelled images on the device: shuffled, shifted and normalised there, under jit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.errors import DataError
from experiments.data.source import Columns

Batch = dict[str, jax.Array]


class Images(NamedTuple):
    """A split on the device: ``image`` uint8 (n, height, width, channels) and ``label`` int32 (n,)."""

    image: jax.Array
    label: jax.Array


def on_device(columns: Columns) -> Images:
    """Puts a split that :func:`experiments.data.read` returned on the device."""
    return Images(jnp.asarray(columns["image"]), jnp.asarray(columns["label"].astype(np.int32)))


def steps_per_epoch(images: Images, batch_size: int) -> int:
    """How many whole batches a split has.

    Raises:
      DataError: not one.
    """
    if batch_size > len(images.label):
        raise DataError(f"a batch must fit in the set's {len(images.label)} examples, got --batch-size {batch_size}")
    return len(images.label) // batch_size


def epochs(images: Images, batch_size: int, seed: int, shift: int = 0, start: int = 0) -> Iterator[Batch]:
    """Batches for ever, the set shuffled anew in every epoch; a batch depends on the seed and its number only.

    Args:
      images: the split.
      batch_size: examples a batch; what is left of an epoch is dropped.
      seed: of the order and the shifts.
      shift: largest number of pixels that each image is moved, up or down and left or right; 0 for none.
      start: number of the first batch, counted from 0.

    Yields:
      ``image``: float32 (batch, height, width, channels) in [0, 1]; ``label``: int32 (batch,).
    """
    steps, key = steps_per_epoch(images, batch_size), jax.random.key(seed)
    first_epoch, first_step = divmod(start, steps)
    for epoch in itertools.count(first_epoch):
        order_key, shift_key = jax.random.split(jax.random.fold_in(key, epoch))
        order = _order(order_key, len(images.label))
        for step in range(first_step if epoch == first_epoch else 0, steps):
            yield _batch(images, order, step, shift_key, batch_size, shift)


def in_order(images: Images, batch_size: int) -> Iterator[Batch]:
    """One pass over a split as it is, for evaluation; the last batch may be smaller."""
    n = len(images.label)
    order = jnp.arange(n)
    for start in range(0, n, batch_size):
        yield _take(images, order[start : start + batch_size])


@functools.partial(jax.jit, static_argnums=1)
def _order(key: jax.Array, n: int) -> jax.Array:
    return jax.random.permutation(key, n)


@functools.partial(jax.jit, static_argnames=("batch_size", "shift"))
def _batch(images: Images, order: jax.Array, step: int, key: jax.Array, batch_size: int, shift: int) -> Batch:
    batch = _take(images, jax.lax.dynamic_slice(order, (step * batch_size,), (batch_size,)))
    if shift:
        offsets = jax.random.randint(jax.random.fold_in(key, step), (batch_size, 2), 0, 2 * shift + 1)
        batch["image"] = jax.vmap(functools.partial(_shifted, shift=shift))(batch["image"], offsets)
    return batch


@jax.jit
def _take(images: Images, rows: jax.Array) -> Batch:
    return {"image": images.image[rows].astype(jnp.float32) / 255, "label": images.label[rows]}


def _shifted(image: jax.Array, offset: jax.Array, shift: int) -> jax.Array:
    padded = jnp.pad(image, ((shift, shift), (shift, shift), (0, 0)))
    return jax.lax.dynamic_slice(padded, (offset[0], offset[1], 0), image.shape)
