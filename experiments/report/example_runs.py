"""Trains the runs whose page the site shows: a small GPT-2 in float16, bfloat16 and float32.

python -m experiments.report.example_runs

It learns the standard library's own sources, in about four minutes on two free cores. What the page reads is kept in
experiments/results/report, and make docs makes the page of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

if __name__ == "__main__":  # before JAX is imported: its CUDA plugin would look for a GPU
    os.environ["JAX_PLATFORMS"] = "cpu"

from experiments import language_modeling
from experiments.training import cli
from experiments.training.run_folders import run_folder

KEPT = Path(__file__).resolve().parents[1] / "results" / "report"
POLICIES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16", "float32": "float32"}
_SCALE = "dynamic:loss_scale=16777216,period=40"  # so large that the first steps are skipped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the runs."""

    steps: int = 160
    """Steps of each run."""
    data_dir: cli.Folder = None
    """Folder of the prepared data sets. (default: ~/.cache/jaxmp/data)"""
    run_dir: cli.Folder = None
    """Folder to write the runs to. (default: runs/example_runs-TIME)"""


def main(config: Config) -> None:
    cli.require("--steps", config.steps, 1)
    folder = run_folder("example_runs", config.run_dir)
    for name, policy in POLICIES.items():
        half = policy == "mixed_float16"
        language_modeling.train(
            language_modeling.Config(
                model="gpt2",
                policy=policy,
                loss_scale=_SCALE if half else "none",
                steps=config.steps,
                watch=10 if half else 0,
                evaluate_every=40,
                checkpoint_every=0,
                data_dir=config.data_dir,
                run_dir=folder / name,
            )
        )
        keep(folder / name, KEPT / name)


def keep(run: Path, kept: Path) -> None:
    """Copy what the page reads of a run, without the arrays of its memory."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.csv", "summary.json", "plan.json", "watch.jsonl"):
        if (run / name).is_file():
            shutil.copy(run / name, kept / name)
    memory = json.loads((run / "memory.json").read_text())
    shown = {name: memory[name] for name in ("device", "peak", "by_kind")}
    (kept / "memory.json").write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
