"""Rank guides before the reference and the notebooks in the search of the site, as a hook of MkDocs."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Halve the score of a page that is not a guide."""
    if page.file.src_uri.startswith(("reference/", "notebooks/")):
        page.meta["search"] = {"boost": 0.5}
    return markdown
