"""Find the files of MNIST, Fashion-MNIST and CIFAR-10.

The module also says why other files cannot be used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.data import archives, folders
from experiments.data.class_names import CLASSES
from experiments.data.errors import DataError

MNIST_FILES = {split: (f"{stem}-images-idx3-ubyte.gz", f"{stem}-labels-idx1-ubyte.gz")
               for split, stem in (("train", "train"), ("test", "t10k"))}  # fmt: skip
CIFAR10_FILES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", "cifar-10-batches-bin", "cifar-10-batches-py")
_OFFICIAL, _OTHER = "checksum as registered in tensorflow-datasets", "checksum not registered in tensorflow-datasets"


@dataclasses.dataclass(frozen=True)
class Found:
    """A source of a data set's images.

    ``read`` returns a split's images (arrays or files) and their labels.
    """

    origin: str
    read: Callable[[str], tuple[Sequence[np.ndarray | Path], Sequence[int]]]


def find(name: str, root: Path) -> tuple[Found | None, list[str]]:
    """Find the archives of a data set, or else a folder of its images.

    The function looks in ``downloads/manual`` and in ``root``, and in their folders ``name``. Files in a folder
    ``name`` are taken to be of this data set. Files elsewhere may be of another data set, and are used only if their
    checksums or their class names show that they are of this data set.

    Returns:
      The source, or None, and the reasons why other files cannot be used.

    Raises:
      DataError: a folder ``name`` has files that cannot be used.
    """
    passed_over: list[str] = []
    manual = root / "downloads" / "manual"
    for look in (_archives, _images):
        for folder in (manual / name, manual, root / name, root):
            is_named = folder.name == name and folder != root
            try:
                if place := look(name, folder, is_named):
                    return place, passed_over
            except DataError as error:
                if is_named:
                    raise
                passed_over.append(str(error))
    for folder in (manual / name, manual):
        unknown = [path.name for path in folders.visible(folder) if path.name not in CLASSES] if folder.is_dir() else []
        if unknown and not passed_over:
            shown = ", ".join(sorted(unknown)[:5]) + (", …" if len(unknown) > 5 else "")
            passed_over.append(
                f"{folder} has {shown}, and none has the name of an archive of {name}, or is called train or test"
            )
    return None, passed_over


def parsed(name: str, paths: Mapping[str, str | Path], origin: str) -> Found:
    """Return the images in archives. ``paths`` maps their published names to files."""

    def read(split: str) -> archives.Split:
        if name == "cifar10":
            return archives.cifar10_split(Path(paths[CIFAR10_FILES[0]]), split)
        images, labels = MNIST_FILES[split]
        return archives.mnist_split(Path(paths[images]), Path(paths[labels]))

    return Found(origin, read)


def published(name: str) -> tuple[str, list[str]]:
    """Return the URL and the names of the archives that TFDS downloads."""
    import tensorflow_datasets as tfds

    urls = list(tfds.builder_cls(name).url_infos)
    return urls[0].rpartition("/")[0] + "/", [file_of(url) for url in urls]


def file_of(url: str) -> str:
    return url.rpartition("/")[2]


def _archives(name: str, folder: Path, is_named: bool) -> Found | None:
    if name == "cifar10":
        for path in (folder / file for file in CIFAR10_FILES):
            if path.exists():
                return parsed(name, {CIFAR10_FILES[0]: path}, f"{path.name}, {_checked(name, [path])}")
        return None
    names = [file for files in MNIST_FILES.values() for file in files]
    there = {
        file: path
        for file in names
        for path in (folder / file.removesuffix(".gz"), folder / file)  # if both exist, the second replaces the first
        if path.is_file()
    }
    if not there:
        return None
    if absent := [file for file in names if file not in there]:
        raise DataError(
            f"{name} must have its four files in one folder, but {folder} lacks {', '.join(absent)}; add the "
            f"missing files (from {published(name)[0]}), or move the others away"
        )
    if not is_named and (other := _unregistered(name, there.values())):
        raise DataError(
            f"{_listed(other)} may be of another data set, because MNIST's and Fashion-MNIST's files have the same "
            f"names and the checksum is not registered for {name}; move all four to {folder / name} if they are of "
            f"{name}"
        )
    return parsed(name, there, f"the original archives, {_checked(name, there.values())}")


def _images(name: str, folder: Path, is_named: bool) -> Found | None:
    try:
        labels = folders.labels_of(folder, CLASSES[name], numbers=is_named)
    except DataError as error:
        remedy = (
            "rename them"
            if is_named
            else f"rename them, or move them to {folder / name}, where numbers are allowed too"
        )
        raise DataError(f"{error}; {remedy}") from error
    if labels is None:
        return None
    origin = f"image files in the folder {folder.name}: their pixels may differ from the original's"
    return Found(origin, lambda split: folders.files_of(folder, split, labels))


def _checked(name: str, paths: Iterable[Path]) -> str:
    other = _unregistered(name, paths)
    if other:
        print(f"note: {_OTHER}, so that damage may go unnoticed: {_listed(other)}", file=sys.stderr, flush=True)
    return _OTHER if other else _OFFICIAL


def _unregistered(name: str, paths: Iterable[Path]) -> list[Path]:
    import tensorflow_datasets as tfds

    registered = {file_of(url): info.checksum for url, info in tfds.builder_cls(name).url_infos.items()}

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return [path for path in paths if path.is_dir() or digest(path) != registered.get(path.name)]


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(map(str, paths))
