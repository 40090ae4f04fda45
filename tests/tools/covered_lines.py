"""Record how much of the library the tests run, in tests/README.md.

    .venv/bin/python -m pip install pytest-cov
    .venv/bin/python -m pytest --cov=jaxmp --cov-branch
    .venv/bin/python tests/tools/covered_lines.py .coverage --record now

The second command writes the file .coverage, which the third command reads. Processes that the
tests start are not measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import tempfile
from pathlib import Path

import coverage

from experiments.report.marked_text import write_marked

README = Path(__file__).parents[1] / "README.md"


def totals(data: Path) -> dict[str, int]:
    """Return the totals of the report that coverage writes as JSON."""
    measured = coverage.Coverage(data_file=data)
    measured.load()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "coverage.json"
        measured.json_report(outfile=str(report), ignore_errors=True)  # the data names an HTML template too
        coverage_totals: dict[str, int] = json.loads(report.read_text())["totals"]
    return coverage_totals


def main() -> None:
    """Read the coverage data and write the sentence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the coverage data, at the root of the checkout that was measured")
    parser.add_argument(
        "--record", choices=("now", "earlier"), required=True, help="whether the tests are today's or earlier ones"
    )
    options = parser.parse_args()
    root = options.data.resolve().parent
    coverage_totals = totals(options.data)
    lines, branches = coverage_totals["num_statements"], coverage_totals["num_branches"]
    commit = subprocess.check_output(["git", "-C", root, "rev-parse", "--short", "HEAD"], text=True).strip()
    text = (
        f"At commit {commit}, the tests run {coverage_totals['covered_lines'] / lines:.1%} of the {lines:,} lines and "
        f"{coverage_totals['covered_branches'] / branches:.1%} of the {branches:,} branches\nof the library "
        f"(measured on {datetime.date.today()})."
    )
    name = "coverage" if options.record == "now" else "earlier coverage"
    write_marked(README, name, f"python tests/tools/covered_lines.py --record {options.record}", text)
    print(text)


if __name__ == "__main__":
    main()
