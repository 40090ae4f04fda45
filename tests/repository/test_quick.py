"""make quick chooses the tests for the changed files."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.once

spec = importlib.util.spec_from_file_location("quick", ROOT / ".ci" / "quick.py")
quick = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quick)

FILES = {
    "jaxmp/optim/__init__.py": "from jaxmp.optim.scale import grow as grow",
    "jaxmp/optim/scale.py": "def grow(): ...",
    "jaxmp/training/step.py": "from jaxmp.optim import scale",
    "jaxmp/training/state.py": "",
    "jaxmp/inspect/_tune/search.py": "",
    "jaxmp/inspect/_tune/tune.py": "from jaxmp.inspect._tune import search",
    "jaxmp/cli/tune.py": "from jaxmp.inspect._tune import tune",
    "docs/page.md": "",
    "tests/conftest.py": "",
    "tests/nnx/conftest.py": "",
    "tests/tools/trace.json": "{}",
    "tests/tools/traces.py": "PATH = 'trace.json'",
    "tests/optim/test_skip.py": "",
    "tests/training/test_step.py": "",
    "tests/training/test_state.py": "",
    "tests/docs/test_pages.py": "",
    "tests/inspect/test_tune.py": "",
    "tests/inspect/test_tune_plants.py": "",
    "tests/inspect/test_memory.py": "",
    "tests/nnx/test_imports.py": "from jaxmp.optim import checks, scale",
    "tests/nnx/test_names.py": "COMMAND = 'python -m jaxmp.optim.scale'",
    "tests/nnx/test_words.py": "SUM = jaxmp.optim.scales",
    "tests/linen/test_trace.py": "from traces import PATH",
}


def write(names) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(FILES.get(name, ""))


def commit(names=()) -> None:
    write(names)
    subprocess.run(["git", "add", "."], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *author, "commit", "--quiet", "--allow-empty", "-m", "a commit"], check=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BASE", raising=False)
    subprocess.run(["git", "init", "--quiet", "--initial-branch=main"], check=True)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("jaxmp/optim/scale.py", ["nnx/test_imports.py", "nnx/test_names.py", "optim/test_skip.py"]),
        ("jaxmp/optim/__init__.py", ["optim/test_skip.py"]),
        ("jaxmp/training/state.py", ["training/test_state.py"]),
        ("docs/page.md", ["docs/test_pages.py"]),
        ("tests/nnx/test_words.py", ["nnx/test_words.py"]),
        ("tests/tools/trace.json", ["linen/test_trace.py"]),
        ("tests/nnx/conftest.py", ["nnx/test_imports.py", "nnx/test_names.py", "nnx/test_words.py"]),
        ("tests/conftest.py", [name[6:] for name in FILES if quick.is_test(Path(name))]),
        ("tests/deleted/test_deleted.py", []),
    ],
)  # fmt: skip
def test_the_tests_of_a_file_are_those_of_its_folder_and_those_that_use_it(repository, changed, tests):
    write(FILES)
    always = "tests/training/test_step.py"  # it is in CORE, and also has the name of a file that imports scale.py
    assert quick.tests_of([changed]) == sorted({f"tests/{test}" for test in tests} | {always})


def test_the_tests_with_the_name_of_an_importing_file_run(repository, monkeypatch):
    monkeypatch.setattr(quick, "CORE", [])
    write(FILES)
    assert "tests/training/test_step.py" in quick.tests_of(["jaxmp/optim/scale.py"])
    assert "tests/training/test_step.py" not in quick.tests_of(["jaxmp/optim/__init__.py"])


def test_slow_tests_of_pages_and_scripts_run_only_if_their_own_file_changed(repository):
    write(FILES)
    assert "tests/docs/test_pages.py" in quick.tests_of(["docs/page.md"])
    assert "tests/docs/test_pages.py" not in quick.slow_tests_of(["docs/page.md"])
    assert "tests/docs/test_pages.py" in quick.slow_tests_of(["tests/docs/test_pages.py"])
    assert "tests/optim/test_skip.py" in quick.slow_tests_of(["jaxmp/optim/scale.py"])


def test_slow_tests_of_an_inspection_tool_have_its_name(repository):
    write(FILES)
    of_inspect = ["tests/inspect/test_memory.py", "tests/inspect/test_tune.py", "tests/inspect/test_tune_plants.py"]
    assert quick.tests_of(["jaxmp/inspect/_tune/search.py"]) == [*of_inspect, "tests/training/test_step.py"]
    assert quick.slow_tests_of(["jaxmp/inspect/README.md"]) == ["tests/training/test_step.py"]
    assert quick.slow_tests_of(["jaxmp/inspect/_tune/search.py"]) == [*of_inspect[1:], "tests/training/test_step.py"]


def test_the_tests_that_always_run_exist():
    assert all((ROOT / test).is_file() for test in quick.CORE)


def test_the_base_is_main_then_the_last_commit_and_a_named_commit_comes_first(repository, monkeypatch):
    commit(["first.py"])
    assert quick.changes()[1] == []
    commit(["second.py"])
    base, changed = quick.changes()
    assert (len(base), changed) == (40, ["second.py"])  # a commit on main is compared with the one before
    subprocess.run(["git", "switch", "--quiet", "-c", "branch"], check=True)
    commit(["third.py"])
    write(["untracked.py"])
    assert quick.changes() == ("main", ["third.py", "untracked.py"])
    subprocess.run(["git", "update-ref", "refs/remotes/origin/main", "main~1"], check=True)
    assert quick.changes() == ("origin/main", ["second.py", "third.py", "untracked.py"])
    monkeypatch.setenv("BASE", "HEAD")
    assert quick.changes() == ("HEAD", ["untracked.py"])
    monkeypatch.setenv("BASE", "no-such-commit")
    with pytest.raises(SystemExit, match="no-such-commit failed"):
        quick.changes()
