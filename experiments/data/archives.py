"""Read the archives of MNIST, Fashion-MNIST and CIFAR-10.

MNIST and Fashion-MNIST are idx files. CIFAR-10 is a tar file of binary records or of Python pickles.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.errors import DataError

Split = tuple[np.ndarray, np.ndarray]  # uint8 (n, height, width, channels) and int64 (n,)

CIFAR10_BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_IDX_IMAGES, _IDX_LABELS = 0x0803, 0x0801  # magic numbers of unsigned-byte arrays with 3 axes and with 1


def mnist_split(images: Path, labels: Path) -> Split:
    """Read a split in MNIST's format from its two idx files, gzipped or not.

    Raises:
      DataError: a file is damaged or empty, or the files do not belong together. The message names the file.
    """
    pixels, numbers = _idx(images, _IDX_IMAGES), _idx(labels, _IDX_LABELS)
    if len(pixels) != len(numbers):
        got = f"{len(pixels)} in {images} and {len(numbers)} in {labels}"
        raise DataError(f"there must be as many labels as images, got {got}; download them again")
    return pixels[..., None], _labels(numbers, labels)


def cifar10_split(archive: Path, split: str) -> Split:
    """Read a split of CIFAR-10 from an archive, or from its unpacked folder.

    The archive is ``cifar-10-binary.tar.gz`` or ``cifar-10-python.tar.gz``.

    Raises:
      DataError: a file is damaged or a batch is missing. The message names the file.
    """
    batches = CIFAR10_BATCHES[split]
    splits: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    contents = _unpacked(archive, batches) if archive.is_dir() else _packed(archive, batches)
    for batch, content in contents.items():
        read = _cifar10_binary if batch.endswith(".bin") else _cifar10_pickle
        splits[batch.removesuffix(".bin")] = read(content, f"{batch} in {archive}")
    if missing := [batch for batch in batches if batch not in splits]:
        raise DataError(f"{archive} must hold {', '.join(batches)}, but {', '.join(missing)} is not in it")
    planes = np.concatenate([splits[batch][0] for batch in batches])
    labels = np.concatenate([splits[batch][1] for batch in batches])
    return planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), _labels(labels, archive)


def _packed(archive: Path, batches: tuple[str, ...]) -> dict[str, bytes]:
    contents = {}
    with _names_the_damaged(archive), tarfile.open(archive, "r:*") as tar:
        for member in tar:
            batch = Path(member.name).name
            if batch.removesuffix(".bin") in batches and (file := tar.extractfile(member)):
                contents[batch] = file.read()
        while tar.fileobj and tar.fileobj.read(
            1 << 20
        ):  # read to the end of the file, to verify the checksum of the compression
            pass
    return contents


def _unpacked(folder: Path, batches: tuple[str, ...]) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.name.removesuffix(".bin") in batches)
    return {path.name: path.read_bytes() for path in files if path.is_file()}


def _idx(path: Path, magic: int) -> np.ndarray:
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        with _names_the_damaged(path):
            content = gzip.decompress(content)
    dimensions = magic & 0xFF
    header = np.frombuffer(content, ">i4", min(1 + dimensions, len(content) // 4))
    if len(header) <= dimensions or header[0] != magic:
        got = content[:4].hex()
        raise DataError(
            f"{path} must start like an idx file of {dimensions} dimensions, got {got!r}; download it again"
        )
    shape, values = tuple(header[1:].tolist()), np.frombuffer(content, np.uint8, offset=4 * len(header))
    if values.size != np.prod(shape):
        raise DataError(f"{path} must hold {np.prod(shape)} values by its header, got {values.size}; download it again")
    return values.reshape(shape)


def _cifar10_binary(content: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    if not content or len(content) % 3073:
        raise DataError(f"{name} must consist of records of 3073 bytes, got {len(content)} bytes; download it again")
    records = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    return records[:, 1:], records[:, 0]


def _cifar10_pickle(content: bytes, name: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        planes, labels = np.asarray(batch[b"data"], np.uint8), np.asarray(batch[b"labels"])
        if planes.shape != (len(labels), 3072):
            raise ValueError(f"data of shape {planes.shape} for {len(labels)} labels")
    except Exception as error:  # a damaged pickle can fail in any way
        raise DataError(f"{name} must be a pickle of CIFAR-10 ({error}); download it again") from error
    return planes, labels


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that allows only arrays.

    A pickle from an unknown source could call any function.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants {module}.{name}")


def _labels(labels: np.ndarray, path: Path) -> np.ndarray:
    if not labels.size:
        raise DataError(f"a set must have examples, got none in {path}; download it again")
    if not 0 <= labels.min() <= labels.max() <= 9:
        raise DataError(f"labels must be 0 to 9, got {labels.min()} to {labels.max()} in {path}; download it again")
    return labels.astype(np.int64)


@contextlib.contextmanager
def _names_the_damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError) as error:
        if (
            isinstance(error, OSError) and error.errno is not None
        ):  # an error of the disk; a decompressor's error has no errno
            raise
        raise DataError(
            f"{path} is damaged or was cut short ({' '.join(str(error).split())}); download it again"
        ) from error
