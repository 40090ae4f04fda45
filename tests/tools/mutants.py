"""Change the library at random places, and count the changes that fail a test.

    .venv/bin/python -m pip install pytest-cov
    .venv/bin/python -m pytest --cov --cov-context=test --junitxml=junit.xml
    .venv/bin/python tests/tools/mutants.py --write
    .venv/bin/python tests/tools/mutants.py jaxmp/optim/loss_scale.py --count 20

The second command writes .coverage and junit.xml. A mutant is a copy of the library with one changed operator,
comparison, condition or number. Each mutant is tested with the quickest tests that run the changed line, and then with
other tests that run this line, first those of the mutant's folder. A mutant is found if a test fails or does not end in
time. With --write, the result and the mutants that were not found are written into survivors.txt.
"""

from __future__ import annotations

import argparse
import ast
import collections
import datetime
import importlib
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import coverage

ROOT, SURVIVORS = Path(__file__).parents[2], Path(__file__).with_name("survivors.txt")
FOLDERS = ("jaxmp/engine", "jaxmp/optim", "jaxmp/training", "jaxmp/linen", "jaxmp/nnx")
QUICKEST = 8  # so many tests run first
SECONDS = 45  # other tests run for so long, as junit.xml says
LIMIT = 240  # seconds, after which tests count as failed

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


def sites(file: str) -> Iterator[Mutant]:
    """Yield all mutants of a file, each within one line.

    Texts of errors and f-strings are not changed. Neither are annotations, which Python does not evaluate, and
    ``zip(strict=True)``, whose arguments have equal lengths.
    """
    source = (ROOT / file).read_text()
    lines = source.splitlines()
    tree = ast.parse(source)
    unchanged: list[ast.AST] = []
    for node in ast.walk(tree):
        is_strict = isinstance(node, ast.keyword) and node.arg == "strict"
        if is_strict or isinstance(node, (ast.Raise, ast.JoinedStr)):
            unchanged.append(node)
        annotations = getattr(node, "annotation", None), getattr(node, "returns", None)
        unchanged += [annotation for annotation in annotations if annotation is not None]
    in_unchanged = {id(inner) for node in unchanged for inner in ast.walk(node)}
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for statement in [statement for function in functions for statement in function.body]:
        for node in ast.walk(statement):
            if id(node) in in_unchanged or getattr(node, "lineno", 0) != getattr(node, "end_lineno", -1):
                continue
            for start, end, text in _changes(node, source):
                line = lines[node.lineno - 1]
                yield Mutant(file, node.lineno, line, line[:start] + text + line[end:])


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


def tests_by_line() -> dict[tuple[str, int], set[str]]:
    """Return the tests that run each line, by file and line, from .coverage."""
    data = coverage.CoverageData(str(ROOT / ".coverage"))
    data.read()
    tests = {}
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            tests[file, line] = {context.partition("|")[0] for context in contexts if context}
    return tests


def seconds_by_test() -> dict[str, float]:
    """Return the seconds of each test, from junit.xml. A failed test has infinity."""
    seconds = {}
    for case in ElementTree.parse(ROOT / "junit.xml").iter("testcase"):
        parts = case.get("classname", "").split(".")
        classes = [part for part in parts if part[:1].isupper()]
        file = "/".join(part for part in parts if part not in classes) + ".py"
        name = "::".join((file, *classes, case.get("name", "")))
        has_failed = case.find("failure") is not None or case.find("error") is not None
        seconds[name] = math.inf if has_failed else float(case.get("time", 0))
    return seconds


def tests_for(mutant: Mutant, covering: set[str], seconds: dict[str, float]) -> list[str]:
    """Return the tests to run on a mutant, in order."""

    def time(test: str) -> float:
        return seconds.get(test, 9.0)

    folder = f"tests/{mutant.file.split('/')[1]}/"
    by_time = sorted((test for test in covering if time(test) < math.inf), key=time)
    chosen, slower, total = by_time[:QUICKEST], by_time[QUICKEST:], 0.0
    for test in sorted(slower, key=lambda test: not test.startswith(folder)):
        total += time(test)
        if total > SECONDS:
            break
        chosen.append(test)
    return chosen


def is_found(mutant: Mutant, tests: list[str]) -> bool:
    """Run tests on a copy of the package with the mutant; return whether one fails."""
    if not tests:
        return False
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "jaxmp", copy / "jaxmp", ignore=shutil.ignore_patterns("__pycache__"))
        for name in os.listdir(ROOT):
            if name not in ("jaxmp", ".git", "build", "runs"):
                (copy / name).symlink_to(ROOT / name)
        lines = (ROOT / mutant.file).read_text().splitlines()
        lines[mutant.line - 1] = mutant.after
        (copy / mutant.file).write_text("\n".join(lines) + "\n")
        # A fork has jax, flax and pytest imported. A new process would import them for longer than the tests run.
        process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(copy, tests))
        process.start()
        process.join(LIMIT)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        return process.exitcode != 0


def _run_tests(folder: Path, tests: list[str]) -> None:
    os.setsid()  # processes of the tests are killed with this one
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1), os.dup2(silent, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    import pytest

    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
    os._exit(code)  # `sys.exit` fails in the fork of a thread, and each mutant would count as found


def main() -> None:
    """Draw mutants, run the tests on them, and print which mutants the tests found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=FOLDERS, help="files and folders of the library to change")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write the result into survivors.txt")
    options = parser.parse_args()
    covering, seconds = tests_by_line(), seconds_by_test()
    for name in ("flax.linen", "flax.nnx", "jax", "optax", "pytest"):
        importlib.import_module(name)

    def run(mutant: Mutant) -> bool:
        is_dead = is_found(mutant, tests_for(mutant, covering.get((mutant.file, mutant.line), set()), seconds))
        print("found   " if is_dead else "survives", f"{mutant.file}:{mutant.line}", mutant.after.strip(), flush=True)
        return is_dead

    places = [ROOT / path for path in options.paths]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    mutants = sorted({mutant for file in files for mutant in sites(str(file.relative_to(ROOT)))})
    drawn = random.Random(options.seed).sample(mutants, min(options.count, len(mutants)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(drawn, pool.map(run, drawn), strict=True))
    summary = summarise(results, options.seed)
    print(summary)
    if options.write:
        write_survivors(summary, [mutant for mutant in drawn if not results[mutant]])


def summarise(results: dict[Mutant, bool], seed: int) -> str:
    """Return how many mutants were found, in all and in each folder."""
    all_by_folder: collections.Counter[str] = collections.Counter()
    found_by_folder: collections.Counter[str] = collections.Counter()
    for mutant, is_dead in results.items():
        folder = mutant.file.rpartition("/")[0]
        all_by_folder[folder] += 1
        found_by_folder[folder] += is_dead
    lines = [
        f"The tests found {sum(results.values())} of {len(results)} mutants (seed {seed}, {datetime.date.today()})."
    ]
    lines += [f"  {folder}: {found_by_folder[folder]} of {all_by_folder[folder]}" for folder in sorted(all_by_folder)]
    return "\n".join(lines)


def write_survivors(summary: str, survivors: list[Mutant]) -> None:
    """Write survivors.txt again, with the reasons that people wrote below earlier survivors."""
    reasons = {}
    for entry in SURVIVORS.read_text().strip().split("\n\n")[1:]:
        place, before, after, *reason = entry.splitlines()
        reasons[place.partition(":")[0], before, after] = reason
    entries = [summary]
    for mutant in sorted(survivors):
        change = (f"  {mutant.before.strip()}", f"  {mutant.after.strip()}")
        entries.append("\n".join((f"{mutant.file}:{mutant.line}", *change, *reasons.get((mutant.file, *change), ()))))
    SURVIVORS.write_text("\n\n".join(entries) + "\n")


if __name__ == "__main__":
    main()
