"""The data that a compiled program moves between devices: kind, dtype, axis of the mesh, bytes."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxmp.base import tables
from jaxmp.inspect.compiled import hlo
from jaxmp.sharding.plan import Sharding as Sharding
from jaxmp.sharding.specs import (
    names_of,
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """Equal operations that move data between devices.

    Attributes:
      kind: that of XLA: ``"all-gather"``, ``"all-reduce"``, ``"reduce-scatter"``, ``"all-to-all"``, …
      dtype: what crosses the wire.
      axis: the axes of the mesh that it goes over, ``+`` between; the number of devices where there is no mesh.
      count: how often a call runs it, turns of loops counted.
      bytes: of the whole array, once: what is gathered, or what each device has of a sum before it is reduced.
      wire: bytes that one device sends for all of them, by a ring: (n - 1)/n of the whole, of an all-reduce twice that.
      path: the names of modules and scopes that they come from, ``/`` between.
      source: the user's file and line; empty where the program does not say.
      arrays: the bytes of each array, where one operation moves several.
    """

    kind: str
    dtype: str
    axis: str
    count: int
    bytes: int
    wire: float
    path: str
    source: str
    arrays: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Collectives(tables.Shown):
    """What a compiled program moves between devices; ``rows``, those that move most first. ``str()`` is a table."""

    rows: tuple[Collective, ...]

    @property
    def wire(self) -> float:
        """Bytes that one device sends in a call."""
        return sum(row.wire for row in self.rows)

    def bytes_per_param(self, params: Any) -> float:
        """``wire`` over how many numbers the params are, a tree of arrays or shapes.

        With all weights gathered in half for the forward and for the backward pass and gradients reduced in float32,
        n devices send 8 (n - 1)/n bytes a param: 7 of 8.
        """
        return self.wire / sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))

    @property
    def totals(self) -> dict[tuple[str, str, str], float]:
        """``wire`` by kind, dtype and axis, the most first."""
        totals: dict[tuple[str, str, str], float] = {}
        for row in self.rows:
            key = row.kind, row.dtype, row.axis
            totals[key] = totals.get(key, 0.0) + row.wire
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def _shown(self) -> Any:
        cells = [
            (round(row.wire), row.count, row.bytes, row.kind, row.dtype, row.axis, row.path, row.source)
            for row in self.rows
        ]
        columns = ("sent", "count", "whole", "kind", "dtype", "axis", "path", "source")
        return f"{self.wire:,.0f} bytes sent by a device", columns, cells, ()


def ideal_wire(params: Any, axes: Iterable[str] = ("fsdp",)) -> float:
    """Bytes that one device sends at least in a training step that keeps no gathered weight from pass to pass.

    Each weight is gathered in 16 bits for the forward and for the backward pass, and its gradient reduced in float32:
    8 (n - 1)/n bytes a param over n devices.

    Args:
      params: a tree of arrays or shapes, each with a ``NamedSharding``.
      axes: of the mesh, over which the batch is split.

    >>> mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
    >>> ideal_wire(jax.ShapeDtypeStruct((8, 4), "float32", sharding=jax.NamedSharding(mesh, jax.P("fsdp"))))
    224.0
    """
    axes, total = set(axes), 0.0
    for leaf in jax.tree.leaves(params):
        mesh, names = leaf.sharding.mesh, set(names_of(leaf.sharding.spec))
        parts, copies, others = (
            math.prod(mesh.shape[name] for name in own) for own in (names & axes, axes - names, names - axes)
        )
        total += 8 * math.prod(leaf.shape) / others * ((parts - 1) / parts + (copies - 1) / copies / parts)
    return total


def collectives(compiled: jax.stages.Compiled, program: hlo.HloProgram | None = None) -> Collectives:
    """What a compiled program moves between devices, by kind, dtype, axis of the mesh, size and place.

    On a CPU XLA widens half collectives to float32, so for their dtypes compile for a GPU, which need not be there.

    Args:
      compiled: ``jax.jit(fun).lower(*args).compile()``, the arguments on a mesh.
      program: its text, where that is read already.

    >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    >>> x = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, jax.P("fsdp")))
    >>> moved = collectives(jax.jit(jnp.sum).lower(x).compile())
    >>> [(row.kind, row.dtype, row.axis, row.bytes) for row in moved.rows]
    [('all-reduce', 'float32', 'fsdp', 4)]
    """
    mesh = next((s.mesh for s in jax.tree.leaves(compiled.input_shardings) if isinstance(s, NamedSharding)), None)
    program = program or hlo.HloProgram(str(compiled.as_text()))
    counts: collections.Counter[Any] = collections.Counter()
    for computation, instruction, times in program.walk(repeat_loops=True):
        kind = instruction.opcode.removesuffix("-start")
        if kind not in hlo.COLLECTIVES:
            continue
        groups = _groups(instruction.text) or [list(range(program.partitions))]
        axis, n = _axis_of(groups, mesh), len(groups[0])
        sizes: dict[str, list[int]] = {}
        known = program.computations[computation]
        for name in instruction.operands:
            for array in program.joined(computation, known[name]) if name in known else ():
                whole = int(array.bytes) * (n if kind == "all-gather" else 1)
                sizes.setdefault(hlo.dtype_name(array.dtype), []).append(whole)
        for dtype, arrays in sizes.items():
            counts[kind, dtype, axis, n, tuple(sorted(arrays)), instruction.path, program.source(instruction)] += times
    rows = (
        Collective(kind, dtype, axis, count, sum(arrays), count * sum(arrays) * _sent(kind, n), path, source, arrays)
        for (kind, dtype, axis, n, arrays, path, source), count in counts.items()
    )
    return Collectives(tuple(sorted(rows, key=lambda row: (-row.wire, row.kind, row.dtype, row.axis))))


def _sent(kind: str, n: int) -> float:
    """What one of ``n`` devices sends, by a ring, in parts of the whole."""
    return float(n > 1) if kind == "collective-permute" else (1 + (kind == "all-reduce")) * (n - 1) / n


_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\[([\d,]*)\])? ?\{([^}]*)\}")
_PART = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


def _groups(text: str) -> list[list[int]]:
    """The groups of devices that exchange data, by their numbers in the program; none if all do.

    Raises:
      ValueError: they are written in a notation that is not known here.
    """
    if listed := _LISTED.search(text):
        return [[int(each) for each in group.split(",") if each] for group in re.findall(r"\{([\d, ]*)\}", listed[1])]
    if counted := _COUNTED.search(text):
        shape, order = ([int(each) for each in counted[n].split(",")] for n in (1, 2))
        devices = np.arange(math.prod(order)).reshape(order)
        if counted[3]:
            devices = devices.transpose([int(each) for each in counted[3].split(",")])
        return devices.reshape(shape).tolist()
    if named := _NAMED.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        number = np.array([int(n) for n in named[2].split(",")]) if named[2] else np.arange(math.prod(sizes.values()))
        # An axis of which a part takes part, 'x':(2)4, is cut in three: what is before it, itself, what is after it.
        parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _PART.findall(named[3])}
        cut = [(*parts[n], size // math.prod(parts[n])) if n in parts else (size, 1, 1) for n, size in sizes.items()]
        own = range(1, 3 * len(sizes), 3)
        devices = number.reshape([size for each in cut for size in each])
        devices = devices.transpose([n for n in range(devices.ndim) if n not in own] + list(own))
        return devices.reshape(-1, math.prod(size for _, size in parts.values())).tolist()
    if written := re.search(r"(?:replica_groups|source_target_pairs)=(?!\{\})[^ ]*[^ ,]", text):
        raise ValueError(
            "groups of devices must be in one of XLA's notations {{0,1},…}, [2,4]<=[8] or mesh['x'=8], got "
            f"{written[0]}; take a JAX that jaxmp is tested with (jaxmp doctor)"
        )
    return []


def _axis_of(groups: list[list[int]], mesh: Any) -> str:
    """The fewest axes of the mesh along which the groups lie."""
    shape = dict(mesh.shape) if mesh is not None else {}
    devices = np.arange(math.prod(shape.values())).reshape(tuple(shape.values()))
    for length in range(1, len(shape) + 1):
        for names in itertools.combinations(shape, length):
            along = [list(shape).index(name) for name in names]
            rest = [n for n in range(len(shape)) if n not in along]
            lines = devices.transpose([*rest, *along]).reshape(-1, math.prod(shape[name] for name in names))
            line_of = {int(device): n for n, line in enumerate(lines) for device in line}
            if all(len({line_of.get(device) for device in group}) == 1 for group in groups):
                return "+".join(names)
    return f"{len(groups[0])} devices"
