"""The data sets: content, folders, and batches that can be reproduced."""

from __future__ import annotations

import collections
import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
from places import ROOT

from experiments import data
from experiments.data import images, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def digits(folder: Path) -> dict[str, data.source.Columns]:
    return data.read("digits", folder)


@pytest.fixture(scope="module")
def pysource(data_dir: Path) -> dict[str, data.source.Columns]:
    return data.read("pysource", data_dir)


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


def test_the_stock_reader_of_tfds_reads_what_was_prepared_and_reading_again_prepares_nothing(digits, folder):
    source = tfds.data_source("digits", data_dir=folder)["train"]
    assert len(source) == len(digits["train"]["label"])
    np.testing.assert_array_equal(source[3]["image"], digits["train"]["image"][3])
    assert "tensorflow" not in sys.modules

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*digits*")}
    again = data.read("digits", folder)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*digits*")}
    for split in ("train", "test"):
        np.testing.assert_array_equal(digits[split]["image"], again[split]["image"])


@pytest.mark.slow("reads the whole standard library")
def test_pysource_is_the_standard_library_and_every_tenth_file_is_for_the_test(pysource):
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(
        name
        for path in root.rglob("*.py")
        if not (name := path.relative_to(root).as_posix()).startswith(("site-packages/", "dist-packages/"))
    )
    assert [name.decode() for name in pysource["test"]["name"]] == names[9::10]
    assert len(pysource["train"]["name"]) + len(pysource["test"]["name"]) == len(names) > 500
    for name, source in list(zip(pysource["train"]["name"], pysource["train"]["source"], strict=True))[::200]:
        assert (root / name.decode()).read_bytes() == source


@pytest.mark.slow("two processes that import all anew")
def test_two_processes_may_prepare_at_once_in_a_home_that_is_new_and_empty(tmp_path):
    program = (
        "from experiments import data; import hashlib; d = data.read('digits');"
        "print(hashlib.sha256(d['train']['image'].tobytes()).hexdigest())"
    )
    env = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    env |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [process.communicate()[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    data_folder = tmp_path / ".cache" / "jaxmp" / "data"
    assert [path.name for path in data_folder.iterdir()] == ["digits"]


def test_an_unknown_set_a_folder_that_cannot_be_written_and_what_is_too_large_are_errors(tmp_path, monkeypatch):
    known = ", ".join(data.BUILDERS)
    with pytest.raises(data.DataError, match=f"unknown data set 'digit'; there are: {known}"):
        data.read("digit")
    (tmp_path / "file").write_text("")
    with pytest.raises(data.DataError, match=r"cannot keep digits under .*file.*name another folder with --data-dir"):
        data.read("digits", tmp_path / "file")
    with pytest.raises(data.DataError, match="a batch must fit in the set's 12 examples, got --batch-size 13"):
        images.steps_per_epoch(numbered_images(12), 13)
    with pytest.raises(data.DataError, match="shorter than the text of 4 tokens, got --context 4"):
        next(text.windows(jax.numpy.zeros(4, np.int32), 4, 2, seed=0))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.default_data_dir() == tmp_path / "jaxmp" / "data"


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


def test_the_same_seed_gives_the_same_batches_and_another_seed_others():
    def first(seed: int) -> list[np.ndarray]:
        batches = images.epochs(numbered_images(12), 5, seed, 1)
        return [np.asarray(leaf) for _ in range(4) for leaf in jax.tree.leaves(next(batches))]

    assert all(np.array_equal(a, b) for a, b in zip(first(1), first(1), strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first(1), first(2), strict=True))


def test_a_shift_moves_an_image_whole_and_fills_with_zeros():
    square = np.zeros((1, 6, 6, 1), np.uint8)
    square[0, 2:4, 2:4] = 255
    batches = images.epochs(images.on_device({"image": square, "label": np.zeros(1, int)}), 1, seed=0, shift=2)
    corners = set()
    for _ in range(60):
        image = np.asarray(next(batches)["image"])[0, :, :, 0]
        rows, columns = np.nonzero(image)
        assert image.sum() == 4 and len(set(rows)) == len(set(columns)) == 2
        corners.add((int(rows.min()), int(columns.min())))
    assert {row for row, _ in corners} == {column for _, column in corners} == {0, 1, 2, 3, 4}


def test_evaluation_sees_every_image_once_in_order_and_windows_from_the_first_token_to_the_last():
    labels = [np.asarray(batch["label"]) for batch in images.in_order(numbered_images(7), 3)]
    assert [len(batch) for batch in labels] == [3, 3, 1]
    np.testing.assert_array_equal(np.concatenate(labels), np.arange(7))

    tokens = jax.numpy.arange(101, dtype=np.int32)
    first, last = list(text.spread(tokens, 4, batch_size=3, batches=2))
    starts = np.concatenate([first["context"][:, 0], last["context"][:, 0]])
    np.testing.assert_array_equal(starts, [0, 19, 38, 57, 76, 96])
    assert int(last["target"][-1]) == 100


def test_windows_are_cut_from_the_text_and_repeat_with_the_seed():
    tokens = jax.numpy.arange(50, dtype=np.int32) * 3
    batches = [next(text.windows(tokens, 4, 16, seed)) for seed in (5, 5, 6)]
    for batch in batches:
        assert (batch["context"].shape, batch["target"].shape) == ((16, 4), (16,))
        starts = np.asarray(batch["context"])[:, 0] // 3
        expected = (starts[:, None] + np.arange(5)) * 3
        np.testing.assert_array_equal(np.c_[batch["context"], batch["target"]], expected)
    np.testing.assert_array_equal(batches[0]["context"], batches[1]["context"])
    assert not np.array_equal(batches[0]["context"], batches[2]["context"])


def test_the_name_of_pysource_depends_on_the_files(monkeypatch, tmp_path):
    from experiments.data import pysource as module

    (tmp_path / "a.py").write_text("x = 1")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(tmp_path))
    names = [module.pysource(data_dir=tmp_path / "data").builder_config.name]
    (tmp_path / "a.py").write_text("x = 12")
    names.append(module.pysource(data_dir=tmp_path / "data").builder_config.name)
    assert names[0] != names[1]
    (tmp_path / "a.py").unlink()
    with pytest.raises(data.DataError, match=r"needs the standard library's sources, but .* has no \.py files"):
        module.pysource(data_dir=tmp_path / "data")
