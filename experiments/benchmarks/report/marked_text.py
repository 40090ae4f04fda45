"""Text in a page that a command writes between two markers.

The markers are HTML comments, in lines of their own::

    <!-- NAME: written by `COMMAND` -->
    …
    <!-- /NAME -->
"""

from __future__ import annotations

import re
from pathlib import Path


def read_marked(page: Path, name: str, command: str) -> str:
    """Return the text between the markers of a page.

    Raises:
      SystemExit: the page does not have the markers.
    """
    return _match(page, name, command)["text"]


def write_marked(page: Path, name: str, command: str, text: str) -> None:
    """Replace the text between the markers of a page.

    Raises:
      SystemExit: the page does not have the markers.
    """
    match = _match(page, name, command)
    page_text = match.string
    page.write_text(f"{page_text[: match.start('text')]}{text.strip()}{page_text[match.end('text') :]}")


def _match(page: Path, name: str, command: str) -> re.Match[str]:
    begin, end = f"<!-- {name}: written by `{command}` -->\n\n", f"\n\n<!-- /{name} -->"
    match = re.search(f"{re.escape(begin)}(?P<text>.*?){re.escape(end)}", page.read_text(), re.DOTALL)
    if match is None:
        raise SystemExit(f"error: {page} must have {begin.strip()!r} and {end.strip()!r}, each between empty lines")
    return match
