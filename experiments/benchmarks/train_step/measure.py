"""Measure a row alone in its process, and prepare rows to take turns."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from experiments.benchmarks.measure import energy, profiling
from experiments.benchmarks.measure.turns import Prepared, all_of, failed
from experiments.benchmarks.models.workloads import Workload
from experiments.benchmarks.train_step import jax_steps
from experiments.benchmarks.train_step.rows import Pass, Row
from experiments.measure import flops, memory
from experiments.report.progress import Progress


def prepare(case: Workload, row: Row, which: Pass) -> Prepared:
    """Compile a row's step or forward pass, and put its arrays on the device."""
    return (_torch_steps() if row.torch else jax_steps).prepare(case, row, which, case.random_batch())


def start_anew(rows: Iterable[Row]) -> None:
    """Free the memory of earlier rows, before ``rows`` are prepared."""
    gc.collect()
    if any(row.torch for row in rows):
        _torch_steps().start_anew()


def describe(case: Workload, row: Row, which: Pass, prepared: Prepared, seconds: float) -> dict[str, Any]:
    """Measure everything about a step but its time.

    Args:
      case: the model and its sizes.
      row: the row.
      which: the pass.
      prepared: the compiled pass of the row.
      seconds: how long the step runs to measure its energy; 0 to measure no energy.

    Returns:
      A dictionary. Figures that the device cannot measure are None.

      - ``compile_seconds``, ``compiled_bytes``: see :class:`experiments.benchmarks.measure.turns.Prepared`
      - ``peak``: the peak bytes on the GPU
      - ``joules``, ``power``: see :func:`experiments.benchmarks.measure.energy.of_call`
      - ``tensor_time``: the share of the kernels' time in tensor-core kernels
      - ``kernel_ms``, ``kernel_count``, ``groups``, ``kernels``: see
        :func:`experiments.benchmarks.measure.profiling.summary`
      - ``kinds``, ``modules``: see :func:`experiments.benchmarks.measure.profiling.by_module`; only for train steps of
        jaxmp
      - ``flops``: the FLOPs by dtype
      - ``tensor_flops``: the share of FLOPs in tensor-core dtypes
      - ``seconds``: the seconds that the warm-up, the trace, the energy and the count of FLOPs took
    """
    watch = Stopwatch()
    for _ in range(3):
        jax.block_until_ready(prepared.turn())
    watch.lap("warm-up")
    peak = _torch_steps().peak() if row.torch else memory.device_peak()
    kernels: profiling.Kernels = {}
    by_module: dict[str, Any] = {}
    if peak is not None:  # only a GPU counts its memory
        try:
            kernels, by_module = _trace_kernels(row, prepared)
        except Exception as error:  # the time and the memory of the row do not depend on its kernels
            by_module = {"kernels_error": failed(error)}
    watch.lap("trace")
    used = energy.of_call(prepared.turn, 0.0 if peak is None else seconds)
    watch.lap("energy")
    counted = jax_steps.step_flops(case, row) if which == "train" and not row.torch else {}
    watch.lap("count of FLOPs")
    return {
        "compile_seconds": prepared.compile_seconds,
        "compiled_bytes": prepared.compiled_bytes,
        "peak": peak,
        **used,
        "tensor_time": profiling.tensor_core_share(kernels, row.precision),
        **profiling.summary(kernels),
        **by_module,
        "flops": counted,
        "tensor_flops": flops.tensor_core_share(counted) if counted else None,
        "seconds": watch.laps,
    }


def _trace_kernels(row: Row, prepared: Prepared) -> tuple[profiling.Kernels, dict[str, Any]]:
    """Return the kernels of a call by name, and for some rows also by kind of work and module."""
    if row.torch:
        return profiling.of_torch(prepared.turn), {}
    kernels = profiling.by_name(profiling.of_jax(prepared.turn))
    if prepared.joinable is None:
        return kernels, {}
    turn, program = prepared.joinable()
    for _ in range(2):
        jax.block_until_ready(turn())
    return kernels, profiling.by_module(profiling.of_jax(turn), program)


class Stopwatch:
    """The seconds of the parts of a measurement.

    Attributes:
      laps: the seconds of each part, by its name.
    """

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Save the seconds since the last part ended."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


def alone(case: Workload, row: Row, passes: Iterable[Pass], seconds: float) -> dict[str, Any]:
    """Measure each pass with nothing else on the device.

    The forward pass comes first, because the peak of a process never falls and a train step has the higher peak.
    """
    figures: dict[str, Any] = {}
    for which in sorted(passes):  # "forward" before "train"
        if which == "forward" and not row.forward:
            continue
        prepared: Prepared | None = None
        watch = Stopwatch()
        try:
            prepared = prepare(case, row, which)
            watch.lap("preparing")
            figures[which] = describe(case, row, which, prepared, seconds)
            figures[which]["seconds"] = watch.laps | figures[which]["seconds"]
        except Exception as error:  # if a pass fails, the other pass is still measured
            figures[which] = {"error": failed(error)}
        prepared = None
        gc.collect()
    return figures


def prepare_all(
    case: Workload, rows: Mapping[str, Row], which: Pass, progress: Progress
) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Prepare all rows to take turns in this process.

    Return the prepared rows, and the errors of the rows that failed. The rows with the largest temporaries are prepared
    first, so that later rows can reuse the memory of these temporaries.
    """
    start_anew(rows.values())
    order = {"fp32": 0, "tf32": 1}
    names = sorted(rows, key=lambda name: order.get(rows[name].precision, 2))
    make = {name: functools.partial(prepare, case, rows[name], which) for name in names}
    prepared, errors = all_of(make, lambda name: progress.advance(0, f"{rows[name].label}: getting ready", case.name))
    return {name: prepared[name] for name in rows if name in prepared}, errors


def _torch_steps() -> Any:
    from experiments.benchmarks.train_step import torch_steps

    return torch_steps
