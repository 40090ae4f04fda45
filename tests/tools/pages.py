"""Run the Python blocks of a Markdown page, and compare their output with it.

All blocks in tabs with the same title (`=== "NNX"`) share their variables. All blocks outside of tabs share theirs. A
block ```` ```text title="prints" ```` has the output of the Python block before it. In it, `...` stands for any text.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = {
    "equinox": "equinox",
    "haiku": "haiku",
    "huggingface_hub": "huggingface_hub",
    "qwix": "qwix",
    "compile-only": "jax_cuda13_plugin",
}

_TAB = re.compile(r'=== "(.*)"')
_FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
_NEEDS = re.compile(r"# needs: (\S+)")
_LIKE_DOCTEST = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    tab: str  # the title of the tab, or ""
    line: int  # the number of the first line of code in the page
    code: str
    prints: str | None
    needs: str | None  # a package to import first


def blocks(page: Path) -> list[Block]:
    """Return the Python blocks of a page, in order."""
    text = page.read_text()
    python_blocks: list[Block] = []
    for fence in _FENCE.finditer(text):
        indent, language, body = fence.groups()
        code = textwrap.dedent(body)
        if language == "python":
            needs = _NEEDS.search(code)
            line = text[: fence.start(3)].count("\n") + 1
            python_blocks.append(
                Block(_tab(text, fence.start(), indent), line, code, None, PACKAGES[needs[1]] if needs else None)
            )
        elif language == 'text title="prints"':
            python_blocks[-1] = python_blocks[-1]._replace(prints=code)
    return python_blocks


def _tab(text: str, position: int, indent: str) -> str:
    """Return the title of the tab around a fence, or an empty text."""
    if not indent:
        return ""
    return _TAB.findall(text[:position])[-1]


def run(page: Path, tab: str) -> None:
    """Run the blocks in the tabs with one title.

    If ``tab`` is empty, run the blocks outside of tabs.

    Raises:
      AssertionError: a block does not print what the page shows.
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
