"""What fills the memory while a program of XLA runs, and which code made it."""

from __future__ import annotations

import dataclasses
import re

from jaxmp.inspect.compiled.hlo import CONTROL, Array, Instruction, Program, is_end

_ALIASES = frozenset({"bitcast", "get-tuple-element", "tuple", "while", "optimization-barrier"})
_INDEX = re.compile(r"index=(\d+)")
_BODY = re.compile(r"body=%?([\w.$-]+)")


@dataclasses.dataclass
class Buffer:
    """A result, or one array of a tuple, that lives from one instruction to another.

    Attributes:
      bytes: its size.
      array: its dtype and shape.
      made_by: what JAX calls the operation, with its modules.
      maker: the instruction that computes it; a loop, if its turns write into the buffer.
      last: the last one that reads it, or itself.
      start, end: the first and the last instruction of the schedule during which it is there.
    """

    bytes: float
    array: Array
    made_by: str
    maker: Instruction
    last: Instruction
    start: int
    end: int


def peak(program: Program, computation: str = "") -> list[Buffer]:
    """The buffers that are there at the moment when they are the most bytes, largest first.

    ``program`` is a scheduled one, as XLA compiles for GPUs; ``computation`` is where to look, its entry by default.
    Parameters, what is written into them, and constants are not counted. An elementwise kernel writes into an operand
    that nobody reads afterwards. XLA packs the buffers by rules of its own, so that this is an estimate.
    """
    instructions = list(program.computations[computation or program.entry].values())
    held: dict[str, list[Buffer | None]] = {}  # the buffers of each result; None is a parameter's or a constant's
    buffers: list[Buffer] = []
    inner: dict[int, list[Buffer]] = {}
    for position, each in enumerate(instructions):
        read = [buffer for name in each.operands for buffer in held.get(name, [])]
        for buffer in read:
            if buffer is not None:
                buffer.end, buffer.last = position, each
        if each.opcode == "get-tuple-element" and (index := _INDEX.search(each.text)):
            held[each.name] = read[int(index[1]) : int(index[1]) + 1]
        elif each.opcode in _ALIASES or is_end(each.opcode):
            held[each.name] = list(read)
        else:
            made = program.made_by(each).op_name or each.name
            own = [Buffer(array.bytes, array, made, each, each, position, position) for array in each.arrays]
            given = each.opcode in ("parameter", "constant")
            held[each.name] = [None] * len(own) if given else [*own]
            buffers += [] if given else own
        if each.opcode == "while":
            made = program.made_by(each).op_name or each.name
            for number, buffer in enumerate(held[each.name]):
                if buffer is not None and _is_written(program, each, number):
                    buffer.maker, buffer.made_by = each, made
        if each.opcode in CONTROL:
            within = [peak(program, name) for name in program.bodies(each)]
            inner[position] = max(within, key=_total, default=[])
    for buffer in held[instructions[-1].name] if instructions else []:
        if buffer is not None and buffer.end == len(instructions) - 1:
            buffer.end = buffer.start - 1  # written into a donated parameter
    _share(program, computation or program.entry, held, buffers)
    moments = [[*inner.get(moment, [])] for moment in range(len(instructions))]
    for buffer in buffers:
        for moment in range(buffer.start, buffer.end + 1):
            moments[moment].append(buffer)
    largest = max(moments, key=_total, default=[])
    return sorted((each for each in largest if each.bytes), key=lambda buffer: buffer.bytes, reverse=True)


def _is_written(program: Program, loop: Instruction, number: int) -> bool:
    """Return whether the turns of a loop change an element of its carry."""
    found = _BODY.search(loop.text)
    body = program.computations[found[1]] if found else {}
    (*_, root) = body.values()
    if root.opcode != "tuple":
        return True
    result = body[root.operands[number]]
    while result.opcode in ("bitcast", "copy"):
        result = body[result.operands[0]]
    index = _INDEX.search(result.text)
    is_element = result.opcode == "get-tuple-element" and body[result.operands[0]].opcode == "parameter"
    return not (is_element and index is not None and int(index[1]) == number)


def _share(program: Program, computation: str, held: dict[str, list[Buffer | None]], buffers: list[Buffer]) -> None:
    """Ends each buffer that a loop fusion can write its result into one instruction early.

    XLA does so with what the fusion reads directly: not with one of several results, as a product of cuBLAS has. Into
    what is updated in place, and into what a product adds to, it writes in any case.
    """
    instructions = list(program.computations[computation].values())
    places = {each.name: position for position, each in enumerate(instructions)}
    made_at: dict[int, list[Buffer]] = {}
    for buffer in buffers:
        made_at.setdefault(buffer.start, []).append(buffer)
    for position, each in enumerate(instructions):
        for operand, _ in program.written_into(computation, each).values():
            for old in held.get(each.operands[operand], []):
                if old is not None and old.end == position:
                    old.end = position - 1
        if each.opcode != "fusion" or "kind=kLoop" not in each.text:
            continue
        own = [
            buffer for name in each.operands for buffer in held.get(name, []) if buffer and buffer.start == places[name]
        ]
        free = [buffer for buffer in own if buffer.end == position]
        for made in made_at.get(position, []):
            if match := next((buffer for buffer in free if buffer.bytes == made.bytes), None):
                free.remove(match)
                match.end = position - 1


def _total(buffers: list[Buffer]) -> float:
    return sum(buffer.bytes for buffer in buffers)
