"""What of the experiments the newest Python runs too: attention, what compiles for a GPU, and a run of a script."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEWEST = (
    "models/test_attention.py",
    "benchmarks/test_compile_only.py",
    "benchmarks/test_float8.py::test_compiled",
    "test_runs.py::test_image_classification_trains_two_steps",
)


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All else has the mark ``once``: scripts, data and reports call the library, whose own tests run on both."""
    for item in items:
        if HERE in item.path.parents:
            name = f"{item.path.relative_to(HERE).as_posix()}::{item.name}"
            if not name.startswith(NEWEST):
                item.add_marker("once")
