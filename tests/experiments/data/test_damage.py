"""A prepared set that was damaged afterwards, and a disk that is full while one is prepared: one line each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from places import ROOT

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
    "records cut": (rewrite("*train.array_record*", lambda content: content[:3000]), ".*64KB.*"),
    "a byte of the records": (
        rewrite("*train.array_record*", lambda content: content[:9000] + bytes([content[9000] ^ 1]) + content[9001:]),
        ".*",
    ),
    "records missing": (remove_records, ".*No such file or directory.*"),
    "info broken": (rewrite("dataset_info.json", lambda _: b"{"), "Failed to load JSON.*"),
    "info empty": (rewrite("dataset_info.json", lambda _: b""), ".*"),
    "folder empty": (empty, "it lacks dataset_info.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_set_is_named_and_prepared_anew_once_it_is_removed(damage, tmp_path):
    before = data.read("digits", tmp_path)["train"]["image"]
    folder = tmp_path / "digits" / "1.0.0"
    change, reason = DAMAGE[damage]
    change(folder)
    message = rf"^{folder} is damaged \({reason}\); remove {folder} and it is prepared anew$"
    with pytest.raises(data.DataError, match=message):
        data.read("digits", tmp_path)
    empty(folder)
    folder.rmdir()
    np.testing.assert_array_equal(data.read("digits", tmp_path)["train"]["image"], before)


@pytest.mark.parametrize("content", ["{", "{}"])
def test_a_damaged_record_of_the_origin_is_named(content, tmp_path):
    data.read("digits", tmp_path)
    folder = tmp_path / "digits" / "1.0.0"
    (folder / "origin.json").write_text(content)
    with pytest.raises(data.DataError, match=rf"{folder} is damaged \(.*\); remove {folder} and it is prepared anew"):
        data.origin("digits", tmp_path)


def test_a_disk_that_is_full_while_a_set_is_prepared_is_one_line_and_nothing_is_left(tmp_path):
    program = (
        "import resource; from experiments import data\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))\n"
        "try: data.read('digits', 'data')\n"
        "except data.DataError as error: print(error)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"cannot keep digits under {tmp_path / 'data'} (") and "File too large" in line
    assert line.endswith("name another folder with --data-dir") and not list((tmp_path / "data").iterdir())
