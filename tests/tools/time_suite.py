"""Time the tests in fresh clones, and write the times into tests/README.md.

    python tests/tools/time_suite.py --runs 3
    python tests/tools/time_suite.py --check

Each clone uses the environments of this checkout and has no compiled programs. Leave the machine idle meanwhile.
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
FAILED = "failed"


def checks() -> list[str]:
    """Return the targets that `make check` runs."""
    line = re.search(r"^check: (.*?) ##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line, "the Makefile has no target `check`"
    return line[1].split()


@contextlib.contextmanager
def fresh_clone(*environments: str) -> Iterator[Path]:
    """Make a clone that uses the named environments of this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "jaxmp"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        for name in environments:
            if not (ROOT / name / "installed").exists():
                raise SystemExit(f"error: {name} is not installed; run make {name}/installed first")
            (clone / name).symlink_to(ROOT / name)
        for name in ("pyproject.toml", "constraints.txt", ".ci/setup.sh"):
            os.utime(clone / name, (0, 0))  # older than the environments, so make does not install the clone in them
        yield clone


def timed(target: str, clone: Path) -> tuple[str, float, float]:
    """Run a target of make; return pytest's last lines, and elapsed and CPU seconds."""
    environment = os.environ | {"PYTHONPATH": str(clone)}
    environment.pop("PYTHON", None)  # with another version, make would install the environment again
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(["make", target], cwd=clone, env=environment, capture_output=True, text=True)
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode:
        print(f"make {target} failed:\n{done.stdout}\n{done.stderr}", flush=True)
        return FAILED, seconds, cpu
    summaries = [line.strip("= ") for line in done.stdout.splitlines() if re.search(r"\d passed", line)]
    results = [re.sub(r" in .*", "", summary) for summary in summaries]
    return "; ".join(results) or "passed", seconds, cpu


def processor() -> str:
    """Return the name of the CPU, or of its architecture if the name is unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return name[1] if name else platform.processor() or platform.machine()


def row(name: str, result: str, seconds: float, cpu: float) -> str:
    """Return a row of the table, and print it."""
    whole_seconds = round(seconds)
    text = f"| {name} | {result} | {whole_seconds // 60}:{whole_seconds % 60:02} | {cpu:.0f} |\n"
    print(text, end="", flush=True)
    return text


def main() -> None:
    """Time `make test` several times, or `make check` once, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="how often to run make test")
    parser.add_argument("--check", action="store_true", help="time the targets of make check instead")
    options = parser.parse_args()
    rows = []
    if options.check:
        marker, first, introduction = "times of check", "target", "The targets of `make check`, in one fresh clone"
        seconds_of_all, cpu_of_all = 0.0, 0.0
        with fresh_clone(".venv", ".venv-newest") as clone:
            for target in checks():
                result, seconds, cpu = timed(target, clone)
                rows.append(row(f"`make {target}`", result, seconds, cpu))
                seconds_of_all, cpu_of_all = seconds_of_all + seconds, cpu_of_all + cpu
        rows.append(row("all", "", seconds_of_all, cpu_of_all))
    else:
        marker, first, introduction = "times", "run", "Each run is in a fresh clone without compiled programs"
        for number in range(1, options.runs + 1):
            with fresh_clone(".venv") as clone:
                rows.append(row(str(number), *timed("test", clone)))
    if any(FAILED in text for text in rows):
        raise SystemExit("error: a target failed, so the table is not written")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax", "optax", "pytest"))
    table = (
        f"{introduction}, on {os.cpu_count()} cores ({processor()}), without the time to install the environment "
        f"(Python {platform.python_version()}, {versions}, {datetime.date.today()}):\n\n"
        f"| {first} | result | min:s | CPU s |\n|---:|---|---:|---:|\n" + "".join(rows)
    )
    write_marked(README, marker, "python tests/tools/time_suite.py" + " --check" * options.check, table)


if __name__ == "__main__":
    main()
