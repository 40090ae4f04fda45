"""The site builds without a warning, and its reference shows the public names."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

MODULES = ["jaxmp", *(f"jaxmp.{name}" for name in ("linen", "nnx", "inspect", "inspect.plots", "sharding"))]
MODULES += [f"jaxmp.{name}" for name in ("checkpoint", "losses", "base.hardware", "jmp")]


@pytest.mark.once
@pytest.mark.slow("builds the whole site")
def test_the_site_builds_without_a_warning_and_shows_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    reference = "".join(page.read_text() for page in (tmp_path / "reference").glob("*.html"))
    for name in MODULES:
        module = importlib.import_module(name)
        public = [public for public in module.__all__ if not inspect.ismodule(getattr(module, public))]
        assert [public for public in public if f'id="{name}.{public}"' not in reference] == [], name
    assert "&gt;&gt;&gt;" in reference and ":func:" not in reference
