from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import ROOT

import jaxmp

pytestmark = pytest.mark.once


def python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


TIMED_IMPORT = "import jax, time; t = time.process_time(); import jaxmp; print(time.process_time() - t)\n"


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """Return the CPU time of importing jaxmp, and the names loaded and missing."""
    for_later = {"flax", "matplotlib", "tensorflow", "tensorflow_datasets", "jmp", "rich", "orbax"}
    code = (
        "jaxmp.get_policy('auto'); jaxmp.hardware.detect(); autocast = jaxmp.autocast(jax.numpy.vdot, 'mixed_bfloat16')"
    )
    output = python(
        f"{TIMED_IMPORT}import sys; print({for_later} & {{*sys.modules}})\n"
        f"{code}; jax.jit(autocast)(1., 2.); print('flax' in sys.modules)\n"
        "print([name for name in dir(jaxmp) if not hasattr(jaxmp, name)])"
    )
    return output.split()


def test_importing_jaxmp_imports_nothing_that_it_does_without_and_policies_hardware_and_autocast_work_without_flax(
    imported,
):
    assert imported[1:] == ["set()", "False", "[]"]  # no optional package, no Flax, no missing name


def test_importing_jaxmp_adds_at_most_a_tenth_of_a_second_to_importing_jax(imported):
    # CPU time depends little on other processes; the first run may still write bytecode
    assert float(imported[0]) <= 0.1 or any(float(python(TIMED_IMPORT)) <= 0.1 for _ in range(2))


@pytest.mark.slow("a process of its own that compiles")
def test_no_part_of_jaxmp_that_is_loaded_later_has_what_was_jitted_before_compiled_again():
    output = python(
        "import jax, jaxmp; from flax import nnx; traced = []\n"
        "own = jax.jit(lambda x: traced.append('own') or x)\n"
        "half = jax.jit(jaxmp.autocast(lambda w: traced.append('half') or w @ w, 'mixed_bfloat16'))\n"
        "eye = jax.numpy.eye(2)\n"
        "for later in ('losses', 'inspect', 'hardware', 'linen', 'nnx', 'checkpoint', 'make_train_step'):\n"
        "    own(eye), half(eye), getattr(jaxmp, later)\n"
        "net = jaxmp.nnx.apply_policy(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 'mixed_bfloat16')\n"
        "net(eye), own(eye), half(eye), print(*traced)"
    )
    assert output == "own half"


def test_a_type_checker_sees_the_names_of_all():
    source = (ROOT / "jaxmp" / "__init__.py").read_text()
    imports_from = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    names = {alias.asname for node in imports_from for alias in node.names}
    assert names - {None} == {*jaxmp.__all__}


def test_a_name_that_is_none_is_pythons_error():
    with pytest.raises(AttributeError, match="module 'jaxmp' has no attribute 'no_such_name'"):
        jaxmp.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("all_finite", "write jaxmp.jmp.all_finite"),
        ("select_tree", "write jaxmp.jmp.select_tree, or jaxmp.keep_if_skipped"),
        ("apply_policy", "write jaxmp.linen.apply_policy or jaxmp.nnx.apply_policy"),
        ("GradScaler", r"write jaxmp.loss_scaling\(tx, jaxmp.DynamicLossScale\(\)\)"),
        ("unscale", r"write jaxmp.value_and_grad\(loss_fn, opt_state\), whose gradients are unscaled"),
    ],
)
def test_the_error_for_a_name_of_another_library_or_module_says_what_to_write(name, remedy):
    with pytest.raises(AttributeError, match=remedy):
        getattr(jaxmp, name)


def test_dir_of_an_adapter_has_what_the_docs_name_of_it_and_no_more():
    files = (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"))
    text = "".join(file.read_text() for file in files)
    for module in (jaxmp.linen, jaxmp.nnx):
        assert dir(module) == sorted({*re.findall(rf"\b{module.__name__}\.(\w+)", text)})
        assert all(hasattr(module, name) for name in dir(module))


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


def not_required(*names: str) -> set[str]:
    """Return the installed distributions other than these and their requirements."""
    distributions, new = set(), {Requirement(name) for name in names}
    while new:
        requirement = new.pop()
        extras = {"", *requirement.extras}
        if (key := (canonicalize_name(requirement.name), *sorted(extras))) in distributions:
            continue
        distributions.add(key)
        # A requirement may be absent: it is for another platform, or of an extra that is not installed.
        with contextlib.suppress(metadata.PackageNotFoundError):
            for text in metadata.requires(requirement.name) or []:
                other = Requirement(text)
                if not other.marker or any(other.marker.evaluate({"extra": extra}) for extra in extras):
                    new.add(other)
    installed = {name for name, *_ in distributions}
    tops = metadata.packages_distributions()
    return {top for top, owners in tops.items() if not installed & {canonicalize_name(owner) for owner in owners}}


def helps(names: list[str]) -> None:
    """Run the modules with --help where nothing else is installed."""
    hidden = not_required("jaxmp", "jax", "flax", "optax", "rich", "tyro")
    code = f"""
import contextlib, io, runpy, sys

class Installed:
    finders = [*sys.meta_path]

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {sorted(hidden)}:
            found = (finder.find_spec(name, path, target) for finder in cls.finders)
            return next((spec for spec in found if spec), None)

sys.meta_path[:] = [Installed]
for name in {names}:
    sys.argv, text = ["", "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code and "--run-dir" in text.getvalue(), (name, end.code)
    else:
        raise AssertionError(name)
"""
    python(code)


@pytest.mark.slow("starts a process for each benchmark")
def test_every_benchmark_helps_with_jax_flax_optax_rich_and_tyro_only():
    folder = ROOT / "experiments" / "benchmarks"
    names = [file.stem for file in folder.glob("[a-z]*.py")] + [
        file.parent.name for file in folder.glob("*/__main__.py")
    ]
    assert {"loss_scaling", "train_step", "accuracy"} <= set(names)
    helps([f"experiments.benchmarks.{name}" for name in sorted(names)])


@pytest.mark.slow("starts a process, to check the slow test above")
def test_a_package_that_these_five_do_not_require_cannot_be_imported_there():
    with pytest.raises(subprocess.CalledProcessError) as error:
        helps(["matplotlib"])
    assert "No module named matplotlib" in error.value.stderr
