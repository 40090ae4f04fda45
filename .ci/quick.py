"""Prints the tests that cover what differs from main, what is not committed included: ``make quick`` runs them.

A file is covered by the tests of its name in `tests/`, which mirrors the folders, then by those of its folder; then by
the tests that import it, and by those of the files that import it; then by these files' users, and so on. The nearest
are taken until there are BUDGET tests, which take about two minutes on two cores; of two as near, the one that imports
less is more about the file. Changed tests, those of a changed file's name and those of CORE always run.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CORE = ["tests/test_import.py", "tests/policy/test_policy.py", "tests/training/test_step.py"]
BUDGET = 300  # functions, each with all of its parameters: 0.6 s of a core on average
ROOTS = ("jaxmp", "experiments", "tests")
# Who reads what is no module, beside the tests that have its name in a string.
ALSO = {
    r"experiments/results|README": ["experiments/report"],
    r".*\.(md|ipynb)$": ["docs", "properties/test_table.py"],
    r"pyproject|constraints|Makefile|\.ci": ["cli", "docs/test_readme.py", "test_setup.py"],
}


class Imports:
    """File to the files that it uses: imports of all kinds, attributes of packages, names in strings, its conftests."""

    def __init__(self) -> None:
        files = [file for root in ROOTS for file in Path(root).rglob("*.py")] + [Path("conftest.py")]
        self.modules = {module(file): str(file) for file in files}
        # Scripts and data are named in strings; an __init__.py or README.md means another one in each folder.
        named = [*Path("tests/tools").glob("*.*"), *Path("experiments/launch").glob("*"), *Path().glob("*.*")]
        self.named = {file.name: str(file) for file in named if file.is_file()}
        self.nodes = {str(file): list(ast.walk(ast.parse(file.read_text(), file))) for file in files}
        self.exports = {module(Path(name)): dict(exports(nodes)) for name, nodes in self.nodes.items()}
        self.used = {name: set(self.uses(name)) - {name} for name in self.nodes}

    def uses(self, name: str) -> Iterator[str]:
        """The files that one file uses."""
        bound = {}  # what a name in this file is the short name of
        for node in self.nodes[name]:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self.file(alias.name)
                    bound[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else None
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    if alias.asname != alias.name:  # else for others to import from here
                        yield from self.file(node.module)
                        yield from self.file(f"{node.module}.{alias.name}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = {word for word in re.findall(r"[\w.-]+", node.value) if "." in word} | {node.value}
                yield from (self.named[word] for word in words & self.named.keys())
                yield from (self.modules[word] for word in words & self.modules.keys())
        for text in map(dotted, self.nodes[name]):
            first, _, rest = (text or "").partition(".")
            if rest and first in bound:
                yield from self.file(f"{bound[first] or first}.{rest}")
        if Path(name).name.startswith("test_"):
            beside = (str(folder / "conftest.py") for folder in Path(name).parents)
            yield from (each for each in beside if each in self.nodes)

    def file(self, name: str) -> list[str]:
        """The file that has what a dotted name means, through all that packages import for others."""
        place, _, rest = name.partition(".")
        while rest and place in self.exports:
            first, _, after = rest.partition(".")
            if f"{place}.{first}" in self.modules:
                place, rest = f"{place}.{first}", after
            elif first in self.exports[place]:
                return self.file(f"{self.exports[place][first]}.{after}".rstrip("."))
            else:
                break
        return [self.modules[place]] if place in self.modules else []


def module(file: Path) -> str:
    """The name that a file is imported by; those of the tests' tools have no package."""
    parts = file.with_suffix("").parts
    return file.stem if parts[:2] == ("tests", "tools") else ".".join(parts[:-1] if file.stem == "__init__" else parts)


def exports(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """The names that a file has from another one."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def dotted(node: ast.AST) -> str | None:
    """``a.b.c`` as text, None for what is no name or an attribute of none."""
    if isinstance(node, ast.Attribute):
        return (value := dotted(node.value)) and f"{value}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


@functools.cache
def mirrored(name: str) -> tuple[tuple[str, bool], ...]:
    """Return the tests of a file's name, with True, then those of the folders that it lies in, with False."""
    path = Path(name)
    if path.parts[0] == "tests":
        return ((name, True),) if path.name.startswith("test_") else ()
    inside = path.relative_to(path.parts[0]) if path.parts[0] in ("jaxmp", ".ci") else path
    own = inside.parent if path.stem in ("__init__", "__main__") else inside.with_suffix("")
    paired = []
    for place in (own, *own.parents):
        if place.parts not in ((), ("experiments",), ("experiments", "benchmarks")):
            tests = [
                *Path("tests", place).rglob("test_*.py"),
                *Path("tests", place.parent).glob(f"test_{place.name}*.py"),
            ]
            paired += [(str(test), place == own) for test in tests]
    return tuple(paired)


def near(changed: list[str], imports: Imports) -> dict[str, tuple[int, int]]:
    """Tests to how far they are from what changed: 0 has its name, 1 its folder, 2 its users; and how many imports."""
    found: dict[str, int] = {}
    for name in changed:
        for place in (
            Path("tests", place) for pattern, also in ALSO.items() if re.match(pattern, name) for place in also
        ):
            found |= {str(test): 1 for test in ([place] if place.suffix else place.rglob("test_*.py"))}
    steps = dict.fromkeys(changed, 0)
    front, step = {*changed}, 0
    while front:
        for test, exact in (each for name in front for each in mirrored(name)):
            found[test] = min(found.get(test, 2 * step + 1), 2 * step + (not exact))
        step += 1
        front = {name for name, used in imports.used.items() if used & front} - steps.keys()
        steps |= dict.fromkeys(front, step)
    return {test: (far, steps.get(test, step)) for test, far in found.items() if test in imports.nodes}


def chosen(changed: list[str], imports: Imports) -> tuple[list[str], list[str]]:
    """The tests to run and those, farther away, for which there is no time."""
    found = near(changed, imports) | dict.fromkeys(CORE, (0, 0))
    taken, left, count = [], [], 0
    for test in sorted(found, key=lambda test: (found[test], len(imports.used[test]), test)):
        functions = len(re.findall(r"^ *def test_", Path(test).read_text(), re.MULTILINE))
        if found[test][0] == 0 or count + functions <= BUDGET:
            taken.append(test)
            count += functions
        else:
            left.append(test)
    return taken, left


def git(*arguments: str) -> list[str]:
    """The lines that a command of git prints."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def differing() -> tuple[str, list[str]]:
    """The main branch, the remote's if there is one, and the files that differ from where this one left it."""
    mains = git(
        "for-each-ref", "--sort=-refname", "--format=%(refname:short)", "refs/remotes/origin/main", "refs/heads/main"
    )
    main = (mains or ["HEAD"])[0]
    changed = git("diff", "--name-only", git("merge-base", "HEAD", main)[0])
    return main, changed + git("ls-files", "--others", "--exclude-standard")


if __name__ == "__main__":
    main, changed = differing()
    taken, left = chosen(changed, Imports())
    examples = [name for name in changed if re.match(r"jaxmp/.*\.py", name) and Path(name).exists()]
    print(f"{len(changed)} files differ from {main}", file=sys.stderr)
    if left:
        print(f"{len(left)} files of tests that use them from farther away are left to make test", file=sys.stderr)
    print(*sorted(taken + examples), sep="\n")
