"""Write the plan and the memory of a train step for ``jaxmp report``."""

from __future__ import annotations

import warnings
from pathlib import Path

import jaxmp
from experiments.training.experiment import Batch, Experiment


def describe(experiment: Experiment, state: jaxmp.TrainState, batch: Batch, folder: Path) -> None:
    """Write ``plan.json`` and ``memory.json`` of a step that has run.

    The plan is autocast's cast plan, or else the audit of the step. The memory comes from the program that the step has
    already compiled. On a mesh the step would be compiled again, so there is no ``memory.json``. If a file cannot be
    made, there is only a warning.
    """

    def plan() -> str:
        if experiment.cast_plan is not None:
            return experiment.cast_plan(state.params, state.model_state, batch, None).to_json()
        return jaxmp.inspect.audit(experiment.step, compile=False)(state, batch).to_json()

    def memory() -> str:
        return jaxmp.inspect.memory(experiment.step)(state, batch).to_json()

    files = {"plan.json": plan} if experiment.create_on_mesh else {"plan.json": plan, "memory.json": memory}
    for name, text in files.items():
        try:
            (folder / name).write_text(text())
        except Exception as error:  # the run continues without this file
            warnings.warn(f"this run has no {name}, which jaxmp report reads: {error}", stacklevel=2)
