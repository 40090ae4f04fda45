"""Read XLA programs: their instructions, modules and source lines.

HLO is the language of XLA's programs. A computation is a function in HLO, such as the body of a loop or of a fusion.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from jaxmp._internals.jax.sources import source_among
from jaxmp.inspect.compiled.trip_counts import trip_count
from jaxmp.program.scopes import RECOMPUTED

_COLLECTIVES = frozenset({"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all"})
_COLLECTIVES |= {"collective-permute", "collective-broadcast"}
CONTROL = frozenset({"while", "conditional", "call"})
"""Instructions that only run other computations."""
NO_WORK = CONTROL | {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all"}
NO_WORK |= {"optimization-barrier", "partition-id", "replica-id"}
BACKWARD = frozenset({"backward", "recomputed"})
"""The phases of instructions in the backward pass."""
WRITES_INTO = re.compile(r"\{(\d*)\}: \((\d+), \{\}")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.$-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.$-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d+[a-z\d]*|pred)\[([\d,]*)\](\{[\d,]*(?::[^{}]*)?\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_HOST = 5
"""The compiler's number for the memory of the host."""
_NOT_NAMES = re.compile(r"/\*.*?\*/|" + _ARRAY.pattern)
_OPERAND = re.compile(r"%?([A-Za-z_][\w.$-]*)")
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.$-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?[\w.$-]+,? ?")
_SECTION = re.compile(r"^(\w+|\}.*)?$")
"""A line that is empty, names a table of source lines, or ends a computation."""
_FRAME = re.compile(r"^(\d+) (?:\{(.*)\}|\"(.*)\")$")
_FACT = re.compile(r"(\w+)=(\d+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_PARAMETER = re.compile(r"parameter\((\d+)\)")
_INDEX = re.compile(r"index=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRANSFORM = re.compile(r"\b(?:jit|pjit|jvp|transpose|vmap\d*|pmap|shard_map|custom_jvp|custom_vjp)\(")
_JIT = re.compile(r"\bp?jit\([^()]*\)")
_JAX_SCOPES = frozenset({"checkpoint", RECOMPUTED, "remat", "remat2", "while", "body", "cond", "shard_map"})
_JAX_SCOPES |= {"closed_call", "core_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


class Array(NamedTuple):
    """An array in XLA's notation.

    Attributes:
      dtype: XLA's name of the dtype.
      shape: the shape.
      layout: the layout, such as ``"{1,0:T(8,128)}"``; empty if the text has none.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def bytes(self) -> float:
        """Return the size in bytes."""
        return bytes_of_element(self.dtype) * math.prod(self.shape)

    @property
    def memory_bytes(self) -> float:
        """Return the bytes in the device's memory.

        On a TPU, they include the padding to whole tiles, and are 0 for an array in the memory of the core.
        """
        space = _SPACE.search(self.layout)
        is_in_core = _TILE.search(self.layout) and space and int(space[1]) != _HOST
        return 0.0 if is_in_core else bytes_of_element(self.dtype) * math.prod(self._padded_shape())

    def _padded_shape(self) -> list[int]:
        """Return the sizes from the slowest to the fastest axis, padded to whole tiles."""
        tile_text = _TILE.search(self.layout)
        if tile_text is None or not self.shape:
            return [*self.shape]
        order = [int(axis) for axis in self.layout[1:].partition(":")[0].split(",")]
        tile = [int(size) for size in tile_text[1].split(",")]
        sizes = [1] * (len(tile) - len(order)) + [self.shape[axis] for axis in reversed(order)]
        first = len(sizes) - len(tile)
        return sizes[:first] + [-(-size // unit) * unit for size, unit in zip(sizes[first:], tile, strict=True)]


def parse_arrays(shape: str) -> list[Array]:
    """Return an array, or all arrays of a tuple, from XLA's notation.

    >>> [str(array) for array in parse_arrays("(bf16[2,3]{1,0}, pred[])")]
    ['bf16[2,3]', 'pred[]']
    """
    arrays = []
    for dtype, sizes, layout in _ARRAY.findall(shape):
        arrays.append(Array(dtype, tuple(int(size) for size in sizes.split(",") if size), layout))
    return arrays


def bytes_of_element(dtype: str) -> float:
    """Return the size of an element in bytes, for a dtype in XLA's notation.

    >>> bytes_of_element("bf16"), bytes_of_element("f8e4m3fn"), bytes_of_element("s4"), bytes_of_element("pred")
    (2.0, 1.0, 0.5, 1.0)
    """
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 1.0


def dtype_name(dtype: str) -> str:
    """Return NumPy's name of a dtype in XLA's notation.

    >>> dtype_name("bf16"), dtype_name("f8e4m3fn"), dtype_name("s8"), dtype_name("pred")
    ('bfloat16', 'float8_e4m3fn', 'int8', 'bool')
    """
    if dtype == "pred":
        return "bool"
    kind = "bf" if dtype.startswith("bf") else dtype[0]
    size = dtype.removeprefix(kind)
    names = {"s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}
    return names[kind] + re.sub(r"^(\d)(e)", r"\1_\2", size)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program; ``operands`` are names of other instructions."""

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    text: str

    @property
    def bytes(self) -> float:
        """Return the size of the instruction's result in bytes."""
        return sum(array.bytes for array in self.arrays)

    @property
    def memory_bytes(self) -> float:
        """Return the bytes of the result that are in the device's memory."""
        return sum(array.memory_bytes for array in self.arrays)

    @property
    def arrays(self) -> list[Array]:
        """Return the arrays of the result: several for a tuple, else one."""
        return parse_arrays(self.result)

    @property
    def parameter(self) -> int | None:
        """Return the number of a parameter; None for other instructions."""
        return _number_in(self.text, _PARAMETER)

    @property
    def index(self) -> int | None:
        """Return the index of the tuple element to read; None for other instructions."""
        return _number_in(self.text, _INDEX)

    @property
    def known_trips(self) -> int | None:
        """Return the number of iterations that the compiler wrote to a loop; None if it wrote none."""
        return _number_in(self.text, _TRIPS)

    @property
    def estimated_cycles(self) -> int | None:
        """Return the cycles that the compiler for TPUs estimates; None if it estimates none."""
        return _number_in(self.text, _CYCLES)

    @property
    def target(self) -> str:
        """Return the library function of a custom call; empty for other instructions."""
        match = _TARGET.search(self.text)
        return match[1] if match else ""

    @property
    def op_name(self) -> str:
        """Return JAX's name of the operation, with scopes and transformations.

        The name is empty if XLA created the operation.
        """
        match = _OP_NAME.search(self.text)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def path(self) -> str:
        """Return the modules and scopes around the instruction, joined by ``/``."""
        return path_in_name(self.op_name)

    @property
    def phase(self) -> str:
        """Return the phase of a function under ``jax.grad`` in which the instruction runs.

        The phase is ``"forward"``, ``"backward"`` or ``"recomputed"`` (by the backward pass, under ``jax.checkpoint``).
        It is empty outside of the differentiated function.
        """
        name = self.op_name
        if RECOMPUTED in name:
            return "recomputed"
        if "transpose(" in name:
            return "backward"
        return "forward" if "jvp(" in name else ""

    @property
    def collective(self) -> str:
        """Return the kind of a collective, such as ``"all-gather"``; empty for other instructions."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in _COLLECTIVES else ""

    @property
    def is_kernel(self) -> bool:
        """Return whether the instruction launches a kernel."""
        return self.opcode not in NO_WORK and not is_end(self.opcode)


def _number_in(text: str, pattern: re.Pattern[str]) -> int | None:
    match = pattern.search(text)
    return int(match[1]) if match else None


def path_in_name(op_name: str) -> str:
    """Return the modules and scopes in the name of an operation.

    Transformations, JAX's own scopes and the operation itself are left out.

    >>> path_in_name("jit(step)/transpose(jvp(GPT2))/attention2/qkv/dot_general")
    'GPT2/attention2/qkv'
    """
    scopes, _, _ = _TRANSFORM.sub("", _JIT.sub("", op_name.partition(";")[0])).rpartition("/")
    path = []
    for scope in scopes.split("/"):
        name = scope.strip("()")
        is_split_by_xla = ":" in name
        is_mark = name.startswith(("jaxmp.", "branch_"))
        if name and name not in _JAX_SCOPES and not is_mark and not is_split_by_xla:
            path.append(name)
    return "/".join(path)


class HloProgram:
    """An XLA program, read from the text of its HLO.

    The text may come from the lowered program or from the optimised program.

    Attributes:
      name: the name of the program, such as ``"jit_step"``.
      computations: a dict from the name of each computation to a dict of its instructions by name.
      entry: the name of the computation that runs first.
      aliases: a dict from the number of a result to the number of the parameter whose buffer the result reuses.
      partitions: the number of devices that run the program together.
      is_for_tpu: whether the program was compiled for a TPU, whose arrays are split into tiles.
      not_counted: a sentence on the lines that could not be read; empty if all were read. A warning has this sentence.

    Raises:
      ValueError: the text has no entry computation.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        self._frames: dict[str, dict[int, str]] = {}
        header, *lines = text.splitlines() or [""]
        self.name = header.removeprefix("HloModule ").partition(",")[0].strip()
        partitions = re.search(r"num_partitions=(\d+)", header)
        self.partitions = int(partitions[1]) if partitions else 1
        self.is_for_tpu = _TILE.search(header) is not None
        aliases = header.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
        self.aliases = {int(result or 0): int(parameter) for result, parameter in WRITES_INTO.findall(aliases)}
        unread = self._parse(lines)
        if not self.entry:  # otherwise the program would seem to compute and send nothing
            raise ValueError(
                f"the text of an XLA program must have an ENTRY, got {text[:60]!r}; pass compiled.as_text() of a "
                "backend that shows its programs"
            )
        self.not_counted: tuple[str, ...] = ()
        if unread:
            count = "1 line" if len(unread) == 1 else f"{len(unread)} lines"
            self.not_counted = (f"{count} of the compiled program that jaxmp cannot read, such as {unread[0]!r}",)
            warnings.warn(f"not counted: {self.not_counted[0]}; please report it", stacklevel=3)

    def _parse(self, lines: list[str]) -> list[str]:
        """Read the tables of source lines, which come first, and the computations.

        Return the lines that are neither.
        """
        section, computation, unread = "", None, list[str]()
        for line in lines:
            frame = _FRAME.match(line) if computation is None else None
            if frame:
                self._frames.setdefault(section, {})[int(frame[1])] = frame[2] or frame[3] or ""
                continue
            section = line
            if opening := _COMPUTATION.match(line):
                computation = self.computations.setdefault(opening[2], {})
                self.entry = opening[2] if opening[1] else self.entry
            elif computation is not None and (match := _INSTRUCTION.match(line)):
                name, result, opcode, arguments = match.groups()
                # Newer versions of XLA split a fusion into fusion-start and fusion-done, which only renames the result.
                if opcode == "fusion-start":
                    fused = self.computations[_CALLED.findall(line)[0]]
                    opcode, result = "fusion", [*fused.values()][-1].result
                elif opcode == "fusion-done":
                    opcode = "bitcast"
                operands = () if opcode == "constant" else _operands(arguments)
                computation[name] = Instruction(name, opcode, result, operands, line)
            elif not _SECTION.match(line):
                unread.append(line.strip())
        return unread

    def trips(self, loop: Instruction) -> int | None:
        """Return the number of iterations of a loop; None if it is unknown, or if the instruction is no loop."""
        return self._trips.get(loop.name)

    def is_loop_of_unknown_length(self, instruction: Instruction) -> bool:
        """Return whether an instruction is a loop whose number of iterations is unknown."""
        return instruction.name in self._trips and self.trips(instruction) is None

    @functools.cached_property
    def _trips(self) -> dict[str, int | None]:
        trips: dict[str, int | None] = {}
        for computation, instructions in self.computations.items():
            for instruction in instructions.values():
                if instruction.opcode == "while":
                    trips[instruction.name] = trip_count(self.computations, computation, instruction)
        return trips

    def inside(self, instruction: Instruction) -> list[tuple[str, Instruction]]:
        """Return the instructions inside a fusion or a call, each with its computation."""
        return [
            (name, inner)
            for name in self.bodies(instruction)
            for inner in self.computations.get(name, {}).values()
        ]  # fmt: skip

    def made_by(self, instruction: Instruction) -> Instruction:
        """Return the instruction that has JAX's name for a kernel.

        Usually this is the kernel's own instruction. If the kernel is a fusion without a name from JAX, it is the last
        instruction inside the fusion that has a name from JAX.
        """
        if instruction.op_name or instruction.opcode != "fusion":
            return instruction
        for _, inner in reversed(self.inside(instruction)):
            if inner.op_name:
                return inner
        return instruction

    def source(self, instruction: Instruction) -> str:
        """Return the user's file and line, such as ``"package/module.py:12"``.

        The text is empty if the program does not have the file and line.
        """
        return source_among(self.lines(instruction))

    def lines(self, instruction: Instruction) -> list[tuple[str, int]]:
        """Return the files and lines of the calls that made an instruction, the innermost first."""
        match = re.search(r"stack_frame_id=(\d+)", instruction.text)
        frames = self._frames.get("StackFrames", {})
        # Some versions of XLA print parent numbers that are too high by one, even for frame 1, which has no parent.
        shift = "parent_frame_id=1" in frames.get(1, "")
        number, lines = int(match[1]) if match else 0, list[tuple[str, int]]()
        while number in frames and len(lines) < len(frames):
            frame = _facts(frames[number])
            location = _facts(self._frames["FileLocations"][frame["file_location_id"]])
            lines.append((self._frames["FileNames"][location["file_name_id"]], location["line"]))
            number = frame.get("parent_frame_id", 0) - shift
        return lines

    def bodies(self, instruction: Instruction) -> list[str]:
        """Return the computations that an instruction calls.

        The condition of a loop with a known number of iterations is left out.
        """
        text = instruction.text if self.trips(instruction) is None else _CONDITION.sub("", instruction.text)
        branches = [name for names in _BRANCHES.findall(text) for name in _OPERAND.findall(names)]
        return [*_CALLED.findall(text), *branches]

    def instructions_by_run(
        self, into_fusions: bool = True, repeat_loops: bool = False
    ) -> Iterator[tuple[str, Instruction, int]]:
        """Yield each instruction with its computation and the number of its executions.

        The body of a loop counts once, unless ``repeat_loops`` is True and the number of iterations is known. If
        ``into_fusions`` is False, instructions inside fusions and reductions are skipped: only kernels are left.
        """
        stack = [(self.entry, 1)]
        while stack:
            name, times = stack.pop()
            for instruction in self.computations.get(name, {}).values():
                yield name, instruction, times
                if not into_fusions and instruction.opcode not in CONTROL:
                    continue
                turns = self.trips(instruction) if repeat_loops else None
                times_of_bodies = times if turns is None else times * turns
                stack += [(body, times_of_bodies) for body in self.bodies(instruction)]

    def joined(self, computation: str, instruction: Instruction) -> list[Array]:
        """Return the arrays of an instruction's result.

        If the result is a concatenation, return the arrays that are concatenated.
        """
        inside = self.inside(instruction) if instruction.opcode == "fusion" else [(computation, instruction)]
        body, last = inside[-1]
        if last.opcode != "concatenate":
            return instruction.arrays
        return [array for name in last.operands for array in self.computations[body][name].arrays]

    def dtypes(self, computation: str, instruction: Instruction) -> tuple[str, ...]:
        """Return the dtypes of an instruction's operands."""
        known = self.computations[computation]
        results = [known[name].arrays for name in instruction.operands if name in known]
        return tuple(parts[0].dtype for parts in results if parts)


def is_end(opcode: str) -> bool:
    """Return whether an instruction only waits for an earlier instruction."""
    return opcode.endswith("-done") or opcode == "async-update"


def _facts(text: str) -> dict[str, int]:
    """Return the numbers by name from one row of a table of source lines."""
    return {key: int(number) for key, number in _FACT.findall(text)}


def _operands(text: str) -> tuple[str, ...]:
    """Return the names of the operands in the text of an instruction.

    ``text`` begins after the opening parenthesis of the operands.
    """
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            text = text[:position]
            break
    return tuple(_OPERAND.findall(_NOT_NAMES.sub("", text)))
