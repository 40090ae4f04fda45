"""The kinds of kernels, by the operations that they compute."""

from __future__ import annotations

from collections.abc import Sequence

from jaxmp.inspect.compiled.hlo import NO_WORK, HloProgram, Instruction
from jaxmp.inspect.compiled.kernels import KernelProduct

HALF, FLOAT32, ATTENTION, CONVOLUTION = "half products", "float32 products", "attention", "convolutions"
REDUCTION, ELEMENTWISE, CAST, MOVE = "reductions", "elementwise", "casts", "copies and layout"
COLLECTIVE, CALLBACK, UPDATE = "collectives", "callbacks to Python", "optimizer and finite check"
OTHER, UNKNOWN, WAITING = "other", "unknown programs", "waiting"
KINDS = (
    HALF,
    FLOAT32,
    ATTENTION,
    CONVOLUTION,
    REDUCTION,
    ELEMENTWISE,
    CAST,
    MOVE,
    COLLECTIVE,
    CALLBACK,
    UPDATE,
    OTHER,
    UNKNOWN,
    WAITING,
)
"""All kinds. ``"half products"`` have operands of at most 16 bits. ``"unknown programs"`` are kernels whose program
could not be read. ``"waiting"`` is the time without any kernel."""
PRODUCTS = (HALF, FLOAT32, ATTENTION, CONVOLUTION)
BOUND_BY_BYTES = (REDUCTION, ELEMENTWISE, CAST, MOVE, UPDATE)
"""Kinds of kernels whose time is mostly that of their bytes."""

_MOVES = frozenset({"copy", "transpose", "reshape", "reverse", "broadcast", "slice", "concatenate", "pad", "gather"})
_MOVES |= {"dynamic-slice", "dynamic-update-slice", "copy-start", "slice-start"}
_CASTS = frozenset({"convert", "reduce-precision", "bitcast-convert"})
_REDUCTIONS = frozenset({"reduce", "reduce-window", "scatter", "select-and-scatter"})
_OTHER = frozenset({"custom-call", "sort", "rng", "rng-bit-generator", "fft", "infeed", "outfeed"})


def kind_of(program: HloProgram, instruction: Instruction, products: Sequence[KernelProduct], phase: str) -> str:
    """Return the kind of a kernel, one of :data:`KINDS`.

    Args:
      program: the compiled program.
      instruction: the instruction that launches the kernel.
      products: the products in the kernel.
      phase: the phase of the kernel; ``"update"`` for the update of a train step.
    """
    if products:
        return _kind_of_product(max(products, key=lambda product: product.flops))
    inside = [inner for _, inner in program.inside(instruction)] if instruction.opcode == "fusion" else [instruction]
    opcodes = {inner.opcode for inner in inside} - NO_WORK
    if any(inner.collective for inner in inside):
        return COLLECTIVE
    if any(is_callback(inner) for inner in inside):
        return CALLBACK
    if phase == "update":
        return UPDATE
    if opcodes & _OTHER:
        return OTHER
    if opcodes & _REDUCTIONS:
        return REDUCTION
    if opcodes <= _MOVES:
        return MOVE
    if opcodes <= _MOVES | _CASTS:
        return CAST
    return ELEMENTWISE


def is_callback(instruction: Instruction) -> bool:
    """Return whether an instruction calls a Python function, as ``jax.pure_callback`` does."""
    return "callback" in instruction.target


def _kind_of_product(product: KernelProduct) -> str:
    if product.kind != "dot":
        return ATTENTION if product.kind == "attention" else CONVOLUTION
    return HALF if has_at_most_16_bits(product.dtype) else FLOAT32


def has_at_most_16_bits(dtype: str) -> bool:
    """Return whether a dtype has at most 16 bits.

    >>> has_at_most_16_bits("bfloat16"), has_at_most_16_bits("float8_e4m3fn"), has_at_most_16_bits("tensorfloat32")
    (True, True, False)
    """
    if dtype == "tensorfloat32":
        return False
    return dtype.startswith(("bfloat16", "float16", "float8", "float4", "int8", "uint8", "int4", "uint4"))
