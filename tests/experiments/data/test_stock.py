"""MNIST, Fashion-MNIST and CIFAR-10 from archives, folders and downloads."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image
from stock_tools import MNIST_FILES, assert_read, truncate, write_cifar10, write_folder, write_mnist
from stock_tools import no_network as no_network
from tensorflow_datasets.core.download.checksums import UrlInfo

from experiments import data
from experiments.data import stock


def test_mnist_and_fashion_mnist_are_read_from_a_folder_each(tmp_path):
    for seed, name in enumerate(("mnist", "fashion_mnist")):
        written = write_mnist(tmp_path / "downloads" / "manual" / name, 10 * seed)
        assert_read(name, tmp_path, written)
        assert data.origin(name, tmp_path) == (
            f"{name}/3.0.1: the original archives, checksum not registered in tensorflow-datasets"
        )


def test_files_that_could_be_either_sets_are_taken_by_their_checksum_only(tmp_path, monkeypatch):
    written = write_mnist(tmp_path / "downloads" / "manual")
    with pytest.raises(data.DataError, match="mnist is not in"):
        data.read("mnist", tmp_path)
    url_infos = {}
    for name in MNIST_FILES:
        checksum = hashlib.sha256((tmp_path / "downloads" / "manual" / name).read_bytes()).hexdigest()
        url_infos[f"https://example.org/{name}"] = UrlInfo(0, checksum, name)
    mnist, fashion_mnist = (tfds.builder_cls(name) for name in ("mnist", "fashion_mnist"))
    monkeypatch.setattr(fashion_mnist, "url_infos", fashion_mnist.url_infos)  # else it would be inherited
    monkeypatch.setattr(mnist, "url_infos", url_infos)
    assert_read("mnist", tmp_path, written)
    assert data.origin("mnist", tmp_path).endswith("archives, checksum as registered in tensorflow-datasets")
    with pytest.raises(data.DataError, match="fashion_mnist is not in"):
        data.read("fashion_mnist", tmp_path)


@pytest.mark.parametrize(("form", "place"), [("binary", "downloads/manual"), ("python", ".")])
def test_cifar10_is_read_from_either_archive_as_stock_tfds_would_have_it(form, place, tmp_path):
    written = write_cifar10(tmp_path / place / f"cifar-10-{form}.tar.gz", form)
    assert_read("cifar10", tmp_path, written)
    assert data.origin("cifar10", tmp_path).startswith(f"cifar10/3.0.2: cifar-10-{form}.tar.gz, checksum not")
    source = tfds.data_source("cifar10", data_dir=tmp_path)["train"]
    for record in source[0], source[19]:  # the id of an example is its number in the archive
        number = int(record["id"].removeprefix(b"train_"))
        np.testing.assert_array_equal(record["image"], written["train"][0][number])
    names = tfds.builder("cifar10", data_dir=tmp_path).info.features["label"].names
    assert tuple(names) == stock.CLASSES["cifar10"] and "tensorflow" not in sys.modules


@pytest.mark.parametrize(("place", "suffix"), [("downloads/manual/cifar10", "jpg"), (".", "png")])
def test_cifar10_is_read_from_a_folder_of_class_folders(place, suffix, tmp_path):
    written = write_folder(tmp_path / place, stock.CLASSES["cifar10"], suffix)
    (tmp_path / place / "train" / "cat" / "Thumbs.db").write_text("not an image")
    expected = {
        split: (np.stack(list(files.values())), np.array([int(name.split("/")[0]) for name in files]))
        for split, files in written.items()
    }
    assert_read("cifar10", tmp_path, expected)
    name = (tmp_path / place).resolve().name
    origin = f"cifar10/3.0.2: image files in the folder {name}: their pixels may differ from the original's"
    assert data.origin("cifar10", tmp_path) == origin


def test_class_folders_may_be_numbers_and_colours_become_grey(tmp_path):
    for names in [stock.CLASSES["fashion_mnist"], tuple("0123456789")]:
        root = tmp_path / names[0][:1]
        names = tuple(name.replace("/", "_").upper() for name in names)
        for split in ("train", "test"):
            for label, name in enumerate(names):
                folder = root / "fashion_mnist" / split / name
                folder.mkdir(parents=True)
                Image.new("RGB", (28, 28), (label, label, label)).save(folder / "a.png")
        columns = data.read("fashion_mnist", root)["train"]
        assert sorted(columns["label"].tolist()) == list(range(10))
        np.testing.assert_array_equal(columns["image"][:, 0, 0, 0], columns["label"])


def test_a_folder_of_images_at_the_root_that_is_another_sets_is_not_taken(tmp_path):
    write_folder(tmp_path, stock.CLASSES["cifar10"])
    with pytest.raises(data.DataError, match="mnist is not in"):
        data.read("mnist", tmp_path)


def test_errors_in_images_are_named_and_nothing_is_left_behind(tmp_path):
    folder = tmp_path / "downloads" / "manual" / "cifar10"
    write_folder(folder, stock.CLASSES["cifar10"])
    bad, wide, only = (folder / name for name in ("test/dog/0000.png", "train/ship/0001.png", "test/frog/0000.png"))
    content = bad.read_bytes()
    truncate(bad)
    with pytest.raises(data.DataError, match=rf"{bad} is damaged or not an image \(.*\); replace it"):
        data.read("cifar10", tmp_path)
    bad.write_bytes(content)
    content = wide.read_bytes()
    Image.new("RGB", (40, 32)).save(wide)
    with pytest.raises(data.DataError, match=rf"images must be 32×32, got 40×32 in {wide}; resize them"):
        data.read("cifar10", tmp_path)
    wide.write_bytes(content)
    only.unlink()
    with pytest.raises(data.DataError, match=r"every class must have images .*, but there are none in .*test/frog"):
        data.read("cifar10", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["downloads"]


def test_without_network_and_files_the_error_says_what_to_put_where(tmp_path):
    with pytest.raises(data.DataError) as error:
        data.read("cifar10", tmp_path)
    manual = tmp_path / "downloads" / "manual"
    for text in (
        "no way to www.cs.toronto.edu",
        f"{manual}/cifar-10-binary.tar.gz or {manual}/cifar-10-python.tar.gz (from https://www.cs.toronto.edu/~kriz/)",
        f"{manual}/cifar10/train/CLASS/*.png",
        "airplane, automobile",
        "--data-dir",
    ):
        assert text in str(error.value)

    folder = tmp_path / "downloads" / "manual" / "mnist"
    write_mnist(folder)
    (folder / MNIST_FILES[3]).unlink()
    message = rf"four files .*{folder} lacks {MNIST_FILES[3]}; add the missing files \(from https://storage"
    with pytest.raises(data.DataError, match=message):
        data.read("mnist", tmp_path)


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(Silent, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("good", [True, False], ids=["good", "another checksum"])
def test_with_a_network_tfds_downloads_and_checks(good, tmp_path, monkeypatch, capsys):
    written = write_mnist(tmp_path / "server")
    monkeypatch.setattr(stock, "_reach", lambda url: None)
    with served(tmp_path / "server") as address:
        infos = {}
        for name in MNIST_FILES:
            content = (tmp_path / "server" / name).read_bytes()
            checksum = hashlib.sha256(content if good else b"").hexdigest()
            infos[f"{address}/{name}"] = UrlInfo(tfds.core.utils.Size(len(content)), checksum, name)
        monkeypatch.setattr(tfds.builder_cls("mnist"), "url_infos", infos)
        if good:
            assert_read("mnist", tmp_path / "data", written)
            assert data.origin("mnist", tmp_path / "data").endswith("downloaded by tensorflow-datasets")
            assert f"downloading mnist from {address}/" in capsys.readouterr().err
        else:
            with pytest.raises(data.DataError, match=r"TFDS could not download it .*wrong checksum.* Put there"):
                data.read("mnist", tmp_path / "data")


def test_a_set_that_tfds_prepared_is_read_unless_it_is_in_tfrecord_files(tmp_path, capsys):
    written = write_mnist(tmp_path / "downloads" / "manual" / "mnist")
    data.read("mnist", tmp_path)
    shown = capsys.readouterr()
    assert "preparing mnist, train  20/20" in shown.err and not shown.out
    folder = tmp_path / "mnist" / "3.0.1"
    (folder / "origin.json").unlink()  # as TFDS leaves it
    assert_read("mnist", tmp_path, written)
    assert data.origin("mnist", tmp_path) == "mnist/3.0.1: as prepared by tensorflow-datasets"
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps({**info, "fileFormat": "tfrecord"}))
    with pytest.raises(data.DataError, match=rf"{folder} has mnist as tfrecord files, .* file_format='array_record'"):
        data.read("mnist", tmp_path)
