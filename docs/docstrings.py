"""Turn jaxmp's docstrings into Markdown for griffe: roles and doctests become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    """Rewrites each docstring of the package before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object; griffe calls this."""
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value)


def in_markdown(docstring: str) -> str:
    """Return a docstring without roles, its doctests in fenced blocks."""
    paragraphs = _ROLE.sub(r"`\1`", docstring).split("\n\n")
    return "\n\n".join(_fenced(paragraph) for paragraph in paragraphs)


def _fenced(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if not lines or not lines[0].lstrip().startswith(">>>"):
        return paragraph
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return "\n".join([f"{indent}```pycon", *lines, f"{indent}```"])
