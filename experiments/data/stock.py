"""Build `mnist`, `fashion_mnist` and `cifar10` without TensorFlow.

The data sets have the names, versions and features of TFDS. TFDS's builders need TensorFlow to read the archives, and
the builders here replace that part. They read the published archives or folders of images in the data folder. If there
are none, TFDS downloads and checks the archives. The examples have TFDS's order, and TFDS can read the prepared data
sets.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from experiments.data import folders, places
from experiments.data.class_names import CLASSES as CLASSES
from experiments.data.errors import DataError
from experiments.report.progress import Progress


def builder(name: str, **kwargs: Any) -> tfds.core.GeneratorBasedBuilder:
    """Return a TFDS builder that does not need TensorFlow."""
    stock = tfds.builder_cls(name)
    with tfds.core.registered.skip_registration():

        class Local(stock):
            name = stock.name

            def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
                root = Path(dl_manager.download_dir).parent
                place, passed_over = places.find(name, root)
                place = place or download(name, root, dl_manager, passed_over)
                self.origin = place.origin
                if name == "cifar10":  # TFDS would read the names from the archive
                    self.info.features["label"].names = CLASSES[name]
                return {split: self._generate_examples(split, *place.read(split)) for split in folders.SPLITS}

            def _generate_examples(self, split: str, images: Any, labels: Any) -> Iterator[tuple[int, dict[str, Any]]]:
                features = self.info.features
                with Progress(f"preparing {name}, {split}", len(labels)) as progress:
                    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
                        record = {"image": _pixels(image, features["image"].shape), "label": int(label)}
                        yield i, ({"id": f"{split}_{i:05d}"} | record if "id" in features else record)
                        progress.advance(1, "images")

    return Local(**kwargs)


def download(name: str, root: Path, dl_manager: Any, passed_over: Sequence[str] = ()) -> places.Found:
    """Let TFDS download the archives and check them.

    Raises:
      DataError: the download failed. The message says which files to put where, and why other files cannot be used.
    """
    url_infos = tfds.builder_cls(name).url_infos
    try:
        for url in url_infos:
            _reach(url)
        for reason in passed_over:
            print(f"note: not taken: {reason}", file=sys.stderr)
        print(f"downloading {name} from {places.published(name)[0]}", file=sys.stderr, flush=True)
        with _shown():
            paths = dl_manager.download({places.file_of(url): url for url in url_infos})
    except Exception as error:  # the remedy is the same for all errors
        raise DataError(_what_to_do(name, root, " ".join(str(error).split()), passed_over)) from error
    return places.parsed(name, paths, "downloaded by tensorflow-datasets")


def _pixels(image: np.ndarray | Path, shape: tuple[int, int, int]) -> Any:
    if isinstance(image, Path):
        return folders.encoded(image, shape)
    if image.shape != shape:
        raise DataError(f"images must be of shape {shape}, got {image.shape}; is it another set's archive?")
    return Image.fromarray(image[..., 0] if shape[-1] == 1 else np.ascontiguousarray(image))


def _what_to_do(name: str, root: Path, reason: str, passed_over: Sequence[str]) -> str:
    manual = root / "downloads" / "manual"
    base, files = places.published(name)
    if name == "cifar10":
        paths = " or ".join(str(manual / file) for file in places.CIFAR10_FILES[:2])
    else:
        paths = ", ".join(str(manual / name / file) for file in files)
    folder = manual / name / "train" / "CLASS"
    return (
        f"{name} is not in {root}, and TFDS could not download it ({reason})."
        + "".join(f" Found, but not taken: {place}." for place in passed_over)
        + f" Put there: {paths} (from {base}). Or images, as {folder}/*.png and {manual / name / 'test'}/CLASS/*.png, "
        f"CLASS being each of {', '.join(CLASSES[name])} or its number. Or name the folder that has them with "
        "--data-dir"
    )


def _reach(url: str) -> None:
    """Raise at once if there is no network. TFDS would try again for minutes."""
    if not urllib.request.getproxies():
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
        socket.create_connection((parts.hostname, port), timeout=10).close()


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Show TFDS's progress bar on a terminal while it downloads."""
    if sys.stderr.isatty():
        tfds.enable_progress_bar()
    try:
        yield
    finally:
        tfds.disable_progress_bar()
