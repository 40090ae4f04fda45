"""Change the library at random places, and count the changes that fail a test.

    .venv/bin/python -m pip install pytest-cov
    .venv/bin/python -m pytest --cov=jaxmp --cov-context=test --junitxml=junit.xml
    .venv/bin/python tests/tools/mutants.py . .coverage --out mutants.json

The second command writes .coverage and junit.xml. A mutant is a copy of the
library with one changed operator, comparison, condition or number. The change is in the engine, loss scaling, the
train step or an adapter. Each mutant is tested with the quickest tests that run the changed line. Then come more tests
that run this line, first those of the mutant's folder. A mutant is found if a test fails or does not end in time. With
--mutants, the mutants that an earlier run found are not tested again.
"""

from __future__ import annotations

import argparse
import ast
import collections
import datetime
import importlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from experiments.report.marked_text import write_marked

README, SURVIVORS = Path(__file__).parents[1] / "README.md", Path(__file__).with_name("survivors.txt")
FOLDERS = ("jaxmp/engine", "jaxmp/optim", "jaxmp/training", "jaxmp/linen", "jaxmp/nnx")
SECONDS = 240  # a run of tests that takes longer counts as failed

_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Pow: "*", ast.BitOr: "&"}


class Mutant(NamedTuple):
    """A change of one line: its file, its number, its old text and its new text."""

    file: str
    line: int
    before: str
    after: str


def sites(file: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file, each within one line."""
    source = file.read_text()
    lines = source.splitlines()
    tree = ast.parse(source)
    in_messages = {id(inner) for node in ast.walk(tree) for inner in _message(node)}
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in function.body:
                for node in ast.walk(statement):
                    if id(node) in in_messages or getattr(node, "lineno", 0) != getattr(node, "end_lineno", -1):
                        continue
                    for start, end, text in _changes(node, source):
                        line = lines[node.lineno - 1]
                        yield Mutant(str(file), node.lineno, line, line[:start] + text + line[end:])


def _message(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in errors and f-strings, which are texts and not mutated."""
    if isinstance(node, (ast.Raise, ast.JoinedStr)):
        yield from ast.walk(node)


def _changes(node: ast.AST, source: str) -> Iterator[tuple[int, int, str]]:
    """Yield changes of a node: the columns to replace in its line, and the new text."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        new = f"{text(node.left)} {_COMPARISONS[type(node.ops[0])]} {text(node.comparators[0])}"
        yield node.col_offset, node.end_col_offset, new
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not isinstance(node.left, ast.Constant):
        yield node.col_offset, node.end_col_offset, f"{text(node.left)} {_OPERATORS[type(node.op)]} {text(node.right)}"
    elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
        word = "or" if isinstance(node.op, ast.And) else "and"
        yield node.col_offset, node.end_col_offset, f"({text(node.values[0])} {word} {text(node.values[1])})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.col_offset, node.end_col_offset, f"({text(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node.col_offset, node.end_col_offset, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node.col_offset, node.end_col_offset, str(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield node.test.col_offset, node.test.end_col_offset, f"not ({text(node.test)})"


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """Return ``count`` random mutants of the folders, with paths below ``root``."""
    mutants = []
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            mutants += [mutant._replace(file=str(Path(mutant.file).relative_to(root))) for mutant in sites(file)]
    return random.Random(seed).sample(mutants, min(count, len(mutants)))


def tests_by_line(coverage_file: Path) -> dict[tuple[str, int], set[str]]:
    """Return the tests that run each line, by file and line."""
    import coverage

    data = coverage.CoverageData(str(coverage_file))
    data.read()
    tests: dict[tuple[str, int], set[str]] = collections.defaultdict(set)
    for file in data.measured_files():
        short = "jaxmp/" + file.rpartition("/jaxmp/")[2]
        for line, contexts in data.contexts_by_lineno(file).items():
            tests[short, line] |= {context.partition("|")[0] for context in contexts if context}
    return tests


def seconds_by_test(junit: Path) -> dict[str, float]:
    """Return the seconds of each test in pytest's XML report.

    A failed test has infinity.
    """
    import xml.etree.ElementTree as ElementTree

    seconds = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        has_failed = case.find("failure") is not None or case.find("error") is not None
        seconds[name] = math.inf if has_failed else float(case.get("time", 0))
    return seconds


def more_tests(mutant: Mutant, tests: list[str], seconds: dict[str, float], most: float) -> list[str]:
    """Return tests that take at most ``most`` seconds in all.

    The tests of the mutant's folder come first.
    """
    folder = f"tests/{mutant.file.split('/')[1]}/"
    chosen, total = [], 0.0
    for test in sorted(tests, key=lambda test: (not test.startswith(folder), seconds.get(test, 9.0))):
        total += seconds.get(test, 9.0)
        if total > most:
            break
        chosen.append(test)
    return chosen


def is_found(root: Path, mutant: Mutant, tests: list[str]) -> bool:
    """Run tests on a copy of the package with the mutant; return whether one fails."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(root / "jaxmp", copy / "jaxmp", ignore=shutil.ignore_patterns("__pycache__"))
        for name in os.listdir(root):
            if name not in ("jaxmp", ".git", "build", "runs"):
                (copy / name).symlink_to(root / name)
        file = copy / mutant.file
        lines = file.read_text().splitlines()
        assert lines[mutant.line - 1] == mutant.before, mutant
        lines[mutant.line - 1] = mutant.after
        file.write_text("\n".join(lines) + "\n")
        return _fails(copy, tests)


def _fails(folder: Path, tests: list[str]) -> bool:
    child = os.fork()
    if child == 0:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1), os.dup2(silent, 2)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) != 0
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def main() -> None:
    """Draw mutants, run the tests on them, and print which mutants the tests found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the folder of the checkout")
    parser.add_argument("coverage", type=Path, help="the coverage data; junit.xml must be in the same folder")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=int, default=8, help="the number of quickest tests that run first")
    parser.add_argument("--seconds", type=float, default=20, help="the time for more tests of a mutant")
    parser.add_argument("--mutants", type=Path, help="the results of an earlier run, to test its survivors again")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--record",
        choices=("now", "earlier"),
        help="write the result of these tests, or of earlier ones, into tests/README.md",
    )
    options = parser.parse_args()
    # Mutants run in forks of this process, so that these modules are imported only once.
    for name in ("flax.linen", "flax.nnx", "jax", "optax", "pytest"):
        importlib.import_module(name)

    root = options.root.resolve()
    before: dict[str, Any] = {}
    if options.mutants:
        before = json.loads(options.mutants.read_text())
        drawn = [moved for row in before["rows"] if (moved := _in(root, Mutant(*row["mutant"])))]
        known = {Mutant(*row["mutant"]) for row in before["rows"] if row["found"]}
    else:
        drawn, known = draw(root, options.count, options.seed), set()
    covering = tests_by_line(options.coverage)
    seconds = seconds_by_test(options.coverage.with_name("junit.xml"))

    def row(mutant: Mutant) -> dict[str, object]:
        tests = [test for test in covering.get((mutant.file, mutant.line), ()) if seconds.get(test, 9.0) < math.inf]
        tests.sort(key=lambda test: seconds.get(test, 9.0))
        is_dead = mutant in known
        if not is_dead and (quickest := tests[: options.tests]):
            is_dead = is_found(root, mutant, quickest)
        if not is_dead and (slower := more_tests(mutant, tests[options.tests :], seconds, options.seconds)):
            is_dead = is_found(root, mutant, slower)
        print("found   " if is_dead else "survives", f"{mutant.file}:{mutant.line}", mutant.after.strip(), flush=True)
        return {"mutant": mutant, "covered": bool(tests), "found": is_dead}

    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(row, drawn))
    count = sum(bool(row["found"]) for row in rows)
    effort = {name: max(getattr(options, name), before.get(name, 0)) for name in ("tests", "seconds")}
    options.out.write_text(json.dumps({"found": count, "of": len(rows), **effort, "rows": rows}, indent=1))
    print(f"{count} of {len(rows)} mutants found")
    if options.record == "earlier":
        record_earlier(rows, len(seconds), root)
    if options.record == "now":
        tried = (
            f"{effort['tests']} quickest tests that run its line. If they passed, more of these tests ran for "
            f"{effort['seconds']:g} seconds"
        )
        record(rows, tried, options.seed)


def record(rows: list[dict[str, Any]], tried: str, seed: int) -> None:
    """Write the number of mutants found in each folder into tests/README.md.

    The survivors go into a file.
    """
    all_by_folder, found_by_folder = collections.Counter(), collections.Counter()
    survivors = []
    whys = {}  # the reasons that people wrote below earlier survivors
    for entry in SURVIVORS.read_text().split("\n\n"):
        place, before, after, *why = entry.strip().splitlines()
        whys[place.partition(":")[0], before, after] = "".join(f"{line}\n" for line in why)
    for row in rows:
        file, line, before, after = row["mutant"]
        folder = "/".join(file.split("/")[:2])
        all_by_folder[folder] += 1
        found_by_folder[folder] += bool(row["found"])
        if not row["found"]:
            old, new = f"  {before.strip()}", f"  {after.strip()}"
            survivors.append(f"{file}:{line}\n{old}\n{new}\n{whys.get((file, old, new), '')}")
    SURVIVORS.write_text("\n".join(sorted(survivors)))
    cells = [
        f"| `{folder}` | {found_by_folder[folder]} of {all_by_folder[folder]} |\n" for folder in sorted(all_by_folder)
    ]
    table = (
        f"The tests found {len(rows) - len(survivors)} of {len(rows)} mutants (seed {seed}, {datetime.date.today()}). "
        f"Each mutant was tested\nwith the {tried}. "
        "`tools/survivors.txt` lists the mutants\nthat were not found, and says why.\n\n"
        "| folder | found |\n|---|---:|\n" + "".join(cells)
    )
    write_marked(README, "mutants", "python tests/tools/mutants.py --record now", table)


def record_earlier(rows: list[dict[str, Any]], count: int, root: Path) -> None:
    """Write the number of mutants that earlier tests found into tests/README.md."""
    commit = subprocess.check_output(["git", "-C", root, "rev-parse", "--short", "HEAD"], text=True).strip()
    all_by_folder = collections.Counter(row["mutant"][0].split("/")[1] for row in rows)
    found_by_folder = collections.Counter(row["mutant"][0].split("/")[1] for row in rows if row["found"])
    folders = ", ".join(f"{name} {found_by_folder[name]} of {all_by_folder[name]}" for name in sorted(all_by_folder))
    text = (
        f"For comparison, at commit {commit} the same folders had {count:,} test cases. They found "
        f"{found_by_folder.total()} of {len(rows)}\nmutants of the library of that time ({folders}).\n"
    )
    write_marked(README, "earlier mutants", "python tests/tools/mutants.py --record earlier", text)


def _in(root: Path, mutant: Mutant) -> Mutant | None:
    """Return the same mutant in another checkout, or None if its line is not there.

    The line may have moved.
    """
    file = root / mutant.file
    lines = file.read_text().splitlines() if file.exists() else []
    numbers = [n for n, line in enumerate(lines, 1) if line == mutant.before]
    if not numbers:
        return None
    return mutant._replace(line=min(numbers, key=lambda n: abs(n - mutant.line)))


if __name__ == "__main__":
    main()
