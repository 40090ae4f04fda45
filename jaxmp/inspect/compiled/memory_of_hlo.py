"""Find the buffers at the memory peak of an XLA program."""

from __future__ import annotations

import dataclasses
import re

from jaxmp.inspect.compiled.hlo import CONTROL, Array, HloProgram, Instruction, is_end
from jaxmp.inspect.compiled.kernels import copied_array, written_into

_ALIASES = frozenset({"bitcast", "get-tuple-element", "tuple", "while", "optimization-barrier"})
_BODY = re.compile(r"body=%?([\w.$-]+)")


@dataclasses.dataclass
class Buffer:
    """The memory of an array: an instruction's result, or one element of a tuple.

    Attributes:
      bytes: the size of the buffer.
      array: the dtype and shape of the array in the buffer.
      maker: the instruction that computes the array, or the loop that writes into the buffer.
      last: the last instruction that reads the array, or the maker if nothing reads it.
      start, end: the first and last position in the schedule at which the buffer exists.
    """

    bytes: float
    array: Array
    maker: Instruction
    last: Instruction
    start: int
    end: int


_Results = dict[str, list[Buffer | None]]
"""The buffers of each result, by the instruction's name; None for a parameter or a constant."""


def buffers_at_peak(program: HloProgram, computation: str = "") -> list[Buffer]:
    """Return the buffers at the memory peak, largest first.

    The result is an estimate, because XLA packs buffers by its own rules. Parameters, results that are written into
    parameters, and constants are not counted. An elementwise kernel is assumed to reuse the buffer of an operand that
    nothing reads later.

    Args:
      program: a scheduled program, as XLA compiles for GPUs.
      computation: the name of the computation; by default, the entry of the program.
    """
    computation = computation or program.entry
    instructions = list(program.computations[computation].values())
    results: _Results = {}
    buffers: list[Buffer] = []
    inner_peaks: dict[int, list[Buffer]] = {}
    for position, instruction in enumerate(instructions):
        buffers += _add_buffers(program, instruction, position, results)
        if instruction.opcode in CONTROL:
            peaks = [buffers_at_peak(program, name) for name in program.bodies(instruction)]
            inner_peaks[position] = max(peaks, key=_total, default=[])
    for buffer in results[instructions[-1].name] if instructions else []:
        if buffer is not None and buffer.end == len(instructions) - 1:
            buffer.end = buffer.start - 1  # written into a donated parameter
    _reuse_buffers(program, computation, results)
    moments = [list(inner_peaks.get(position, [])) for position in range(len(instructions))]
    for buffer in buffers:
        for position in range(buffer.start, buffer.end + 1):
            moments[position].append(buffer)
    largest = max(moments, key=_total, default=[])
    return sorted((buffer for buffer in largest if buffer.bytes), key=_bytes_of, reverse=True)


def _add_buffers(program: HloProgram, instruction: Instruction, position: int, results: _Results) -> list[Buffer]:
    """Add the buffers of an instruction to ``results``, and return the new buffers."""
    read = [buffer for name in instruction.operands for buffer in results.get(name, [])]
    for buffer in read:
        if buffer is not None:
            buffer.end, buffer.last = position, instruction
    name, opcode = instruction.name, instruction.opcode
    index = instruction.index
    if opcode == "get-tuple-element" and index is not None:
        results[name] = read[index : index + 1]
        return []
    if opcode in _ALIASES or is_end(opcode):
        results[name] = list(read)
        if opcode == "while":
            for number, buffer in enumerate(read):
                if buffer is not None and _is_written(program, instruction, number):
                    buffer.maker = instruction
        return []
    arrays = instruction.arrays
    if opcode in ("parameter", "constant"):
        results[name] = [None] * len(arrays)
        return []
    if (copy := copied_array(instruction)) is not None:
        arrays = [copy]
    new = [Buffer(array.memory_bytes, array, instruction, instruction, position, position) for array in arrays]
    results[name] = [*new]
    return new


def _is_written(program: HloProgram, loop: Instruction, number: int) -> bool:
    """Return whether the iterations of a loop change element ``number`` of its carry."""
    match = _BODY.search(loop.text)
    body = program.computations[match[1]] if match else {}
    (*_, root) = body.values()
    if root.opcode != "tuple" or number >= len(root.operands):  # the arrays of a nested tuple count as written
        return True
    result = body[root.operands[number]]
    while result.opcode in ("bitcast", "copy"):
        result = body[result.operands[0]]
    is_element = result.opcode == "get-tuple-element" and body[result.operands[0]].opcode == "parameter"
    return not (is_element and result.index == number)


def _reuse_buffers(program: HloProgram, computation: str, results: _Results) -> None:
    """End buffers one instruction early if a kernel reuses them for its result.

    A kernel that updates an operand in place, or a product that adds to an operand, always reuses the buffer of this
    operand. A loop fusion is an elementwise kernel. It reuses a buffer of the same size as its result, but only if the
    instruction that creates the buffer is an operand of the fusion. The buffers of tuple elements are not reused, such
    as the result of a cuBLAS product.
    """
    positions = {name: position for position, name in enumerate(program.computations[computation])}
    for instruction in program.computations[computation].values():
        position = positions[instruction.name]
        for operand, _ in written_into(program, computation, instruction).values():
            for buffer in results.get(instruction.operands[operand], []):
                if buffer is not None and buffer.end == position:
                    buffer.end = position - 1
        if instruction.opcode != "fusion" or "kind=kLoop" not in instruction.text:
            continue
        new_sizes = [buffer.bytes for buffer in results[instruction.name] if buffer is not None]
        for name in instruction.operands:
            for buffer in results.get(name, []):
                if buffer is None or buffer.start != positions[name] or buffer.end != position:
                    continue
                if buffer.bytes in new_sizes:
                    new_sizes.remove(buffer.bytes)
                    buffer.end = position - 1


def _bytes_of(buffer: Buffer) -> float:
    return buffer.bytes


def _total(buffers: list[Buffer]) -> float:
    return sum(buffer.bytes for buffer in buffers)
