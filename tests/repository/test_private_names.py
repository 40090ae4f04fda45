"""Private names of JAX and Flax are used in jaxmp/_internals only."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.once

OF_PYTHON = {"_replace", "_fields", "_asdict", "_slotnames"}  # of named tuples and copyreg


def own_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names of any kind that these nodes define."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def used_names(node: ast.AST) -> list[str]:
    """Return the parts of an attribute or of an import of another package."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    module = getattr(node, "module", None) or ""
    if not isinstance(node, (ast.Import, ast.ImportFrom)) or module.split(".")[0] in ("jaxmp", "__future__"):
        return []
    return [part for alias in node.names for part in f"{module}.{alias.name}".split(".")]


def foreign_names(folder: Path) -> dict[str, set[str]]:
    """Return, by file, the private names of other packages that it uses."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    nodes = {name: [*ast.walk(ast.parse(path.read_text()))] for name, path in files.items()}
    our_names = {name for of_file in nodes.values() for name in own_names(of_file)} | OF_PYTHON
    foreign: dict[str, set[str]] = {}
    for path, of_file in nodes.items():
        names = {name for node in of_file for name in used_names(node)}
        if private := {name for name in names if name.startswith("_") and not name.endswith("__")} - our_names:
            foreign[path] = private
    return foreign


def test_private_names_of_jax_and_flax_are_used_in_the_room_for_them():
    foreign = foreign_names(ROOT / "jaxmp")
    rooms = {path for path in foreign if path.startswith("_internals/")}
    assert {path: foreign[path] for path in foreign.keys() - rooms} == {}
    assert {"_internals/flax/nnx.py", "_internals/jax/traces.py"} <= rooms


def test_a_private_name_is_found_as_an_attribute_and_in_an_import(tmp_path):
    (tmp_path / "one.py").write_text("from jax._src import core\n\ndef _own(x):\n    return x._state, x._own\n")
    (tmp_path / "two.py").write_text("import flax.linen._hidden\n")
    assert foreign_names(tmp_path) == {"one.py": {"_src", "_state"}, "two.py": {"_hidden"}}
