"""Run the Python blocks of a Markdown page, and compare what they print with the page.

A block in a tab (`=== "NNX"`) sees the names of all tabs of that title. The other blocks see each other's
names. A block ```` ```text title="prints" ```` is what the Python block before it prints; `...` stands for anything.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = {"equinox": "equinox", "haiku": "haiku", "compile-only": "jax_cuda13_plugin"}

_TAB = re.compile(r'=== "(.*)"')
_FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
_NEEDS = re.compile(r"# needs: (\S+)")
_LIKE_DOCTEST = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    tab: str  # its title, or ""
    line: int  # of the first line of code in the page
    code: str
    prints: str | None
    needs: str | None  # a package to import first


def blocks(page: Path) -> list[Block]:
    """Return the Python blocks of a page, in order."""
    text = page.read_text()
    found: list[Block] = []
    for fence in _FENCE.finditer(text):
        indent, language, body = fence.groups()
        code = textwrap.dedent(body)
        if language == "python":
            needs = _NEEDS.search(code)
            line = text[: fence.start(3)].count("\n") + 1
            found.append(
                Block(_tab(text, fence.start(), indent), line, code, None, PACKAGES[needs[1]] if needs else None)
            )
        elif language == 'text title="prints"':
            found[-1] = found[-1]._replace(prints=code)
    return found


def _tab(text: str, position: int, indent: str) -> str:
    """Return the title of the tab that a fence lies in."""
    if not indent:
        return ""
    return _TAB.findall(text[:position])[-1]


def run(page: Path, tab: str) -> None:
    """Run the blocks of one tab, or those outside of tabs, in order.

    Raises:
      AssertionError: a block prints something else than the page says.
    """
    scope: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.tab != tab:
            continue
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, scope)
        if block.prints is not None:
            got = printed.getvalue()
            assert doctest.OutputChecker().check_output(block.prints, got, _LIKE_DOCTEST), f"{page}:{block.line}\n{got}"
