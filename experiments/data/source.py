"""Prepare a data set with tensorflow-datasets (TFDS), and read it.

The files are array_record files. TensorFlow is never imported.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.data.class_names import CLASSES
from experiments.data.errors import DataError

if TYPE_CHECKING:  # not imported here, because not every script reads a data set
    import tensorflow_datasets as tfds


def _digits(**kwargs: Any) -> tfds.core.DatasetBuilder:
    from experiments.data.digits import Digits

    return Digits(**kwargs)


def _stock(name: str, **kwargs: Any) -> tfds.core.DatasetBuilder:
    from experiments.data import stock

    return stock.builder(name, **kwargs)


def _pysource(**kwargs: Any) -> tfds.core.DatasetBuilder:
    from experiments.data.pysource import pysource

    return pysource(**kwargs)


Builders = dict[str, Callable[..., "tfds.core.DatasetBuilder"]]
# The data sets of images that the scripts offer. An example has an `image`, uint8 (height, width, channels), and a
# `label`.
IMAGES: Builders = {"digits": _digits, **{name: functools.partial(_stock, name) for name in CLASSES}}
BUILDERS: Builders = {**IMAGES, "pysource": _pysource}
_ORIGIN = "origin.json"  # a file in the folder of a data set that says what it was prepared from

Columns = dict[str, Any]  # by feature: an array (fixed shape) or a list of bytes


def default_data_dir() -> Path:
    """Return the default data folder.

    The folder is ``$XDG_CACHE_HOME/jaxmp/data`` or ``~/.cache/jaxmp/data``.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmp" / "data"


def data_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """Return ``data_dir`` as an absolute path, or the default data folder.

    The folder may also have a tokenizer's files.
    """
    return Path(data_dir or default_data_dir()).expanduser().absolute()


def read(name: str, data_dir: str | os.PathLike[str] | None = None) -> dict[str, Columns]:
    """Read a whole data set in its stored order. Return the columns of each split.

    A column is an array or, for text, a list of bytes. The first call prepares the data set under ``data_dir`` (see
    :func:`default_data_dir`), unless TFDS has already prepared it there as array_record files. Several processes may
    call this function at the same time.

    Raises:
      DataError: the data set is unknown, damaged or not available, or the folder cannot be written to.
    """
    with _prepared(name, data_dir) as builder:
        return {split: _columns(source) for split, source in builder.as_data_source().items()}


def origin(name: str, data_dir: str | os.PathLike[str] | None = None) -> str:
    """Return the origin of the data set, for the record of a result.

    Raises:
      DataError: for the reasons given in :func:`read`.
    """
    with _prepared(name, data_dir) as builder:
        path = Path(builder.data_dir) / _ORIGIN
        made_from = json.loads(path.read_text())["origin"] if path.is_file() else "as prepared by tensorflow-datasets"
        return f"{builder.info.full_name}: {made_from}"


@contextlib.contextmanager
def _prepared(name: str, data_dir: str | os.PathLike[str] | None) -> Iterator[tfds.core.DatasetBuilder]:
    """Yield the builder of a prepared data set.

    Silence TFDS, and turn errors into :class:`DataError`.
    """
    if name not in BUILDERS:
        raise DataError(f"unknown data set {name!r}; there are: {', '.join(BUILDERS)}")
    root = data_folder(data_dir)
    try:
        with _quiet():
            nowhere = (
                root / ".nothing"
            )  # a builder reads its folder, which may be damaged, so use a folder that does not exist
            final = root / Path(BUILDERS[name](data_dir=nowhere).data_dir).relative_to(nowhere)
            if not final.is_dir():
                _prepare(name, root, final)
            with _names_the_damaged(final):
                yield _readable(name, root, final)
    except ModuleNotFoundError as error:
        remedy = "pip install -e '.[experiments]'"
        raise DataError(f"{name} is read with {error.name}, which is not installed; {remedy}") from error
    # For a full disk, array_record's writer raises a RuntimeError.
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"cannot keep {name} under {root} ({reason}); name another folder with --data-dir") from error


def _readable(name: str, root: Path, final: Path) -> tfds.core.DatasetBuilder:
    import tensorflow_datasets as tfds

    if not (final / "dataset_info.json").is_file():
        raise FileNotFoundError("it lacks dataset_info.json")
    builder = BUILDERS[name](data_dir=root)
    if builder.info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        raise DataError(
            f"{final} has {name} as {builder.info.file_format.value} files, which only TensorFlow reads, but this "
            "project reads array_record; prepare it with file_format='array_record', or move that folder away and it "
            "is prepared again"
        )
    return builder


@contextlib.contextmanager
def _names_the_damaged(final: Path) -> Iterator[None]:
    try:
        yield
    except (DataError, MemoryError, ModuleNotFoundError, PermissionError):
        raise
    except Exception as error:  # TFDS, protobuf, array_record and pillow have errors of their own
        reason = " ".join(str(error).split())
        raise DataError(f"{final} is damaged ({reason}); remove {final} and it is prepared again") from error


def _prepare(name: str, root: Path, final: Path) -> None:
    """Prepare a data set in a temporary folder, and move the result.

    So no process sees an incomplete data set. If two processes prepare it at the same time, one result is kept.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=root) as scratch:
        builder = BUILDERS[name](data_dir=scratch, file_format="array_record")
        # Only TFDS's own data sets have files in the download folder.
        builder.download_and_prepare(download_dir=root / "downloads" if name in CLASSES else None)
        made_from = getattr(builder, "origin", builder.info.description)
        (Path(builder.data_dir) / _ORIGIN).write_text(json.dumps({"origin": made_from}))
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(builder.data_dir, final)
        except OSError:  # another process was faster
            if not final.is_dir():
                raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence TFDS's progress bars, its output on stdout, and absl's warnings."""
    import tensorflow_datasets as tfds

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tfds.enable_progress_bar()
        logger.setLevel(level)


def _columns(source: Any) -> Columns:
    records = source.__getitems__(range(len(source)))
    columns = {key: [record[key] for record in records] for key in records[0]}
    return {key: column if isinstance(column[0], bytes) else np.asarray(column) for key, column in columns.items()}
