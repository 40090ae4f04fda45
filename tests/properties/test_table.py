"""The table of tests/README.md is complete, and every test that it names exists."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from places import ROOT

pytestmark = pytest.mark.once

TESTS = ROOT / "tests"
LATER = "comes with autocast"


def rows() -> dict[int, tuple[str, str, str]]:
    """Return by number the cells of each row: property, tests, autocast tests."""
    section = (TESTS / "README.md").read_text().partition("## The map of properties")[2]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {int(number): tuple(texts) for number, *texts in cells[2:]}


def named(text: str) -> list[tuple[str, str]]:
    """Return the file and name of each test that ``text`` names."""
    return re.findall(r"`([\w/]*test_\w+\.py)::(\w+)`", text)


@functools.cache
def collected_from(file: str) -> set[str]:
    """Return the names of the tests that pytest collects in a file."""
    body = ast.parse((TESTS / file).read_text()).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    assignments = [node for node in body if isinstance(node, ast.Assign)]
    names = {getattr(target, "id", "") for node in assignments for target in node.targets}
    return functions | {name for name in names if name.startswith("Test")}


def test_the_table_has_26_properties_in_order_and_tests_of_autocast_up_to_13():
    assert list(rows()) == list(range(1, 27))
    assert len({property for property, _, _ in rows().values()}) == 26

    for number, (_, _, autocast) in rows().items():
        assert autocast == "–" if number > 13 else autocast == LATER or named(autocast)


def test_every_property_has_tests_that_exist():
    missing = []
    for number, (_, explicit, autocast) in rows().items():
        assert named(explicit), f"property {number} has no test in the third column"
        assert explicit.count("`") == 2 * len(named(explicit)), "text in backticks must be file.py::name"
        missing += [test for test in named(explicit + autocast) if test[1] not in collected_from(test[0])]
    assert not missing


def test_every_test_of_a_property_is_in_the_table():
    files = [f"properties/{name}.py" for name in ("test_models", "test_runs", "test_scaler")]
    written = {(file, name) for file in files for name in collected_from(file)}
    assert written
    assert written <= {test for _, explicit, autocast in rows().values() for test in named(explicit + autocast)}
