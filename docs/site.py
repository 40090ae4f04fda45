"""Build hooks of the site: addresses, the reference, the notebooks, links out of docs/.

`make docs` builds the site with mkdocs, which calls these functions by their names.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import griffe
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

#: The title, first sentence and names of each page of the reference, in the order of the navigation. If the names are
#: empty, the page has all names of the module in its file name.
PAGES: dict[str, tuple[str, str, str]] = {
    "models": (
        "Models and policies",
        "A policy sets the dtypes of a model.",
        "linen.apply_policy nnx.apply_policy get_policy Policy PolicyMap Float8",
    ),
    "train_step": (
        "Train step",
        "A compiled step with its state, or the parts for a step of your own.",
        "make_train_step nnx.make_train_step make_eval_step TrainState nnx.Optimizer value_and_grad nnx.value_and_grad "
        "low_precision raise_if_stuck NonFiniteTrainingError",
    ),
    "loss_scale": (
        "Loss scale",
        "Loss scaling wraps an optax optimizer. See [loss scaling](../concepts/loss_scaling.md).",
        "loss_scaling DynamicLossScale StaticLossScale HeadroomLossScale NoOpLossScale LossScale get_loss_scale "
        "keep_if_skipped wrap_opt_state LossScalingState",
    ),
    "autocast": (
        "Autocast",
        "Autocast sets the dtypes of any JAX function. See [how autocast decides](../autocast.md).",
        "autocast linen.autocast nnx.autocast cast_plan precision autocast_dtype CastPlan UnknownOperationError "
        "UnmatchedOverrideError",
    ),
    "jaxmp_inspect": ("Inspect", "Tools that read programs and runs. See [the tools](../tools/index.md).", ""),
    "jaxmp_inspect_plots": ("Plots", "Pictures of the tools' results, with matplotlib.", ""),
    "jaxmp_sharding": ("Sharding", "Params over many devices. See [sharding](../sharding.md).", ""),
    "jaxmp_checkpoint": (
        "Checkpoints",
        "Save and restore states, also under another policy. See [saving](../saving.md).",
        "",
    ),
    "jaxmp_losses": ("Losses", "Cross-entropies for half precision.", ""),
    "jaxmp_hardware": ("Hardware", "The dtypes that a device computes fast.", ""),
    "jaxmp_jmp": ("jmp", "The names of jmp, for programs that use it.", ""),
}

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")

_in_markdown = runpy.run_path(str(ROOT / "docs" / "docstrings.py"))["in_markdown"]

#: The file of a module that `jaxmp` shows under another name.
FILES = {"jaxmp.hardware": "jaxmp.base.hardware"}


def names_of(page: str) -> list[str]:
    """Return the public names of a page of the reference, as ``jaxmp.…``."""
    if listed := PAGES[page][2]:
        return [f"jaxmp.{name}" for name in listed.split()]
    module = page.replace("_", ".")
    loaded = importlib.import_module(FILES.get(module, module))
    public = [name for name in loaded.__all__ if not inspect.ismodule(getattr(loaded, name))]
    functions_first = sorted(public, key=lambda name: (name[0].isupper(), name))
    return [f"{module}.{name}" for name in functions_first]


def path_of(name: str) -> str:
    """Return the path of a public name in the package, which is its anchor."""
    module, short = name.rsplit(".", 1)
    return f"{FILES.get(module, module)}.{short}"


def _reference_page(page: str) -> str:
    """Return the Markdown of a page of the reference."""
    title, sentence, names_listed = PAGES[page]
    lines = [f"# {title}", "", sentence, ""]
    for name in names_of(page):
        label = name.removeprefix("jaxmp.") if names_listed else name.rsplit(".", 1)[1]
        lines += [f"::: {path_of(name)}", "    options:", f"      heading: {name}", f"      toc_label: {label}", ""]
    return "\n".join(lines)


def _reference_index() -> str:
    """Return the Markdown of the page that lists all public names."""
    package = griffe.load("jaxmp", search_paths=[ROOT])
    lines = ["# Reference", "", "All public names. The names that most programs need come first.", ""]
    for page, (title, _, _) in PAGES.items():
        lines += [f"## [{title}]({page}.md)", "", "| name | purpose |", "|---|---|"]
        for name in names_of(page):
            docstring = package[path_of(name).removeprefix("jaxmp.")].docstring
            lines.append(f"| [`{name}`][{path_of(name)}] | {_in_markdown(docstring.value.splitlines()[0])} |")
        lines.append("")
    return "\n".join(lines)


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
    """Add the reference's pages, the notebooks, and the pictures that pages show."""
    files.append(File.generated(config, "reference/index.md", content=_reference_index()))
    for page in PAGES:
        files.append(File.generated(config, f"reference/{page}.md", content=_reference_page(page)))
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
