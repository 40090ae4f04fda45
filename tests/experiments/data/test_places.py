"""Where the files of data sets may be, and errors for unusable files."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from stock_tools import MNIST_FILES, assert_read, write_cifar10, write_folder, write_mnist
from stock_tools import no_network as no_network

from experiments import data
from experiments.data import places, stock

CIFAR10 = stock.CLASSES["cifar10"]


def refusal(name: str, root: Path) -> str:
    with pytest.raises(data.DataError) as error:
        data.read(name, root)
    return str(error.value)


@pytest.mark.parametrize(("renamed", "place"), [(True, "downloads/manual/mnist"), (False, "mnist")])
def test_idx_files_need_not_be_gzipped(renamed, place, tmp_path, capsys):
    written = write_mnist(tmp_path / place)
    for name in MNIST_FILES:
        path = tmp_path / place / name
        path.write_bytes(gzip.decompress(path.read_bytes()))
        path.rename(path.with_suffix("") if renamed else path)
    assert_read("mnist", tmp_path, written)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: checksum not registered")]
    assert len(notes) == 1 and "train-images-idx3-ubyte" in notes[0]


@pytest.mark.parametrize(
    ("form", "folder", "place"),
    [("binary", "cifar-10-batches-bin", "."), ("python", "cifar-10-batches-py", "downloads/manual/cifar10")],
)
def test_cifar10_may_be_unpacked(form, folder, place, tmp_path, capsys):
    written = write_cifar10(tmp_path / "archive", form)
    with tarfile.open(tmp_path / "archive") as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / "unpacked" / "cifar-10-batches").rename(tmp_path / place / folder)
    assert_read("cifar10", tmp_path, written)
    assert f"note: checksum not registered in tensorflow-datasets, so that damage may go unnoticed: {tmp_path}" in (
        capsys.readouterr().err
    )


def test_an_unpacked_folder_that_lacks_a_batch_is_an_error(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert "cifar-10-batches-py must hold data_batch_1, " in refusal("cifar10", tmp_path)


def test_files_whose_set_is_unsure_are_named_with_the_remedy(tmp_path):
    folder = tmp_path / "downloads" / "manual"
    write_mnist(folder)
    message = refusal("mnist", tmp_path)
    assert "mnist is not in" in message and f"Found, but not taken: {folder / MNIST_FILES[0]}, " in message
    assert f"checksum is not registered for mnist; move all four to {folder / 'mnist'} if they are" in message


def test_a_folder_with_some_of_the_four_files_is_named(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / MNIST_FILES[2]).unlink()
    assert f"Found, but not taken: mnist must have its four files in one folder, but {tmp_path} lacks t10k-im" in (
        refusal("mnist", tmp_path)
    )


def test_class_folders_that_do_not_fit_are_named(tmp_path):
    for i, (place, names, fault) in enumerate(
        (
            (".", CIFAR10[:9], "but there is no folder for truck"),
            ("cifar10", (*CIFAR10, "cow"), "but cow is not one of them"),
            (".", (*CIFAR10, "Cat"), "but Cat, cat are one class"),
            (
                "cifar10",
                ("cats", *CIFAR10[:3], *CIFAR10[4:]),
                "but cats is not one of them and there is no folder for cat",
            ),
        )
    ):
        folder = (tmp_path / str(i) / place).resolve()
        write_folder(folder, names)
        assert f"{folder} must have a folder for each of airplane, {', '.join(CIFAR10[1:])}, {fault}; rename them" in (
            refusal("cifar10", tmp_path / str(i))
        )


def test_a_folder_with_val_in_place_of_test_is_named(tmp_path):
    folder = tmp_path
    write_folder(folder, CIFAR10)
    (folder / "test").rename(folder / "val")
    message = refusal("cifar10", tmp_path)
    assert "images must be in folders called train and test, got " in message and f"train, val in {folder}; " in message


def test_numbered_classes_are_mnists_where_the_folder_has_no_name(tmp_path):
    for split in ("train", "test"):
        for number in range(10):
            (tmp_path / split / str(number)).mkdir(parents=True)
            Image.new("L", (28, 28), number).save(tmp_path / split / str(number) / "a.png")
    message = refusal("fashion_mnist", tmp_path)
    assert "but 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 is not one of them" in message
    assert f"or move them to {tmp_path / 'fashion_mnist'}, where numbers are allowed too" in message
    columns = data.read("mnist", tmp_path)["train"]
    np.testing.assert_array_equal(columns["image"][:, 0, 0, 0], columns["label"])


def test_files_that_cannot_be_used_are_reported_before_a_download(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stock, "_reach", lambda url: None)

    class Manager:
        def download(self, urls):
            return {name: tmp_path / name for name in urls}

    write_mnist(tmp_path)
    source, passed_over = places.find("mnist", tmp_path)
    assert source is None and len(passed_over) == 1
    stock.download("mnist", tmp_path, Manager(), passed_over)
    assert f"note: not taken: {passed_over[0]}\ndownloading mnist from" in capsys.readouterr().err


def test_a_file_with_the_name_of_an_image_that_is_not_one_is_named(tmp_path):
    write_folder(tmp_path / "cifar10", CIFAR10)
    bad = tmp_path / "cifar10" / "train" / "dog" / "5.png"
    bad.mkdir()
    assert refusal("cifar10", tmp_path).startswith(f"{bad} is damaged or not an image (")
    bad.rmdir()
    bad.symlink_to("nowhere")
    assert refusal("cifar10", tmp_path).startswith(f"{bad} is damaged or not an image (")
    bad.unlink()
    bad.write_bytes(b"")
    assert refusal("cifar10", tmp_path) == f"{bad} is damaged or not an image (of no known format); replace it"


def test_files_of_other_names_in_the_folder_for_them_are_named(tmp_path):
    place = "downloads/manual/cifar10"
    (tmp_path / place).mkdir(parents=True)
    for i in range(7):
        (tmp_path / place / f"cifar{i}.zip").write_text("")
    (tmp_path / "downloads" / "manual" / "mnist").mkdir()
    listed = ", ".join(f"cifar{i}.zip" for i in range(5))
    assert (
        f"Found, but not taken: {tmp_path / place} has {listed}, …, and none has the name of an archive of cifar10"
        in (refusal("cifar10", tmp_path))
    )
