"""The data sets: content, folders, and batches that can be reproduced."""

from __future__ import annotations

import collections
import hashlib
import sys
from typing import Any

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from experiments import data
from experiments.data import images, text


@pytest.fixture(scope="module")
def digits() -> dict[str, Any]:
    return data.read("digits")[0]


def test_digits_are_scikit_learns_and_every_fifth_of_a_class_is_for_the_test(digits):
    from sklearn.datasets import load_digits  # its import takes two seconds

    original = load_digits()
    expected: dict[str, list[int]] = {"train": [], "test": []}
    counts: collections.Counter[int] = collections.Counter()
    for i, label in enumerate(original.target.tolist()):
        counts[label] += 1
        expected["test" if counts[label] % 5 == 0 else "train"].append(i)
    assert len(expected["train"]) + len(expected["test"]) == 1797
    for split, rows in expected.items():
        np.testing.assert_array_equal(digits[split]["label"], original.target[rows])
        np.testing.assert_array_equal(np.round(digits[split]["image"][..., 0] * (16 / 255)), original.images[rows])
        assert digits[split]["image"].dtype == np.uint8
    digest = hashlib.sha256(digits["test"]["image"].tobytes() + digits["test"]["label"].tobytes()).hexdigest()
    assert digest[:16] == "c828ed8d66d49993"  # on every machine


def test_images_are_read_from_folders_of_classes(tmp_path):
    for split, name, value in (("train", "a", 10), ("train", "b", 20), ("test", "a", 30), ("test", "b", 40)):
        (tmp_path / "mnist" / split / name).mkdir(parents=True)
        Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(tmp_path / "mnist" / split / name / "0.png")
    splits, origin = data.read("mnist", tmp_path)
    assert splits["test"]["image"][:, 0, 0, 0].tolist() == [30, 40] and splits["test"]["label"].tolist() == [0, 1]
    assert origin == "mnist: image files in the folder mnist"
    (tmp_path / "mnist" / "test" / "a" / "0.png").unlink()
    with pytest.raises(data.DataError, match=r"every class must have images, but .*test/a has none"):
        data.read("mnist", tmp_path)


def test_a_set_that_tfds_has_prepared_is_read_without_tensorflow(tmp_path):
    class Mnist(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name, VERSION = "mnist", tfds.builder_cls("mnist").VERSION

        def _info(self):
            image = tfds.features.Image(shape=(28, 28, 1))
            features = {"image": image, "label": tfds.features.ClassLabel(num_classes=10)}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, _):
            return {"train": self._generate_examples(3), "test": self._generate_examples(2)}

        def _generate_examples(self, count):
            for i in range(count):
                yield i, {"image": Image.fromarray(np.full((28, 28), i, np.uint8)), "label": i}

    Mnist(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    splits, origin = data.read("mnist", tmp_path)
    assert sorted(splits["train"]["label"].tolist()) == [0, 1, 2] and splits["test"]["image"].shape == (2, 28, 28, 1)
    np.testing.assert_array_equal(splits["train"]["image"][:, 0, 0, 0], splits["train"]["label"])
    assert origin.endswith("as prepared by tensorflow-datasets") and "tensorflow" not in sys.modules


def numbered_images(n: int) -> images.Images:
    """Return a data set in which all pixels of image i, and its label, are i."""
    numbers = np.arange(n)
    return images.on_device(
        {"image": np.tile(numbers[:, None, None, None], (1, 4, 4, 1)).astype(np.uint8), "label": numbers}
    )


def test_an_epoch_has_every_image_once_in_an_order_of_its_own():
    batches = images.epochs(numbered_images(12), 4, seed=0)
    epochs = [np.concatenate([next(batches)["label"] for _ in range(3)]) for _ in range(2)]
    batch = next(batches)
    assert (batch["image"].dtype, batch["image"].shape) == (np.float32, (4, 4, 4, 1))
    np.testing.assert_allclose(batch["image"][:, 0, 0, 0], np.asarray(batch["label"]) / 255, rtol=1e-6)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(12))
    assert not np.array_equal(*epochs)


def test_evaluation_sees_every_image_once_in_order_and_windows_from_the_first_token_to_the_last():
    labels = [np.asarray(batch["label"]) for batch in images.in_order(numbered_images(7), 3)]
    assert [len(batch) for batch in labels] == [3, 3, 1]
    np.testing.assert_array_equal(np.concatenate(labels), np.arange(7))

    tokens = jax.numpy.arange(101, dtype=np.int32)
    first, last = list(text.spread(tokens, 4, batch_size=3, batches=2))
    starts = np.concatenate([first["context"][:, 0], last["context"][:, 0]])
    np.testing.assert_array_equal(starts, [0, 19, 38, 57, 76, 96])
    assert int(last["target"][-1]) == 100
