"""Install the missing packages of build/wheelhouse into .cache/wheels, and print that folder.

No network is needed. Packages that are already installed for this Python (such as JAX and torch) do not change.
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
    """Return the wheels of packages that are not installed."""
    missing = []
    for wheel in wheels:
        try:
            metadata.version(wheel.name.partition("-")[0])
        except metadata.PackageNotFoundError:
            missing.append(wheel)
    return missing


def main() -> None:
    """Install the missing wheels, unless an earlier call did, and print the folder for PYTHONPATH."""
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
                f"error: {HOUSE} could not be installed (pip ended with {code}): its wheels may be for another Python "
                f"than {version}; on a machine with a network, run make wheelhouse WHEEL_PYTHON={version}"
            )
        installed.write_text(names)
    print(TARGET)


if __name__ == "__main__":
    main()
