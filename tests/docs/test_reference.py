"""Every public name has a docstring, and every public module has a page."""

from __future__ import annotations

import importlib
import inspect
import re

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


def test_every_public_module_has_a_page():
    pages = re.findall(r"reference/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert {module.replace(".base", "").replace(".", "_") for module in MODULES} == set(pages)
