"""Say in sentences why a call takes its time, and why half precision may not make it faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxmp.base import tables
from jaxmp.inspect._profile import kinds
from jaxmp.inspect._profile.ceilings import Ceilings
from jaxmp.inspect._profile.kernel_rows import ProfileRow
from jaxmp.inspect._profile.power import PowerReading

_NOTABLE = 0.10
"""The share of the time from which a kind of work is worth a sentence."""
_NOTABLE_PRODUCTS = 0.02
"""The share of the time from which products are worth a sentence."""
_SMALL = 128
"""The smallest size at which a product can use a GPU well: the tiles of its kernels have this width."""
_SLOW = 0.3
"""The share of a large product's FLOP/s below which a small product is slow."""
_GAP_BETWEEN_KERNELS = 0.02
"""The milliseconds up to which a wait belongs to the launch of the next kernel, not to other work of the host."""
_NAMED = 3
"""The number of paths that a sentence names."""


class Measured(NamedTuple):
    """The measurements that the sentences read; see :class:`jaxmp.inspect.Profile`.

    Attributes:
      milliseconds: the time of a call.
      busy: the share of the time in which a kernel runs.
      groups: the milliseconds by kind.
      rows: the rows by instruction.
      programs: the number of compiled programs that a call runs.
      drawing: the milliseconds that the host takes to draw a batch.
      ceilings: the fastest products and copy of the device.
      power: the power reading, or None.
    """

    milliseconds: float
    busy: float
    groups: Mapping[str, float]
    rows: Sequence[ProfileRow]
    programs: int
    drawing: float
    ceilings: Ceilings
    power: PowerReading | None


def sentences_of(measured: Measured) -> tuple[str, ...]:
    """Return the sentences, those on the whole call first."""
    return (
        *_on_products(measured),
        *_on_waiting(measured),
        *_on_float32(measured),
        *_on_small_products(measured),
        *_on_other_kinds(measured),
        *_on_power(measured),
    )


def _share(measured: Measured, *names: str) -> float:
    return sum(measured.groups.get(name, 0.0) for name in names) / measured.milliseconds


def _on_products(measured: Measured) -> list[str]:
    products = _share(measured, *kinds.PRODUCTS)
    memory_bound = measured.busy - products
    text = f"{products:.0%} of the time is in products, convolutions and attention, which half precision makes faster."
    if memory_bound >= _NOTABLE:
        text += f" {memory_bound:.0%} is in other kernels: the bytes that they move limit most of them."
    return [text]


def _on_waiting(measured: Measured) -> list[str]:
    waiting = 1 - measured.busy
    if waiting < _NOTABLE:
        return []
    launches = sum(row.calls for row in measured.rows)
    gap = waiting * measured.milliseconds / max(launches, 1)
    if measured.drawing >= waiting * measured.milliseconds / 2:
        reason = (
            f"the iterator takes {measured.drawing:.3g} ms for each batch. Prepare batches in other processes, before "
            "they are needed"
        )
    elif measured.programs > 1:
        reason = (
            f"a call runs {measured.programs} compiled programs, and Python between them. Put the whole step in one "
            "jax.jit"
        )
    elif gap < _GAP_BETWEEN_KERNELS:
        reason = (
            f"it pauses {1e3 * gap:.2g} µs at each of {launches:.0f} kernels, which are short. Use a larger batch or "
            "fewer, larger layers"
        )
    else:
        reason = "look for callbacks, values that Python reads, and arrays that each call copies to the device"
    return [f"The device waits {waiting:.0%} of the time: {reason}."]


def _on_float32(measured: Measured) -> list[str]:
    wide = [row for row in measured.rows if row.dtype and not kinds.is_half(row.dtype)]
    share = sum(row.milliseconds for row in wide) / measured.milliseconds
    if share < _NOTABLE_PRODUCTS:
        return []
    if not any(row.dtype and kinds.is_half(row.dtype) for row in measured.rows):
        return [f"All products run in float32, {share:.0%} of the time: no policy and no autocast is in effect."]
    return [f"{share:.0%} of the time is in float32 products: {_paths(wide)}."]


def _on_small_products(measured: Measured) -> list[str]:
    speeds = {row: _relative_speed(row, measured.ceilings) for row in measured.rows if _is_small(row)}
    slow = [row for row, speed in speeds.items() if speed is not None and speed < _SLOW]
    share = sum(row.milliseconds for row in slow) / measured.milliseconds
    if share < _NOTABLE_PRODUCTS:
        return []
    longest = max(slow, key=lambda row: row.milliseconds)
    return [
        f"{share:.0%} of the time is in products that are too small for this device: {_paths(slow)}. {longest.size} "
        f"(rows×terms×columns) runs at {speeds[longest]:.1%} of the speed of a large product."
    ]


def _is_small(row: ProfileRow) -> bool:
    sizes = [int(size) for size in row.size.split("×") if size]
    return bool(sizes) and min(sizes) < _SMALL


def _relative_speed(row: ProfileRow, ceilings: Ceilings) -> float | None:
    """Return the FLOP/s of a product relative to a large product of its dtype; None if that is unknown."""
    return ceilings.share(row.milliseconds, row.dtype, row.flops, moved=None)


_ADVICE = {
    kinds.CAST: "audit shows casts that repeat or undo each other",
    kinds.MOVE: "they only change layouts; keep the axes of activations in one order",
    kinds.COLLECTIVE: "collectives shows what the devices send each other",
    kinds.UPDATE: "it moves the params and their moments, whatever the precision of the products",
    kinds.OTHER: "these are kernels of libraries, sorts and random numbers",
}
"""What a reader can do about a kind of work that takes a notable share of the time."""


def _on_other_kinds(measured: Measured) -> list[str]:
    lines = []
    for kind, advice in _ADVICE.items():
        share = _share(measured, kind)
        if share >= _NOTABLE:
            lines.append(f"{share:.0%} of the time is in {kind}: {advice}.")
    return lines


def _on_power(measured: Measured) -> list[str]:
    power = measured.power
    if power is None:
        return []
    lines = []
    for reason, share in power.throttled.items():
        if share >= _NOTABLE:
            limit = f"power limit of {power.power_limit:.0f} W" if reason == "power limit" else reason
            lines.append(
                f"The {limit} lowers the clocks {share:.0%} of the time, to {power.sm_clock:.0f} of "
                f"{power.max_sm_clock:.0f} MHz on average."
            )
    return lines


def _paths(rows: Sequence[ProfileRow]) -> str:
    """Return the paths of rows, those with the most time first, with one path for equal layers."""
    times: dict[str, float] = {}
    groups = tables.grouped(rows, lambda row: tables.without_numbers(row.path))
    for group in groups:
        path = tables.common_path([row.path for row in group]) or "no named scope"
        times[path] = sum(row.milliseconds for row in group)
    paths = sorted(times, key=lambda path: -times[path])
    rest = len(paths) - _NAMED
    return ", ".join(paths[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
