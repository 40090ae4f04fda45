"""Choose the tests for the newest Python, share data, and skip pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.training import loop

HERE = Path(__file__).parent
NEWEST = (
    "models/test_attention.py",
    "test_runs.py::test_image_classification_trains_two_steps",
    "test_runs.py::test_language_modeling_trains_two_steps",
    "test_masked_lm.py::test_products_are_in_half_and_the_loss_is_in_float32",
)


@pytest.hookimpl(tryfirst=True)  # before pytest reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests but those of ``NEWEST`` to run ``once``.

    They call the library, whose own tests run on both versions of Python.
    """
    for item in items:
        if item.path.is_relative_to(HERE):
            name = f"{item.path.relative_to(HERE).as_posix()}::{item.name}"
            if not name.startswith(NEWEST):
                item.add_marker("once")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data folder for all workers, so that each data set is built once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "data"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def empty_curves() -> Iterator[None]:
    """Let runs write an empty curves.png; drawing takes longer than training.

    `test_runs.py` tests the real picture.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "curves", lambda rows, path, title: path.touch())
        yield
