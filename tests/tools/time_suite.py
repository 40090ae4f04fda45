"""Time the tests in fresh clones, and write the times into tests/README.md.

    python tests/tools/time_suite.py --runs 3
    python tests/tools/time_suite.py --check

Each clone uses the environment of this checkout and has no compiled programs. Leave the machine idle meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from experiments.report.marked_text import write_marked

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "tests" / "README.md"


CHECKS = ("lint", "types", "test", "slow", "newest")
"""The targets that `make check` runs."""


@contextlib.contextmanager
def fresh_clone() -> Iterator[Path]:
    """Make a clone that uses the environments of this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "jaxmp"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        for environment in (".venv", ".venv-newest"):
            (clone / environment).symlink_to(ROOT / environment)
        for name in ("pyproject.toml", "constraints.txt", ".ci/setup.sh"):
            os.utime(clone / name, (0, 0))  # older than the environments, so make does not install the clone in them
        yield clone


def timed(target: str, clone: Path) -> tuple[str, float, float]:
    """Run a target of make; return the last lines of pytest, the elapsed seconds and the CPU seconds."""
    environment = os.environ | {"PYTHONPATH": str(clone)}
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(["make", target], cwd=clone, env=environment, capture_output=True, text=True)
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode:
        raise SystemExit(f"make {target} failed:\n{done.stdout}\n{done.stderr}")
    results = [re.sub(r" in .*", "", line.strip("= ")) for line in done.stdout.splitlines() if " passed" in line]
    return "; ".join(results) or "passed", seconds, cpu


def row(name: str, result: str, seconds: float, cpu: float) -> str:
    """Return a row of the table, and print it."""
    text = f"| {name} | {result} | {seconds // 60:.0f}:{seconds % 60:02.0f} | {cpu:.0f} |\n"
    print(text, end="", flush=True)
    return text


def main() -> None:
    """Time `make test` several times, or all targets of `make check` once, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="how often to run make test")
    parser.add_argument("--check", action="store_true", help="time the targets of make check instead")
    options = parser.parse_args()
    rows = []
    if options.check:
        marker, first, introduction = "times of check", "target", "The targets of `make check`, in one fresh clone"
        with fresh_clone() as clone:
            figures = [timed(target, clone) for target in CHECKS]
        rows = [row(f"`make {target}`", *figure) for target, figure in zip(CHECKS, figures, strict=True)]
        rows.append(row("all", "", sum(figure[1] for figure in figures), sum(figure[2] for figure in figures)))
    else:
        marker, first, introduction = "times", "run", "Each run is in a fresh clone without compiled programs"
        for number in range(1, options.runs + 1):
            with fresh_clone() as clone:
                rows.append(row(str(number), *timed("test", clone)))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax", "optax", "pytest"))
    table = (
        f"{introduction}, on {os.cpu_count()} cores, without the time to install the environment "
        f"(Python {platform.python_version()}, {versions}, {datetime.date.today()}):\n\n"
        f"| {first} | result | min:s | CPU s |\n|---:|---|---:|---:|\n" + "".join(rows)
    )
    write_marked(README, marker, "python tests/tools/time_suite.py" + " --check" * options.check, table)


if __name__ == "__main__":
    main()
