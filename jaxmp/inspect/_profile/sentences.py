"""Say in sentences why a call takes its time, and why half precision may not make it faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxmp.base import tables
from jaxmp.inspect._profile import kinds
from jaxmp.inspect._profile.ceilings import Ceilings
from jaxmp.inspect._profile.kernel_rows import ProfileRow

_NOTABLE = 0.10
"""The share of the time from which a kind of work is worth a sentence."""
_NOTABLE_PRODUCTS = 0.02
"""The share of the time from which products are worth a sentence."""
_NOTABLE_PART = 0.03
"""The share of the time from which a kind of work is named among the others."""
_SMALL = 128
"""The smallest size at which a product can use a GPU well: the tiles of its kernels have this width."""
_FAST = 0.5
"""The share of the device's bandwidth from which bytes limit a kernel."""
_SLOW = 0.2
"""The share of a large product's FLOP/s below which a small product is slow."""
_GAP_BETWEEN_KERNELS = 0.02
"""The milliseconds up to which a wait belongs to the launch of the next kernel, not to other work of the host."""
_NAMED = 3
"""The number of paths that a sentence names."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements that the sentences read; see :class:`jaxmp.inspect.Profile`.

    Attributes:
      milliseconds: the time of a call.
      busy: the share of the time in which a kernel runs.
      groups: the milliseconds by kind.
      rows: the rows by instruction.
      ceilings: the fastest products and copy of the device.
      is_cpu: whether the device is a CPU.
      is_python: whether the function is a Python function, which runs without ``jax.jit``.
      has_program_dtypes: whether the dtypes of products are those that the program asks for. On a CPU, the dtypes of a
        Python function's products are those in which the CPU computes.
      copied: the numbers of the arguments with large NumPy arrays, which each call copies to the device.
      drawing: the milliseconds that the host takes to draw a batch.
      callbacks: the paths of the program's calls of Python.
      has_graphs: whether kernels ran in CUDA graphs, so that their instructions are unknown.
      without_profiler: the milliseconds of a call without the profiler if the profiler makes it much slower, else None.
    """

    milliseconds: float
    busy: float
    groups: Mapping[str, float]
    rows: Sequence[ProfileRow]
    ceilings: Ceilings
    is_cpu: bool = False
    is_python: bool = False
    has_program_dtypes: bool = True
    copied: Sequence[int] = ()
    drawing: float = 0.0
    callbacks: Sequence[str] = ()
    has_graphs: bool = False
    without_profiler: float | None = None

    def share(self, *names: str) -> float:
        """Return the share of the time in kinds of work."""
        return sum(self.groups.get(name, 0.0) for name in names) / self.milliseconds


def sentences_of(measured: Measured) -> tuple[str, ...]:
    """Return the sentences, those on the whole call first."""
    return (
        *_on_profiler(measured),
        *_on_products(measured),
        *_on_waiting(measured),
        *_on_callbacks(measured),
        *_on_float32(measured),
        *_on_small_products(measured),
        *_on_other_kinds(measured),
    )


def _on_profiler(measured: Measured) -> list[str]:
    if measured.without_profiler is None:
        return []
    with_profiler, without = tables.time_text(measured.milliseconds), tables.time_text(measured.without_profiler)
    return [
        f"The profiler slows the call down from {without} to {with_profiler}, so the shares and the busy time are not "
        "those of a call without it."
    ]


def _on_products(measured: Measured) -> list[str]:
    unknown = measured.share(kinds.UNKNOWN)
    lines = []
    if unknown >= _NOTABLE and measured.has_graphs:
        lines.append(
            f"{unknown:.0%} of the time is in CUDA graphs, whose kernels have no paths in a trace, so the other shares "
            "are too low. Profile the jitted step, or set XLA_FLAGS=--xla_gpu_enable_command_buffer= before you start "
            "Python."
        )
    elif unknown >= _NOTABLE:
        lines.append(
            f"{unknown:.0%} of the time is in programs that could not be read, so the other shares are too low."
        )
    device = (
        "a CPU computes them more slowly in half precision than in float32"
        if measured.is_cpu
        else "half precision makes these faster"
    )
    products = measured.share(*kinds.PRODUCTS)
    lines.append(f"{products:.0%} of the time is in products, convolutions and attention: {device}.")
    return lines + _on_bytes(measured)


def _on_bytes(measured: Measured) -> list[str]:
    """Return a sentence on the kernels that compute no products, and on what limits them."""
    parts = []
    for kind, milliseconds in sorted(measured.groups.items(), key=lambda item: -item[1]):
        if kind in kinds.BOUND_BY_BYTES and milliseconds >= _NOTABLE_PART * measured.milliseconds:
            parts.append(f"{kind} {milliseconds / measured.milliseconds:.0%}")
    if not parts or measured.share(*kinds.BOUND_BY_BYTES) < _NOTABLE:
        return []
    rows = [row for row in measured.rows if row.kind in kinds.BOUND_BY_BYTES and row.ceiling_share is not None]
    milliseconds = sum(row.milliseconds for row in rows)
    reason = ""
    if milliseconds:
        speed = sum(row.milliseconds * min(row.ceiling_share or 0.0, 1.0) for row in rows) / milliseconds
        reason = ", which the bytes that they move limit" if speed >= _FAST else ", many of them too short to be fast"
    return [f"Other kernels{reason}: {', '.join(parts)}."]


def _on_waiting(measured: Measured) -> list[str]:
    waiting = 1 - measured.busy
    if waiting < _NOTABLE:
        return []
    return [
        f"The device waits {waiting:.0%} of the time: {_reason_to_wait(measured, waiting * measured.milliseconds)}."
    ]


def _reason_to_wait(measured: Measured, milliseconds: float) -> str:
    launches = sum(row.calls for row in measured.rows)
    executions = _executions(measured.rows)
    if measured.drawing >= milliseconds / 2:
        return (
            f"the iterator takes {tables.time_text(measured.drawing)} for each batch. Prepare batches in other "
            "processes, before they are needed"
        )
    if measured.is_python and executions > 1:
        return (
            f"between the {executions:.0f} programs that a call runs, Python computes, reads values (as float(loss) "
            "does) or waits for data. Put the whole step in one jax.jit, and read values rarely"
        )
    if measured.callbacks:
        return f"the program calls Python in {_listed(measured.callbacks)}"
    if measured.copied:
        arguments = ", ".join(map(str, measured.copied))
        return f"each call copies the NumPy arrays of argument {arguments} to the device. Use jax.device_put before"
    if measured.is_python:
        return "Python computes, reads values (as float(loss) does), waits for data or starts the program"
    if milliseconds / max(launches, 1) < _GAP_BETWEEN_KERNELS:
        return (
            f"it pauses {tables.time_text(milliseconds / launches)} at each of {launches:.0f} kernels, which are "
            "short. Use a larger batch, or fewer and larger layers"
        )
    reason = (
        "the host takes longer to start a call than the device to run it. Use a larger batch, or take several steps in "
        "one program with jax.lax.scan"
    )
    return reason + (". Or other processes use this CPU" if measured.is_cpu else "")


def _executions(rows: Sequence[ProfileRow]) -> float:
    """Return how many programs a call runs.

    Each execution of a program runs most of its instructions once, and those in loops more often.
    """
    calls: dict[str, float] = {}
    for row in rows:
        if row.program:  # copies of arguments belong to no program
            calls[row.program] = min(row.calls, calls.get(row.program, row.calls))
    return max(sum(calls.values()), 1.0)


def _on_callbacks(measured: Measured) -> list[str]:
    share = measured.share(kinds.CALLBACK)
    if share < _NOTABLE_PRODUCTS:
        return []
    return [f"{share:.0%} of the time is in Python functions that the program calls: {_listed(measured.callbacks)}."]


def _on_float32(measured: Measured) -> list[str]:
    wide = [row for row in measured.rows if row.dtype and not kinds.has_at_most_16_bits(row.dtype)]
    share = sum(row.milliseconds for row in wide) / measured.milliseconds
    if share < _NOTABLE_PRODUCTS or not measured.has_program_dtypes:
        return []
    dtypes = " and ".join(sorted({row.dtype for row in wide}))
    if not any(row.dtype and kinds.has_at_most_16_bits(row.dtype) for row in measured.rows):
        return [f"All products run in {dtypes}, {share:.0%} of the time: no policy and no autocast is in effect."]
    return [f"{share:.0%} of the time is in {dtypes} products: {_paths(wide)}."]


def _on_small_products(measured: Measured) -> list[str]:
    speeds = {row: _relative_speed(row, measured.ceilings) for row in measured.rows if _is_small(row)}
    slow = [row for row, speed in speeds.items() if speed is not None and speed < _SLOW]
    share = sum(row.milliseconds for row in slow) / measured.milliseconds
    if share < _NOTABLE_PRODUCTS:
        return []
    longest = max(slow, key=lambda row: row.milliseconds)
    return [
        f"{share:.0%} of the time is in products that are too small for this device: {_paths(slow)}. {longest.size} "
        f"(rows×terms×columns) runs at {100 * (speeds[longest] or 0):.2g}% of the speed of a large product."
    ]


def _is_small(row: ProfileRow) -> bool:
    """Return whether a row has single products of a small size.

    A batch of small products, as in an attention of many heads, can use the whole device.
    """
    sizes = [int(size) for size in row.size.split("×") if size]
    return len(sizes) == 3 and min(sizes) < _SMALL


def _relative_speed(row: ProfileRow, ceilings: Ceilings) -> float | None:
    """Return the FLOP/s of a product relative to a large product of its dtype; None if that is unknown."""
    return ceilings.share(row.duration, row.dtype, row.flops, moved=None)


_ADVICE = {
    kinds.CAST: "Casts: audit shows those that repeat or undo each other.",
    kinds.MOVE: "Copies and layout: they compute nothing; keep the axes of activations in one order.",
    kinds.COLLECTIVE: "Collectives: jaxmp.inspect.memory shows what the devices send each other.",
    kinds.UPDATE: "Optimizer and finite check: their time does not depend on the batch, so a larger batch hides them.",
    kinds.OTHER: "Other: kernels of libraries, sorts and random numbers.",
}
"""The advice for kinds of work that take a notable share of the time."""


def _on_other_kinds(measured: Measured) -> list[str]:
    return [advice for kind, advice in _ADVICE.items() if measured.share(kind) >= _NOTABLE]


def _paths(rows: Sequence[ProfileRow]) -> str:
    """Return the paths of rows, those with the most time first, with one path for equal layers."""
    times: dict[str, float] = {}
    for group in tables.grouped(rows, lambda row: tables.without_numbers(row.path)):
        path = tables.common_path([row.path for row in group]) or "no named scope"
        times[path] = sum(row.milliseconds for row in group)
    return _listed(sorted(times, key=lambda path: -times[path]))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
