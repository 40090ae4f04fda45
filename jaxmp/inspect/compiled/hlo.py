"""Reading XLA's programs: what their instructions are, where they come from, their FLOPs, and the bytes they move."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxmp._internals.jax.sources import source_among

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
_ARRAY = re.compile(r"\b([a-z]+\d+[a-z\d]*|pred)\[([\d,]*)\]")
_NOT_NAMES = re.compile(r"/\*.*?\*/|" + _ARRAY.pattern)
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.$-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_OPERAND = re.compile(r"%?([A-Za-z_][\w.$-]*)")
_PRODUCTS = {"dot": "dot", "convolution": "convolution"}
_KERNELS = {"__cublas": "dot", "__cudnn$conv": "convolution", "__cudnn$fmha": "attention"}
COLLECTIVES = frozenset({"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all"})
COLLECTIVES |= {"collective-permute", "collective-broadcast"}
CONTROL = frozenset({"while", "conditional", "call"})
"""Whose bodies work."""
NO_WORK = CONTROL | {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all"}
NO_KERNEL = NO_WORK | {"optimization-barrier", "partition-id", "replica-id"}
_PICKS = frozenset({"slice", "dynamic-slice", "gather"})
_NUMBER = re.compile(r"parameter\((\d+)\)")
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # which operand holds what is written
_WRITES_INTO = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_FRAME = re.compile(r"^(\d+) (?:\{(.*)\}|\"(.*)\")$")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TRANSFORM = re.compile(r"\b(?:jit|pjit|jvp|transpose|vmap\d*|pmap|shard_map|custom_jvp|custom_vjp)\(")
_JIT = re.compile(r"\bp?jit\([^()]*\)")
_JAX_SCOPES = frozenset({"checkpoint", "rematted_computation", "remat", "remat2", "while", "body", "cond", "shard_map"})
_JAX_SCOPES |= {"closed_call", "core_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_CONDITION = re.compile(r"condition=%?[\w.$-]+,? ?")


class Array(NamedTuple):
    """An array in XLA's notation: its dtype by XLA's name, and its sizes."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def bytes(self) -> float:
        """Its size; a KeyError of a dtype that is not known here."""
        return _BYTES[self.dtype] * math.prod(self.shape)


def arrays(shape: str) -> list[Array]:
    """An array, or all arrays of a tuple, in XLA's notation.

    >>> [str(each) for each in arrays("(bf16[2,3]{1,0}, pred[])")]
    ['bf16[2,3]', 'pred[]']
    """
    return [Array(dtype, tuple(int(n) for n in sizes.split(",") if n)) for dtype, sizes in _ARRAY.findall(shape)]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program; ``operands`` are the names of what it reads."""

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    text: str

    @property
    def bytes(self) -> float:
        """The size of its result."""
        return size(self.result)

    @property
    def arrays(self) -> list[Array]:
        """Its result, or the parts of it."""
        return arrays(self.result)

    @property
    def op_name(self) -> str:
        """What JAX calls the operation, with its scopes and transformations; empty where XLA made it."""
        found = _OP_NAME.search(self.text)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def path(self) -> str:
        """The names of modules and scopes around it, ``/`` between."""
        return path_of(self.op_name)


def path_of(op_name: str) -> str:
    """The path in the name of an operation: without transformations, JAX's own scopes and the operation itself.

    >>> path_of("jit(step)/transpose(jvp(GPT2))/attention2/qkv/dot_general")
    'GPT2/attention2/qkv'
    """
    scopes, _, _ = _TRANSFORM.sub("", _JIT.sub("", op_name.partition(";")[0])).rpartition("/")
    names = (name.strip("()") for name in scopes.split("/"))
    own = (name for name in names if name not in _JAX_SCOPES and not name.startswith(("jaxmp.", "branch_")))
    own = (name for name in own if ":" not in name)  # what XLA made one of several
    return "/".join(name for name in own if name)


def dtype_name(dtype: str) -> str:
    """NumPy's name of one of XLA's dtypes.

    >>> dtype_name("bf16"), dtype_name("f8e4m3fn"), dtype_name("s8"), dtype_name("pred")
    ('bfloat16', 'float8_e4m3fn', 'int8', 'bool')
    """
    if dtype == "pred":
        return "bool"
    kind = "bf" if dtype.startswith("bf") else dtype[0]
    rest = dtype.removeprefix(kind)
    names = {"s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}
    return names[kind] + re.sub(r"^(\d)(e)", r"\1_\2", rest)


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, a convolution or a fused attention in a kernel.

    Attributes:
      kind: ``"dot"``, ``"convolution"`` or ``"attention"``.
      dtype: of its operands; ``"tensorfloat32"`` where float32 ones may be rounded to it.
      flops: of one time; a multiply-add is 2. Of a causal attention half the square, as its kernels skip the rest.
    """

    kind: str
    dtype: str
    flops: int


def size(shape: str) -> float:
    """Bytes of an array, or of all arrays of a tuple, in XLA's notation.

    Raises:
      KeyError: a dtype that is not known here.

    >>> size("bf16[2,3]{1,0}"), size("(f8e4m3fn[8], pred[], u32[2])")
    (12, 17)
    """
    return sum(each.bytes for each in arrays(shape))


class Program:
    """A program of XLA, from the text of its HLO, optimised or as it was lowered.

    Attributes:
      computations: name to instructions.
      entry: the name of the first one to run.
      aliases: results that are written into a parameter, by number.
      partitions: the devices that run it together.

    Raises:
      ValueError: the text has no entry.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry, current = "", None
        header, *lines = text.splitlines() or [""]
        partitions = re.search(r"num_partitions=(\d+)", header)
        self.partitions = int(partitions[1]) if partitions else 1
        aliases = header.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
        self.aliases = {int(result or 0): int(parameter) for result, parameter in _WRITES_INTO.findall(aliases)}
        self._frames: dict[str, dict[int, str]] = {}
        section = ""
        for line in lines:
            if current is None and (row := _FRAME.match(line)):
                self._frames.setdefault(section, {})[int(row[1])] = row[2] or row[3] or ""
                continue
            section = line
            if opening := _COMPUTATION.match(line):
                current = self.computations.setdefault(opening[2], {})
                self.entry = opening[2] if opening[1] else self.entry
            elif current is not None and (found := _INSTRUCTION.match(line)):
                name, result, opcode, rest = found.groups()
                if opcode == "fusion-start":  # of newer XLAs: its end is but another name of what it makes
                    own = self.computations[_CALLED.findall(line)[0]]
                    opcode, result = "fusion", [*own.values()][-1].result
                opcode = "bitcast" if opcode == "fusion-done" else opcode
                operands = tuple(_OPERAND.findall(_NOT_NAMES.sub("", _arguments(rest)))) if opcode != "constant" else ()
                current[name] = Instruction(name, opcode, result, operands, line)
        if not self.entry:  # or what reads it would find that nothing is sent, and nothing computed
            raise ValueError(
                f"the text of a program of XLA has an ENTRY, got {text[:60]!r}; pass compiled.as_text(), of a backend "
                "that shows its programs"
            )

    def inside(self, instruction: Instruction) -> list[tuple[str, Instruction]]:
        """What a fusion or a call consists of, with the computation that it stands in."""
        bodies = self.bodies(instruction)
        return [(name, each) for name in bodies for each in self.computations.get(name, {}).values()]

    def made_by(self, instruction: Instruction) -> Instruction:
        """The instruction with JAX's name for what a kernel does: itself, or the last named one in a fusion."""
        if instruction.op_name or instruction.opcode != "fusion":
            return instruction
        inside = [each for _, each in self.inside(instruction)]
        return next((each for each in reversed(inside) if each.op_name), instruction)

    def source(self, instruction: Instruction) -> str:
        """The user's file and line, ``"package/module.py:12"``; empty where the program does not say."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.text)
        frames = self._frames.get("StackFrames", {})
        # Some versions print parents by one too high: the first frame has none, and 0 is none.
        shift = "parent_frame_id=1" in frames.get(1, "")
        number, places = int(found[1]) if found else 0, list[tuple[str, int]]()
        while number in frames and len(places) < len(frames):
            facts = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", frames[number])}
            location = self._frames["FileLocations"][facts["file_location_id"]]
            facts |= {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", location)}
            places.append((self._frames["FileNames"][facts["file_name_id"]], facts["line"]))
            number = facts.get("parent_frame_id", 0) - shift
        return source_among(places)

    def bodies(self, instruction: Instruction) -> list[str]:
        """The computations that an instruction calls, without the condition of a loop whose repetitions are known."""
        text = _CONDITION.sub("", instruction.text) if TRIPS.search(instruction.text) else instruction.text
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
                trips = TRIPS.search(instruction.text) if repeat_loops else None
                inner = self.bodies(instruction)
                stack += [(each, times * (int(trips[1]) if trips else 1)) for each in inner]

    def joined(self, computation: str, instruction: Instruction) -> list[Array]:
        """The arrays of its result; where it joins others to one, those."""
        inside = self.inside(instruction) if instruction.opcode == "fusion" else [(computation, instruction)]
        body, last = inside[-1]
        if last.opcode != "concatenate":
            return instruction.arrays
        return [array for name in last.operands for array in self.computations[body][name].arrays]

    def dtypes(self, computation: str, instruction: Instruction) -> tuple[str, ...]:
        """The dtypes of an instruction's operands."""
        known = self.computations[computation]
        read = [known[name].arrays for name in instruction.operands if name in known]
        return tuple(each[0].dtype for each in read if each)

    def written_into(self, computation: str, instruction: Instruction) -> dict[int, tuple[int, float]]:
        """Which results are written into an operand: by result the operand's number and the bytes that change."""
        if instruction.opcode == "custom-call":
            _, _, aliases = instruction.text.partition("output_to_operand_aliasing={")
            found = _WRITES_INTO.findall(aliases.partition("}, ")[0] + "}")
            return {int(n or 0): (int(operand), instruction.bytes) for n, operand in found}
        known, roots = self.computations[computation], [instruction]
        if instruction.opcode == "fusion":
            known = {each.name: each for _, each in self.inside(instruction)}
            roots = [self._behind_bitcasts(known, name) for name in list(known)[-1:]]
            if roots and roots[0].opcode == "tuple":
                roots = [self._behind_bitcasts(known, name) for name in roots[0].operands]
        written = {}
        for number, root in enumerate(roots):
            if root.opcode not in _IN_PLACE:
                continue
            update = known[root.operands[_IN_PLACE[root.opcode]]].bytes
            parameter = _NUMBER.search(self._behind_bitcasts(known, root.operands[0]).text)
            if root is instruction:
                written[number] = (0, update)
            elif parameter:
                written[number] = (int(parameter[1]), update)
        return written

    @staticmethod
    def _behind_bitcasts(known: dict[str, Instruction], name: str) -> Instruction:
        while known[name].opcode in ("bitcast", "copy") and known[name].operands:
            name = known[name].operands[0]
        return known[name]

    def products_of(self, computation: str, instruction: Instruction, masked: bool = True) -> list[Product]:
        """The products of a kernel, those in a fusion too; of a causal attention half the square unless not masked."""
        if instruction.opcode == "fusion":
            inside = self.inside(instruction)
            return [product for name, each in inside for product in self.products_of(name, each, masked)]
        kind = product_kind(instruction)
        if kind is None:
            return []
        known, text = self.computations[computation], instruction.text
        read = [known[name].arrays[0] for name in instruction.operands if name in known and known[name].arrays]
        result = instruction.arrays[0].shape
        if kind == "attention":
            # Both are (batch, tokens, heads, width): XLA's own order, whatever the layout is.
            query, key = read[0].shape, read[1].shape
            times = 5 if "Backward" in text.split("custom_call_target=")[1].split(",")[0] else 2
            flops = times * 2 * math.prod(query) * key[1] // (2 if masked and '"CAUSAL"' in text else 1)
        elif kind == "dot":
            found = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([^\]}]*)[\]}]', text)
            axes = re.findall(r"\d+", found[1]) if found else []
            flops = 2 * math.prod(result) * math.prod(read[0].shape[int(axis)] for axis in axes)
        else:
            flops = _convolution_flops(text, result, read[0].shape, read[1].shape)
        dtype = dtype_name(max((each.dtype for each in read[:2]), key=lambda name: _BYTES[name]))
        may_round = dtype == "float32" and not re.search(r"highest|HIGHEST", text)
        return [Product(kind, "tensorfloat32" if may_round else dtype, flops)]

    def moved(self, computation: str, instruction: Instruction) -> float:
        """Bytes that a kernel reads and writes; of an operand that it picks from or writes into, that part only."""
        known = self.computations[computation]
        read = {n: known[name].bytes for n, name in enumerate(instruction.operands) if name in known}
        read = {n: each for n, each in read.items() if instruction.operands[n] not in instruction.operands[:n]}
        inside = [each for _, each in self.inside(instruction)] if instruction.opcode == "fusion" else []
        for parameter in (each for each in inside if each.opcode == "parameter"):
            number = _NUMBER.search(parameter.text)
            operand = int(number[1]) if number else -1
            users = [each for each in inside if parameter.name in each.operands]
            if operand in read and all(each.opcode in _PICKS and each.operands[0] == parameter.name for each in users):
                read[operand] = min(read[operand], sum(each.bytes for each in users))
        written = [each.bytes for each in (inside or [instruction])[-1].arrays]
        if instruction.opcode != "custom-call":
            for result, (operand, changed) in self.written_into(computation, instruction).items():
                if operand in read:
                    read[operand], written[result] = changed, changed
        elif len(written) > 1 and re.search(r"\b[su]8\[\d*\]\S*\)$", instruction.result):
            written.pop()  # the workspace of a library
        return sum(read.values()) + sum(written)


def is_end(opcode: str) -> bool:
    """Whether it only waits for what was started before."""
    return opcode.endswith("-done") or opcode == "async-update"


def product_kind(instruction: Instruction) -> str | None:
    """``"dot"``, ``"convolution"`` or ``"attention"``; None of what is no product, a fusion of them too."""
    if instruction.opcode != "custom-call":
        return _PRODUCTS.get(instruction.opcode)
    target = re.search(r'custom_call_target="([^"]*)"', instruction.text)
    return next((kind for start, kind in _KERNELS.items() if target and target[1].startswith(start)), None)


def _convolution_flops(text: str, result: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Of a convolution, or of its derivative by the input or by the kernel, as cuDNN has them.

    Each number that the forward convolution returns has as many terms as the kernel has numbers per output feature.
    """
    outputs, kernel = result, right
    if "convBackwardInput" in text:
        outputs = left
    elif "convBackwardFilter" in text:
        outputs, kernel = kernel, outputs
    labels = re.search(r"dim_labels=\w+_(\w+)->", text)
    features = kernel[labels[1].index("o")] if labels else 1
    dilated = re.search(r"lhs_dilate=([\dx]+)", text)  # zeros between the inputs
    zeros = math.prod(int(n) for n in dilated[1].split("x")) if dilated else 1
    return 2 * math.prod(outputs) * math.prod(kernel) // max(features, 1) // zeros


def _arguments(rest: str) -> str:
    """What stands before the parenthesis that closes an instruction's operands."""
    depth = 1
    for position, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:position]
    return rest
