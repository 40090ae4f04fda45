"""The data that a compiled program moves between devices."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

import jax

from jaxmp.base import tables
from jaxmp.inspect.compiled import hlo
from jaxmp.inspect.compiled.groups import axis_of, groups_of
from jaxmp.inspect.compiled.kernels import written_into
from jaxmp.inspect.compiled.meshes import mesh_of

_CHANNEL = re.compile(r"channel_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """Equal operations of a program that move arrays between devices.

    Operations are equal if they have the same kind, dtype, axis, arrays, path and source.

    Attributes:
      kind: XLA's kind: ``"all-gather"``, ``"all-reduce"``, ``"reduce-scatter"``, ``"all-to-all"``, …
      dtype: the dtype of the data that is sent.
      axis: the mesh axes over which devices communicate, joined by ``+``. If there is no mesh, or if the devices do not
        lie along mesh axes, it is the number of devices, such as ``"8 devices"``.
      count: the number of executions in one call of the program. A loop of unknown length counts as one iteration.
      bytes: the size of the data that one operation moves. For an all-gather, it is the size of the gathered array; for
        other kinds, it is the size of one device's operand.
      wire: the bytes that one device sends in all executions. In each execution, a device in a ring of n devices sends
        (n - 1)/n of ``bytes``. In an all-reduce, the device sends twice as much, and so it does in a gather that a
        TPU's compiler writes as a sum with zeros. In a collective-permute, it sends all of ``bytes``.
      path: the names of modules and scopes around the operations, joined by ``/``.
      source: the file and line in the user's code; empty if the compiled program does not have them.
      arrays: the bytes of each array that one operation moves; their sum is ``bytes``.
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
    """The collectives of a compiled program.

    Attributes:
      rows: the collectives; those that send the most bytes come first.
    """

    rows: tuple[Collective, ...]

    @property
    def wire(self) -> float:
        """Return the bytes that one device sends in one call."""
        return sum(row.wire for row in self.rows)

    @property
    def totals(self) -> dict[tuple[str, str, str], float]:
        """Return the bytes that one device sends, by kind, dtype and axis, largest first."""
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
        columns = ("sent", "count", "bytes", "kind", "dtype", "axis", "path", "source")
        return f"{self.wire:,.0f} bytes sent by each device", columns, cells, ()


def collectives_of(compiled: jax.stages.Compiled, program: hlo.HloProgram) -> Collectives:
    """Return the collectives of a compiled program, whose HLO is ``program``.

    Equal collectives are counted together. Collectives in half precision (float16 or bfloat16) are shown as float32 if
    the program was compiled for a CPU, because XLA runs them in float32 there.
    """
    mesh = mesh_of(compiled.input_shardings)
    counts: collections.Counter[Any] = collections.Counter()
    chains: set[str] = set()
    for computation, instruction, times in program.instructions_by_run(repeat_loops=True):
        if kind := instruction.collective:
            if (chain := _chain_of(instruction)) in chains:
                continue
            if chain is not None:
                chains.add(chain)
            groups = groups_of(instruction.text) or [list(range(program.partitions))]
            axis, devices = axis_of(groups, mesh), len(groups[0])
            where = instruction.path, program.source(instruction)
            share = _sent_share(kind, devices)
            if kind == "all-reduce" and _is_scattered(program, computation, instruction):
                kind, share = "reduce-scatter", _sent_share("reduce-scatter", devices)
            elif kind == "all-reduce" and _is_gather(program, computation, instruction):
                kind = "all-gather"
            for dtype, arrays in _arrays_by_dtype(program, computation, instruction, devices).items():
                counts[kind, dtype, axis, share, arrays, *where] += times
    rows = []
    for (kind, dtype, axis, share, arrays, path, source), count in counts.items():
        size = sum(arrays)
        wire = count * size * share
        rows.append(Collective(kind, dtype, axis, count, size, wire, path, source, arrays))
    return Collectives(tuple(sorted(rows, key=lambda row: (-row.wire, row.kind, row.dtype, row.axis))))


def _is_scattered(program: hlo.HloProgram, computation: str, all_reduce: hlo.Instruction) -> bool:
    """Return whether each device keeps only its slice of a sum, in the kernel of the sum.

    The compiler for TPUs writes a reduce-scatter in this form.
    """
    instructions = program.computations[computation]
    *_, root = instructions.values()
    while root.opcode in ("bitcast", "copy") and root.operands[0] in instructions:
        root = instructions[root.operands[0]]
    return root.opcode == "dynamic-slice" and root.operands[0] == all_reduce.name


def _is_gather(program: hlo.HloProgram, computation: str, all_reduce: hlo.Instruction) -> bool:
    """Return whether a sum joins the parts of all devices, because each device has zeros elsewhere.

    The compiler for TPUs writes some gathers in this form, in which a device sends twice as much as in a ring.
    """
    known = program.computations[computation]
    return all(name in known and _fills_zeros(program, computation, known[name]) for name in all_reduce.operands)


def _fills_zeros(program: hlo.HloProgram, computation: str, instruction: hlo.Instruction) -> bool:
    """Return whether an instruction writes a part into an array of zeros."""
    known = program.computations[computation]
    written = written_into(program, computation, instruction)
    if list(written) != [0]:
        return False
    operand, _ = written[0]
    target = known.get(instruction.operands[operand])
    filling = known.get(target.operands[0]) if target is not None and target.opcode == "broadcast" else None
    return filling is not None and re.search(r"constant\(-?0\)", filling.text) is not None


def _chain_of(instruction: hlo.Instruction) -> str | None:
    """Return the channel of a collective that was split into a chain; None for other instructions.

    The compiler for TPUs runs such a collective piece by piece, inside of the kernels beside it. Each of these kernels
    contains the whole instruction, but the data is sent once.
    """
    match = _CHANNEL.search(instruction.text)
    return match[1] if match and "chain_id=" in instruction.text else None


def _arrays_by_dtype(
    program: hlo.HloProgram, computation: str, instruction: hlo.Instruction, devices: int
) -> dict[str, tuple[int, ...]]:
    """Return the bytes of each array that a collective moves, by dtype."""
    instructions = program.computations[computation]
    sizes: dict[str, list[int]] = {}
    for name in instruction.operands:
        if name in instructions:
            for array in program.joined(computation, instructions[name]):
                parts = devices if instruction.opcode.startswith("all-gather") else 1
                sizes.setdefault(hlo.dtype_name(array.dtype), []).append(int(array.bytes) * parts)
    return {dtype: tuple(sorted(arrays)) for dtype, arrays in sizes.items()}


def _sent_share(kind: str, devices: int) -> float:
    """Return the bytes that each device sends, divided by the bytes of the array."""
    if kind == "collective-permute":
        return float(devices > 1)
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (devices - 1) / devices
