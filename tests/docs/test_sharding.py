"""The code of docs/sharding.md runs on several devices."""

from __future__ import annotations

import jax
import pytest
from pages import blocks, run
from places import ROOT
from recompiles import compiled_once

pytestmark = [pytest.mark.once, pytest.mark.slow("runs the code of the docs")]

PAGE = ROOT / "docs" / "sharding.md"


@pytest.mark.usefixtures("standard_promotion")
def test_the_examples_run():
    names = {}
    examples = [block for block in blocks(PAGE) if not block.tab]
    for block in examples:
        exec(compile(block.code, f"{PAGE.name}, line {block.line}", "exec"), names)
    assert len(examples) == 3 and compiled_once(names["step"])
    assert all(leaf.sharding.mesh.size == 8 for leaf in jax.tree.leaves(names["state"]))
    assert float(names["metrics"]["loss"]) > 0


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("tab", ["Linen", "NNX"])
def test_the_recipes_run(tab):
    run(PAGE, tab)
