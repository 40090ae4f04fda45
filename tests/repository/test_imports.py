"""Files import each other in one direction, and private names of other libraries stay in their room."""

from __future__ import annotations

import ast
import functools
import re
import runpy
from pathlib import Path

from places import ROOT


@functools.cache
def import_statements(file: Path, text: str) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Return each import of a file, and whether it runs when the file is imported."""
    statements = []

    def collect(node: ast.AST, at_once: bool) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            statements.append((node, at_once))
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, (ast.stmt, ast.ExceptHandler, ast.match_case)):  # no expression has an import
                collect(inner, at_once and not runs_later(node))

    collect(ast.parse(text, file), True)
    return statements


def imports(roots: list[Path], at_once: bool = False) -> dict[str, set[str]]:
    """Map each module under ``roots`` to the modules under ``roots`` it imports.

    By default, imports inside functions and for type checkers count too. With ``at_once``, only imports that run when
    the file is imported count. An import of ``package.one`` then also counts as an import of ``package``, unless the
    importing module is itself in ``package``, because the package's file is already running.
    """
    files = {}
    for root in roots:
        for file in root.rglob("*.py"):
            parts = file.relative_to(root.parent).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for node, runs_at_once in import_statements(file, file.read_text()):
            if at_once and not runs_at_once:
                continue
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names}
            else:
                assert not node.level, f"{file} has a relative import"
                full_names = {f"{node.module}.{alias.name}" for alias in node.names}
                # `from package import x` imports the module x, or a name in the package's own file
                graph[name] |= {full_name if full_name in files else node.module for full_name in full_names}
        if at_once:
            graph[name] |= set().union(*map(packages, graph[name])) - packages(name)
        graph[name] = (graph[name] & files.keys()) - {name}
    return graph


def runs_later(node: ast.AST) -> bool:
    """Return whether the node is a function or code for type checkers only."""
    return isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))


def packages(name: str) -> set[str]:
    """Return the packages that contain a module."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def import_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that import each other, also indirectly."""
    reached = {}
    for name in graph:
        reached[name], new = set(), graph[name]
        while new:
            reached[name] |= new
            new = set().union(*(graph[module] for module in new)) - reached[name]
    cycles = set()
    for name in graph:
        if name in reached[name]:
            cycles.add(tuple(sorted(module for module in reached[name] if name in reached[module])))
    return [list(cycle) for cycle in sorted(cycles)]


def test_no_files_import_each_other_in_a_cycle():
    for at_once in (False, True):
        assert import_cycles(imports([ROOT / "jaxmp", ROOT / "experiments"], at_once)) == []


def test_in_the_library_only_its_room_for_them_imports_jaxs_internals():
    internal = re.compile(r"^\s*(from|import) jax(\._src| import _src)", re.MULTILINE)
    users = {file.parent for file in (ROOT / "jaxmp").rglob("*.py") if internal.search(file.read_text())}
    assert users == {ROOT / "jaxmp" / "_internals" / "jax"}


ROOMS = runpy.run_path(str(ROOT / "docs" / "draw_rooms.py"))["FOLDERS"]
"""The folders of the library. Each imports only those before it."""


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_a_folder_of_the_library_imports_only_those_before_it():
    graph = imports([ROOT / "jaxmp"])
    arrows = set()
    for name, all_used in graph.items():
        if room_of(name) in ROOMS:
            arrows |= {(name, used) for used in all_used}
    users = {room_of(name) for name, used in arrows if room_of(used) not in ROOMS}
    assert users <= {"cli"}  # cli uses the whole library
    arrows = {(name, used) for name, used in arrows if room_of(used) in ROOMS}
    upward = {(name, used) for name, used in arrows if ROOMS.index(room_of(used)) > ROOMS.index(room_of(name))}
    assert not upward
    adapters = {(room_of(name), room_of(used)) for name, used in arrows if room_of(name) in ("linen", "nnx")}
    assert ("nnx", "linen") not in adapters
    assert adapters.isdisjoint({("linen", room) for room in ("optim", "sharding", "training")})


def test_the_root_shows_the_folders_and_little_else():
    entries = {path.name for path in (ROOT / "jaxmp").iterdir() if path.name != "__pycache__"}
    files = {"__init__.py", "__main__.py", "README.md", "jmp.py", "losses.py", "py.typed"}
    assert entries == {*ROOMS, *files}


def test_a_cycle_is_found_wherever_its_imports_stand(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("from package import two")
    (package / "two.py").write_text("def late():\n    import package.three")
    (package / "three.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.one import name"
    )
    (package / "four.py").write_text("import package.one")
    assert import_cycles(imports([package])) == [["package.one", "package.three", "package.two"]]


def test_a_package_may_import_its_own_files_if_these_need_neither_it_nor_what_imports_it(tmp_path):
    around = ["outer", "package", "package.one"]
    packages = [
        ("from package.one import name", "", "", []),
        ("from package import one", "import package.two", "", []),
        ("import package.one", "from package import name", "", [["package", "package.one"]]),
        ("import package.one", "import outer", "import package.two", [around]),
        ("import package.one", "import outer", "def late():\n    import package.two", []),
        ("", "import outer", "import package.two", []),
    ]
    for init, inner, outer, expected in packages:
        files = {"package/__init__.py": init, "package/one.py": inner, "package/two.py": "", "outer/__init__.py": outer}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        assert import_cycles(imports([tmp_path / "package", tmp_path / "outer"], at_once=True)) == expected
