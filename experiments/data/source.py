"""Read a whole data set: embedded data, folders of images, or what tensorflow-datasets (TFDS) has prepared.

Digits and the source code of Python's library are on every machine. TensorFlow is never imported.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

IMAGES = ("digits", "mnist", "fashion_mnist", "cifar10")
"""The data sets of images that the scripts offer. An example has an `image`, uint8 (height, width, channels), and a
`label`."""

_SUFFIXES = (".jpg", ".jpeg", ".png")

Columns = dict[str, Any]
"""The examples of a split by feature: an array of a fixed shape, or a list of bytes."""


class DataError(ValueError):
    """A data set could not be read or split into batches.

    The message says what to do.
    """


def data_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """Return ``data_dir`` as an absolute path.

    The default is ``$XDG_CACHE_HOME/jaxmp/data`` or ``~/.cache/jaxmp/data``.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmp" / "data"
    return Path(data_dir or default).expanduser().absolute()


def read(name: str, data_dir: str | os.PathLike[str] | None = None) -> tuple[dict[str, Columns], str]:
    """Read a whole data set in its stored order.

    Images other than the digits come from a folder ``NAME`` in ``data_dir`` with ``train/CLASS/*.jpg`` and
    ``test/CLASS/*.jpg``, or else from TFDS.

    Returns:
      The columns of each split, and a line on their origin.

    Raises:
      DataError: the data set is unknown, damaged or not available.
    """
    if name == "digits":
        return _digits(), "digits: scikit-learn's copy of the optical recognition of handwritten digits"
    if name == "pysource":
        return _pysource()
    if name not in IMAGES:
        raise DataError(f"unknown data set {name!r}; there are: {', '.join((*IMAGES, 'pysource'))}")
    root = data_folder(data_dir)
    try:
        if (root / name / "train").is_dir():
            return _folder(root / name), f"{name}: image files in the folder {name}"
        return _tfds(name, root)
    except ModuleNotFoundError as error:
        raise DataError(
            f"{name} is read with {error.name}, which is not installed; pip install -e '.[experiments]', or put images "
            f"there: {root / name}/train/CLASS/*.png and test/CLASS/*.png"
        ) from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{name} cannot be read from {root} ({reason}); prepare it with tensorflow-datasets and "
            f"file_format='array_record', or put images there: {root / name}/train/CLASS/*.png and test/CLASS/*.png"
        ) from error


def _digits() -> dict[str, Columns]:
    """Return 1,797 digits of 8×8 pixels. Every fifth image of each class is in the test split."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]  # scikit-learn counts from 0 to 16
    is_test = np.zeros(len(images), bool)
    for label in range(10):
        is_test[np.flatnonzero(digits.target == label)[4::5]] = True
    masks = {"train": ~is_test, "test": is_test}
    return {split: {"image": images[mask], "label": digits.target[mask]} for split, mask in masks.items()}


def _pysource() -> tuple[dict[str, Columns], str]:
    """Return the sources of Python's standard library. Every tenth file in the order of names is in the test split."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if path.is_file())
    files = [path for path in files if not {"site-packages", "dist-packages"} & {*path.parts}]
    if not files:
        raise DataError(f"pysource needs the standard library's sources, but {root} has no .py files")
    sources = [path.read_bytes() for path in files]
    digest = hashlib.sha256(b"".join(sources)).hexdigest()[:8]
    test, train = sources[9::10], [source for i, source in enumerate(sources) if i % 10 != 9]
    origin = f"pysource: the standard library of Python {platform.python_version()}, sha256 {digest}"
    return {"train": {"source": train}, "test": {"source": test}}, origin


def _folder(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the columns ``image`` and ``label`` of each split.

    Labels number the class folders in alphabetical order. All images must have the same size.

    Raises:
      ValueError: a split lacks a class, or images have different sizes.
    """
    from PIL import Image

    classes = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    splits = {}
    for split in ("train", "test"):
        images, labels = [], []
        for label, name in enumerate(classes):
            files = sorted(path for path in (folder / split / name).glob("*") if path.suffix.lower() in _SUFFIXES)
            if not files:
                raise ValueError(f"every class must have images, but {folder / split / name} has none")
            images += [np.asarray(Image.open(file).convert("RGB")) for file in files]
            labels += [label] * len(files)
        if len({image.shape for image in images}) > 1:
            raise ValueError(f"all images must have the same size, but those in {folder / split} have several")
        splits[split] = {"image": np.stack(images), "label": np.asarray(labels)}
    return splits


def _tfds(name: str, root: Path) -> tuple[dict[str, Columns], str]:
    """Return a data set that TFDS has prepared as array_record files, or prepares now."""
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=root, file_format="array_record")
    if not Path(builder.data_dir).is_dir():
        builder.download_and_prepare()
    splits = {}
    for split, source in builder.as_data_source().items():
        records = source.__getitems__(range(len(source)))
        splits[split] = {key: np.asarray([record[key] for record in records]) for key in ("image", "label")}
    return splits, f"{builder.info.full_name}: as prepared by tensorflow-datasets"
