"""Build hooks of the site: addresses, the notebooks, links out of docs/.

`make docs` builds the site with mkdocs, which calls these functions by their names.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")


@event_priority(100)  # before mike, which appends the version to the site's address
def on_config(config: Any) -> Any:
    """Take the addresses of the repository and of the site from pyproject.toml.

    `repo_url` is not set, because the theme would then load the repository's stars from another site.
    """
    addresses = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    if "/OWNER/" not in addresses["Repository"]:
        link = {"name": "Repository", "icon": "fontawesome/brands/git-alt", "link": addresses["Repository"]}
        config.extra["social"] = [link]
    config.site_url = addresses.get("Documentation")
    return config


@event_priority(100)  # before mkdocs-jupyter, which turns notebooks into pages
def on_files(files: Files, config: Any) -> Files:
    """Add the notebooks, and the pictures that pages show."""
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        name = f"notebooks/{notebook.name}"
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for picture in _pictures_outside(files):
        files.append(File.generated(config, f"pictures/{picture}", abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to pictures outside of docs/ at the site's own, and name other files there."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        is_picture, text, target, _ = match.groups()
        outside = _outside(folder, target)
        if outside is None:
            return match[0]
        if outside.startswith("notebooks/"):
            return f"[{text}]({posixpath.relpath(outside, folder or '.')})"
        if is_picture:
            return f"![{text}]({posixpath.relpath('pictures/' + outside, folder or '.')})"
        return f"{text} (`{outside}`)"

    return _LINK.sub(replace, markdown)


def _outside(folder: str, target: str) -> str | None:
    """Return the path from the root of the repository if a link of a page leaves docs/."""
    path = posixpath.normpath(posixpath.join("docs", folder, target))
    return None if path.startswith("docs/") else path


def _pictures_outside(files: Files) -> set[str]:
    pictures = set()
    for file in files.documentation_pages():
        for is_picture, _, target, _ in _LINK.findall(file.content_string):
            outside = _outside(posixpath.dirname(file.src_uri), target)
            if is_picture and outside is not None:
                pictures.add(outside)
    return pictures
