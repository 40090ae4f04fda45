"""make quick chooses the tests for the changed files."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from places import ROOT

pytestmark = [pytest.mark.once, pytest.mark.slow("reads the imports of every file")]

spec = importlib.util.spec_from_file_location("quick", ROOT / ".ci" / "quick.py")
quick = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quick)


@pytest.fixture(scope="module")
def imports():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield quick.Imports()


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("jaxmp/training/loss_function.py", ["training/test_errors.py"]),
        ("experiments/benchmarks/shared/records.py", ["experiments/benchmarks/test_call_cost.py"]),
        ("experiments/benchmarks/shared/records.py", ["experiments/benchmarks/test_autocast.py"]),
        ("experiments/data/errors.py", ["experiments/data/test_data.py"]),
        ("tests/experiments/conftest.py", ["experiments/data/test_data.py"]),
        ("tests/tools/gradscaler_traces.json", ["properties/test_scaler.py"]),
        ("tests/tools/transformers_models.npz", ["experiments/models/test_weights.py"]),
        ("tests/tools/plan_block.txt", ["engine/test_plan_text.py", "cli/test_plan.py"]),
        ("tests/tools/two_processes.py", ["test_processes.py"]),
        ("tests/tools/process_errors.py", ["experiments/training/test_several_processes.py"]),
        ("tests/nnx/test_linen.py", ["nnx/test_linen.py"]),
        ("docs/sharding.md", ["docs/test_sharding.py"]),
        (".ci/quick.py", ["test_quick.py"]),
    ],
)  # fmt: skip
def test_the_tests_of_a_file_are_those_of_its_name_and_of_what_imports_or_names_it(imports, changed, tests):
    assert {f"tests/{test}" for test in tests} <= set(quick.chosen([changed], imports)[0])


def test_every_file_of_the_library_has_tests_beside_those_that_always_run(imports):
    files = [name for name in imports.nodes if name.startswith("jaxmp/") and not name.endswith("/__init__.py")]
    assert len(files) > 50 and all(quick.near([name], imports).keys() - set(quick.CORE) for name in files)


@pytest.mark.parametrize("changed", ["jaxmp/base/dtypes.py", "jaxmp/__init__.py", "conftest.py", "tests/conftest.py"])
def test_the_nearest_tests_of_a_file_that_all_import_run_up_to_the_budget(imports, changed):
    taken, left = quick.chosen([changed], imports)
    tests = re.findall(r"^def test_", "".join((ROOT / test).read_text() for test in taken), re.MULTILINE)
    assert quick.BUDGET * 0.9 < len(tests) <= quick.BUDGET and len(left) > 50


def test_a_changed_test_always_runs(imports):
    changed = [name for name in imports.nodes if Path(name).name.startswith("test_")]
    taken, left = quick.chosen(changed, imports)
    assert set(taken) == set(changed) and not left


@pytest.mark.parametrize(
    "text",
    [
        "import jaxmp\njaxmp.call()", "import jaxmp\njaxmp.one.call()", "from jaxmp import call", "import jaxmp.one",
        "from jaxmp import one", "import jaxmp.one as other\nother.call()", "from jaxmp.one import call",
        "from tool import call", "def test():\n    import tool", "'python -m jaxmp.one'", "PATH = 'tool.py'",
    ],
)  # fmt: skip
def test_an_import_is_found_however_it_is_written(tmp_path, monkeypatch, text):
    files = {
        "jaxmp/__init__.py": "from jaxmp.one import call as call\nfrom jaxmp import two as two",
        "jaxmp/one.py": "def call(): ...",
        "jaxmp/two.py": "",
        "tests/tools/tool.py": "import jaxmp\njaxmp.one.call()",
        "tests/test_other.py": "import jaxmp\njaxmp.two",
        "tests/test_user.py": text,
        "conftest.py": "",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert quick.near(["jaxmp/one.py"], quick.Imports()).keys() == {"tests/test_user.py"}


def test_a_commit_on_main_is_compared_with_the_remote_main(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = ["-c", "user.name=a", "-c", "user.email=a@b.c"]

    def commit() -> None:
        subprocess.run(["git", *name, "commit", "--quiet", "--allow-empty", "-m", "a commit"], check=True)

    subprocess.run(["git", "init", "--quiet", "--initial-branch=main"], check=True)
    commit()
    assert quick.differing() == ("main", [])
    subprocess.run(["git", "update-ref", "refs/remotes/origin/main", "HEAD"], check=True)
    Path("file.py").touch()
    subprocess.run(["git", "add", "file.py"], check=True)
    commit()
    Path("other.py").touch()
    assert quick.differing() == ("origin/main", ["file.py", "other.py"])
