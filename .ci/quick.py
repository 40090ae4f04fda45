"""Print the tests that cover the changes since a base commit. ``make quick`` runs them.

Changes that are not committed count too. The base is the commit in the environment variable BASE, or else the commit
where the branch left main. If nothing differs from main, the base is the commit before HEAD. The tests of a changed
file are:

1. the file itself, if it is a test;
2. the tests of the folder that mirrors its own: ``tests/optim`` for ``jaxmp/optim/loss_scale.py``;
3. the tests that import or name it, directly or through a helper of the tests;
4. the tests with the name of a file that imports it.

The tests of CORE and the examples in changed docstrings always run.

With ``--slow``, fewer files are printed, because ``make nightly`` runs all slow tests. ``make slow-changed`` uses this
option:

- The tests of scripts, notebooks and docs pages are printed only if their own files changed.
- A changed Markdown file does not print the tests of its folder.
- A changed file of an inspection tool prints the tests with the name of the tool, not all tests of its folder:
  ``tests/inspect/test_tune*.py`` for ``jaxmp/inspect/_tune/search.py``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CORE = ["tests/test_import.py", "tests/policy/test_policy.py", "tests/training/test_step.py"]


def git(*arguments: str) -> list[str]:
    """Return the lines that a git command prints. If it fails, git itself prints why."""
    done = subprocess.run(["git", *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"error: git {' '.join(arguments)} failed")
    return done.stdout.splitlines()


def changes() -> tuple[str, list[str]]:
    """Return the base commit as it was named, and the files that differ from it."""
    mains = ("refs/remotes/origin/main", "refs/heads/main")
    main = git("for-each-ref", "--sort=-refname", "--format=%(refname:short)", *mains)[:1]
    last_or_only = git("rev-list", "--first-parent", "--max-count=2", "HEAD")[-1]
    for base in [os.environ["BASE"]] if os.environ.get("BASE") else [*main, last_or_only]:
        changed = git("diff", "--name-only", "--no-renames", git("merge-base", "HEAD", base)[0])
        changed += git("ls-files", "--others", "--exclude-standard")
        if changed:
            break
    return base, changed


def is_test(path: Path) -> bool:
    """Return whether pytest collects tests from a file of this name."""
    return path.parts[0] == "tests" and path.match("test_*.py")


def is_helper(path: Path) -> bool:
    """Return whether a file serves other tests: a conftest, or a file of ``tests/tools``."""
    return path.name == "conftest.py" or path.parts[:2] == ("tests", "tools")


def mirror(path: Path) -> Path:
    """Return the folder of the tests of a file: the nearest one that exists."""
    inside = path.relative_to(path.parts[0]) if path.parts[0] in ("jaxmp", ".ci") else path
    folder = Path("tests", inside.with_suffix(""))
    while not folder.is_dir():
        folder = folder.parent
    return folder


def is_in_tool(path: Path) -> bool:
    """Return whether a file is a part of an inspection tool, as in ``jaxmp/inspect/_tune``."""
    return path.parent.name.startswith("_") and path.parent.parent.name == "inspect"


def named_after(path: Path) -> set[Path]:
    """Return the tests with the name of a file, or of the inspection tool that it is a part of."""
    names = [path.stem, path.parent.name.removeprefix("_")] if is_in_tool(path) else [path.stem]
    return {test for name in names for test in mirror(path).glob(f"test_{name}*.py")}


def users(path: Path) -> list[Path]:
    """Return the files that import a module, or that contain the name of another file."""
    if path.name in ("__init__.py", "conftest.py"):
        return []
    if path.suffix == ".py" and path.parts[0] in ("jaxmp", "experiments"):
        package, name = ".".join(path.parts[:-1]), path.stem
        patterns = [rf"{package}\.{name}", rf"from {package} import .*{name}"]
    elif path.suffix == ".py" and is_helper(path):
        patterns = [f"import {path.stem}", f"from {path.stem} import", re.escape(path.name)]
    else:
        patterns = [re.escape(path.name)]
    searched = ["git", "grep", "--untracked", "-lwE", "|".join(patterns), "--", "tests", "jaxmp", "experiments"]
    lines = subprocess.run(searched, stdout=subprocess.PIPE, text=True).stdout.splitlines()  # it fails if it finds none
    return [Path(line) for line in lines if line != str(path)]


def own_tests(path: Path, for_slow: bool) -> set[Path]:
    """Return the tests of a file's folder.

    With ``for_slow``, a Markdown file has none, and a file of an inspection tool has those with the tool's name.
    """
    if for_slow and path.suffix == ".md":
        return set()
    if for_slow and is_in_tool(path):
        return named_after(path)
    return set(mirror(path).glob("test_*.py"))


def tests_of(changed: list[str], *, for_slow: bool = False) -> list[str]:
    """Return the files of tests to run for changed files.

    With ``for_slow``, return the files whose slow tests to run.
    """
    tests = {Path(test) for test in CORE}
    paths = [Path(name) for name in changed]
    for path in paths:  # helpers that use a changed file are added to the list
        if is_test(path):
            tests.add(path)
        elif path.name == "conftest.py":
            tests |= set(Path("tests").rglob("test_*.py") if len(path.parts) == 1 else path.parent.rglob("test_*.py"))
        elif path.parts[0] != "tests":
            tests |= own_tests(path, for_slow)
        for user in users(path):
            if is_test(user):
                tests.add(user)
            elif is_helper(user) and user not in paths:
                paths.append(user)
            elif user.suffix == ".py" and path.suffix == ".py":
                tests |= named_after(user)
    return sorted(str(test) for test in tests if test.exists())


def slow_tests_of(changed: list[str]) -> list[str]:
    """Return the test files whose slow tests to run.

    Those of scripts, notebooks and pages are left out, unless they changed themselves.
    """
    programs = (("tests", "experiments"), ("tests", "docs"))
    tests = tests_of(changed, for_slow=True)
    return [test for test in tests if test in changed or Path(test).parts[:2] not in programs]


if __name__ == "__main__":
    base, changed = changes()
    tests = slow_tests_of(changed) if sys.argv[1:] == ["--slow"] else tests_of(changed)
    examples = [name for name in changed if re.fullmatch(r"jaxmp/.*\.py", name) and Path(name).exists()]
    files = "1 file differs" if len(changed) == 1 else f"{len(changed)} files differ"
    print(f"{files} from {base}", file=sys.stderr)
    print(*tests, *examples, sep="\n")
