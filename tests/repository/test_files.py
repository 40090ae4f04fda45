"""Links work, versions agree, files name no machine, and public names have a docstring."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.once

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = ["jaxmp", *(f"jaxmp.{name}" for name in ("linen", "nnx", "inspect", "inspect.plots", "sharding"))]
MODULES += [f"jaxmp.{name}" for name in ("checkpoint", "losses", "base.hardware", "jmp")]


def files() -> list[Path]:
    """Return all files of the repository, new ones too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("the files were not checked out with git")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def anchors(page: Path) -> set[str]:
    """Return the anchors that a forge such as GitHub gives the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in shown}


def test_every_link_between_pages_leads_somewhere():
    for page in files():
        if page.suffix != ".md":
            continue
        for path, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            if path.startswith("http"):
                continue
            target = (page.parent / path).resolve() if path else page
            exists = target.exists() or (ROOT / path).exists()  # the site has a copy of the notebooks
            assert exists, f"{page}: {path}"
            is_checked_by_mkdocs = page.is_relative_to(ROOT / "docs") and target.is_relative_to(ROOT / "docs")
            assert not anchor or is_checked_by_mkdocs or anchor in anchors(target), f"{page}: {path}#{anchor}"


def test_no_file_names_a_path_of_a_machine():
    here = [place for place in (str(ROOT), str(Path.home()), sys.prefix) if len(place) > 5]
    for path in files():
        text = path.read_bytes()
        assert not [place for place in here if place.encode() in text], path
        if path.suffix == ".ipynb":
            assert len(text) < 300_000, path
            assert not re.search(rb"site-packages|[\w-]+/[\w-]+\.py:\d+", text), path  # warnings and tracebacks


def test_the_versions_agree():
    version = importlib.import_module("jaxmp").__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search("^## (.+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest.split()[0].rstrip(",") == version
    page, pins = (ROOT / "docs/concepts/limits.md").read_text(), (ROOT / "constraints.txt").read_text()
    minors = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert f"| Python | {', '.join(minors[:-1])} or {minors[-1]} |" in page
    assert PROJECT["requires-python"] == f">={minors[0]},<3.{int(minors[-1].partition('.')[2]) + 1}"
    required = dict(line.split(">=") for line in PROJECT["dependencies"])
    for name in ("JAX", "Flax", "optax"):
        tested = re.findall(rf"^{name.lower()}==(\S+)", pins, re.MULTILINE)
        assert f"| {name} | {required[name.lower()]} or later | {' and '.join(tested)} |" in page


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    for public in module.__all__:
        assert inspect.getdoc(getattr(module, public)), public
