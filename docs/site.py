"""Build hooks of the site: the reference, the notebooks, the report of real runs, links out of docs/.

`make docs` builds the site with mkdocs, which calls these functions by their names.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

from jaxmp.inspect import write_report

ROOT = Path(__file__).resolve().parents[1]

#: The pages of the reference, with a sentence each.
PAGES = {
    "jaxmp": "The names of every day: policies, loss scaling, train steps, autocast.",
    "jaxmp.linen": "Policies and autocast for Linen modules.",
    "jaxmp.nnx": "Policies, the optimizer and the train step for NNX models.",
    "jaxmp.checkpoint": "Save and restore states, also under another policy. See [saving](../saving.md).",
    "jaxmp.inspect": "Tools that read programs and runs. See [the tools](../tools/index.md).",
    "jaxmp.inspect.plots": "Pictures of the tools' results, with matplotlib.",
    "jaxmp.sharding": "Params over many devices. See [sharding](../sharding.md).",
    "jaxmp.losses": "Cross-entropies for half precision.",
    "jaxmp.hardware": "What a device computes fast.",
    "jaxmp.jmp": "The names of jmp, for programs that use it.",
}

#: The folder of runs that pages link to, and the page of the site that the build makes of them.
RUNS, REPORT = "experiments/results/report", "tools/example_report.html"

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")


#: The file of a module that `jaxmp` shows under another name.
FILES = {"jaxmp.hardware": "jaxmp.base.hardware"}


def public_names(module: str) -> list[str]:
    """Return the functions and classes of ``module``'s ``__all__``."""
    loaded = importlib.import_module(FILES.get(module, module))
    return [name for name in loaded.__all__ if not inspect.ismodule(getattr(loaded, name))]


@event_priority(100)  # before mkdocs-jupyter, which turns notebooks into pages
def on_files(files: Files, config: Any) -> Files:
    """Add the reference's pages, the notebooks, the report of real runs, and the pictures that pages show."""
    for module, sentence in PAGES.items():
        lines = [f"# {module}", "", sentence, ""]
        for name in public_names(module):
            lines += [f"::: {FILES.get(module, module)}.{name}", "    options:", f"      heading: {module}.{name}", ""]
        page = f"reference/{module.replace('.', '_')}.md"
        files.append(File.generated(config, page, content="\n".join(lines)))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        name = f"notebooks/{notebook.name}"
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    with tempfile.TemporaryDirectory() as folder:
        half, *others = (ROOT / RUNS / name for name in ("float16", "float32", "bfloat16"))
        page_of_runs = write_report(half, others, Path(folder) / "report.html").read_text()
    files.append(File.generated(config, REPORT, content=page_of_runs))
    for picture in _pictures_outside(files):
        files.append(File.generated(config, f"pictures/{picture}", abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to pictures and runs outside of docs/ at the site's own, and name other files there."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        is_picture, text, target, _ = match.groups()
        outside = _outside(folder, target)
        if outside is None:
            return match[0]
        if outside == RUNS:
            return f"[{text}]({posixpath.relpath(REPORT, folder or '.')})"
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
