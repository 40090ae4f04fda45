"""The checksums of a checkpoint's files.

``sha256sum --check`` can read them. The file begins with a comment that has the checksum of the lines below. So damage
in this file is not mistaken for damage in the files that it lists.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FILE = "checksums.sha256"
ITEMS = ("state", "about")
"""The folders of a checkpoint."""


def write(folder: Path) -> None:
    """Write the checksums of the files in a checkpoint's folder."""
    lines = "".join(f"{checksum}  {name}\n" for name, checksum in _checksums_of(folder).items())
    (folder / FILE).write_text(_first_line(lines) + lines)


def find_damage(folder: Path) -> str | None:
    """Return a sentence on the first damaged file of a checkpoint.

    The result is None if no file is damaged.
    """
    try:
        text, end, lines = (folder / FILE).read_text(errors="replace").partition("\n")
        checksums = _checksums_of(folder)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return str(error)
    if text + end != _first_line(lines):
        return f"{FILE} was changed after it was written, so the other files cannot be checked"
    expected = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines.splitlines())}
    for name in sorted(expected):  # further files, for example of a file manager, are ignored
        if name not in checksums:
            return f"{name} is missing"
        if expected[name] != checksums[name]:
            return f"{name} was changed after it was written"
    return None


def _first_line(lines: str) -> str:
    """Return the comment before the lines, which ``sha256sum --check`` ignores."""
    return f"# {hashlib.sha256(lines.encode()).hexdigest()}  the lines below\n"


def _checksums_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a checkpoint's items, by path."""
    checksums = {}
    for path in sorted(path for item in ITEMS for path in (folder / item).rglob("*") if path.is_file()):
        with path.open("rb") as file:
            checksums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return checksums
