"""The picture of imports in experiments/README.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.once

FOLDER = ROOT / "experiments"
SCRIPTS = ("image_classification", "language_modeling", "masked_lm")


def node(name: str) -> str:
    return "scripts" if name in SCRIPTS else name


def imported(file: Path) -> set[str]:
    """Return the folders and scripts of experiments that a file imports."""
    nodes = set()
    for statement in ast.walk(ast.parse(file.read_text())):
        if isinstance(statement, ast.ImportFrom) and statement.module == "experiments":
            nodes |= {node(alias.name) for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("experiments."):
            nodes.add(node(statement.module.split(".")[1]))
    return nodes


def test_the_readme_shows_the_imports_between_folders():
    arrows = set()
    for file in FOLDER.rglob("*.py"):
        start = node(file.relative_to(FOLDER).with_suffix("").parts[0])
        if start not in ("benchmarks", "__init__"):
            arrows |= {(start, end) for end in imported(file) - {start}}
    shown = re.findall(r"^  (\w+) --> (\w+)$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(arrows)


def test_the_readme_names_all_folders():
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"}
    text = (FOLDER / "README.md").read_text()
    assert {name for name in folders if f"`{name}/`" not in text and f"[{name}/]" not in text} == set()
