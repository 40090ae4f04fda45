"""Run the recipes of docs/sharding.md as one of two processes, and write the losses to a JSON file.

tests/docs/test_devices.py runs this script.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = " ".join(
    [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    + ["--xla_force_host_platform_device_count=2"]
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from pages import blocks
from places import ROOT


def main(coordinator: str, process: int, output: Path) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, process)
    losses: dict[str, list[float]] = {}
    for tab in ("Linen", "NNX"):
        scope: dict[str, Any] = {}
        losses[tab] = []
        for block in blocks(ROOT / "docs" / "sharding.md"):
            if block.tab == tab:
                exec(block.code, scope)
                loss = scope["loss"] if "def own_step" in block.code else scope["metrics"]["loss"]
                losses[tab].append(float(loss))
        assert scope["mesh"].size == 4
    output.write_text(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
