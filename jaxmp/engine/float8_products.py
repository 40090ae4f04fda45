"""Choose the products that are computed in float8: large products of a weight.

A recipe has the settings of float8 products. The engine creates a :class:`Float8Question` when it reads a product in
code with a recipe. The answer is known only after the engine has decided which products are in half precision.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxmp._internals.jax.sources import scopes_and_transforms
from jaxmp._internals.jax.traces import may_be_skipped
from jaxmp._internals.jax.walk import PRODUCTS, walk
from jaxmp.engine.classes import Class, Kind, primitives_of
from jaxmp.engine.marks import DECIDED, WITH_RULE
from jaxmp.policy import float8, float8_product
from jaxmp.policy.policies import Policy

_recipe = functools.cache(float8.get_recipe)
_MOVES = primitives_of(Class.CLEAR) | {"convert_element_type", "concatenate", "stack", "carry", "branches"}
_MASKING = _MOVES | {"select_n"}


class Float8Question:
    """A half product that may become float8; ``bool()`` tells whether it does.

    Args:
      step: the step of the product in the engine's graph.
      recipe: the policy's recipe.
    """

    def __init__(self, step: Any, recipe: float8.Float8) -> None:
        self._step, self._recipe = step, recipe

    def __bool__(self) -> bool:
        return self._answer[0] is not None

    @property
    def why(self) -> str:
        """Return the text for the plan, such as ``"; no float8: 768 < 1536"``.

        The text is ``"; float8"`` for a float8 product, and empty for a product that is not half.
        """
        weight, reason = self._answer
        return "; float8" if weight else reason and f"; no float8: {reason}"

    @property
    def decision(self) -> tuple[Any, ...]:
        """Return the properties that affect the emitted product, except its operands."""
        return self._answer[0], self._recipe, self._is_fused, may_be_skipped()

    def emit(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Compute the product; return its results, and the float8 types of its operands."""
        (lhs, rhs), numbers = operands, self._step.eqn.params["dimension_numbers"]
        weight, _ = self._answer
        result = float8_product.dot_general(lhs, rhs, numbers, self._recipe, weight=weight, is_fused=self._is_fused)
        return [result], [jax.ShapeDtypeStruct(operand.shape, float8.FORWARD_FORMAT) for operand in operands]

    @functools.cached_property
    def _is_fused(self) -> bool:
        """Return whether XLA may fuse an addition to the result into the product.

        XLA must not fuse if a half GELU reads the result (see ``float8_product.dot_general``). If the result leaves
        this program, a GELU outside may read the result, so XLA must not fuse either.
        """

        def follow(node: Any) -> list[Any]:
            return [user for user in node.users if user.name not in PRODUCTS and not user.name.startswith("reduce_")]

        readers = walk([self._step.node], follow)
        return all(reader.users and (reader.name != "tanh" or reader.dtype.itemsize > 2) for reader in readers)

    @functools.cached_property
    def _answer(self) -> tuple[str | None, str]:
        """Return the weight (``"lhs"`` or ``"rhs"``), or None and the reason."""
        step, node, eqn = self._step, self._step.node, self._step.eqn
        dtypes = [operand and (node.compute or operand.written) for operand in step.operands[:2]] if node else []
        if not dtypes or any(dtype is None or dtype.itemsize != 2 for dtype in dtypes):
            return None, ""
        if eqn.primitive.name != "dot_general":
            return None, "a convolution" if "conv" in eqn.primitive.name else "a ragged product"
        if node.dtype.itemsize != 2:
            return None, "a float32 result"
        if WITH_RULE in step.names:
            return None, "in a function with a derivative rule"
        if "transpose" in scopes_and_transforms(eqn)[1]:
            return None, "a derivative that is spelled out"
        if any(eqn.params["dimension_numbers"][1]):
            return None, "batched"
        # If both operands could be the weight, as in a function's first product, the second operand is the weight.
        weight = "rhs" if (origins := _weight_and_sources(step.operands[1])) else "lhs"
        if not (origins := origins or _weight_and_sources(step.operands[0])):
            return None, "two activations"
        if _is_mask(step.operands[0 if weight == "rhs" else 1]):
            return None, "a mask or integers"
        if _is_table(origins):
            return None, "tied"
        if float8.available() == "no":
            return None, "not on this device"
        lhs, rhs = (atom.aval for atom in eqn.invars)
        reason = float8.refusal(lhs, rhs, eqn.params["dimension_numbers"], self._recipe, weight=weight)
        return (None, reason) if reason else (weight, "")


def float8_question(step: Any, rules: Any) -> Float8Question | None:
    """Return a :class:`Float8Question` for a product; None without a recipe.

    Args:
      step: the step of the product in the engine's graph.
      rules: the rules of the whole program.
    """
    if DECIDED in step.names:
        return None
    if step.region.recipe:
        recipe = _recipe(step.region.recipe)
    else:
        levels = [rules.overrides[key] for key in rules.keys_of(step.eqn.primitive.name, step.names)]
        policies = [level for level in levels if isinstance(level, Policy)]
        recipe = policies[0].float8 if policies else rules.float8
    return None if recipe is None else Float8Question(step, recipe)


def _weight_and_sources(node: Any) -> set[Any]:
    """Return a weight ``node`` and all values from which it is moved or cast.

    If ``node`` is computed or has looked-up rows, it is not a weight, and the set is empty.
    """

    def is_moved(value: Any) -> bool:
        # A value computed from integers (which has no inputs here) is not a weight. Looked-up rows are not a weight
        # either, because they belong to an example.
        return value.inputs and value.name in _MOVES and not (value.is_looked_up and _has_rows(value))

    path = {*walk([node], lambda value: value.inputs if value.name in _MOVES else ())}
    return path if all(value.kind is Kind.SOURCE or is_moved(value) for value in path) else set()


def _is_mask(node: Any) -> bool:
    """Return whether a value is a mask or comes from integers or bools.

    A value that a mask selects from scalars counts too.
    """
    path = walk([node], lambda value: value.inputs if value.name in _MASKING else ())
    has_mask = any(value.name == "select_n" or not (value.inputs or value.kind is Kind.SOURCE) for value in path)
    return has_mask and all(value.name in _MASKING or not value.shape for value in path)


def _is_table(weight: set[Any]) -> bool:
    """Return whether rows of the weight are looked up elsewhere: a tied embedding."""

    def follow(node: Any) -> list[Any]:
        alike = (user for user in node.users if user.name in _MOVES or user.shape == node.shape)
        return [user for user in alike if user.name not in PRODUCTS]

    readers = {*walk(weight, follow)}
    one_hot = any(
        user.name in PRODUCTS and any(map(_is_mask, user.inputs)) for reader in readers for user in reader.users
    )
    return one_hot or any(map(_has_rows, readers - weight))


def _has_rows(node: Any) -> bool:
    """Return whether a value is several rows of a table, picked by indices."""
    return node.name == "gather" and len(node.shape) >= len(node.inputs[0].shape)
