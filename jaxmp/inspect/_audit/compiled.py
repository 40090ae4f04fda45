"""Find the traced products and casts in a compiled program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxmp.inspect.compiled import hlo
from jaxmp.inspect.compiled.kernels import multiplied_dtype, product_kind
from jaxmp.inspect.program.product_dtypes import widest
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.values import Value

_ScopesAndPass = tuple[frozenset[str], bool]
"""The scopes around an operation, and whether it is in the backward pass."""


def _scopes_of_instruction(instruction: hlo.Instruction) -> _ScopesAndPass | None:
    """Return an instruction's scopes and pass; None if JAX did not name it."""
    name = instruction.op_name
    return (_scopes_in_name(name), instruction.phase in hlo.BACKWARD) if name else None


def _scopes_of_value(value: Value) -> _ScopesAndPass:
    return _scopes_in_name("/".join((*value.at.names, value.name))), value.at.phase == "backward"


def _scopes_in_name(op_name: str) -> frozenset[str]:
    return frozenset(hlo.path_in_name(op_name).split("/"))


def dtypes_that_ran(program: hlo.HloProgram, values: Sequence[Value]) -> dict[Value, str]:
    """Return the dtype in which a compiled program runs each traced product.

    A traced product matches the compiled products with the same scopes, pass (forward or backward) and result size. If
    no compiled product has this size, all compiled products with the same scopes and pass match. A traced product is
    left out if it has no matches, or if its matches have several dtypes.
    """
    compiled: dict[Any, set[str]] = {}
    for computation, instruction, _ in program.instructions_by_run():
        scopes = _scopes_of_instruction(instruction) if product_kind(instruction) else None
        dtypes = [hlo.dtype_name(dtype) for dtype in program.dtypes(computation, instruction)[:2]]
        if scopes is None or not dtypes:
            continue
        dtype, size = widest(dtypes), math.prod(instruction.arrays[0].shape)
        if program.is_for_tpu and dtype == "float32":
            known = program.computations[computation]
            operands = [known[name].arrays[0] for name in instruction.operands[:2] if name in known]
            dtype = multiplied_dtype(program, instruction, operands)
        compiled.setdefault((scopes, size), set()).add(dtype)
        compiled.setdefault((scopes, None), set()).add(dtype)
    ran = {}
    for value in values:
        if value.name in PRODUCTS:
            scopes, size = _scopes_of_value(value), math.prod(value.shape)
            dtypes_of_value = compiled.get((scopes, size)) or compiled.get((scopes, None), set())
            if len(dtypes_of_value) == 1:
                (ran[value],) = dtypes_of_value
    return ran


class CastsInLoops:
    """The casts that a compiled program repeats in each iteration of a loop."""

    def __init__(self, program: hlo.HloProgram) -> None:
        self._casts: set[Any] = set()
        for name in _computations_in_loops(program):
            for instruction in program.computations.get(name, {}).values():
                # XLA adds casts of its own, which have other names.
                if instruction.opcode == "convert" and instruction.op_name.endswith("/convert_element_type"):
                    (array,) = instruction.arrays
                    size = math.prod(array.shape)
                    self._casts.add((_scopes_of_instruction(instruction), hlo.dtype_name(array.dtype), size))

    def __call__(self, value: Value) -> bool:
        """Return whether the compiled program repeats a cast with the result ``value``."""
        return (_scopes_of_value(value), value.dtype.name, math.prod(value.shape)) in self._casts


def _computations_in_loops(program: hlo.HloProgram) -> set[str]:
    stack: list[str] = []
    for _, instruction, _ in program.instructions_by_run():
        if instruction.opcode == "while":
            stack += program.bodies(instruction)
    inside: set[str] = set()
    while stack:
        name = stack.pop()
        if name not in inside:
            inside.add(name)
            for instruction in program.computations.get(name, {}).values():
                stack += program.bodies(instruction)
    return inside
