"""Batches of images are the same from the host and from the device."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data import images


def random_columns(n: int, height: int = 6, channels: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n)
    return {"image": rng.integers(0, 256, (n, height, height, channels), np.uint8), "label": rng.integers(0, 10, n)}


def on_host(columns: dict[str, np.ndarray]) -> images.Images:
    return images.Images(columns["image"], columns["label"].astype(np.int32))


def assert_same_batches(ours, theirs) -> None:
    for a, b in itertools.zip_longest(ours, theirs):
        for name in ("image", "label"):
            assert isinstance(a[name], jax.Array) and isinstance(b[name], jax.Array)
            assert a[name].dtype == b[name].dtype
            np.testing.assert_array_equal(a[name], b[name])


def test_batches_from_the_host_are_those_from_the_device_bit_for_bit():
    columns = random_columns(10)
    prepared = images.Pixels(9, *images.statistics(columns["image"]), "bfloat16")
    training = [
        itertools.islice(images.epochs(split, 3, 7, shift=2, flip=True, pixels=prepared), 8)
        for split in (on_host(columns), images.on_device(columns))
    ]
    assert_same_batches(*training)
    test = [images.in_order(split, 4, prepared) for split in (on_host(columns), images.on_device(columns))]
    assert_same_batches(*test)


def test_batches_from_the_middle_on_are_those_that_would_have_come():
    split = on_host(random_columns(10))
    expected = itertools.islice(images.epochs(split, 3, 1, shift=1, flip=True), 5, 9)
    assert_same_batches(expected, itertools.islice(images.epochs(split, 3, 1, shift=1, start=5, flip=True), 4))


def test_a_split_that_takes_more_than_its_share_of_the_device_stays_on_the_host(monkeypatch):
    columns = random_columns(10)
    assert not images.hold(columns).on_host  # if the device does not report its memory
    device = type("Device", (), {"memory_stats": lambda self: {"bytes_limit": 4 * columns["image"].nbytes}})()
    monkeypatch.setattr(images.jax, "local_devices", lambda: [device])
    assert not images.hold(columns).on_host
    assert images.hold(columns, share=0.24).on_host


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


def bilinear(image: np.ndarray, size: int) -> np.ndarray:
    """Resize in float64, one output pixel at a time.

    The function interpolates between pixel centres, and repeats the border.
    """
    height = image.shape[0]
    result = np.zeros((size, size, image.shape[2]))
    for row, column in itertools.product(range(size), repeat=2):
        y, x = ((i + 0.5) * height / size - 0.5 for i in (row, column))
        for dy, dx in itertools.product((0, 1), repeat=2):
            top, left = int(np.floor(y)) + dy, int(np.floor(x)) + dx
            weight = (1 - abs(y - top)) * (1 - abs(x - left))
            result[row, column] += weight * image[np.clip(top, 0, height - 1), np.clip(left, 0, height - 1)]
    return result


def test_resizing_is_bilinear_between_pixel_centres_and_averages_what_becomes_smaller():
    stored = random_columns(2)["image"]
    resized = images.plain(jnp.asarray(stored), pixels=images.Pixels(15))
    expected = np.stack([bilinear(image / 255, 15) for image in stored])
    np.testing.assert_allclose(resized, expected, atol=1e-6)

    stored = np.zeros((1, 8, 8, 1), np.uint8)
    stored[:, ::2] = 255  # every other line
    smaller = images.plain(jnp.asarray(stored), pixels=images.Pixels(2))
    np.testing.assert_allclose(smaller, 0.5, atol=0.05)

    assert images.Pixels(9).shape((4, 4, 1)) == (9, 9, 1) and images.Pixels().shape((4, 4, 3)) == (4, 4, 3)
    assert images.plain(jnp.zeros((2, 4, 4, 1), jnp.uint8), pixels=images.Pixels(9)).shape == (2, 9, 9, 1)


def test_half_inputs_are_float32_ones_rounded_once():
    dtype = "bfloat16"
    columns = random_columns(4)
    mean, std = images.statistics(columns["image"])
    stored = jnp.asarray(columns["image"])
    full, half = (images.plain(stored, pixels=images.Pixels(16, mean, std, d)) for d in ("float32", dtype))
    assert half.dtype == dtype
    np.testing.assert_array_equal(half, full.astype(dtype))


def test_half_of_the_images_are_mirrored_and_flips_and_shifts_differ():
    stored = jnp.asarray(np.tile(np.arange(4, dtype=np.uint8), (600, 2, 1))[..., None])
    flipped = np.asarray(images.flipped(stored, jax.random.key(0)))[:, 0, :, 0]
    mirrored = (flipped == [3, 2, 1, 0]).all(1)
    assert (mirrored | (flipped == [0, 1, 2, 3]).all(1)).all()
    assert 240 < mirrored.sum() < 360

    columns = {"image": np.tile(np.arange(36, dtype=np.uint8).reshape(1, 6, 6, 1), (8, 1, 1, 1)), "label": np.zeros(8)}
    batches = images.epochs(images.on_device(columns), 4, 0, shift=2, flip=True)
    image_batches = [np.asarray(next(batches)["image"]) for _ in range(2)]
    assert len({image.tobytes() for batch in image_batches for image in batch}) > 5
