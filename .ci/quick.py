"""Prints the tests that cover what differs from main, what is not committed included: ``make quick`` runs them.

`tests/` mirrors the folders: a file is covered by the folder or file of its name there, and one of the experiments or
of the tests' tools by the tests that import it too. The tests of CORE always run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CORE = ["tests/test_import.py", "tests/test_policy.py", "tests/training/test_step.py"]
# What is not covered by the folder of its name.
ALSO = {
    r"jaxmp/(_jaxpr|_float8_products|overrides)": ["engine"],
    r"jaxmp/_(linen|adapters)": ["linen"],
    r"jaxmp/_(nnx|adapters)": ["nnx"],
    r"jaxmp/(_gathering|_mesh_|_specs|sharding)": ["gathering", "test_sharding.py"],
    r"jaxmp/(_scale_state|optimizer|loss_scale)": ["optimizer", "loss_scale", "training"],
    r"jaxmp/doctor": ["cli"],
    r"experiments/(results|report)|README": ["experiments/report"],
    r".*\.(md|ipynb)$": ["docs", "properties/test_table.py"],
    r"(pyproject|constraints|Makefile|\.ci)": ["cli", "docs/test_readme.py"],
}


def git(*arguments: str) -> list[str]:
    """The lines that a command of git prints."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def covering(changed: str) -> set[str]:
    """The paths of the tests that cover one file."""
    path = Path(changed)
    if path.parts[0] == "tests" and path.name.startswith("test_"):
        return {changed}
    found = {f"tests/{name}" for pattern, names in ALSO.items() if re.match(pattern, changed) for name in names}
    inside = path.relative_to("jaxmp") if path.parts[0] == "jaxmp" else path
    for place in (inside, *inside.parents):  # a file, then the folders that it lies in
        if place.parts not in ((), ("experiments",), ("experiments", "benchmarks"), ("tests",)):
            found |= {str(test) for test in Path("tests", place.parent).glob(f"test_{place.stem}*.py")}
            found.add(f"tests/{place.with_suffix('')}")
    if path.suffix == ".py" and path.parts[0] in ("tests", "experiments"):
        package, name = ".".join(path.with_suffix("").parts[:-1]), path.stem
        place = rf"{re.escape(package)}(\.{name}\b| import .*\b{name}\b)" if package != "tests.tools" else rf"{name}\b"
        found |= {
            str(test)
            for test in Path("tests").rglob("test_*.py")
            if re.search(rf"^\s*(from|import) {place}", test.read_text(), re.MULTILINE)
        }
    return found | ({changed} if path.parts[0] == "jaxmp" and path.suffix == ".py" else set())  # its examples


main = next((name for name in ("main", "origin/main") if git("branch", "--all", "--list", name)), "HEAD")
changes = git("diff", "--name-only", git("merge-base", "HEAD", main)[0]) + git("ls-files", "-o", "--exclude-standard")
chosen = {path for path in CORE + [path for change in changes for path in covering(change)] if Path(path).exists()}
inner = {path for path in chosen if any(str(folder) in chosen for folder in Path(path).parents)}
print(f"{len(changes)} files differ from {main}", file=sys.stderr)
print(*sorted(chosen - inner), sep="\n")
