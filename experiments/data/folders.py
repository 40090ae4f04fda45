"""Read images from folders named after their classes.

The files are ``train/CLASS/*.jpg`` and ``test/CLASS/*.jpg``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

SPLITS = ("train", "test")
_SUFFIXES = (".jpg", ".jpeg", ".png")


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the columns ``image`` and ``label`` of each split.

    Labels number the class folders in alphabetical order. All images must have the same size.

    Raises:
      ValueError: a split lacks a class, or images have different sizes.
    """
    from PIL import Image

    classes = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    splits = {}
    for split in SPLITS:
        images, labels = [], []
        for label, name in enumerate(classes):
            files = sorted(p for p in (folder / split / name).glob("*") if p.suffix.lower() in _SUFFIXES)
            if not files:
                raise ValueError(
                    f"every class must have images ({', '.join(_SUFFIXES)}), but {folder / split / name} has none"
                )
            images += [np.asarray(Image.open(file).convert("RGB")) for file in files]
            labels += [label] * len(files)
        if len({image.shape for image in images}) > 1:
            raise ValueError(f"all images must have the same size, but those in {folder / split} have several")
        splits[split] = {"image": np.stack(images), "label": np.asarray(labels)}
    return splits
