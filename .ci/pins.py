"""Merges ``pip freeze`` of the oldest and the newest environment into constraints.txt: ``pins.py OLDEST NEWEST``.

Where the two differ, the line carries a marker. Lines that pin nothing (comments, addresses) are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path


def pins(file: str) -> dict[str, str]:
    """Name (lower case) to ``name==version``."""
    lines = Path(file).read_text().splitlines()
    return {line.partition("==")[0].lower(): line for line in lines if "==" in line and not line.startswith("#")}


oldest, newest = pins(sys.argv[1]), pins(sys.argv[2])
print("# What jaxmp is developed and tested with, on the oldest supported Python and on newer ones (make pins).")
for name in sorted(oldest | newest):
    if oldest.get(name) == newest.get(name):
        print(oldest[name])
        continue
    if name in oldest:
        print(f'{oldest[name]} ; python_version < "3.12"')
    if name in newest:
        print(f'{newest[name]} ; python_version >= "3.12"')
