"""Train the runs whose page the docs site shows.

The runs train a small GPT-2 in float16, bfloat16 and float32.

python -m experiments.benchmarks.report.example_runs

The model learns the source text of Python's standard library. The three runs take about four minutes on two free cores.
The files that the page needs are copied to experiments/results/report. `make docs` builds the page from them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # must come before JAX is imported, because its CUDA plugin would look for a GPU
    os.environ["JAX_PLATFORMS"] = "cpu"

from experiments import language_modeling
from experiments.training import cli
from experiments.training.run_folders import run_folder
from jaxmp.inspect.run_files import WATCH_FILE

KEPT = Path(__file__).resolve().parents[2] / "results" / "report"
POLICIES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16", "float32": "float32"}
_SCALE = "dynamic:loss_scale=1048576,period=40"  # so large that the first steps are skipped
_SHOWN = "activation_gradients"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of the runs."""

    runs: tuple[Literal[tuple(POLICIES)], ...] = tuple(POLICIES)
    """The runs to train."""
    steps: int = 160
    """Steps of each run."""
    data_dir: cli.Folder = None
    """Folder of the prepared data sets. (default: ~/.cache/jaxmp/data)"""
    run_dir: cli.Folder = None
    """Folder to write the runs to. (default: runs/example_runs-TIME)"""


def main(config: Config) -> None:
    cli.require("--steps", config.steps, 1)
    folder = run_folder("example_runs", config.run_dir)
    for name in config.runs:
        is_float16 = name == "float16"
        language_modeling.train(
            language_modeling.Config(
                model="gpt2",
                policy=POLICIES[name],
                loss_scale=_SCALE if is_float16 else "none",
                steps=config.steps,
                learning_rate=1e-3,
                watch=10 if is_float16 else 0,
                evaluate_every=40,
                checkpoint_every=0,
                data_dir=config.data_dir,
                run_dir=folder / name,
            )
        )
        keep(folder / name, KEPT / name)


def keep(run: Path, folder: Path) -> None:
    """Copy the files that the page reads, without data that it does not show.

    The copy leaves out the list of arrays in the memory plan. Its watch.jsonl has shares only for the kind of tensors
    that the heat map shows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.csv", "summary.json", "plan.json"):
        shutil.copy(run / name, folder / name)
    if (run / WATCH_FILE).is_file():
        rows = [json.loads(line) for line in (run / WATCH_FILE).read_text().splitlines()]
        for row in rows:
            for shares in ("vanished", "zeros"):
                row[shares] = {_SHOWN: row[shares][_SHOWN]}
        (folder / WATCH_FILE).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    memory = json.loads((run / "memory.json").read_text())
    shown = {name: memory[name] for name in ("device", "peak", "by_kind")}
    (folder / "memory.json").write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
