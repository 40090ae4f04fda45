"""Installs from build/wheelhouse what this Python lacks into .cache/wheels, without a network, and prints that folder.

What the machine has stays as it is: its JAX, its torch and what was built for them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOUSE, TARGET = ROOT / "build" / "wheelhouse", ROOT / ".cache" / "wheels"


def lacking(wheels: list[Path]) -> list[Path]:
    """The wheels of packages that are not installed."""
    found = []
    for wheel in wheels:
        try:
            metadata.version(wheel.name.partition("-")[0])
        except metadata.PackageNotFoundError:
            found.append(wheel)
    return found


def main() -> None:
    """Installs them, unless they were, and prints the folder for PYTHONPATH."""
    wheels = lacking(sorted(HOUSE.glob("*.whl")))
    names, installed = "\n".join(wheel.name for wheel in wheels), TARGET / "installed"
    if not installed.exists() or installed.read_text() != names:
        shutil.rmtree(TARGET, ignore_errors=True)
        TARGET.mkdir(parents=True)
        flags = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", "--target", str(TARGET)]
        command = [sys.executable, "-m", "pip", "install", *flags, *map(str, wheels)]
        if wheels and (code := subprocess.run(command, stdout=sys.stderr).returncode):
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            sys.exit(
                f"error: {HOUSE} could not be installed (pip ended with {code}): its wheels are for one Python, and "
                f"this is {version}; make it anew where there is a network: make wheelhouse WHEEL_PYTHON={version}"
            )
        installed.write_text(names)
    print(TARGET)


if __name__ == "__main__":
    main()
