"""Find the products of a kernel, their FLOPs, and the bytes the kernel moves."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from jaxmp.inspect.compiled.hlo import WRITES_INTO, Array, HloProgram, Instruction, bytes_of_element, dtype_name
from jaxmp.inspect.program.product_dtypes import algorithm_dtype

_LIBRARIES = {"__cublas": "dot", "__cudnn$conv": "convolution", "__cudnn$fmha": "attention"}
"""The kinds of products, by the prefix of a library call's name."""
_PRECISION = re.compile(r'operand_precision"?[=:][\[{]([^\]}]*)')
_ALGORITHM = re.compile(r'\balgorithm"?[=:]"?(?:ALG_)?dot_(\w+)', re.IGNORECASE)
_PICKS = frozenset({"slice", "dynamic-slice", "gather"})
_DESTINATION = {"copy-start": 0, "slice-start": 1}
"""Instructions that copy beside other kernels, and the position of the copy among the arrays of their result."""
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""Instructions that write into their first operand, and the position of the operand with the new elements."""


@dataclasses.dataclass(frozen=True)
class KernelProduct:
    """A matrix product, a convolution or a fused attention in a kernel.

    Attributes:
      kind: ``"dot"``, ``"convolution"`` or ``"attention"``.
      dtype: the dtype in which the operands are multiplied, see :func:`multiplied_dtype`.
      flops: the FLOPs of one execution; a multiply-add is 2. For causal attention, only 50 % of the scores
        are counted, because kernels skip the masked scores.
      size: the rows, terms and columns of a matrix product, after the number of products if there are several; empty
        for other kinds.
    """

    kind: str
    dtype: str
    flops: int
    size: tuple[int, ...] = ()


def product_kind(instruction: Instruction) -> str | None:
    """Return the kind of a product, or None for other instructions.

    The kind is ``"dot"``, ``"convolution"`` or ``"attention"``.
    """
    if instruction.opcode in ("dot", "convolution"):
        return instruction.opcode
    for start, kind in _LIBRARIES.items():
        if instruction.target.startswith(start):
            return kind
    return None


def products_of(
    program: HloProgram, computation: str, instruction: Instruction, masked: bool = True
) -> list[KernelProduct]:
    """Return the products of a kernel, which may be a fusion.

    If ``masked`` is True, the masked scores of a causal attention are not counted.
    """
    if instruction.opcode == "fusion":
        inside = program.inside(instruction)
        return [product for name, inner in inside for product in products_of(program, name, inner, masked)]
    kind = product_kind(instruction)
    if kind is None:
        return []
    known = program.computations[computation]
    operands = [known[name].arrays[0] for name in instruction.operands if name in known and known[name].arrays]
    size: tuple[int, ...] = ()
    if kind == "attention":
        flops = _attention_flops(instruction, operands, masked)
    elif kind == "dot":
        terms = _dot_terms(instruction, operands)
        flops = 2 * math.prod(instruction.arrays[0].shape) * terms
        size = _dot_size(instruction, operands, terms)
    else:
        flops = _convolution_flops(instruction, operands)
    return [KernelProduct(kind, multiplied_dtype(program, instruction, operands), flops, size)]


def multiplied_dtype(program: HloProgram, product: Instruction, operands: Sequence[Array]) -> str:
    """Return the dtype in which a product multiplies its operands.

    It is the dtype of the product's algorithm, see :func:`algorithm_dtype`. Without an algorithm, it is the wider dtype
    of the operands. Float32 operands are rounded, unless the product asks for the highest precision. On a GPU they may
    be rounded to TensorFloat-32. On a TPU they are rounded to bfloat16, or to ``"bf16x3"`` at the precision ``"high"``:
    three products of bfloat16 parts.
    """
    algorithm = _ALGORITHM.search(product.text)
    if algorithm and (dtype_of_algorithm := algorithm_dtype(algorithm[1])):
        return dtype_of_algorithm
    dtype = dtype_name(max((operand.dtype for operand in operands[:2]), key=bytes_of_element))
    precision = _PRECISION.search(product.text)
    levels = precision[1].lower() if precision else ""
    if dtype != "float32" or "highest" in levels:
        return dtype
    if not program.is_for_tpu:
        return "tensorfloat32"
    return "bf16x3" if "high" in levels else "bfloat16"


def _attention_flops(instruction: Instruction, operands: list[Array], masked: bool) -> int:
    # XLA orders the axes as (batch, tokens, heads, width) for any layout.
    query, key = operands[0].shape, operands[1].shape
    products = 5 if "Backward" in instruction.target else 2
    is_triangle = masked and '"CAUSAL"' in instruction.text
    return products * 2 * math.prod(query) * key[1] // (2 if is_triangle else 1)


def _dot_terms(instruction: Instruction, operands: list[Array]) -> int:
    """Return the number of terms in each sum of a matrix product."""
    match = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([^\]}]*)[\]}]', instruction.text)
    axes = re.findall(r"\d+", match[1]) if match else []
    return math.prod(operands[0].shape[int(axis)] for axis in axes)


def _dot_size(instruction: Instruction, operands: list[Array], terms: int) -> tuple[int, ...]:
    """Return the rows, terms and columns of a matrix product, after the number of products if there are several."""
    # With a batch of b products, the left operand has b × rows × terms elements, and so on.
    batch_rows = math.prod(operands[0].shape) // max(terms, 1)
    batch_columns = math.prod(operands[1].shape) // max(terms, 1)
    results = math.prod(instruction.arrays[0].shape)
    batch = max(batch_rows * batch_columns // max(results, 1), 1)
    size = batch_rows // batch, terms, batch_columns // batch
    return size if batch == 1 else (batch, *size)


def _convolution_flops(instruction: Instruction, operands: list[Array]) -> int:
    """Return the FLOPs of a convolution, or of its derivative in cuDNN.

    A derivative has as many FLOPs as the forward convolution. Each element of the forward result is a sum over all
    weights of one output feature.
    """
    text = instruction.text
    outputs, kernel = instruction.arrays[0].shape, operands[1].shape
    if "convBackwardInput" in text:
        outputs = operands[0].shape
    elif "convBackwardFilter" in text:
        outputs, kernel = kernel, outputs
    labels = re.search(r"dim_labels=\w+_(\w+)->", text)
    features = kernel[labels[1].index("o")] if labels else 1
    dilated = re.search(r"lhs_dilate=([\dx]+)", text)  # zeros inserted between inputs do not count
    zeros = math.prod(int(n) for n in dilated[1].split("x")) if dilated else 1
    return 2 * math.prod(outputs) * math.prod(kernel) // max(features, 1) // zeros


def written_into(program: HloProgram, computation: str, instruction: Instruction) -> dict[int, tuple[int, float]]:
    """Return the results of a kernel that are written into operands.

    Returns:
      A dict from the number of a result to the number of its operand and the bytes that change in the operand.
    """
    if instruction.opcode == "custom-call":
        _, _, aliases = instruction.text.partition("output_to_operand_aliasing={")
        pairs = WRITES_INTO.findall(aliases.partition("}, ")[0] + "}")
        return {int(result or 0): (int(operand), instruction.bytes) for result, operand in pairs}
    if instruction.opcode != "fusion":
        if instruction.opcode not in _IN_PLACE:
            return {}
        return {0: (0, _update_bytes(program.computations[computation], instruction))}
    known = {inner.name: inner for _, inner in program.inside(instruction)}
    written = {}
    for number, root in enumerate(_roots(known)):
        if root.opcode in _IN_PLACE:
            parameter = _behind_bitcasts(known, root.operands[0]).parameter
            if parameter is not None:
                written[number] = parameter, _update_bytes(known, root)
    return written


def _update_bytes(known: dict[str, Instruction], write: Instruction) -> float:
    return known[write.operands[_IN_PLACE[write.opcode]]].memory_bytes


def _roots(known: dict[str, Instruction]) -> list[Instruction]:
    """Return the instructions that compute the results of a fusion."""
    if not known:
        return []
    root = _behind_bitcasts(known, list(known)[-1])
    return [_behind_bitcasts(known, name) for name in root.operands] if root.opcode == "tuple" else [root]


def _behind_bitcasts(known: dict[str, Instruction], name: str) -> Instruction:
    while known[name].opcode in ("bitcast", "copy") and known[name].operands:
        name = known[name].operands[0]
    return known[name]


def copied_array(instruction: Instruction) -> Array | None:
    """Return the copy that an instruction makes beside other kernels; None for other instructions.

    The compiler for TPUs copies operands into the memory of the core before a kernel needs them.
    """
    position = _DESTINATION.get(instruction.opcode)
    return None if position is None else instruction.arrays[position]


def moved_bytes(program: HloProgram, computation: str, instruction: Instruction) -> float:
    """Return the bytes that a kernel reads and writes.

    If the kernel reads or writes only some elements of an operand, only these elements are counted.
    """
    read = _read_bytes(program, computation, instruction)
    if (copy := copied_array(instruction)) is not None:
        return min(sum(read.values()), copy.bytes) + copy.memory_bytes
    written = [array.memory_bytes for array in instruction.arrays]
    if instruction.opcode != "custom-call":
        for result, (operand, changed) in written_into(program, computation, instruction).items():
            if read.get(operand):
                read[operand], written[result] = changed, changed
    elif len(written) > 1 and re.search(r"\b[su]8\[\d*\]\S*\)$", instruction.result):
        written.pop()  # the workspace of a library call
    return sum(read.values()) + sum(written)


def _read_bytes(program: HloProgram, computation: str, instruction: Instruction) -> dict[int, float]:
    """Return the bytes that a kernel reads of each operand.

    A repeated operand counts once. If a fusion picks elements from an operand, only these elements count.
    """
    known = program.computations[computation]
    read: dict[int, float] = {}
    for number, name in enumerate(instruction.operands):
        if name in known and name not in instruction.operands[:number]:
            read[number] = known[name].memory_bytes
            if instruction.opcode == "fusion":
                picked = _picked_bytes(program, program.bodies(instruction)[0], number)
                read[number] = read[number] if picked is None else min(read[number], picked)
    return read


def _picked_bytes(program: HloProgram, body: str, number: int) -> float | None:
    """Return the bytes that a fusion picks from a parameter; None if it reads the whole parameter."""
    instructions = program.computations.get(body, {}).values()
    parameters = [inner.name for inner in instructions if inner.opcode == "parameter" and inner.parameter == number]
    if not parameters:
        return None
    picked = 0.0
    for inner in instructions:
        for position, name in enumerate(inner.operands):
            if name not in parameters:
                continue
            if inner.opcode in _PICKS and position == 0:
                picked += inner.memory_bytes
            elif inner.opcode == "fusion":
                picked_inside = _picked_bytes(program, program.bodies(inner)[0], position)
                if picked_inside is None:
                    return None
                picked += picked_inside
            else:
                return None
    return picked
