"""Check that a tag can be released, and print the notes of its release page: ``release.py v0.1.0``.

The notes are the version's entry in CHANGELOG.md. Nothing needs to be installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version_in(file: str, pattern: str) -> str:
    """Return the version that a file states."""
    match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    return match[1] if match else ""


def entry(version: str) -> tuple[str, str]:
    """Return the heading and the text of a version in CHANGELOG.md."""
    for part in re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        if re.match(rf"{re.escape(version)}(?![\w.])", heading):
            return heading, text.strip()
    return "", ""


def problems(tag: str) -> list[str]:
    """Return what must be changed before the release."""
    errors = []
    version = version_in("jaxmp/__init__.py", r'^__version__ = "(.+)"$')
    if tag != f"v{version}":
        errors.append(f"the tag must be v{version}, the version in jaxmp/__init__.py, got {tag}")
    cited = version_in("CITATION.cff", r"^version: (.+)$")
    if cited != version:
        errors.append(f"CITATION.cff has version {cited}, but jaxmp/__init__.py has {version}")
    heading, _ = entry(version)
    if not re.search(r"\(\d{4}-\d\d-\d\d\)$", heading):
        errors.append(f'CHANGELOG.md needs a heading with a date, such as "## {version} (2027-01-31)", got "{heading}"')
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    if "/OWNER/" in address:
        errors.append(f"replace OWNER by your account in pyproject.toml: Repository = {address}")
    return errors


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: release.py TAG")
    tag = sys.argv[1]
    if errors := problems(tag):
        sys.exit("\n".join(f"error: {problem}" for problem in errors))
    print(entry(tag.removeprefix("v"))[1])
