"""The site builds without a warning, and its reference shows the public names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.once

#: Words of other libraries that readers type into the site's search.
WORDS = {"AMP", "amp", "autocast", "GradScaler", "LossScaleOptimizer", "unscale_", "O1", "fp16", "bf16", ".half()"}
WORDS |= {"no_grad", "set_to_none", "clip_grad_norm_", "set_global_policy", "checkpointing", "remat", "channels_last"}
WORDS |= {"torch.compile", "torch.save", "DDP", "FSDP", "no_sync", "EMA", "peft", "QLoRA", "bitsandbytes"}


@pytest.mark.slow("builds the whole site")
def test_the_site_builds_without_a_warning_and_shows_every_public_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    reference = (tmp_path / "reference" / "train_step.html").read_text()
    assert reference.index('id="jaxmp.make_train_step"') < reference.index('id="jaxmp.TrainState"')
    names = (tmp_path / "reference" / "index.html").read_text()
    assert 'href="models.html#jaxmp.linen.apply_policy"' in names and ">Return the policy that a text" in names
    assert '<ol start="12">' in (tmp_path / "autocast.html").read_text()  # plans and pictures name rules by number
    assert "&gt;&gt;&gt;" in reference and ":func:" not in reference
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    texts = {entry["location"]: re.sub("<.*?>", "", entry["text"]) for entry in index["docs"]}
    words = [word.strip(",") for word in texts["glossary.html#words-of-other-libraries"].split()]
    assert set(words) >= WORDS
