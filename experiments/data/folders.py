"""Reads images from folders that are named after their classes: ``train/CLASS/*.jpg`` and ``test/CLASS/*.jpg``."""

from __future__ import annotations

import io
import re
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from experiments.data.errors import DataError

SPLITS = ("train", "test")
_SUFFIXES = (".jpg", ".jpeg", ".png")
_MODES = {1: "L", 3: "RGB"}


def classes_of(folder: Path) -> set[str] | None:
    """The names of the class folders, or None where ``folder`` has no ``train`` and ``test``."""
    if not all((folder / split).is_dir() for split in SPLITS):
        return None
    return {path.name for split in SPLITS for path in _visible(folder / split) if path.is_dir()}


def labels_of(names: set[str], classes: tuple[str, ...]) -> dict[str, int] | None:
    """Folder name to label, by the class's name or its number; None unless there is a folder for each and no other.

    Case and all but letters and digits are ignored: a folder cannot be called T-shirt/top.
    """
    known = {_plain(name): label for label, name in enumerate(classes)} | {str(i): i for i in range(len(classes))}
    labels = {name: known.get(_plain(name), -1) for name in names}
    return labels if sorted(labels.values()) == list(range(len(classes))) else None


def files_of(folder: Path, split: str, labels: dict[str, int]) -> tuple[list[Path], list[int]]:
    """The files of a split and their labels, in the order of labels and names.

    Raises:
      DataError: a class has no image.
    """
    files: list[Path] = []
    numbers: list[int] = []
    for name, label in sorted(labels.items(), key=lambda item: item[1]):
        found = folder / split / name
        paths = sorted(p for p in _visible(found) if p.suffix.lower() in _SUFFIXES) if found.is_dir() else []
        if not paths:
            raise DataError(f"every class must have images ({', '.join(_SUFFIXES)}), but there are none in {found}")
        files += paths
        numbers += [label] * len(paths)
    return files, numbers


def encoded(path: Path, shape: tuple[int, int, int]) -> io.BytesIO | Image.Image:
    """The file as it is, once it was seen to hold a whole image of that shape, or the image in the right colours.

    Raises:
      DataError: the file is damaged, or of another size; the message names it.
    """
    content = path.read_bytes()
    try:
        image = Image.open(io.BytesIO(content))
        image.load()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} is damaged or no image ({error}); replace it") from error
    height, width, channels = shape
    if image.size != (width, height):
        raise DataError(f"images must be {width}×{height}, got {image.width}×{image.height} in {path}; resize them")
    return io.BytesIO(content) if image.mode == _MODES[channels] else image.convert(_MODES[channels])


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
