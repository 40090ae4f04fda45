"""Prepare a set with tensorflow-datasets as array_record files, and read it.

TensorFlow is never imported.
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

from experiments.data.errors import DataError
from experiments.data.places import CLASSES

if TYPE_CHECKING:  # not needed by those who read no set
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
# Of an `image`, uint8 (height, width, channels), and a `label`: the scripts offer these.
IMAGES: Builders = {"digits": _digits, **{name: functools.partial(_stock, name) for name in CLASSES}}
BUILDERS: Builders = {**IMAGES, "pysource": _pysource}
_ORIGIN = "origin.json"  # beside TFDS's files: what the set was prepared from

Columns = dict[str, Any]  # feature to array (fixed shape), or to list of bytes


def default_data_dir() -> Path:
    """Return the folder of the sets unless one is named.

    It is ``$XDG_CACHE_HOME/jaxmp/data`` or ``~/.cache/jaxmp/data``.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmp" / "data"


def data_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """The folder that is named, or the default one; a tokenizer's files may lie there, too."""
    return Path(data_dir or default_data_dir()).expanduser().absolute()


def read(name: str, data_dir: str | os.PathLike[str] | None = None) -> dict[str, Columns]:
    """Read all of a set, in its stored order: split to columns.

    A column is an array or, for text, a list of bytes.

    The first call prepares the set under ``data_dir`` (see :func:`default_data_dir`); later ones read it there, and so
    does this one if TFDS prepared it there as array_record files. Several processes may do so at once.

    Raises:
      DataError: the set is unknown, damaged or cannot be had, or the folder cannot be written.
    """
    with _prepared(name, data_dir) as builder:
        return {split: _columns(source) for split, source in builder.as_data_source().items()}


def origin(name: str, data_dir: str | os.PathLike[str] | None = None) -> str:
    """Return the origin of the data set, for the record of a result.

    Raises:
      DataError: as :func:`read`.
    """
    with _prepared(name, data_dir) as builder:
        path = Path(builder.data_dir) / _ORIGIN
        made_from = json.loads(path.read_text())["origin"] if path.is_file() else "as prepared by tensorflow-datasets"
        return f"{builder.info.full_name}: {made_from}"


@contextlib.contextmanager
def _prepared(name: str, data_dir: str | os.PathLike[str] | None) -> Iterator[tfds.core.DatasetBuilder]:
    """The builder of a set that is there, in what is quiet and explains itself."""
    if name not in BUILDERS:
        raise DataError(f"unknown data set {name!r}; there are: {', '.join(BUILDERS)}")
    root = data_folder(data_dir)
    try:
        with _quiet():
            nowhere = root / ".nothing"  # a builder reads what is in its folder, and that may be damaged
            final = root / Path(BUILDERS[name](data_dir=nowhere).data_dir).relative_to(nowhere)
            if not final.is_dir():
                _prepare(name, root, final)
            with _names_the_damaged(final):
                yield _readable(name, root, final)
    except ModuleNotFoundError as error:
        remedy = "pip install -e '.[experiments]'"
        raise DataError(f"{name} is read with {error.name}, which is not installed; {remedy}") from error
    # array_record's writer has no OSError for a full disk.
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
            f"{final} has {name} as {builder.info.file_format.value} files, which only TensorFlow reads, and "
            "array_record is what can be read without: prepare it with file_format='array_record', or move that "
            "folder away and it is prepared anew"
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
        raise DataError(f"{final} is damaged ({reason}); remove {final} and it is prepared anew") from error


def _prepare(name: str, root: Path, final: Path) -> None:
    """Prepare a set in a separate folder, and move the result.

    Of two processes one wins, and nobody sees half a set.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=root) as scratch:
        builder = BUILDERS[name](data_dir=scratch, file_format="array_record")
        # Only a stock set may have files to look for and to keep in the data folder.
        builder.download_and_prepare(download_dir=root / "downloads" if name in CLASSES else None)
        made_from = getattr(builder, "origin", builder.info.description)
        (Path(builder.data_dir) / _ORIGIN).write_text(json.dumps({"origin": made_from}))
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(builder.data_dir, final)
        except OSError:  # it is there already
            if not final.is_dir():
                raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence TFDS's progress bars, its announcement on stdout, and absl's advice."""
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
