"""The code of every page of the site runs, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from _pytest.mark import ParameterSet
from pages import PACKAGES, blocks, run
from places import ROOT

DOCS = ROOT / "docs"

#: Pages whose code another test runs.
ELSEWHERE = ("coming_from.md", "sharding.md", "autocast.md", "cookbook/lora.md", "cookbook/recipes_of_others.md")

PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
TESTED = [page for page in PAGES if page not in ELSEWHERE]
PARTS = sorted({(page, block.tab) for page in TESTED for block in blocks(DOCS / page)})


def marked(page: str, tab: str) -> ParameterSet:
    compiles = any(block.tab == tab and block.needs == PACKAGES["compile-only"] for block in blocks(DOCS / page))
    slow = pytest.mark.slow("all programs of the site")
    return pytest.param(page, tab, marks=pytest.mark.absent_gpu if compiles else slow)


@pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning")  # of Flax, for qwix
@pytest.mark.parametrize(("page", "tab"), [marked(*part) for part in PARTS], ids=lambda part: part or "page")
def test_the_code_of_a_page_runs(page: str, tab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(DOCS / page):
        if block.tab == tab and block.needs:
            pytest.importorskip(block.needs)
    with jax.numpy_dtype_promotion("standard"):
        run(DOCS / page, tab)


def test_printed_text_that_differs_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```python\nprint(1)\n```\n\n```text title="prints"\n2\n```\n')
    with pytest.raises(AssertionError, match=r"page\.md:2"):
        run(page, "")
