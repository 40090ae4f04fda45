"""Reading XLA's programs: products by dtype, casts, kernels, and the bytes that all else moves."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

_DTYPES = {
    0.25: "s2 u2",
    0.5: "s4 u4 f4e2m1fn",
    1: "pred s8 u8 f8e5m2 f8e4m3 f8e4m3fn f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz f8e3m4 f8e8m0fnu",
    2: "f16 bf16 s16 u16",
    4: "f32 s32 u32",
    8: "f64 s64 u64 c64",
    16: "c128",
}
_BYTES = {name: size for size, names in _DTYPES.items() for name in names.split()}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.$-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.$-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
ARRAY = re.compile(r"\b([a-z]+\d+[a-z\d]*|pred)\[([\d,]*)\]")
_NOT_NAMES = re.compile(r"/\*.*?\*/|" + ARRAY.pattern)
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.$-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_OPERAND = re.compile(r"%?([A-Za-z_][\w.$-]*)")
_PRODUCTS = {"dot": "dot", "convolution": "convolution"}
_KERNELS = {"__cublas": "dot", "__cudnn$conv": "convolution", "__cudnn$fmha": "attention"}
_NO_WORK = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all"})
_NO_WORK |= {"while", "conditional", "call"}  # their bodies work
_NO_KERNEL = _NO_WORK | {"optimization-barrier", "partition-id", "replica-id"}
_LAYOUT = frozenset({"copy", "transpose"})
_PICKS = frozenset({"slice", "dynamic-slice", "gather"})
_NUMBER = re.compile(r"parameter\((\d+)\)")
CONTROL = frozenset({"while", "conditional", "call"})
_CONDITION = re.compile(r"condition=%?[\w.$-]+,? ?")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program; ``bytes`` are of its result, ``operands`` the names of what it reads."""

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    text: str

    @property
    def bytes(self) -> float:
        """The size of its result."""
        return size(self.result)


def size(shape: str) -> float:
    """Bytes of an array, or of all arrays of a tuple, in XLA's notation.

    Raises:
      KeyError: a dtype that is not known here.

    >>> size("bf16[2,3]{1,0}"), size("(f8e4m3fn[8], pred[], u32[2])")
    (12, 17)
    """
    arrays = ARRAY.findall(shape)
    return sum(_BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in arrays)


class Program:
    """A program of XLA, from the text of its HLO, optimised or as it was lowered.

    Attributes:
      computations: name to instructions.
      entry: the name of the first one to run.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry, current = "", None
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header[2], {})
                self.entry = header[2] if header[1] else self.entry
            elif current is not None and (found := _INSTRUCTION.match(line)):
                name, result, opcode, rest = found.groups()
                operands = tuple(_OPERAND.findall(_NOT_NAMES.sub("", _arguments(rest)))) if opcode != "constant" else ()
                current[name] = Instruction(name, opcode, result, operands, line)

    def bodies(self, instruction: Instruction) -> list[str]:
        """The computations that an instruction calls, without the condition of a loop whose repetitions are known."""
        text = _CONDITION.sub("", instruction.text) if _TRIPS.search(instruction.text) else instruction.text
        branches = [name for found in _BRANCHES.findall(text) for name in _OPERAND.findall(found)]
        return [*_CALLED.findall(text), *branches]

    def walk(self, into_fusions: bool = True, repeat_loops: bool = False) -> Iterator[tuple[str, Instruction, int]]:
        """Each instruction with its computation and how often it runs.

        A loop's body counts once unless repeated. Without ``into_fusions`` these are the kernels: what a fusion or a
        reduction is made of is left out.
        """
        stack = [(self.entry, 1)]
        while stack:
            name, times = stack.pop()
            for instruction in self.computations.get(name, {}).values():
                yield name, instruction, times
                if not into_fusions and instruction.opcode not in CONTROL:
                    continue
                trips = _TRIPS.search(instruction.text) if repeat_loops else None
                inner = self.bodies(instruction)
                stack += [(each, times * (int(trips[1]) if trips else 1)) for each in inner]

    def dtypes(self, computation: str, instruction: Instruction) -> tuple[str, ...]:
        """The dtypes of an instruction's operands."""
        known = self.computations[computation]
        arrays = [ARRAY.search(known[name].result) for name in instruction.operands if name in known]
        return tuple(array[1] for array in arrays if array)

    def products(self) -> collections.Counter[str]:
        """How many matrix products, convolutions and fused attentions there are, as in ``"dot bf16×bf16"``."""
        counts: collections.Counter[str] = collections.Counter()
        for computation, instruction, times in self.walk():
            if kind := _product(instruction):
                counts[f"{kind} {'×'.join(self.dtypes(computation, instruction)[:2])}"] += times
        return counts

    def converts(self) -> collections.Counter[str]:
        """How many casts between floating dtypes there are, as in ``"f32→bf16"``."""
        counts: collections.Counter[str] = collections.Counter()
        for computation, instruction, times in self.walk():
            if instruction.opcode == "convert" and (cast := self._cast(computation, instruction)):
                counts[cast] += times
        return counts

    def round_trips(self) -> int:
        """How many casts undo the cast before them: float32 to half and back, or half to float32 and back."""
        count = 0
        for computation, instruction, times in self.walk():
            if instruction.opcode == "convert" and (cast := self._cast(computation, instruction)):
                before = self.computations[computation].get(instruction.operands[0])
                if before is not None and before.opcode == "convert":
                    old, new = cast.split("→")
                    count += times * (self._cast(computation, before) == f"{new}→{old}")
        return count

    def launches(self) -> int:
        """How many kernels a run launches: fusions, products, copies and the like, a loop's as often as it repeats.

        A call of a library is one, however many kernels the library makes of it.
        """
        kernels = self.walk(into_fusions=False, repeat_loops=True)
        return sum(times for _, each, times in kernels if each.opcode not in _NO_KERNEL and not is_end(each.opcode))

    def attention_flops(self) -> dict[str, int]:
        """FLOPs of cuDNN's fused attentions by dtype: two products forward, five backward, masks ignored."""
        flops: collections.Counter[str] = collections.Counter()
        for computation, instruction, times in self.walk(repeat_loops=True):
            if _product(instruction) != "attention":
                continue
            known = self.computations[computation]
            shapes = [ARRAY.search(known[name].result) for name in instruction.operands[:2]]
            query, key = (tuple(int(n) for n in shape[2].split(",")) for shape in shapes if shape)
            backward = "Backward" in instruction.text.split("custom_call_target=")[1].split(",")[0]
            # Both are (batch, tokens, heads, width): XLA's own order, whatever the layout is.
            products = (5 if backward else 2) * 2 * math.prod(query) * key[1]
            flops[self.dtypes(computation, instruction)[0]] += times * products
        return dict(flops)

    def _moved(self, computation: str, instruction: Instruction) -> float:
        """Bytes that a kernel reads and writes; of an operand that it only picks from, what it picks."""
        known = self.computations[computation]
        read = {name: known[name].bytes for name in instruction.operands if name in known}
        bodies = self.bodies(instruction) if instruction.opcode.startswith("fusion") else []
        inside = [each for name in bodies for each in self.computations.get(name, {}).values()]
        for parameter in (each for each in inside if each.opcode == "parameter"):
            number = _NUMBER.search(parameter.text)
            name = instruction.operands[int(number[1])] if number else ""
            users = [each for each in inside if parameter.name in each.operands]
            if name in read and all(each.opcode in _PICKS and each.operands[0] == parameter.name for each in users):
                read[name] = min(read[name], sum(each.bytes for each in users))
        return sum(read.values()) + (inside[-1] if inside else instruction).bytes

    def _is_product(self, instruction: Instruction) -> bool:
        """Whether it is a product, or a library's product that a fusion hands a slice to."""
        inner = self.bodies(instruction) if instruction.opcode == "fusion" else []
        calls = [each for name in inner for each in self.computations.get(name, {}).values()]
        return bool(_product(instruction)) or any(each.opcode == "custom-call" and _product(each) for each in calls)

    def _cast(self, computation: str, instruction: Instruction) -> str | None:
        (old, *_), new = self.dtypes(computation, instruction) or ("",), ARRAY.search(instruction.result)
        floating = new is not None and "f" in old and "f" in new[1]
        return f"{old}→{new[1]}" if floating and new is not None else None

    def traffic(self) -> tuple[float, float]:
        """Bytes that kernels other than products move, read plus written, and those of them that change a layout."""
        total = layout = 0.0
        for computation, instruction, times in self.walk(into_fusions=False, repeat_loops=True):
            if instruction.opcode in _NO_WORK or is_end(instruction.opcode) or self._is_product(instruction):
                continue
            moved = times * self._moved(computation, instruction)
            total += moved
            layout += moved * (instruction.opcode in _LAYOUT or "wrapped_transpose" in instruction.text[:80])
        return total, layout


def is_end(opcode: str) -> bool:
    """Whether it only waits for what was started before."""
    return opcode.endswith("-done") or opcode == "async-update"


def _product(instruction: Instruction) -> str | None:
    if instruction.opcode != "custom-call":
        return _PRODUCTS.get(instruction.opcode)
    target = re.search(r'custom_call_target="([^"]*)"', instruction.text)
    return next((kind for start, kind in _KERNELS.items() if target and target[1].startswith(start)), None)


def _arguments(rest: str) -> str:
    """What stands before the parenthesis that closes an instruction's operands."""
    depth = 1
    for position, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:position]
    return rest
