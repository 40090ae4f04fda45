"""Measure where the time of a call goes on the attached device."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxmp.base import hardware, tables
from jaxmp.base.arguments import require_whole_number
from jaxmp.base.inspection import tool
from jaxmp.inspect._profile import kinds
from jaxmp.inspect._profile.ceilings import Ceilings, measure_ceilings
from jaxmp.inspect._profile.kernel_rows import ProfileRow, rows_of
from jaxmp.inspect._profile.repeated_call import RepeatedCall
from jaxmp.inspect._profile.sentences import Measured, sentences_of
from jaxmp.inspect._profile.trace import traced
from jaxmp.inspect._profile.traced_dtypes import with_traced_dtypes
from jaxmp.inspect.compiled import compiling
from jaxmp.inspect.compiled.hlo import HloProgram
from jaxmp.inspect.program.calls import is_step, under_policy

_SECONDS = 1.0
"""The seconds for which calls are timed on a GPU."""
_ROUND_MILLISECONDS = 50.0
_LEAST_ROUNDS = 3
_SHOWN = 20
_SLOW_PROFILER, _SLOW_PROFILER_ON_CPU = 1.05, 1.5
"""The ratio of the times with and without the profiler above which the report says that the shares may be wrong. Times
on a CPU vary more."""
WITHOUT_CUDA_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""The options of XLA for a program whose kernels a trace joins to instructions. XLA launches many kernels at once, as a
CUDA graph, and a trace has only the name of the graph."""


@dataclasses.dataclass(frozen=True)
class Profile(tables.Shown):
    """Where the time of a call went on a device.

    The printed table has one row for equal layers, with ``*`` in place of their numbers.

    Attributes:
      device: the name of the device.
      milliseconds: the time of a call. On a GPU, it is the median over rounds of several calls, without the profiler.
        On a CPU, the calls under the profiler are timed.
      milliseconds_without_profiler: the time of a call without the profiler, which is shorter if the profiler slows
        down the kernels.
      busy: the share of ``milliseconds`` in which the device ran a kernel.
      tensor_core_time: the milliseconds in kernels with products whose dtype the device's tensor cores multiply.
      groups: the milliseconds by kind: ``"half products"`` (at most 16 bits), ``"float32 products"``, ``"attention"``,
        ``"convolutions"``, ``"reductions"``, ``"elementwise"``, ``"casts"``, ``"copies and layout"``,
        ``"collectives"``, ``"callbacks to Python"``, ``"optimizer and finite check"`` (the update of a train step),
        ``"other"``, ``"unknown programs"``, and ``"waiting"`` (no kernel runs). They add up to ``milliseconds``.
      rows: the kernels by instruction of the compiled program, slowest first.
      sentences: the reasons why the call takes this time.
      ceilings: the fastest product by dtype and the fastest copy, measured on this device.
      not_counted: what the report cannot tell, such as how busy the device is if the profiler slows down the call.
    """

    device: str
    milliseconds: float
    milliseconds_without_profiler: float
    busy: float
    tensor_core_time: float
    groups: dict[str, float]
    rows: tuple[ProfileRow, ...]
    sentences: tuple[str, ...]
    ceilings: Ceilings
    not_counted: tuple[str, ...] = ()

    def _shown(self) -> Any:
        title = f"{tables.time_text(self.milliseconds)} a call on {self.device}, busy {self.busy:.0%} of the time"
        layers = tables.grouped(self.rows, _same_layer)
        layers.sort(key=lambda rows: -sum(row.milliseconds for row in rows))
        groups = [f"{kind} {tables.time_text(time)}" for kind, time in self.groups.items() if time]
        lines = [title, *self.sentences, f"by kind: {', '.join(groups)}"]
        notes = [f"… and {len(layers) - _SHOWN} more"] if len(layers) > _SHOWN else []
        notes += tables.not_counted(self.not_counted)
        return "\n".join(lines), _COLUMNS, [_cells(rows, self.milliseconds) for rows in layers[:_SHOWN]], notes


_COLUMNS = ("ms", "share", "kind", "dtype", "size", "path", "phase", "calls", "of the\nceiling")


def _same_layer(row: ProfileRow) -> tuple[str, ...]:
    return row.kind, row.dtype, row.size, tables.without_numbers(row.path), row.phase


def _cells(rows: Sequence[ProfileRow], total: float) -> tuple[Any, ...]:
    first = rows[0]
    milliseconds = sum(row.milliseconds for row in rows)
    # The share of the sum: the time at the ceilings, divided by the measured time.
    at_ceiling = sum(row.milliseconds * (row.ceiling_share or 0.0) for row in rows)
    return (
        f"{milliseconds:.3f}",
        f"{milliseconds / total:.1%}",
        first.kind,
        first.dtype,
        first.size,
        tables.common_path([row.path for row in rows]),
        first.phase,
        f"{sum(row.calls for row in rows):g}",
        _percent_of_ceiling(at_ceiling / milliseconds) if at_ceiling else "",
    )


def _percent_of_ceiling(share: float) -> str:
    """Return a share as text. A kernel whose operands are in a cache is faster than a copy in memory."""
    return ">100%" if share > 1 else f"{share:.0%}"


@tool
def profile(
    fun: Callable[..., Any],
    policy: Any = None,
    *,
    overrides: Mapping[str, str] | None = None,
    steps: int = 5,
) -> Callable[..., Profile]:
    """Return a function that measures where the time of a call of ``fun`` goes.

    The returned function runs the call on copies of its arguments: twice to warm up, for a second to measure the time
    (on a CPU, ``steps`` times), and ``steps`` times under JAX's profiler. Each kernel is joined to the instruction of
    the compiled program that launched it, and so to a path, a phase and a kind of work. For this, a program for a GPU
    is compiled again without CUDA graphs. The sentences of the report say why half precision is not faster here. A
    function that donates a state continues with the state that it returns.

    Args:
      fun: a train step, a jitted function, or a Python function. A Python function runs as it is, without ``jax.jit``,
        so that the report shows what it costs. Pass an iterator in place of a batch, and each call draws the next
        batch: the time that this takes is a part of the measured time.
      policy: a policy with which :func:`jaxmp.autocast` runs ``fun``, under ``jax.jit``. Leave it out for a train step
        that was made with a policy.
      overrides: overrides of ``policy``, as for :func:`jaxmp.autocast`.
      steps: the number of calls under the profiler.

    Returns:
      A function of ``fun``'s arguments that returns a :class:`Profile`.

    Raises:
      ValueError: ``steps`` is not a positive integer, an iterator ended, or the trace has no kernels (the device is
        neither a GPU nor a CPU, or the function runs no program).
      TypeError: an argument is donated, and no result can replace it; or a loader of batches is not an iterator.
      RuntimeError: another profile is running, or JAX's profiler cannot trace the GPU.

    >>> step = jax.jit(lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
    >>> measured = profile(step)(jnp.ones((64, 64)), jnp.ones((256, 64)))
    >>> [sentence for sentence in measured.sentences if sentence.startswith("All products")]
    ['All products run in float32, ...: no policy and no autocast is in effect.']
    """
    require_whole_number("steps", steps)
    under = under_policy(fun, policy, overrides)
    fun = under if policy is None or is_step(fun) else jax.jit(under)

    def measure(*args: Any) -> Profile:
        return _profile_of(RepeatedCall(fun, args), steps)

    return measure


def _profile_of(call: RepeatedCall, steps: int) -> Profile:
    _warm_up(call)
    device = hardware.detect()
    is_cpu = device.platform == "cpu"
    trace = None if call.is_python else compiling.trace_of_call(call.fun, call.args)
    text = ""
    if not is_cpu:
        timed = _timed(call, steps)
        if trace is not None:
            call.run, text = compiling.call_with_options(call.fun, call.args, WITHOUT_CUDA_GRAPHS)
            _warm_up(call)
    else:
        timed = _row(call, steps).per_call(steps)
        if trace is not None:
            text = str(compiling.compiled_of(trace).as_text())
    without_profiler = timed.milliseconds
    in_trace: list[_Timed] = []
    events = traced(lambda: in_trace.append(_row(call, steps)))
    if not events:
        raise ValueError(
            f"the trace of {device.name} has no kernels; profile reads traces of GPUs and CPUs, of a function that "
            "runs operations of JAX"
        )
    if is_cpu:  # the profiler slows down the kernels and the time between them alike
        timed = in_trace[0].per_call(steps)
    rows = [_as_on_device(row, device) for row in rows_of(events, steps, text)]
    if trace is not None and is_cpu:
        rows = with_traced_dtypes(rows, trace)
    ceilings = measure_ceilings(sorted({row.dtype for row in rows if row.dtype}))
    rows = [_with_share(row, ceilings) for row in rows]
    groups = dict.fromkeys(kinds.KINDS, 0.0)
    for row in rows:
        groups[row.kind] += row.milliseconds
    running = sum(groups.values())
    milliseconds = max(timed.milliseconds, running)
    groups[kinds.WAITING] = milliseconds - running
    program = HloProgram(text) if text else None
    is_slowed = milliseconds > (_SLOW_PROFILER_ON_CPU if is_cpu else _SLOW_PROFILER) * without_profiler
    not_counted = ("how busy the device is without the profiler",) if is_slowed else ()
    measured = Measured(
        milliseconds=milliseconds,
        busy=running / milliseconds,
        groups=groups,
        rows=rows,
        ceilings=ceilings,
        is_cpu=is_cpu,
        is_python=call.is_python,
        has_program_dtypes=trace is not None or not is_cpu,
        copied=call.copied,
        drawing=timed.drawing,
        callbacks=_callbacks_in(program),
        has_graphs=any(event.is_in_graph for event in events),
        without_profiler=without_profiler if is_slowed else None,
    )
    return Profile(
        device=device.name,
        milliseconds=milliseconds,
        milliseconds_without_profiler=without_profiler,
        busy=measured.busy,
        tensor_core_time=sum(row.milliseconds for row in rows if row.dtype in device.tensor_cores),
        groups=groups,
        rows=tuple(rows),
        sentences=sentences_of(measured),
        ceilings=ceilings,
        not_counted=not_counted if program is None else (*program.not_counted, *not_counted),
    )


def _callbacks_in(program: HloProgram | None) -> list[str]:
    """Return the paths of the calls of Python in a compiled program."""
    paths = []
    for instructions in program.computations.values() if program else ():
        for instruction in instructions.values():
            if kinds.is_callback(instruction):
                paths.append("/".join(filter(None, (instruction.path, instruction.op_name.rpartition("/")[2]))))
    return list(dict.fromkeys(paths))


def _warm_up(call: RepeatedCall) -> None:
    for _ in range(2):
        call.wait(call())


class _Timed(NamedTuple):
    """The milliseconds of calls, and the milliseconds in which they draw batches."""

    milliseconds: float
    drawing: float

    def per_call(self, calls: int) -> _Timed:
        """Return the times of a call."""
        return _Timed(self.milliseconds / calls, self.drawing / calls)


def _timed(call: RepeatedCall, steps: int) -> _Timed:
    """Return the median times of a call within a long row of calls.

    The first call of a row starts late, because the device waits for the host's Python code. Later calls do not: the
    host prepares them while the device computes. So a row of one call is subtracted from a longer row.
    """
    calls = max(steps, math.ceil(_ROUND_MILLISECONDS / _row(call, 1).milliseconds))
    rounds = list[_Timed]()
    started = time.perf_counter()
    while len(rounds) < _LEAST_ROUNDS or time.perf_counter() - started < _SECONDS:
        first, all_calls = _row(call, 1), _row(call, calls + 1)
        later = _Timed(all_calls.milliseconds - first.milliseconds, all_calls.drawing - first.drawing)
        rounds.append(later.per_call(calls))
    return _Timed(*map(statistics.median, zip(*rounds, strict=True)))


def _row(call: RepeatedCall, calls: int) -> _Timed:
    """Run calls in a row, wait for the last one, and return the times of all calls together."""
    drawn_before = call.seconds_to_draw
    started = time.perf_counter()
    for _ in range(calls):
        result = call()
    call.wait(result)
    seconds = time.perf_counter() - started
    return _Timed(1e3 * seconds, 1e3 * (call.seconds_to_draw - drawn_before))


def _as_on_device(row: ProfileRow, device: hardware.Hardware) -> ProfileRow:
    """Return a row in which float32 products are TensorFloat-32 only if the device has such products."""
    if row.dtype != "tensorfloat32" or "tensorfloat32" in device.tensor_cores:
        return row
    return dataclasses.replace(row, dtype="float32")


def _with_share(row: ProfileRow, ceilings: Ceilings) -> ProfileRow:
    share = ceilings.share(row.duration, row.dtype, row.flops, row.bytes)
    return dataclasses.replace(row, ceiling_share=share)
