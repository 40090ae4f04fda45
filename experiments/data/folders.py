"""Read images from folders named after their classes.

The files are ``train/CLASS/*.jpg`` and ``test/CLASS/*.jpg``.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.data.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

SPLITS = ("train", "test")
_SUFFIXES = (".jpg", ".jpeg", ".png")
_MODES = {1: "L", 3: "RGB"}


def labels_of(folder: Path, classes: tuple[str, ...], numbers: bool = True) -> dict[str, int] | None:
    """Return the label of each class folder.

    The result is None if ``folder`` has neither ``train`` nor ``test``. A class folder has the name of the class or, if
    ``numbers``, its number. Case is ignored, and so are all characters but letters and digits, because a folder cannot
    have a name such as T-shirt/top.

    Raises:
      DataError: only one of ``train`` and ``test`` exists, or the folders are not exactly one for each class. The
        message says which folders are wrong.
    """
    splits = [split for split in SPLITS if (folder / split).is_dir()]
    if not splits:
        return None
    if len(splits) < len(SPLITS):
        got = ", ".join(sorted(path.name for path in visible(folder) if path.is_dir()))
        raise DataError(f"images must be in folders called train and test, got {got} in {folder}")
    known = {_plain(name): label for label, name in enumerate(classes)}
    if numbers:
        known |= {str(i): i for i in range(len(classes))}
    names = sorted({path.name for split in SPLITS for path in visible(folder / split) if path.is_dir()})
    labels = {name: known.get(_plain(name), -1) for name in names}
    unknown = [name for name in names if labels[name] < 0]
    absent = [name for label, name in enumerate(classes) if label not in labels.values()]
    twice = [name for name in names if labels[name] >= 0 and list(labels.values()).count(labels[name]) > 1]
    wrong = ((unknown, "{} is not one of them"), (absent, "there is no folder for {}"), (twice, "{} are one class"))
    if faults := [text.format(", ".join(names)) for names, text in wrong if names]:
        raise DataError(f"{folder} must have a folder for each of {', '.join(classes)}, but {' and '.join(faults)}")
    return labels


def files_of(folder: Path, split: str, labels: dict[str, int]) -> tuple[list[Path], list[int]]:
    """Return the files of a split and their labels, sorted by label and name.

    Raises:
      DataError: a class has no image.
    """
    files: list[Path] = []
    numbers: list[int] = []
    for name, label in sorted(labels.items(), key=lambda item: item[1]):
        path = folder / split / name
        paths = sorted(p for p in visible(path) if p.suffix.lower() in _SUFFIXES) if path.is_dir() else []
        if not paths:
            raise DataError(f"every class must have images ({', '.join(_SUFFIXES)}), but there are none in {path}")
        files += paths
        numbers += [label] * len(paths)
    return files, numbers


def encoded(path: Path, shape: tuple[int, int, int]) -> io.BytesIO | Image.Image:
    """Check an image file, and return its bytes.

    If its channels are not those in ``shape``, return the converted image.

    Raises:
      DataError: the file is damaged, or the image has another size. The message names the file.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        content = path.read_bytes()
        image = Image.open(io.BytesIO(content))
        image.load()
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        reason = "of no known format" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(f"{path} is damaged or not an image ({reason}); replace it") from error
    height, width, channels = shape
    if image.size != (width, height):
        raise DataError(f"images must be {width}×{height}, got {image.width}×{image.height} in {path}; resize them")
    return io.BytesIO(content) if image.mode == _MODES[channels] else image.convert(_MODES[channels])


def visible(folder: Path) -> list[Path]:
    """Return the files and folders in a folder that are not hidden."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
