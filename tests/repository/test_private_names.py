"""Private names of JAX and Flax are used in few files."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.once

OF_PYTHON = {"_replace", "_fields", "_asdict", "_slotnames"}  # of named tuples and copyreg


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names of any kind that these nodes define."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def foreign_names(folder: Path) -> dict[str, set[str]]:
    """Return, by file, the private names of other packages that it uses."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    nodes = {name: [*ast.walk(ast.parse(path.read_text()))] for name, path in files.items()}
    our_names = {name for of_file in nodes.values() for name in own_names(of_file)} | OF_PYTHON
    foreign: dict[str, set[str]] = {}
    for path, of_file in nodes.items():
        for node in of_file:
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = getattr(node, "module", None) or ""
                names = [part for alias in node.names for part in f"{module}.{alias.name}".split(".")]
                names = [] if names[0] in ("jaxmp", "__future__") else names
            if private := {name for name in names if is_private(name)} - our_names:
                foreign.setdefault(path, set()).update(private)
    return foreign


def test_private_names_of_jax_and_flax_stand_in_the_rooms_for_them():
    foreign = foreign_names(ROOT / "jaxmp")
    rooms = {path for path in foreign if path.startswith("_internals/")}
    assert {path: foreign[path] for path in foreign.keys() - rooms} == {}
    assert {"_internals/flax/nnx.py", "_internals/jax/traces.py"} <= rooms and len(rooms) > 2


def test_inspect_uses_and_overrides_no_private_name_of_a_train_step():
    private = set[str]()
    for path in ("training/step.py", "nnx/training.py"):
        classes = {getattr(node, "name", ""): node for node in ast.parse((ROOT / "jaxmp" / path).read_text()).body}
        private.update(name for name in own_names(ast.walk(classes["TrainStep"])) if is_private(name))
    private -= {"_"}
    assert len(private) > 10
    for path in (ROOT / "jaxmp" / "inspect").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        overridden = {name for cls in classes for name in own_names(ast.walk(cls))}
        assert (path.name, (used | overridden) & private) == (path.name, set())


def test_a_private_name_is_found_as_an_attribute_and_in_an_import(tmp_path):
    (tmp_path / "one.py").write_text("from jax._src import core\n\ndef _own(x):\n    return x._state, x._own\n")
    (tmp_path / "two.py").write_text("import flax.linen._hidden\n")
    assert foreign_names(tmp_path) == {"one.py": {"_src", "_state"}, "two.py": {"_hidden"}}
