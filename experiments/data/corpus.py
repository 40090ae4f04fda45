"""Read a text as documents, and hold out a part.

The text is `pysource`, a file or a folder.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from experiments.data import source
from experiments.data.source import DataError

SUFFIXES = (".txt", ".py", ".md")  # the files of a folder that are read


class Corpus(NamedTuple):
    """Training and held-out documents, as bytes, and a line on their origin."""

    train: list[bytes]
    test: list[bytes]
    origin: str


def read(dataset: str) -> Corpus:
    """Read the documents of ``pysource``, of a file or of a folder.

    With ten files or more, every tenth file in the order of names is held out. With fewer files, the last tenth of each
    is held out.

    Args:
      dataset: ``pysource``, or a path.

    Raises:
      DataError: the path does not exist, has no text, or cannot be read.
    """
    if dataset == "pysource":
        splits, origin = source.read(dataset)
        return Corpus(splits["train"]["source"], splits["test"]["source"], origin)
    path = Path(dataset).expanduser()
    if not dataset or not path.exists():
        raise DataError(
            f"--dataset is pysource, or the path of a text file or of a folder of {', '.join(SUFFIXES)} files, but "
            f"there is no {str(path) if dataset else repr(dataset)}"
        )
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    try:
        documents = [document for file in files if file.is_file() and (document := file.read_bytes())]
    except OSError as error:
        raise DataError(f"--dataset cannot be read: {error}") from error
    if not documents:
        raise DataError(f"--dataset needs text, but {path} has none; a folder's {', '.join(SUFFIXES)} files are read")
    if len(documents) < 10:
        ends = [len(document) * 9 // 10 for document in documents]
        train = [document[:end] for document, end in zip(documents, ends, strict=True)]
        test = [document[end:] for document, end in zip(documents, ends, strict=True)]
    else:
        test = documents[9::10]
        train = [document for i, document in enumerate(documents) if i % 10 != 9]
    count = "1 file" if len(documents) == 1 else f"{len(documents)} files"
    size = sum(map(len, documents))
    # Use only the name of the folder, so that a run can be resumed after its text has moved.
    return Corpus(train, test, f"{path.resolve().name}: {count}, {size} bytes, sha256 {digest(documents)[:12]}")


def digest(documents: list[bytes]) -> str:
    """Return a hash of the documents in their order."""
    whole = hashlib.sha256()
    for document in documents:
        whole.update(len(document).to_bytes(8, "big"))
        whole.update(document)
    return whole.hexdigest()
