"""Time `make test` in fresh clones, and write the times into tests/README.md.

    python tests/tools/time_suite.py --runs 3

Each clone uses the environment of this checkout and has no compiled programs. Leave the machine idle meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import resource
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path

from experiments.report.marked_text import write_marked

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "tests" / "README.md"


def timed_run() -> tuple[str, float, float]:
    """Return pytest's last line, the elapsed seconds, and the CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "jaxmp"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        (clone / ".venv").symlink_to(ROOT / ".venv")
        environment = os.environ | {"PYTHONPATH": str(clone)}
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        # The flag -o takes the environment as it is. Otherwise make would install the clone in it.
        done = subprocess.run(
            ["make", "-o", ".venv/installed", "test"], cwd=clone, env=environment, capture_output=True, text=True
        )
        seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    last = next(line for line in reversed(done.stdout.splitlines()) if " passed" in line)
    return re.sub(r" in .*", "", last.strip("= ")), seconds, cpu


def main() -> None:
    """Run the suite several times, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    rows = []
    for number in range(1, runs + 1):
        result, seconds, cpu = timed_run()
        rows.append(f"| {number} | {result} | {seconds // 60:.0f}:{seconds % 60:02.0f} | {cpu:.0f} |\n")
        print(rows[-1], end="", flush=True)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax", "optax", "pytest"))
    table = (
        f"Each run is in a fresh clone without compiled programs, on {os.cpu_count()} cores, "
        "without the time to install the environment "
        f"(Python {platform.python_version()}, {versions}, {datetime.date.today()}):\n\n"
        "| run | result | min:s | CPU s |\n|---:|---|---:|---:|\n" + "".join(rows)
    )
    write_marked(README, "times", "python tests/tools/time_suite.py", table)


if __name__ == "__main__":
    main()
