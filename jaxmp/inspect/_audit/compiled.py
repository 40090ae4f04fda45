"""Find the traced products and casts in a compiled program."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp.inspect.compiled import hlo
from jaxmp.inspect.compiled.kernels import multiplied_dtype, product_kind
from jaxmp.inspect.program.product_dtypes import operand_dtypes, widest
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

    Traced and compiled products match if they have the same scopes, pass (forward or backward), result size and source
    line. Those that are left match without the line, and then without the size. If products that match have several
    dtypes, see :func:`_dtypes_of_group`. A traced product is left out if it has no matches.
    """
    traced = [value for value in values if value.name in PRODUCTS]
    compiled = list(_compiled_products(program))
    ran: dict[Value, str] = {}
    for has_size, has_line in ((True, True), (True, False), (False, False)):
        dtypes = collections.defaultdict[Any, list[str]](list)
        for product in compiled:
            dtypes[product.key(has_size, has_line)].append(product.dtype)
        groups = collections.defaultdict[Any, list[Value]](list)
        for value in traced:
            groups[_product_of_value(value).key(has_size, has_line)].append(value)
        for key, group in groups.items():
            ran |= _dtypes_of_group(group, dtypes.get(key, []))
        traced = [value for value in traced if _product_of_value(value).key(has_size, has_line) not in dtypes]
        compiled = [product for product in compiled if product.key(has_size, has_line) not in groups]
    return ran


class _Product(NamedTuple):
    """A traced or compiled product, with the facts by which the two are matched."""

    scopes: _ScopesAndPass
    size: int
    line: str
    dtype: str

    def key(self, has_size: bool, has_line: bool) -> tuple[Any, ...]:
        """Return a key that products with the same scopes share, and optionally with the same size and line."""
        return self.scopes, self.size if has_size else None, self.line if has_line else None


def _product_of_value(value: Value) -> _Product:
    dtype = widest(operand_dtypes(value))
    return _Product(_scopes_of_value(value), math.prod(value.shape), value.at.source, dtype)


def _compiled_products(program: hlo.HloProgram) -> Iterator[_Product]:
    for computation, instruction, _ in program.instructions_by_run():
        scopes = _scopes_of_instruction(instruction) if product_kind(instruction) else None
        dtypes = [hlo.dtype_name(dtype) for dtype in program.dtypes(computation, instruction)[:2]]
        if scopes is None or not dtypes:
            continue
        dtype = widest(dtypes)
        if program.is_for_tpu and dtype == "float32":
            known = program.computations[computation]
            operands = [known[name].arrays[0] for name in instruction.operands[:2] if name in known]
            dtype = multiplied_dtype(program, instruction, operands)
        yield _Product(scopes, math.prod(instruction.arrays[0].shape), program.source(instruction), dtype)


def _dtypes_of_group(values: Sequence[Value], dtypes: Sequence[str]) -> dict[Value, str]:
    """Return the dtypes in which products ran that cannot be told apart in the compiled program.

    If the compiled products have several dtypes, a product ran as it is written, unless the compiler widened a product:
    the compiled program has fewer products of this width or narrower than the traced program, and more wider ones. All
    products of this width or narrower then get the widest dtype.
    """
    if len(set(dtypes)) < 2:
        return dict.fromkeys(values, dtypes[0]) if dtypes else {}
    written = {value: _product_of_value(value).dtype for value in values}
    ran = {}
    for value, dtype in written.items():
        size = _itemsize(dtype)
        narrow_before, narrow_after = _count_up_to(size, written.values()), _count_up_to(size, dtypes)
        wide_before, wide_after = len(written) - narrow_before, len(dtypes) - narrow_after
        if narrow_after < narrow_before and wide_after > wide_before:
            ran[value] = max(dtypes, key=_itemsize)
        elif dtype in dtypes:
            ran[value] = dtype
    return ran


def _count_up_to(size: int, dtypes: Iterable[str]) -> int:
    """Return the number of dtypes with at most ``size`` bytes."""
    return sum(_itemsize(dtype) <= size for dtype in dtypes)


def _itemsize(dtype: str) -> int:
    return 4 if dtype.startswith("bf16x") else np.dtype(dtype).itemsize


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
