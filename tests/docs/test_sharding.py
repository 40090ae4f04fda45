"""The code of docs/sharding.md runs on several devices."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest
from recompiles import compiled_once

pytestmark = [pytest.mark.once, pytest.mark.slow("runs the code of the docs")]

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"


@pytest.mark.usefixtures("standard_promotion")
def test_the_examples_run():
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    assert len(blocks) == 4 and compiled_once(names["step"])
    assert all(leaf.sharding.mesh.size == 8 for leaf in jax.tree.leaves(names["state"]))
    assert float(names["metrics"]["loss"]) > 0
