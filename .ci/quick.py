"""Print the tests that cover the changes since main, committed or not. ``make quick`` runs them.

The tests of a changed file are, from near to far:

1. the tests with the file's name, and then the tests of its folder, because the folders of `tests/` mirror the code;
2. the tests that import the file, and the tests of the other files that import it (by name and folder, as in 1);
3. step 2 for the files that import those files, and so on.

The nearest tests are printed until there are BUDGET tests, about a third of the time of all. If tests are
equally near, the tests that import fewer files come first. Three kinds always run: changed tests, tests with the name
of a changed file, and the tests of CORE.
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
BUDGET = 300  # test functions, each with all of its parameters
ROOTS = ("jaxmp", "experiments", "tests")
# Patterns of files that are not modules, each with the tests of these files. Tests that name such a file in a string
# are found without this table.
ALSO = {
    r"experiments/results|README": ["experiments/report"],
    r".*\.(md|ipynb)$": ["docs", "properties/test_table.py"],
    r"pyproject|constraints|Makefile|\.ci": ["cli", "docs/test_readme.py", "test_setup.py", "test_release.py"],
}


class Imports:
    """The files that each file uses, in ``used``.

    A file uses another one by an import, an attribute of a package, a name in a string, or as its conftest.
    """

    def __init__(self) -> None:
        files = [file for root in ROOTS for file in Path(root).rglob("*.py")] + [Path("conftest.py")]
        self.modules = {module(file): str(file) for file in files}
        # Scripts and data files are recognised by their names in strings. Only these folders are searched, because
        # names like README.md occur in many folders.
        named = [*Path("tests/tools").glob("*.*"), *Path("experiments/launch").glob("*"), *Path().glob("*.*")]
        self.named = {file.name: str(file) for file in named if file.is_file()}
        self.nodes = {str(file): list(ast.walk(ast.parse(file.read_text(), file))) for file in files}
        self.exports = {module(Path(name)): dict(exports(nodes)) for name, nodes in self.nodes.items()}
        self.used = {name: set(self.uses(name)) - {name} for name in self.nodes}

    def uses(self, name: str) -> Iterator[str]:
        """Yield the files that one file uses."""
        bound = {}  # imported names, and the dotted names that they stand for (None: the same name)
        for node in self.nodes[name]:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self.file(alias.name)
                    bound[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else None
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    if alias.asname != alias.name:  # `import x as x` is a re-export, which does not use x
                        yield from self.file(node.module)
                        yield from self.file(f"{node.module}.{alias.name}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = {word for word in re.findall(r"[\w.-]+", node.value) if "." in word} | {node.value}
                yield from (self.named[word] for word in words & self.named.keys())
                yield from (self.modules[word] for word in words & self.modules.keys())
        for text in map(dotted, self.nodes[name]):
            first, _, attributes = (text or "").partition(".")
            if attributes and first in bound:
                yield from self.file(f"{bound[first] or first}.{attributes}")
        if Path(name).name.startswith("test_"):
            beside = (str(folder / "conftest.py") for folder in Path(name).parents)
            yield from (conftest for conftest in beside if conftest in self.nodes)

    def file(self, name: str) -> list[str]:
        """Return the file that defines a dotted name, following re-exports; empty if it is not ours."""
        module_name, _, inner_name = name.partition(".")
        while inner_name and module_name in self.exports:
            first, _, after = inner_name.partition(".")
            if f"{module_name}.{first}" in self.modules:
                module_name, inner_name = f"{module_name}.{first}", after
            elif first in self.exports[module_name]:
                return self.file(f"{self.exports[module_name][first]}.{after}".rstrip("."))
            else:
                break
        return [self.modules[module_name]] if module_name in self.modules else []


def module(file: Path) -> str:
    """Return the name by which a file is imported; files in tests/tools have no package."""
    parts = file.with_suffix("").parts
    return file.stem if parts[:2] == ("tests", "tools") else ".".join(parts[:-1] if file.stem == "__init__" else parts)


def exports(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield the names that a file imports from a module, with their dotted names."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def dotted(node: ast.AST) -> str | None:
    """Return an expression such as ``a.b.c`` as text, and None for other expressions."""
    if isinstance(node, ast.Attribute):
        return (value := dotted(node.value)) and f"{value}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


@functools.cache
def mirrored(name: str) -> tuple[tuple[str, bool], ...]:
    """Return the tests with a file's name and those of its folders.

    A test comes with True if it has the file's name, and with False otherwise.
    """
    path = Path(name)
    if path.parts[0] == "tests":
        return ((name, True),) if path.name.startswith("test_") else ()
    inside = path.relative_to(path.parts[0]) if path.parts[0] in ("jaxmp", ".ci") else path
    mirrored_place = inside.parent if path.stem in ("__init__", "__main__") else inside.with_suffix("")
    paired = []
    for place in (mirrored_place, *mirrored_place.parents):
        if place.parts not in ((), ("experiments",), ("experiments", "benchmarks")):
            tests = [
                *Path("tests", place).rglob("test_*.py"),
                *Path("tests", place.parent).glob(f"test_{place.name}*.py"),
            ]
            paired += [(str(test), place == mirrored_place) for test in tests]
    return tuple(paired)


def near(changed: list[str], imports: Imports) -> dict[str, tuple[int, int]]:
    """Return how far each test is from the changed files.

    For each test, the result has a distance, and the number of imports between the test and a changed file. The
    distance is 0 for a test with the name of a changed file, and 1 for a test of its folder. For the tests of the files
    that import it, the distance is 2 by name and 3 by folder, and so on.
    """
    distances: dict[str, int] = {}
    for name in changed:
        for place in (
            Path("tests", place) for pattern, also in ALSO.items() if re.match(pattern, name) for place in also
        ):
            distances |= {str(test): 1 for test in ([place] if place.suffix else place.rglob("test_*.py"))}
    steps = dict.fromkeys(changed, 0)
    front, step = {*changed}, 0
    while front:
        for name in front:
            for test, has_name in mirrored(name):
                distances[test] = min(distances.get(test, 2 * step + 1), 2 * step + (not has_name))
        step += 1
        front = {name for name, used in imports.used.items() if used & front} - steps.keys()
        steps |= dict.fromkeys(front, step)
    return {test: (far, steps.get(test, step)) for test, far in distances.items() if test in imports.nodes}


def chosen(changed: list[str], imports: Imports) -> tuple[list[str], list[str]]:
    """Return the tests to run, and the farther ones that exceed BUDGET."""
    distances = near(changed, imports) | dict.fromkeys(CORE, (0, 0))
    taken, left, count = [], [], 0
    for test in sorted(distances, key=lambda test: (distances[test], len(imports.used[test]), test)):
        functions = len(re.findall(r"^ *def test_", Path(test).read_text(), re.MULTILINE))
        if distances[test][0] == 0 or count + functions <= BUDGET:
            taken.append(test)
            count += functions
        else:
            left.append(test)
    return taken, left


def git(*arguments: str) -> list[str]:
    """Return the lines that a git command prints."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def differing() -> tuple[str, list[str]]:
    """Return the name of the main branch, and the files that changed since this branch left it.

    The remote's main is preferred to the local one.
    """
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
    files = "1 file differs" if len(changed) == 1 else f"{len(changed)} files differ"
    print(f"{files} from {main}", file=sys.stderr)
    if left:
        print(f"{len(left)} more test files use the changed files indirectly; make test runs them too", file=sys.stderr)
    print(*sorted(taken + examples), sep="\n")
