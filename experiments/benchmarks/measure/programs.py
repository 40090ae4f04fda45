"""Count products, kernels and bytes in XLA's programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from jaxmp.inspect.compiled import compiling
from jaxmp.inspect.compiled.hlo import HloProgram, Instruction
from jaxmp.inspect.compiled.kernels import moved_bytes, product_kind


def facts(compiled: Any, program: HloProgram) -> dict[str, Any]:
    """Return the products, kernels and bytes of a compiled function.

    Args:
      compiled: the function, compiled by JAX.
      program: the parsed text of ``compiled``.
    """
    moved, layout = traffic(program)
    return {
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "peak": compiling.peak_bytes(compiled),
        "products": dict(products(program)),
        "launches": launches(program),
        "traffic": moved,
        "layout": layout,
    }


def products(program: HloProgram) -> Counter[str]:
    """Count products and fused attentions by operand dtypes.

    A key is, for example, ``"dot bf16×bf16"``. Convolutions are products too.
    """
    counts = Counter[str]()
    for computation, instruction, times in program.instructions_by_run():
        if kind := product_kind(instruction):
            counts[f"{kind} {'×'.join(program.dtypes(computation, instruction)[:2])}"] += times
    return counts


def words(numbers: Mapping[str, int]) -> str:
    """Return the numbers and their kinds as text."""
    return ", ".join(f"{number} {kind}" for kind, number in sorted(numbers.items())) or "none"


def launches(program: HloProgram) -> int:
    """Return how many kernels a run of the program launches.

    Kernels are fusions, products, copies and the like. Kernels in a loop count once per iteration. A library call
    counts as one kernel, even if the library launches several.
    """
    kernels = program.instructions_by_run(into_fusions=False, repeat_loops=True)
    return sum(times for _, kernel, times in kernels if kernel.is_kernel)


def traffic(program: HloProgram) -> tuple[float, float]:
    """Return two totals of memory traffic.

    Each total adds the bytes read and the bytes written. The first total covers all kernels other than products. The
    second total covers only those kernels that do nothing but change a layout.
    """
    total = layout = 0.0
    for computation, instruction, times in program.instructions_by_run(into_fusions=False, repeat_loops=True):
        if not instruction.is_kernel or _is_product(program, instruction):
            continue
        moved = times * moved_bytes(program, computation, instruction)
        total += moved
        layout += moved * (instruction.opcode in ("copy", "transpose") or "wrapped_transpose" in instruction.text[:80])
    return total, layout


def _is_product(program: HloProgram, instruction: Instruction) -> bool:
    """Return whether an instruction is a product, or a fusion with a library product."""
    calls = [inner for _, inner in program.inside(instruction)] if instruction.opcode == "fusion" else []
    return bool(product_kind(instruction)) or any(
        inner.opcode == "custom-call" and product_kind(inner) for inner in calls
    )
