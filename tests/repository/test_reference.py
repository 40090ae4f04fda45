"""Every public name has a docstring, and a place in the reference."""

from __future__ import annotations

import importlib
import inspect
import runpy

import pytest
from places import ROOT

MODULES = [
    "jaxmp",
    "jaxmp.base.hardware",
    "jaxmp.checkpoint",
    "jaxmp.inspect",
    "jaxmp.inspect.plots",
    "jaxmp.jmp",
    "jaxmp.linen",
    "jaxmp.losses",
    "jaxmp.nnx",
    "jaxmp.sharding",
]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    for public in module.__all__:
        assert inspect.getdoc(getattr(module, public)), public


def test_every_public_name_is_on_exactly_one_page():
    public = []
    for module in MODULES:
        loaded = importlib.import_module(module)
        public += [f"{module}.{name}" for name in loaded.__all__ if not inspect.ismodule(getattr(loaded, name))]
    site = runpy.run_path(str(ROOT / "docs" / "site.py"))
    on_pages = [site["path_of"](name) for page in site["PAGES"] for name in site["names_of"](page)]
    assert sorted(on_pages) == sorted(public)
