"""Merge the pins of the oldest and the newest environment into one list: ``pins.py OLDEST NEWEST``.

The arguments are files written by ``pip freeze``, and the list is printed. A pin that differs between the environments
gets a marker with the Python version. Lines without a version (comments, addresses) are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path


def pins(file: str) -> dict[str, str]:
    """Return the line ``name==version`` of each package, by its name in lower case."""
    lines = Path(file).read_text().splitlines()
    return {line.partition("==")[0].lower(): line for line in lines if "==" in line and not line.startswith("#")}


oldest, newest = pins(sys.argv[1]), pins(sys.argv[2])
print("# The versions with which jaxmp is tested, on the oldest supported Python and on newer ones (make pins).")
for name in sorted(oldest | newest):
    if oldest.get(name) == newest.get(name):
        print(oldest[name])
        continue
    if name in oldest:
        print(f'{oldest[name]} ; python_version < "3.12"')
    if name in newest:
        print(f'{newest[name]} ; python_version >= "3.12"')
