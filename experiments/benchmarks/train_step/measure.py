"""Measure a row alone in its process, and prepare rows to take turns."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from experiments.benchmarks.measure import energy
from experiments.benchmarks.measure.turns import Prepared, all_of, failed
from experiments.benchmarks.models.workloads import Workload
from experiments.benchmarks.train_step import jax_steps
from experiments.benchmarks.train_step.rows import Row
from experiments.measure import memory
from experiments.report.progress import Progress


def prepare(case: Workload, row: Row) -> Prepared:
    """Compile a row's step, and put its arrays on the device."""
    if row.torch:
        return _torch_steps().prepare(case, case.random_batch())
    return jax_steps.prepare(case, row, case.random_batch())


def start_anew(rows: Iterable[Row]) -> None:
    """Free the memory of earlier rows, before ``rows`` are prepared."""
    gc.collect()
    if any(row.torch for row in rows):
        _torch_steps().start_anew()


def alone(case: Workload, row: Row, seconds: float) -> dict[str, Any]:
    """Measure a row with nothing else on the device, except its time.

    Args:
      case: the model and its sizes.
      row: the row.
      seconds: how long the step runs to measure its energy; 0 to measure no energy.

    Returns:
      A dictionary. Figures that the device cannot measure are None. A row that fails has only an ``error``.

      - ``compile_seconds``, ``compiled_bytes``: see :class:`experiments.benchmarks.measure.turns.Prepared`
      - ``peak``: the peak bytes on the GPU
      - ``joules``: the energy of a step, see :func:`experiments.benchmarks.measure.energy.of_call`
    """
    try:
        prepared = prepare(case, row)
        for _ in range(3):
            jax.block_until_ready(prepared.turn())
        peak = _torch_steps().peak() if row.torch else memory.device_peak()
        joules = energy.of_call(prepared.turn, 0.0 if peak is None else seconds)  # only a GPU counts its memory
    except Exception as error:  # if a row fails, the others are still measured
        return {"error": failed(error)}
    return {
        "compile_seconds": prepared.compile_seconds,
        "compiled_bytes": prepared.compiled_bytes,
        "peak": peak,
        "joules": joules,
    }


def prepare_all(
    case: Workload, rows: Mapping[str, Row], progress: Progress
) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Prepare all rows to take turns in this process.

    Return the prepared rows, and the errors of the rows that failed. The rows with the largest temporaries are prepared
    first, so that later rows can reuse the memory of these temporaries.
    """
    start_anew(rows.values())
    order = {"fp32": 0, "tf32": 1}
    names = sorted(rows, key=lambda name: order.get(rows[name].precision, 2))
    make = {name: functools.partial(prepare, case, rows[name]) for name in names}
    prepared, errors = all_of(make, lambda name: progress.advance(0, f"{rows[name].label}: getting ready", case.name))
    return {name: prepared[name] for name in rows if name in prepared}, errors


def _torch_steps() -> Any:
    from experiments.benchmarks.train_step import torch_steps

    return torch_steps
