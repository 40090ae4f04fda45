"""A prepared data set that was damaged later: the error is one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from experiments import data


def rewrite(pattern: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (path,) = folder.glob(pattern)
        path.write_bytes(change(path.read_bytes()))

    return damage


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def remove_records(folder: Path) -> None:
    for path in folder.glob("*train.array_record*"):
        path.unlink()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a byte of the records": (
        rewrite("*train.array_record*", lambda content: content[:9000] + bytes([content[9000] ^ 1]) + content[9001:]),
        ".*",
    ),
    "records missing": (remove_records, ".*No such file or directory.*"),
    "info broken": (rewrite("dataset_info.json", lambda _: b"{"), "Failed to load JSON.*"),
    "folder empty": (empty, "it lacks dataset_info.json"),
}


def test_a_damaged_set_is_named_and_prepared_again_once_it_is_removed(tmp_path):
    before = data.read("digits", tmp_path / "whole")["train"]["image"]
    for i, (change, reason) in enumerate(DAMAGE.values()):
        root = tmp_path / str(i)
        folder = root / "digits" / "1.0.0"
        shutil.copytree(tmp_path / "whole", root)
        change(folder)
        message = rf"^{folder} is damaged \({reason}\); remove {folder} and it is prepared again$"
        with pytest.raises(data.DataError, match=message):
            data.read("digits", root)
    shutil.rmtree(folder)
    np.testing.assert_array_equal(data.read("digits", root)["train"]["image"], before)
    for content in ("{", "{}"):
        (folder / "origin.json").write_text(content)
        with pytest.raises(data.DataError, match=rf"{folder} is damaged \(.*\); remove {folder} and it is prepared "):
            data.origin("digits", root)
