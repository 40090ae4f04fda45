"""Write small files in the formats of the stock data sets, and compare examples."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments import data
from experiments.data import stock

MNIST_FILES = [
    f"{stem}-{kind}" for stem in ("train", "t10k") for kind in ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz")
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(address, timeout):
        raise OSError(f"no way to {address[0]}")

    monkeypatch.setattr(stock.urllib.request, "getproxies", dict)
    monkeypatch.setattr(stock.socket, "create_connection", refuse)


def examples(shape: tuple[int, ...], n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, *shape), np.uint8), np.arange(n) % 10


def idx(array: np.ndarray) -> bytes:
    header = np.array([0x0800 + array.ndim, *array.shape], ">i4")
    return gzip.compress(header.tobytes() + array.astype(np.uint8).tobytes())


def write_mnist(folder: Path, seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": examples((28, 28), 20, seed), "test": examples((28, 28), 10, seed + 1)}
    for split, stem in (("train", "train"), ("test", "t10k")):
        for part, kind in zip(splits[split], ("images-idx3", "labels-idx1"), strict=True):
            (folder / f"{stem}-{kind}-ubyte.gz").write_bytes(idx(part))
    return {split: (pixels[..., None], labels) for split, (pixels, labels) in splits.items()}


def write_cifar10(
    path: Path, form: str, drop: str = "", mode: str = "w:gz"
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    batches = {f"data_batch_{i}": examples((32, 32, 3), 4, i) for i in (1, 2, 3, 4, 5)}
    batches["test_batch"] = examples((32, 32, 3), 4, 6)
    with tarfile.open(path, mode) as tar:
        for name, (pixels, labels) in batches.items():
            planes = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), 3072)
            if form == "binary":
                name, content = f"{name}.bin", np.c_[labels.astype(np.uint8), planes].tobytes()
            else:  # the published files were written by Python 2 and an old NumPy
                content = pickle.dumps({b"data": planes, b"labels": labels.tolist()}, protocol=2)
                content = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
            if name != drop:
                member = tarfile.TarInfo(f"cifar-10-batches/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    train = [np.concatenate(parts) for parts in zip(*list(batches.values())[:5], strict=True)]
    return {"train": (train[0], train[1]), "test": batches["test_batch"]}


def write_folder(folder: Path, names: tuple[str, ...], suffix: str = "png") -> dict[str, dict[str, np.ndarray]]:
    """Write two training images and one test image of each class.

    Return the pixels by split and file.
    """
    written: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
    for split, count in (("train", 2), ("test", 1)):
        for label, name in enumerate(names):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = examples((32, 32, 3), 1, 100 * label + 10 * i + (split == "test"))[0][0]
                path = folder / split / name / f"{i:04}.{suffix}"
                Image.fromarray(pixels).save(path)
                written[split][f"{label}/{i}"] = np.asarray(Image.open(path).convert("RGB"))
    return written


def as_set(images: np.ndarray, labels: np.ndarray) -> set[tuple[bytes, int]]:
    """Return the examples as a set, because TFDS chooses their order."""
    return {(image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True)}


def assert_read(name: str, root: Path, expected: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    columns = data.read(name, root)
    assert columns.keys() == expected.keys()
    for split, (images, labels) in expected.items():
        assert columns[split]["image"].dtype == np.uint8 and columns[split]["image"].shape == images.shape
        assert as_set(columns[split]["image"], columns[split]["label"]) == as_set(images, labels)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])
