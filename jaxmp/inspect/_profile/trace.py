"""Read the kernels of a call from a trace of JAX's profiler."""

from __future__ import annotations

import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

_GRAPH = "command_buffer"
"""XLA's name for a CUDA graph, before a number."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One execution of a kernel.

    Attributes:
      kernel: the name of the kernel. On a CPU, it is the name of the instruction.
      instruction: the name of the HLO instruction that launched the kernel; empty if the trace has none. All kernels
        of a CUDA graph have the name of the graph.
      module: the name of the compiled program.
      program_id: the id of the compiled program; 0 if the trace has none.
      start: the time at which the kernel started, in milliseconds.
      end: the time at which the kernel ended, in milliseconds.
    """

    kernel: str
    instruction: str
    module: str
    program_id: int
    start: float
    end: float

    @property
    def milliseconds(self) -> float:
        """Return how long the kernel took."""
        return self.end - self.start

    @property
    def is_in_graph(self) -> bool:
        """Return whether the kernel ran in a CUDA graph, whose kernels a trace does not join to instructions."""
        return self.instruction.startswith(_GRAPH)


def traced(run: Callable[[], Any]) -> list[Event]:
    """Call ``run`` under JAX's profiler, and return the kernels of the first device.

    Args:
      run: a function that returns after the device has finished.

    Raises:
      RuntimeError: another profile is running; or the profiler recorded no GPU, although a GPU is attached.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python would slow down the host
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # nanobind's class of statistics has no module, which Python 3.12 reports.
        warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute", DeprecationWarning)
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        if jax.default_backend() == "gpu" and not _gpus_in(data):
            raise RuntimeError(
                "JAX's profiler recorded no GPU, so it could not use NVIDIA's library CUPTI; install nvidia-cuda-cupti "
                "in the version of your CUDA, or allow all users to profile"
            )
        return events_of(data)


def events_of(data: Any) -> list[Event]:
    """Return the kernels of the first device in a ``jax.profiler.ProfileData``.

    On a GPU, kernels are the events in its streams. On a CPU, kernels are the events with an HLO instruction.
    """
    gpus = _gpus_in(data)
    for gpu in gpus:
        events = []
        for line in gpu.lines:
            if line.name.startswith("Stream"):
                events += [_event(event, dict(event.stats)) for event in line.events]
        if events:
            return events
    return [] if gpus else _events_of_cpu(data.planes)


def _gpus_in(data: Any) -> list[Any]:
    """Return the GPUs in a trace, by number."""
    gpus = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
    return sorted(gpus, key=lambda plane: int(plane.name.rpartition(":")[2]))


def _events_of_cpu(planes: Iterable[Any]) -> list[Event]:
    by_device: dict[int, list[Event]] = {}
    for event in _all_events(planes):
        stats = dict(event.stats)
        if "hlo_op" in stats:
            by_device.setdefault(stats.get("device_ordinal", 0), []).append(_event(event, stats))
    return by_device[min(by_device)] if by_device else []


def _all_events(planes: Iterable[Any]) -> Iterator[Any]:
    for plane in planes:
        for line in plane.lines:
            yield from line.events


def _event(event: Any, stats: dict[str, Any]) -> Event:
    instruction = str(stats.get("hlo_op", ""))
    return Event(
        kernel=event.name,
        instruction=instruction.rpartition("::")[2],
        module=str(stats.get("hlo_module", "")),
        program_id=int(stats.get("program_id", 0)),
        start=event.start_ns / 1e6,
        end=(event.start_ns + event.duration_ns) / 1e6,
    )


def busy_times(events: list[Event]) -> list[float]:
    """Return for each event the milliseconds in which its kernel ran, without counting any moment twice.

    Kernels that run at the same time share that time equally, so the sum over all events is the time in which the
    device was busy.

    >>> first, second = (Event("", "", "", 0, start, start + 2) for start in (0.0, 1.0))
    >>> busy_times([first, second])
    [1.5, 1.5]
    """
    shares = [0.0] * len(events)
    timed = [(number, event) for number, event in enumerate(events) if event.end > event.start]
    borders = [(event.start, 1, number) for number, event in timed]
    borders += [(event.end, 0, number) for number, event in timed]
    running: set[int] = set()
    before = 0.0
    for time, is_start, number in sorted(borders):
        for other in running:
            shares[other] += (time - before) / len(running)
        before = time
        if is_start:
            running.add(number)
        else:
            running.discard(number)
    return shares
