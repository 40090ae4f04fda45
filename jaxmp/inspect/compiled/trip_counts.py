"""Find the number of iterations of a loop in an XLA program.

The compilers for CPUs and GPUs write the number next to the loop. The compiler for TPUs does not, so the number is read
from the loop itself: from the first value of its counter, the step, and the limit in its condition.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol


class _Instruction(Protocol):
    """The attributes of :class:`jaxmp.inspect.compiled.hlo.Instruction` that this module reads."""

    @property
    def opcode(self) -> str: ...
    @property
    def operands(self) -> Sequence[str]: ...
    @property
    def text(self) -> str: ...
    @property
    def index(self) -> int | None: ...
    @property
    def known_trips(self) -> int | None: ...


Computations = Mapping[str, Mapping[str, _Instruction]]

_CONDITION = re.compile(r"condition=%?([\w.$-]+)")
_BODY = re.compile(r"body=%?([\w.$-]+)")
_INTEGER = re.compile(r"constant\((-?\d+)\)")
_COPIES = frozenset({"copy", "copy-start", "copy-done", "bitcast"})


def trip_count(computations: Computations, computation: str, loop: _Instruction) -> int | None:
    """Return the number of iterations of a loop in ``computation``; None if it is unknown."""
    if loop.known_trips is not None:
        return loop.known_trips
    condition_name, body_name = _CONDITION.search(loop.text), _BODY.search(loop.text)
    if condition_name is None or body_name is None:
        return None
    condition, body = computations[condition_name[1]], computations[body_name[1]]
    carry = _behind_copies(computations[computation], loop.operands[0])
    comparison = _root(condition)
    if carry is None or carry.opcode != "tuple" or comparison is None or "direction=LT" not in comparison.text:
        return None

    counter = _element(condition, comparison.operands[0])
    step = None if counter is None else _step(body, counter)
    if counter is None or step is None or step <= 0:
        return None
    start = _integer(computations[computation], carry.operands[counter])
    limit = _integer(condition, comparison.operands[1])
    limit_element = _element(condition, comparison.operands[1])
    if limit is None and limit_element is not None and _is_unchanged(body, limit_element):
        limit = _integer(computations[computation], carry.operands[limit_element])
    if start is None or limit is None:
        return None
    return max(-(-(limit - start) // step), 0)


def _step(body: Mapping[str, _Instruction], counter: int) -> int | None:
    """Return the constant that each iteration adds to an element of the carry; None if it adds none."""
    root = _root(body)
    if root is None or root.opcode != "tuple":
        return None
    addition = _behind_copies(body, root.operands[counter])
    if addition is None or addition.opcode != "add":
        return None
    left, right = addition.operands
    if _element(body, left) == counter:
        return _integer(body, right)
    return _integer(body, left) if _element(body, right) == counter else None


def _is_unchanged(body: Mapping[str, _Instruction], element: int) -> bool:
    root = _root(body)
    return root is not None and root.opcode == "tuple" and _element(body, root.operands[element]) == element


def _root(instructions: Mapping[str, _Instruction]) -> _Instruction | None:
    """Return the last instruction behind copies, which computes the result."""
    return _behind_copies(instructions, list(instructions)[-1]) if instructions else None


def _element(instructions: Mapping[str, _Instruction], name: str) -> int | None:
    """Return the number of the carry's element that an instruction reads; None for other instructions."""
    read = _behind_copies(instructions, name)
    if read is None or read.opcode != "get-tuple-element":
        return None
    carry = instructions.get(read.operands[0])
    return read.index if carry is not None and carry.opcode == "parameter" else None


def _integer(instructions: Mapping[str, _Instruction], name: str) -> int | None:
    """Return the value of an integer constant; None for other instructions."""
    constant = _behind_copies(instructions, name)
    match = _INTEGER.search(constant.text) if constant is not None and constant.opcode == "constant" else None
    return int(match[1]) if match else None


def _behind_copies(instructions: Mapping[str, _Instruction], name: str) -> _Instruction | None:
    instruction = instructions.get(name)
    while instruction is not None and instruction.opcode in _COPIES:
        instruction = instructions.get(instruction.operands[0])
    return instruction
