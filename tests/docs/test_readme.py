"""The README's code runs and learns; first pages stay short; links work."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest
from pages import blocks
from places import ROOT

pytestmark = pytest.mark.once

README = ROOT / "README.md"


@pytest.fixture(scope="module")
def readme() -> dict[str, Any]:
    """Run the README's example in Linen, and return its names."""
    scope: dict[str, Any] = {}
    linen, _ = blocks(README)
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam is not strict about dtypes
        exec(linen.code, scope)
    return scope


@pytest.mark.slow("runs the code of the docs")
def test_the_examples_of_the_readme_run_and_learn(readme):
    _, nnx = blocks(README)
    scope = dict(readme)
    with jax.numpy_dtype_promotion("standard"):
        exec(nnx.code, scope)
    for metrics in (readme["metrics"], scope["metrics"]):
        assert float(metrics["loss"]) < 0.1 and float(metrics["loss_scale"]) == 2.0**15 and not metrics["skipped"]


def test_the_first_pages_stay_short():
    assert README.stat().st_size <= 6656 and (ROOT / "CONTRIBUTING.md").stat().st_size <= 4000
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 50


def test_every_link_between_pages_leads_somewhere():
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("jaxmp/**/*.md"),
        *ROOT.glob("tests/*.md"),
        *ROOT.glob("experiments/benchmarks/*.md"),
    ]
    for page in pages:
        for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            exists = (page.parent / link).exists() or (ROOT / link).exists()  # the site has a copy of the notebooks
            assert link.startswith("http") or exists, f"{page}: {link}"
