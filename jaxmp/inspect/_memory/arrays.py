"""List the arrays in memory at the peak of a compiled program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxmp.base.trees import path_name
from jaxmp.inspect.compiled import memory_of_hlo
from jaxmp.inspect.compiled.hlo import Array, HloProgram, dtype_name
from jaxmp.inspect.program.argument_kinds import Leaf


@dataclass(frozen=True)
class ArrayInMemory:
    """An array that is in memory at the peak.

    Attributes:
      bytes: the number of bytes on one device.
      dtype: NumPy's name of the dtype.
      shape: the shape on one device.
      kind: one of :data:`jaxmp.inspect._memory.memory.KINDS`.
      path: the path of an argument or a result; for a temporary array, the modules and scopes that compute it, joined
        by ``/``.
      source: the file and line in the user's code that compute a temporary array; empty for an argument or a result.
    """

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    kind: str
    path: str
    source: str


def arguments_in_memory(compiled: Any, program: HloProgram, leaves: Sequence[Leaf]) -> Iterator[ArrayInMemory]:
    """Yield a compiled program's arguments, with the kinds of ``leaves``."""
    shardings = compiled.in_tree.flatten_up_to(compiled.input_shardings)  # None for an unused argument
    used = [(leaf.kind, leaf.path) for leaf, sharding in zip(leaves, shardings, strict=True) if sharding is not None]
    parameters = {}
    for instruction in program.computations[program.entry].values():
        if instruction.opcode == "parameter":
            parameters[instruction.parameter] = instruction
    constants = [("other", "constant")] * (len(parameters) - len(used))  # JAX passes them before the arguments
    for number, (kind, path) in enumerate(constants + used):
        for array in parameters[number].arrays:
            yield _in_memory(array, kind, path)


def results_in_memory(compiled: Any, program: HloProgram) -> Iterator[ArrayInMemory]:
    """Yield the results of a compiled program that are not written into arguments."""
    *_, root = program.computations[program.entry].values()
    paths = [path_name(path) for path, _ in jax.tree.leaves_with_path(compiled.out_info)]
    if len(paths) != len(root.arrays):  # JAX removes results that are unchanged arguments
        paths = ["result"] * len(root.arrays)
    for number, (array, path) in enumerate(zip(root.arrays, paths, strict=True)):
        if number not in program.aliases:
            yield _in_memory(array, "other", path)


def temporaries_in_memory(program: HloProgram, size: int) -> tuple[list[ArrayInMemory], int]:
    """Return the compiler's buffers at the peak, and the bytes without a buffer.

    ``size`` is the number of bytes that the compiler reports for all temporaries.
    """
    arrays = []
    for buffer in memory_of_hlo.buffers_at_peak(program):
        if buffer.bytes <= size:  # the buffers are an estimate and may be slightly too large
            size -= int(buffer.bytes)
            kind = "activations" if _is_activation(program, buffer) else "temporaries"
            made_by = program.made_by(buffer.maker)
            arrays.append(_in_memory(buffer.array, kind, made_by.path, program.source(made_by)))
    return arrays, size


def _in_memory(array: Array, kind: str, path: str, source: str = "") -> ArrayInMemory:
    return ArrayInMemory(int(array.memory_bytes), dtype_name(array.dtype), array.shape, kind, path, source)


def _is_activation(program: HloProgram, buffer: memory_of_hlo.Buffer) -> bool:
    """Return whether a buffer from the forward pass is read after that pass."""
    maker, last_reader = program.made_by(buffer.maker), program.made_by(buffer.last)
    return maker.phase == "forward" and last_reader.phase != "forward"
