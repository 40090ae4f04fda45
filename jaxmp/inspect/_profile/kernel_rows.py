"""Join the kernels of a trace with the instructions that launched them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxmp._internals.jax.executables import live_modules
from jaxmp.inspect._profile import kinds
from jaxmp.inspect._profile.trace import Event, busy_times
from jaxmp.inspect.compiled.hlo import BACKWARD, CONTROL, HloProgram, Instruction
from jaxmp.inspect.compiled.kernels import moved_bytes, products_of


@dataclasses.dataclass(frozen=True)
class ProfileRow:
    """The kernels that one instruction of a compiled program launches.

    Attributes:
      kernel: the name of the kernel that took the most time.
      kind: one of :data:`jaxmp.inspect._profile.kinds.KINDS`, such as ``"half products"``.
      path: the names of the modules and scopes around the instruction, joined by ``/``.
      phase: ``"forward"``, ``"backward"``, ``"recomputed"`` (under ``jax.checkpoint``) or ``"update"`` (after the
        gradients, without a path). It is empty for programs without gradients, and for paths outside of the
        differentiated function.
      calls: the number of executions of the instruction in one call of the function.
      milliseconds: the time of all executions in one call of the function. Kernels that run at the same time share it.
      duration: the milliseconds from start to end of all executions. It is longer than ``milliseconds`` if other
        kernels ran at the same time.
      dtype: the dtype of the product with the most FLOPs; empty without a product.
      size: the sizes of a matrix product, such as ``"64×512×64"`` (rows, terms, columns), with the number of products
        first for a batch of products; empty otherwise.
      flops: the FLOPs of the products in all executions; a multiply-add is 2.
      bytes: the bytes that all executions read and write; None if the instruction is unknown.
      ceiling_share: the speed relative to the fastest product or copy of this device, whichever limits the kernel;
        None if it is unknown.
      program: the name of the compiled program.
      instruction: the name of the instruction in the compiled program.
      source: the file and line in the user's code.
    """

    kernel: str
    kind: str
    path: str
    phase: str
    calls: float
    milliseconds: float
    duration: float
    dtype: str
    size: str
    flops: int
    bytes: int | None
    ceiling_share: float | None
    program: str
    instruction: str
    source: str


_Key = tuple[str, int]
"""The name and the id of a compiled program."""
_ENOUGH = 0.9
"""The share of a trace's instructions that the program of the profiled call must have."""


@dataclasses.dataclass
class _Launches:
    """All executions of one instruction in a trace."""

    milliseconds: float = 0.0
    by_kernel: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def add(self, event: Event, milliseconds: float) -> None:
        """Add an execution of a kernel, which had ``milliseconds`` for itself."""
        self.milliseconds += milliseconds
        self.by_kernel.setdefault(event.kernel, []).append(event.milliseconds)

    @property
    def duration(self) -> float:
        """Return the milliseconds from start to end of all kernels."""
        return sum(map(sum, self.by_kernel.values()))

    @property
    def longest(self) -> str:
        """Return the name of the kernel with the most time."""
        return max(self.by_kernel, key=lambda kernel: sum(self.by_kernel[kernel]))

    @property
    def count(self) -> int:
        """Return the number of executions.

        A library call may launch several kernels in each execution, and one of them more than once.
        """
        return min(map(len, self.by_kernel.values()))


class _ProfiledProgram:
    """A compiled program whose kernels are in a trace."""

    def __init__(self, hlo: HloProgram) -> None:
        self.hlo = hlo
        self.instructions = {
            name: (computation, instruction)
            for computation, instructions in hlo.computations.items()
            for name, instruction in instructions.items()
        }
        self.has_gradients = any(known.phase in BACKWARD for _, known in self.instructions.values())

    def phase(self, instruction: Instruction) -> str:
        """Return the phase of an instruction; see :class:`ProfileRow`."""
        if not self.has_gradients or not instruction.op_name:
            return ""
        return instruction.phase or ("" if instruction.path else "update")


def rows_of(events: Sequence[Event], steps: int, text: str = "") -> list[ProfileRow]:
    """Return a row for each instruction, slowest first.

    Args:
      events: the kernels of ``steps`` calls.
      steps: the number of calls.
      text: the HLO text of the call's program; empty if the call is not a single program.
    """
    programs = _programs_of(events, text)
    kernels = [event for event in events if not _only_runs_others(event, programs)]
    launches: dict[tuple[str, int, str], _Launches] = {}
    for event, milliseconds in zip(kernels, busy_times(kernels), strict=True):
        key = event.module, event.program_id, event.instruction or event.kernel
        launches.setdefault(key, _Launches()).add(event, milliseconds)
    rows = []
    for (module, program_id, instruction), of_instruction in launches.items():
        program = programs.get((module, program_id))
        rows.append(_row(program, module, instruction, of_instruction, steps))
    return sorted(rows, key=lambda row: -row.milliseconds)


def _programs_of(events: Sequence[Event], text: str) -> dict[_Key, _ProfiledProgram]:
    """Return the programs of the kernels, by name and id.

    A program must have the instructions of its kernels. The program of the profiled call may lack a tenth of them,
    because libraries add some. If several other programs have them, the id in the trace decides, or else the program
    stays unknown. The id alone does not suffice, because a program from JAX's compilation cache has another id in the
    trace.
    """
    instructions: dict[_Key, set[str]] = {}
    for event in events:
        if event.instruction and not event.is_in_graph:
            instructions.setdefault((event.module, event.program_id), set()).add(event.instruction)
    programs = {}
    unknown = {}
    call = _ProfiledProgram(HloProgram(text)) if text else None
    for key, names in instructions.items():
        if call is not None and call.hlo.name == key[0] and _share_in(call, names) >= _ENOUGH:
            programs[key] = call
        else:
            unknown[key] = names
    return programs | _live_programs(unknown)


def _share_in(program: _ProfiledProgram, names: set[str]) -> float:
    """Return the share of the names that are instructions of a program."""
    return sum(name in program.instructions for name in names) / len(names)


def _live_programs(instructions: dict[_Key, set[str]]) -> dict[_Key, _ProfiledProgram]:
    """Return the programs of this process that have the instructions, by name and id."""
    modules = live_modules({name for name, _ in instructions}) if instructions else []
    parsed = {text: _ProfiledProgram(HloProgram(text)) for text in {text for _, _, text in modules}}
    programs = {}
    for (name, program_id), names in instructions.items():
        by_name: dict[str, _ProfiledProgram] = {}
        by_id: dict[str, _ProfiledProgram] = {}
        for other_name, number, text in modules:
            if other_name == name and _share_in(parsed[text], names) == 1:
                by_name[text] = parsed[text]
                if number == program_id:
                    by_id[text] = parsed[text]
        matches = by_id or by_name
        if len(matches) == 1:
            (programs[name, program_id],) = matches.values()
    return programs


def _only_runs_others(event: Event, programs: dict[_Key, _ProfiledProgram]) -> bool:
    """Return whether an event is a loop or a branch on a CPU, whose kernels have events of their own.

    On a GPU, the events of a loop are kernels with other names: the copies of its condition.
    """
    if event.kernel != event.instruction:
        return False
    program = programs.get((event.module, event.program_id))
    if program is None or event.instruction not in program.instructions:
        return False
    _, instruction = program.instructions[event.instruction]
    return instruction.opcode in CONTROL


def _row(program: _ProfiledProgram | None, module: str, name: str, launches: _Launches, steps: int) -> ProfileRow:
    row = ProfileRow(
        kernel=launches.longest,
        kind=kinds.MOVE if launches.longest.startswith(("Memcpy", "Memset")) else kinds.UNKNOWN,
        path="",
        phase="",
        calls=launches.count / steps,
        milliseconds=launches.milliseconds / steps,
        duration=launches.duration / steps,
        dtype="",
        size="",
        flops=0,
        bytes=None,
        ceiling_share=None,
        program=module,
        instruction=name,
        source="",
    )
    if program is None or name not in program.instructions:
        return row
    computation, instruction = program.instructions[name]
    origin = program.hlo.made_by(instruction)
    phase = program.phase(origin)
    products = products_of(program.hlo, computation, instruction)
    largest = max(products, key=lambda product: product.flops, default=None)
    return dataclasses.replace(
        row,
        kind=kinds.kind_of(program.hlo, instruction, products, phase),
        path=origin.path,
        phase=phase,
        dtype=largest.dtype if largest else "",
        size="×".join(map(str, largest.size)) if largest else "",
        flops=round(row.calls * sum(product.flops for product in products)),
        bytes=round(row.calls * moved_bytes(program.hlo, computation, instruction)),
        source=program.hlo.source(origin),
    )
