"""Damaged, empty or malicious archives: the error names the file."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from stock_tools import MNIST_FILES, idx, truncate, write_cifar10, write_mnist

from experiments import data
from experiments.data import archives


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(content)


MNIST_DAMAGE = {
    "cut short": (truncate, "train-images.* is damaged or was cut short"),
    "a changed byte": (lambda path: change_a_byte(path), "train-images.* is damaged or was cut short"),
    "no idx": (
        lambda path: path.write_bytes(b"<html>not found</html>"),
        "train-images.* must start like an idx file of 3 dimensions, got '3c68746d'",
    ),
    "nothing": (lambda path: path.write_bytes(b""), "train-images.* must start like an idx file .*, got ''"),
    "no images": (lambda path: path.write_bytes(idx(np.zeros((0, 28, 28)))), "got 0 in .* and 20 in"),
    "labels for images": (
        lambda path: path.write_bytes(idx(np.arange(3))),
        "train-images.* must start like an idx file of 3 dimensions, got '00000801'",
    ),
    "too few values": (
        lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-5])),
        r"train-images.* must hold 15680 values by its header, got 15675",
    ),
    "fewer images than labels": (
        lambda path: path.write_bytes(idx(np.zeros((3, 28, 28)))),
        "there must be as many labels as images, got 3 in .*train-images.* and 20 in .*train-labels",
    ),
    "another size": (
        lambda path: path.write_bytes(idx(np.zeros((20, 8, 8)))),
        r"images must be of shape \(28, 28, 1\), got \(8, 8, 1\)",
    ),
}


def test_a_damaged_idx_file_is_named_and_nothing_is_left_behind(tmp_path):
    for name, (change, message) in MNIST_DAMAGE.items():
        root = tmp_path / name
        write_mnist(root / "downloads" / "manual" / "mnist")
        change(root / "downloads" / "manual" / "mnist" / MNIST_FILES[0])
        with pytest.raises(data.DataError, match=message):
            data.read("mnist", root)
        assert [path.name for path in root.iterdir()] == ["downloads"]


def test_a_cifar10_archive_that_was_cut_short_or_lacks_a_batch_is_named(tmp_path):
    path = tmp_path / "downloads" / "manual" / "cifar-10-binary.tar.gz"
    write_cifar10(path, "binary")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(data.DataError, match=rf"{path} is damaged or was cut short \(.*\); download it again"):
        data.read("cifar10", tmp_path)

    path = tmp_path / "downloads" / "manual" / "cifar-10-binary.tar.gz"
    write_cifar10(path, "binary", drop="data_batch_4.bin")
    with pytest.raises(data.DataError, match=r"must hold data_batch_1, .*, but data_batch_4 is not in it"):
        data.read("cifar10", tmp_path)


def test_one_changed_byte_in_a_cifar10_archive_is_damage(tmp_path):
    for mode, split in (("w:gz", "train"), ("w:bz2", "test"), ("w:xz", "test")):
        path = tmp_path / "cifar-10-binary.tar.gz"
        write_cifar10(path, "binary", mode=mode)
        assert len(archives.cifar10_split(path, split)[1]) == {"train": 20, "test": 4}[split]
        change_a_byte(path)
        with pytest.raises(data.DataError, match=rf"{path} is damaged or was cut short \(.*\); download it again"):
            archives.cifar10_split(path, split)


def test_archives_without_images_or_with_labels_beyond_the_classes_are_an_error(tmp_path):
    write_mnist(tmp_path)
    for file, empty in zip(MNIST_FILES, (np.zeros((0, 28, 28)), np.zeros(0)), strict=False):
        (tmp_path / file).write_bytes(idx(empty))
    with pytest.raises(data.DataError, match=r"a set must have examples, got none in .*train-labels"):
        archives.mnist_split(tmp_path / MNIST_FILES[0], tmp_path / MNIST_FILES[1])

    write_mnist(tmp_path / "downloads" / "manual" / "mnist")
    (tmp_path / "downloads" / "manual" / "mnist" / MNIST_FILES[1]).write_bytes(idx(np.arange(20)))
    with pytest.raises(data.DataError, match=r"labels must be 0 to 9, got 0 to 19 in .*train-labels"):
        data.read("mnist", tmp_path)


class Evil:
    def __reduce__(self):
        return print, ("code from an archive ran",)


def test_a_pickle_is_read_for_its_arrays_and_runs_nothing(tmp_path, capsys):
    for content, message in [
        (pickle.dumps(Evil()), "it wants builtins.print"),
        (b"\x80", "data_batch_1 in .* must be a pickle of CIFAR-10"),
        (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}), r"shape \(2, 3072\) for 1 labels"),
    ]:
        path = tmp_path / "downloads" / "manual" / "cifar-10-python.tar.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:gz") as tar:
            member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        with pytest.raises(data.DataError, match=message):
            data.read("cifar10", tmp_path)
        assert "code from an archive" not in capsys.readouterr().out
