"""Write the page that shows all runs of a comparison."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.comparison.outcomes import Outcome, run_folder
from experiments.measure.timing import quartiles
from experiments.report.json_files import write_json
from jaxmp.inspect import write_report


def write_page(folder: Path, outcomes: list[Outcome], seeds: Sequence[int], file: Path) -> Path:
    """Write the page on the variant with the lowest loss, and return its path.

    The page also shows float32 and the other variants.

    Args:
      folder: the folder of the task's runs, in which :func:`run_folder` names the folder of each run.
      outcomes: the outcomes of all variants, float32 first.
      seeds: the seeds of each variant.
      file: the page to write.
    """
    for outcome in outcomes:
        for seed in seeds:
            path = run_folder(folder, outcome, seed) / "summary.json"
            summary = json.loads(path.read_text())
            write_json(path, {**summary, "ms_per_step": quartiles(outcome.milliseconds)[1]})

    def loss(outcome: Outcome) -> float:
        mean = statistics.fmean(test["loss"] for test in outcome.test)
        return mean if math.isfinite(mean) else math.inf

    baseline, *others = outcomes
    best, *rest = sorted(others, key=loss) or [baseline]
    runs = [best, *([baseline] if others else []), *rest]
    of_runs = [run_folder(folder, run, seeds[0]).parent for run in runs]
    return write_report(of_runs[0], of_runs[1:], file)
