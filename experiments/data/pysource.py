"""Build `pysource`, the source code of Python's library, for TFDS.

The data set is real text that exists on every machine.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from experiments.data.errors import DataError


def stdlib_files() -> list[tuple[str, Path]]:
    """Return the ``.py`` files of this Python's standard library and its tests.

    The result is a sorted list of pairs: the path relative to the library, and the full path.
    """
    root = Path(sysconfig.get_path("stdlib"))
    named = ((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py") if path.is_file())
    installed = ("site-packages/", "dist-packages/")
    files = sorted((name, path) for name, path in named if not name.startswith(installed))
    if not files:
        raise DataError(f"pysource needs the standard library's sources, but {root} has no .py files")
    return files


def pysource(**kwargs: Any) -> Pysource:
    """Return the builder for this Python.

    The name of the data set has Python's version, and a hash of the files' names and sizes.
    """
    listing = "\n".join(f"{name} {path.stat().st_size}" for name, path in stdlib_files())
    digest = hashlib.sha256(listing.encode()).hexdigest()[:8]
    version = platform.python_version().replace(".", "_")
    return Pysource(config=tfds.core.BuilderConfig(name=f"python_{version}_{digest}"), **kwargs)


class Pysource(tfds.core.GeneratorBasedBuilder):
    """A data set with a record for each file: its name and its bytes.

    Every tenth file in the order of names is in the test split.
    """

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="The sources of the standard library of the Python that prepared this.",
            features=tfds.features.FeaturesDict({"name": tfds.features.Text(), "source": tfds.features.Text()}),
            disable_shuffling=True,  # keep the order of names
        )

    def _split_generators(self, _: Any) -> dict[str, Any]:
        return {"train": self._generate_examples(test=False), "test": self._generate_examples(test=True)}

    def _generate_examples(self, test: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        for i, (name, path) in enumerate(stdlib_files()):
            if (i % 10 == 9) == test:
                yield i, {"name": name, "source": path.read_bytes()}
