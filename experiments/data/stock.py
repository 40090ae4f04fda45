"""`mnist`, `fashion_mnist` and `cifar10` under the names, versions and features that TFDS has for them.

TFDS's own builders need TensorFlow to read what they download. These are its builders with that part replaced: they
take the published archives, or folders of images, that lie in the data folder, and else let TFDS download the archives
(and check them). What they prepare, in TFDS's order, stock TFDS reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from experiments.data import archives, folders
from experiments.data.errors import DataError
from experiments.progress import Progress

_FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CLASSES = {"mnist": tuple("0123456789"), "fashion_mnist": _FASHION, "cifar10": _CIFAR10}

_MNIST_FILES = {split: (f"{stem}-images-idx3-ubyte.gz", f"{stem}-labels-idx1-ubyte.gz")
                for split, stem in (("train", "train"), ("test", "t10k"))}  # fmt: skip
_CIFAR10_FILES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")


@dataclasses.dataclass(frozen=True)
class Found:
    """Where a set's images are. ``read`` takes a split to its images (arrays or files) and their labels."""

    origin: str
    read: Callable[[str], tuple[Sequence[np.ndarray | Path], Sequence[int]]]


def builder(name: str, **kwargs: Any) -> tfds.core.GeneratorBasedBuilder:
    """TFDS's builder of that name, which needs no TensorFlow any more."""
    stock = tfds.builder_cls(name)
    with tfds.core.registered.skip_registration():

        class Local(stock):
            name = stock.name

            def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
                root = Path(dl_manager.download_dir).parent
                found = find(name, root) or download(name, root, dl_manager)
                self.origin = found.origin
                if name == "cifar10":  # where TFDS reads the names from the archive
                    self.info.features["label"].names = _CIFAR10
                return {split: self._generate_examples(split, *found.read(split)) for split in folders.SPLITS}

            def _generate_examples(self, split: str, images: Any, labels: Any) -> Iterator[tuple[int, dict[str, Any]]]:
                features = self.info.features
                with Progress(f"preparing {name}, {split}", len(labels)) as progress:
                    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
                        record = {"image": _pixels(image, features["image"].shape), "label": int(label)}
                        yield i, ({"id": f"{split}_{i:05d}"} | record if "id" in features else record)
                        progress.advance(1, "images")

    return Local(**kwargs)


def find(name: str, root: Path) -> Found | None:
    """The set's archives in ``downloads/manual`` below ``root``, or a folder of its images there or in ``root``.

    Raises:
      DataError: a folder of images has other classes than the set.
    """
    manual = root / "downloads" / "manual"
    for folder in (manual / name, manual):
        if found := _archives(name, folder, trusted=folder.name == name):
            return found
    classes = CLASSES[name]
    for folder in (manual / name, root / name, root):
        names = folders.classes_of(folder)
        if names is None:
            continue
        labels = folders.labels_of(names, classes)
        if labels is not None:
            return _folder(folder, labels)
        if folder != root:  # the root may belong to another set
            got = ", ".join(sorted(names))
            raise DataError(f"{folder} must have a folder for each of {', '.join(classes)}, got {got}; rename them")
    return None


def download(name: str, root: Path, dl_manager: Any) -> Found:
    """Lets TFDS download the archives, which checks them too.

    Raises:
      DataError: that was not possible; the message says what to put where.
    """
    url_infos = tfds.builder_cls(name).url_infos
    try:
        for url in url_infos:
            _reach(url)
        print(f"downloading {name} from {_folder_of(next(iter(url_infos)))}", file=sys.stderr, flush=True)
        with _shown():
            paths = dl_manager.download({_file_of(url): url for url in url_infos})
    except Exception as error:  # whatever went wrong on the way, the remedy is the same
        raise DataError(_what_to_do(name, root, " ".join(str(error).split()))) from error
    return _parsed(name, paths, "downloaded by tensorflow-datasets")


def _archives(name: str, folder: Path, trusted: bool) -> Found | None:
    """The set's archives in a folder that is the set's own, or in one where only their checksums say whose they are."""
    if name == "cifar10":
        for file in _CIFAR10_FILES:
            if (folder / file).is_file():
                return _parsed(name, {_CIFAR10_FILES[0]: folder / file}, f"{file}, {_checked(name, folder / file)}")
        return None
    paths = {file: folder / file for files in _MNIST_FILES.values() for file in files}
    if not all(path.is_file() for path in paths.values()):
        return None
    checks = {_checked(name, path) for path in paths.values()}
    if not trusted and checks != {_OFFICIAL}:
        return None
    return _parsed(name, paths, f"the original archives, {_OFFICIAL if checks == {_OFFICIAL} else _OTHER}")


_OFFICIAL, _OTHER = "checksum as registered in tensorflow-datasets", "checksum not registered in tensorflow-datasets"


def _checked(name: str, path: Path) -> str:
    registered = {_file_of(url): info.checksum for url, info in tfds.builder_cls(name).url_infos.items()}
    with path.open("rb") as file:
        return _OFFICIAL if hashlib.file_digest(file, "sha256").hexdigest() == registered.get(path.name) else _OTHER


def _parsed(name: str, paths: dict[str, Any], origin: str) -> Found:
    def read(split: str) -> archives.Split:
        if name == "cifar10":
            return archives.cifar10_split(Path(paths[_CIFAR10_FILES[0]]), split)
        return archives.mnist_split(*(Path(paths[file]) for file in _MNIST_FILES[split]))

    return Found(origin, read)


def _folder(folder: Path, labels: dict[str, int]) -> Found:
    return Found(
        f"image files in {folder}: their pixels may differ from the original's",
        lambda split: folders.files_of(folder, split, labels),
    )


def _pixels(image: np.ndarray | Path, shape: tuple[int, int, int]) -> Any:
    if isinstance(image, Path):
        return folders.encoded(image, shape)
    if image.shape != shape:
        raise DataError(f"images must be of shape {shape}, got {image.shape}; is it another set's archive?")
    return Image.fromarray(image[..., 0] if shape[-1] == 1 else np.ascontiguousarray(image))


def _what_to_do(name: str, root: Path, reason: str) -> str:
    manual = root / "downloads" / "manual"
    urls = list(tfds.builder_cls(name).url_infos)
    if name == "cifar10":
        base = _folder_of(urls[0])
        files = f"{manual / _CIFAR10_FILES[0]} or {manual / _CIFAR10_FILES[1]} (from {base})"
    else:
        paths = [manual / name / _file_of(url) for url in urls]
        there = [path.name for path in paths if path.is_file()]
        files = f"{', '.join(str(path) for path in paths if not path.is_file())} (from {_folder_of(urls[0])}"
        files += f"; {', '.join(there)} is there)" if there else ")"
    folder = manual / name / "train" / "CLASS"
    return (
        f"{name} is not in {root}, and TFDS could not download it ({reason}). Put there: {files}. Or images, as "
        f"{folder}/*.png and {manual / name / 'test'}/CLASS/*.png, CLASS being each of {', '.join(CLASSES[name])} or "
        "its number. Or name the folder that has them with --data-dir"
    )


def _reach(url: str) -> None:
    """Fails at once where TFDS would try again for minutes: there is no network."""
    if not urllib.request.getproxies():
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
        socket.create_connection((parts.hostname, port), timeout=10).close()


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """With TFDS's bar while it downloads, where somebody is looking."""
    if sys.stderr.isatty():
        tfds.enable_progress_bar()
    try:
        yield
    finally:
        tfds.disable_progress_bar()


def _file_of(url: str) -> str:
    return url.rpartition("/")[2]


def _folder_of(url: str) -> str:
    return url.rpartition("/")[0] + "/"
