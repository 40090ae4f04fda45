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


def anchors(page: Path) -> set[str]:
    """Return the anchors that a forge such as GitHub gives the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in shown}


def is_checked_by_mkdocs(page: Path, target: Path, anchor: str) -> bool:
    """Return whether a link with an anchor joins two pages of the site. `make docs` checks such links."""
    return bool(anchor) and page.is_relative_to(DOCS) and target.is_relative_to(DOCS)


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
        for path, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            target = (page.parent / path).resolve() if path else page
            if path.startswith("http") or is_checked_by_mkdocs(page, target, anchor):
                continue
            exists = target.exists() or (ROOT / path).exists()  # the site has a copy of the notebooks
            assert exists, f"{page}: {path}"
            assert not anchor or anchor in anchors(target), f"{page}: {path}#{anchor}"


def test_code_fits_into_its_column():
    for page in DOCS.rglob("*.md"):
        for block in blocks(page):
            assert [line for line in block.code.splitlines() if len(line) > 100] == [], page


def test_every_recipe_is_there_in_linen_and_in_nnx():
    for page in (DOCS / "cookbook").glob("*.md"):
        tabs = {block.tab for block in blocks(page)}
        assert page.stem in ("index", "other_libraries", "policy_gradients") or {"Linen", "NNX"} <= tabs, page


def test_dir_of_an_adapter_has_what_the_docs_name_of_it_and_no_more():
    files = (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"))
    text = "".join(file.read_text() for file in files)
    for module in (jaxmp.linen, jaxmp.nnx):
        assert dir(module) == sorted({*re.findall(rf"\b{module.__name__}\.(\w+)", text)})
        assert all(hasattr(module, name) for name in dir(module))


def test_there_is_a_notebook():
    assert [path.name for path in NOTEBOOKS] == [
        "autocast.ipynb", "find_float32.ipynb", "formats.ipynb", "loss_scale.ipynb", "paper_mx_scales.ipynb",
        "paper_rope.ipynb", "paper_stochastic_rounding.ipynb", "quickstart.ipynb",
    ]  # fmt: skip


def test_a_stored_notebook_is_small_and_names_no_path_of_a_machine():
    for path in NOTEBOOKS:
        text = path.read_text()
        assert len(text) < 300_000
        here = (str(ROOT), str(Path.home()), sys.prefix, sys.base_prefix, "site-packages")
        assert not [place for place in here if place in text]
        assert not re.search(r"[\w-]+/[\w-]+\.py:\d+", text)  # warnings and tracebacks name a file and a line
