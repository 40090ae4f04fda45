"""Batches of images: resumed, and normalised."""

from __future__ import annotations

import itertools

import jax
import numpy as np

from experiments.data import images


def random_columns(n: int, height: int = 6, channels: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    return {"image": rng.integers(0, 256, (n, height, height, channels), np.uint8), "label": rng.integers(0, 10, n)}


def assert_same_batches(ours, theirs) -> None:
    for a, b in itertools.zip_longest(ours, theirs):
        for name in ("image", "label"):
            assert isinstance(a[name], jax.Array) and isinstance(b[name], jax.Array)
            assert a[name].dtype == b[name].dtype
            np.testing.assert_array_equal(a[name], b[name])


def test_batches_from_the_middle_on_are_those_that_would_have_come():
    split = images.on_device(random_columns(10))
    expected = itertools.islice(images.epochs(split, 3, 1, shift=1, flip=True), 5, 9)
    assert_same_batches(expected, itertools.islice(images.epochs(split, 3, 1, shift=1, start=5, flip=True), 4))


def test_statistics_are_those_of_float64_and_normalise():
    stored = random_columns(40)["image"]
    stored[..., 1] = 7
    mean, std = images.statistics(np.tile(stored, (200, 1, 1, 1)))  # more than one part of the sum
    expected = stored.reshape(-1, 3).astype(np.float64) / 255
    np.testing.assert_allclose(mean, expected.mean(0), rtol=1e-12)
    np.testing.assert_allclose(std, [expected[:, 0].std(), 1, expected[:, 2].std()], rtol=1e-12)

    columns = random_columns(50)
    prepared = images.Pixels(0, *images.statistics(columns["image"]))
    (batch,) = images.in_order(images.on_device(columns), 50, prepared)
    np.testing.assert_allclose(batch["image"].mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(batch["image"].std((0, 1, 2)), 1, atol=1e-5)
