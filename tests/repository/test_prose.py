"""Pages and notebooks stay short, their links work, and their code fits into its column."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pages import blocks
from places import ROOT

import jaxmp

DOCS, NOTEBOOKS = ROOT / "docs", sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_the_first_pages_stay_short():
    for name, most in {"README.md": 6144, "CONTRIBUTING.md": 4000}.items():
        assert (ROOT / name).stat().st_size <= most, f"shorten {name}, or move a part of it to docs/"


def test_every_link_between_pages_leads_somewhere():
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("jaxmp/**/*.md"),
        *ROOT.glob("tests/*.md"),
        *ROOT.glob("experiments/*.md"),
        *ROOT.glob("experiments/benchmarks/*.md"),
    ]
    for page in pages:
        for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            exists = (page.parent / link).exists() or (ROOT / link).exists()  # the site has a copy of the notebooks
            assert link.startswith("http") or exists, f"{page}: {link}"


def test_code_fits_into_its_column():
    for page in DOCS.rglob("*.md"):
        for block in blocks(page):
            assert [line for line in block.code.splitlines() if len(line) > 100] == [], page


def test_every_recipe_is_there_in_linen_and_in_nnx():
    for page in (DOCS / "cookbook").glob("*.md"):
        tabs = {block.tab for block in blocks(page)}
        assert page.stem in ("index", "other_libraries") or {"Linen", "NNX"} <= tabs, page


def test_dir_of_an_adapter_has_what_the_docs_name_of_it_and_no_more():
    files = (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"))
    text = "".join(file.read_text() for file in files)
    for module in (jaxmp.linen, jaxmp.nnx):
        assert dir(module) == sorted({*re.findall(rf"\b{module.__name__}\.(\w+)", text)})
        assert all(hasattr(module, name) for name in dir(module))


def test_there_is_a_notebook():
    assert [path.name for path in NOTEBOOKS] == [
        "autocast.ipynb", "find_float32.ipynb", "formats.ipynb", "loss_scale.ipynb", "quickstart.ipynb",
    ]  # fmt: skip


def test_a_stored_notebook_is_small_and_names_no_path_of_a_machine():
    for path in NOTEBOOKS:
        text = path.read_text()
        assert len(text) < 300_000
        here = (str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix, "site-packages")
        assert not [place for place in here if place in text]
        assert not re.search(r"[\w-]+/[\w-]+\.py:\d+", text)  # warnings and tracebacks name a file and a line
