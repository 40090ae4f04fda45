"""Choose the products that are computed in float8: large products with a weight.

A recipe has the settings of float8 products. The choice is made after the engine has decided which products are half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from jaxmp._internals.jax.sources import scopes_and_transforms
from jaxmp.base.dtypes import is_half
from jaxmp.base.graphs import reachable
from jaxmp.engine.graph_paths import COPIES, has_rows, sources_of_weight
from jaxmp.engine.marks import WITH_RULE
from jaxmp.engine.nodes import Graph, Node, Step
from jaxmp.engine.states import Kind
from jaxmp.engine.value_decision import Decision
from jaxmp.policy import float8, float8_product
from jaxmp.program.equations import Array
from jaxmp.program.primitives import PRODUCTS

_MASKING = COPIES | {"select_n"}


class Float8Product(NamedTuple):
    """How a float8 product is emitted."""

    weight: str  # the operand that is the weight, "lhs" or "rhs"
    recipe: float8.Float8
    is_fused: bool  # whether XLA may fuse the operations that read the result into the product


def choose_float8(
    graph: Graph, decision_of: Mapping[Node, Decision]
) -> tuple[dict[Step, Float8Product], dict[Step, str]]:
    """Return the float8 products of a graph, and the refusals.

    A refusal is the reason why another half product with a recipe is not float8.
    """
    products: dict[Step, Float8Product] = {}
    refusals: dict[Step, str] = {}
    for step in graph.steps:
        if step.recipe is None or step.node is None:
            continue
        weight, reason = _weight_or_reason(step, step.node, step.recipe, decision_of)
        if weight:
            products[step] = Float8Product(weight, step.recipe, _is_fused(step.node, decision_of))
        elif reason:
            refusals[step] = reason
    return products, refusals


def emit_float8(step: Step, product: Float8Product, operands: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Compute a product; return its results, and the float8 types of its operands."""
    (lhs, rhs), numbers = operands, step.eqn.params["dimension_numbers"]
    result = float8_product.dot_general(
        lhs, rhs, numbers, product.recipe, weight=product.weight, is_fused=product.is_fused
    )
    return [result], [jax.ShapeDtypeStruct(operand.shape, float8.FORWARD_FORMAT) for operand in operands]


def _is_fused(product: Node, decision_of: Mapping[Node, Decision]) -> bool:
    """Return whether XLA may fuse readers of the result into the product.

    XLA must not fuse if a half GELU reads the result (see ``float8_product.dot_general``). XLA must not fuse either if
    the result leaves this program, because a GELU outside may read it.
    """

    def follow(node: Node) -> list[Node]:
        return [user for user in node.users if user.name not in PRODUCTS and not user.name.startswith("reduce_")]

    readers = reachable([product], follow)
    return all(
        reader.users and (reader.name != "tanh" or not is_half(decision_of[reader].stored_dtype)) for reader in readers
    )


def _weight_or_reason(
    step: Step, node: Node, recipe: float8.Float8, decision_of: Mapping[Node, Decision]
) -> tuple[str, str]:
    """Return the weight of a float8 product, or the reason why it is not float8.

    The result is a pair of texts: the weight (``"lhs"`` or ``"rhs"``) and the reason. One of the two texts is empty.
    Both are empty for a product that is not half.
    """
    eqn = step.eqn
    operands = [operand for operand in step.operands if operand is not None]
    compute_dtype = decision_of[node].compute_dtype
    if len(operands) < 2 or any(not is_half(compute_dtype or operand.original_dtype) for operand in operands):
        return "", ""
    if eqn.primitive.name != "dot_general":
        return "", "a convolution" if "conv" in eqn.primitive.name else "a ragged product"
    if not is_half(decision_of[node].stored_dtype):
        return "", "a float32 result"
    if WITH_RULE in step.names:
        return "", "in a function with a derivative rule"
    if "transpose" in scopes_and_transforms(eqn)[1]:
        return "", "a derivative that is spelled out"
    if any(eqn.params["dimension_numbers"][1]):
        return "", "batched"
    left, right = operands
    # If both operands could be the weight, as in a function's first product, the second operand is the weight.
    weight, other, sources = "rhs", left, sources_of_weight(right)
    if not sources:
        weight, other, sources = "lhs", right, sources_of_weight(left)
    if not sources:
        return "", "two activations"
    if _is_mask(other):
        return "", "a mask or integers"
    if _is_table(sources):
        return "", "tied"
    if float8.available() == "no":
        return "", "not on this device"
    lhs, rhs = (atom.aval for atom in eqn.invars)
    reason = float8.refusal(lhs, rhs, eqn.params["dimension_numbers"], recipe, weight=weight)
    return ("", reason) if reason else (weight, "")


def _is_mask(node: Node) -> bool:
    """Return whether a value is a mask or comes from integers or bools.

    A value that a mask selects from scalars counts too.
    """
    path = reachable([node], lambda value: value.inputs if value.name in _MASKING else ())
    has_mask = any(value.name == "select_n" or not (value.inputs or value.kind is Kind.SOURCE) for value in path)
    return has_mask and all(value.name in _MASKING or not value.shape for value in path)


def _is_table(weight: set[Node]) -> bool:
    """Return whether rows of the weight are looked up elsewhere: a tied embedding."""

    def follow(node: Node) -> list[Node]:
        alike = (user for user in node.users if user.name in COPIES or user.shape == node.shape)
        return [user for user in alike if user.name not in PRODUCTS]

    readers = {*reachable(weight, follow)}
    one_hot = any(
        user.name in PRODUCTS and any(map(_is_mask, user.inputs)) for reader in readers for user in reader.users
    )
    return one_hot or any(map(has_rows, readers - weight))
