"""Record how much of the library the tests run, in tests/README.md.

    python -m pytest -m "not slow" --cov=jaxmp --cov-branch
    python tests/tools/covered_lines.py .coverage --record now

The first command needs pytest-cov. It writes the file .coverage, which the second command reads. Processes that the
tests start are not measured.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
from pathlib import Path

import coverage

from experiments.report.marked_text import write_marked

README = Path(__file__).parents[1] / "README.md"


def shares(data: Path, root: Path) -> tuple[int, int, int, int]:
    """Return the number of lines that ran, of all lines, of branches that ran, and of all branches."""
    measured = coverage.Coverage(data_file=data, branch=True, include=str(root / "jaxmp" / "*"))
    measured.load()
    lines_run = lines = branches_run = branches = 0
    for file in measured.get_data().measured_files():
        numbers = measured._analyze(file).numbers
        lines_run += numbers.n_executed
        lines += numbers.n_statements
        branches_run += numbers.n_executed_branches
        branches += numbers.n_branches
    return lines_run, lines, branches_run, branches


def main() -> None:
    """Read the coverage data and write the sentence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the coverage data, at the root of the checkout that was measured")
    parser.add_argument(
        "--record", choices=("now", "earlier"), required=True, help="whether the tests are earlier ones"
    )
    options = parser.parse_args()
    root = options.data.resolve().parent
    lines_run, lines, branches_run, branches = shares(options.data, root)
    commit = subprocess.check_output(["git", "-C", root, "rev-parse", "--short", "HEAD"], text=True).strip()
    text = (
        f"At commit {commit}, the tests run {lines_run / lines:.1%} of the {lines:,} lines and "
        f"{branches_run / branches:.1%} of the {branches:,} branches\nof the library "
        f"(measured on {datetime.date.today()})."
    )
    name = "coverage" if options.record == "now" else "earlier coverage"
    write_marked(README, name, f"python tests/tools/covered_lines.py --record {options.record}", text)
    print(text)


if __name__ == "__main__":
    main()
