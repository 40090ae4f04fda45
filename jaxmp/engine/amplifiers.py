"""Keep the operands of amplifiers in float32.

An amplifier turns a small error of an operand into a large error of the result. In bfloat16 a coordinate of 300.4
becomes 300, which is another pixel, and a phase of 300.4 becomes noise. A search back from each amplifier finds the
values that must be float32:

- In general, the search goes back through moves, scales, quotients, offsets, bounds, products and sums over an axis,
  because these operations keep the low digits. The search ends at an activation.
- From a factorisation or a solver, the search goes back to the nearest products, which are float32 too.
- From a root or a logarithm, the search ends before the nearest product, which stays half. Example: ``x² + eps``.

The result of a remainder is float32 too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from jaxmp.engine.graph import Graph, Node, Step
from jaxmp.engine.paths import ROOTS, SCALES, SQUARES, multiple_of, readers_of
from jaxmp.engine.states import CLEAR, INFER, JOIN, Rule, State
from jaxmp.program.equations import size_of
from jaxmp.program.primitives import (
    AMPLIFIERS,
    BOUNDS,
    EXTREMES,
    LOGARITHMS,
    PRODUCTS,
    SOLVERS,
    SUMS,
    Trait,
    with_trait,
)
from jaxmp.program.walk import walk

_ORDERINGS = with_trait(Trait.ORDERS)  # not eq, which the derivative of max uses
_SEARCH = "call_hi_primitive"  # jnp.searchsorted from JAX 0.12 on
_CAST = "convert_element_type"
_ROOTS_AND_LOGARITHMS = (ROOTS | LOGARITHMS) - AMPLIFIERS.keys()  # log1p is an amplifier
_ROUNDINGS = with_trait(Trait.ROUNDS)
_QUANTISED = frozenset({"int8", "int4", "int2", "uint8", "uint4", "uint2"})
_KEEP_QUANTISED = SUMS | SCALES | BOUNDS | {"select_n", _CAST}
_READ_BY_ACTIVATION = PRODUCTS | {"reduce_sum"}


def raise_amplified(graph: Graph) -> None:
    """Make values float32 if a search back from an amplifier finds them."""
    quantised = {operand for step in graph.steps if _is_quantising(step) for operand in step.operands}
    for step in graph.steps:
        name = step.eqn.primitive.name
        if name in SOLVERS:
            _raise(walk(_floats(step), _back_to_products), step)
        elif name in _ROOTS_AND_LOGARITHMS:
            _raise(walk(_floats(step), _keepers_of_range), step, but=PRODUCTS)
        else:
            amplified = _amplified_operands(step, name, quantised)
            _raise(walk(amplified, _keepers_of_digits), step)
            if name == "rem" and amplified and step.node is not None:
                _raise([step.node], step)
    _raise_equal_products(graph)


def _raise_equal_products(graph: Graph) -> None:
    """Make a product float32 if an equal product is float32 because of an amplifier."""
    amplified_products = {
        node.same: node for node in graph.nodes if node.name in PRODUCTS and node.rule is Rule.AMPLIFIED
    }
    for node in graph.nodes:
        if node.name in PRODUCTS and node.same in amplified_products:
            node.raise_to(State.FLOAT32, Rule.AMPLIFIED, amplified_products[node.same].cause)


def _raise(nodes: Iterable[Node], step: Step, but: Collection[str] = ()) -> None:
    for node in nodes:
        is_decided_here = node.kind in (INFER, JOIN) or node.is_half_product
        if node.after_product and is_decided_here and node.name not in but:
            node.raise_to(State.FLOAT32, Rule.AMPLIFIED, step.node)


def _floats(step: Step) -> list[Node]:
    return [node for node in step.operands if node is not None]


def _is_quantising(step: Step) -> bool:
    """Return whether a step casts to the small integers of a quantised network."""
    return step.eqn.primitive.name == _CAST and step.eqn.outvars[0].aval.dtype.name in _QUANTISED


def _amplified_operands(step: Step, name: str, quantised: Collection[Node | None]) -> Sequence[Node]:
    """Return the operands whose low digits affect the result of a step."""
    if name in AMPLIFIERS:
        is_quantised = name in _ROUNDINGS and step.node is not None and _is_quantised(step.node, quantised)
        return () if is_quantised else _floats(step)[: AMPLIFIERS[name]]
    if name in _ORDERINGS:
        pairs = zip(_floats(step), _floats(step)[::-1], strict=True)
        return [operand for operand, other in pairs if _is_compared_with_positions(step, operand, other)]
    if name in (_CAST, _SEARCH):
        dtype = step.eqn.outvars[0].aval.dtype
        is_index = dtype.kind in "iu" and dtype.name not in _QUANTISED
        return _floats(step) if is_index else ()
    return ()


def _is_quantised(rounded: Node, quantised: Collection[Node | None]) -> bool:
    """Return whether a rounded value becomes a small integer or feeds a product.

    A fraction such as ``x - floor(x)`` is no rounded value. A straight-through estimator is one:
    ``x + (round(x) - x)``.
    """
    value = multiple_of(rounded.inputs[0])
    multiples = walk(
        [rounded, *rounded.users], lambda node: node.users if node.kind is CLEAR or node.name in SCALES else ()
    )
    fractions = {node for node in multiples if _sums(node, value)}

    def follow(node: Node) -> Sequence[Node]:
        if node in fractions:
            return [reader for reader in readers_of(node) if _sums(reader, value)]
        is_passed = node is rounded or node.kind in (CLEAR, JOIN) or node.name in _KEEP_QUANTISED
        return node.users if is_passed else ()

    after = walk([rounded, *rounded.users], follow)
    return any(reader.name in PRODUCTS or reader in quantised for reader in after)


def _sums(node: Node, value: Node) -> bool:
    """Return whether a node adds a multiple of ``value`` to another value, or takes their difference."""
    return node.name in SUMS and value in [multiple_of(operand) for operand in node.inputs]


def _is_compared_with_positions(step: Step, operand: Node, other: Node) -> bool:
    """Return whether ``other`` is an array of positions or a table."""
    if operand is other or other.after_product:
        return False
    entries = size_of(other.origin.shape)
    is_computed_from_integers = other.is_constant and other.const is None
    if is_computed_from_integers:
        return entries > 1  # a single number is a bound
    # Each value is compared with each entry of a table, so the result is larger than both.
    compared = size_of(step.eqn.outvars[0].aval.shape)
    is_table = 1 < entries < compared and size_of(operand.origin.shape) < compared
    return is_table or other.is_looked_up


def _back_to_products(node: Node) -> Sequence[Node]:
    return () if node.name in PRODUCTS else node.inputs


def _keepers_of_range(node: Node) -> Sequence[Node]:
    """Return operands whose errors a root or logarithm of ``node`` amplifies.

    Examples of ``node`` are ``1 - x²`` and ``x² + eps``.
    """
    if node.name in PRODUCTS or node.name == "reduce_sum":
        return ()
    return node.inputs if node.name in SQUARES else _keepers_of_digits(node)


def _keepers_of_digits(node: Node) -> Sequence[Node]:
    """Return the operands whose low digits the result of ``node`` keeps."""
    if node.name in EXTREMES or not node.after_product:
        return ()
    if node.kind in (CLEAR, JOIN) or node.name in ("reduce_sum", _CAST):
        return node.inputs
    computed = [operand for operand in node.inputs if operand.after_product]
    if _is_quotient(node):  # as in a perspective division
        return computed
    if node.name in PRODUCTS or node.name in SCALES:
        return computed if len(computed) == 1 else ()
    is_choice = node.name in BOUNDS or node.name == "select_n"
    if is_choice or node.name in SUMS:
        # The search ends at a choice or a sum that a product reads: an activation, or a residual stream.
        is_activation = is_choice or len(computed) > 1
        is_read = any(reader.name in _READ_BY_ACTIVATION for reader in readers_of(node))
        return () if is_activation and is_read else computed
    return ()


def _is_quotient(node: Node) -> bool:
    """Return whether a value is ``x / y`` or ``x * (1 / y)``."""
    factors = [operand.origin for operand in node.inputs] if node.name == "mul" else []
    return node.name == "div" or any(factor.name == "div" and factor.inputs[0].is_constant for factor in factors)
