"""Check that an optimizer computes the same on packed leaves as on single leaves.

The update is traced twice, without numbers: on the single leaves, and on the packed tree. Both programs are evaluated
on symbols. The value of a leaf is a formula of the elements of that leaf and of numbers that all leaves share. A
number may depend on leaves only through a sum, maximum or minimum over all elements of all packed leaves, such as a
global norm. If both programs give equal formulas, they compute equal numbers, up to the order of the sums. An unknown
operation on a leaf is an error, so the check refuses every optimizer that it does not understand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp.base.trees import map_nodes_of_type
from jaxmp.optim.packed_tree import InVector, Layout, PackedTree, is_packed, unpacked
from jaxmp.program.equations import bodies_of, elements_of, opened
from jaxmp.program.primitives import COMBINATIONS, Trait, has_trait, with_trait
from jaxmp.program.walk import interpreted

_ELEMENTWISE = with_trait(Trait.ELEMENTWISE)
_IDENTITIES = with_trait(Trait.IDENTITY)
_RESHAPES = with_trait(Trait.KEEPS_ORDER)
"""Operations that return a leaf unchanged if they return its shape."""
_REDUCTIONS = {name: kind for name, kind in COMBINATIONS.items() if has_trait(name, Trait.REDUCES)}
_COMBINE = {name: kind for name, kind in COMBINATIONS.items() if has_trait(name, Trait.ELEMENTWISE)}
_SHAPES = frozenset({"shape", "sharding", "broadcast_dimensions", "out_sharding", "dimensions"})
"""Parameters of operations that do not change the elements of a uniform array."""


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A packed leaf: the name of its group, and its place in the group."""

    group: str
    place: int


@dataclasses.dataclass(frozen=True)
class _Shared:
    """A value that all packed leaves share.

    Attributes:
      formula: the number of the formula.
      is_uniform: whether all elements are equal.
    """

    formula: int
    is_uniform: bool


@dataclasses.dataclass(frozen=True)
class _Elements:
    """An array of a leaf's shape. Each element is computed from the same element of the leaf.

    Attributes:
      leaf: the leaf.
      formula: the number of the formula.
    """

    leaf: _Leaf
    formula: int


@dataclasses.dataclass(frozen=True)
class _Total:
    """A sum (or maximum, minimum …) of the elements of leaves and of shared numbers.

    Attributes:
      kind: the operation: ``"add"``, ``"max"``, ``"min"``, ``"and"`` or ``"or"``.
      leaves: each leaf with the formula of its elements.
      shared: the formulas of the shared numbers.
    """

    kind: str
    leaves: tuple[tuple[_Leaf, int], ...]
    shared: tuple[int, ...]


_Value = _Shared | _Elements | _Total


class _NotElementwiseError(Exception):
    """The reason why leaves cannot be packed."""


def require_elementwise(
    update: Callable[..., Any], layout: Layout, updates: Any, state: Any, params: Any, extra_args: Mapping[str, Any]
) -> None:
    """Raise a ValueError unless ``update`` computes the same on packed leaves.

    Args:
      update: the update function of the wrapped optimizer.
      layout: the leaves that are packed together.
      updates: the packed updates, as arrays or shapes.
      state: the optimizer's state, with packed trees.
      params: the packed params, or None.
      extra_args: the other arguments of ``update``.
    """
    packed_args = updates, state, params
    single_args = jax.eval_shape(unpacked, packed_args)

    def traced(args: Any) -> tuple[Any, Any]:
        program, shapes = jax.make_jaxpr(lambda args: update(*args, **extra_args), return_shape=True)(args)
        return program, shapes

    single = traced(single_args)  # the optimizer's own errors are raised unchanged
    try:
        packed = traced(packed_args)
    except Exception as error:
        raise ValueError(refusal(f"it raises {type(error).__name__} for packed params")) from error
    formulas: dict[Hashable, int] = {}
    of_packed = _Evaluation(formulas, dict.fromkeys((group.name for group in layout.groups), 1))
    of_single = _Evaluation(formulas, {group.name: len(group.members) for group in layout.groups})
    facts = _facts_of_packed(packed_args, formulas)
    try:
        packed_result = of_packed.result(*packed, facts)
        single_result = of_single.result(*single, map_nodes_of_type(_each_leaf, facts, PackedTree))
        _require_equal(packed_result, single_result, of_packed, of_single)
    except _NotElementwiseError as error:
        raise ValueError(refusal(str(error))) from None


def refusal(reason: str) -> str:
    """Return the text of the error for an optimizer whose leaves cannot be packed."""
    return (
        f"pack_small takes optimizers that update each element on its own, such as optax.adamw, but {reason}; leave "
        "pack_small out"
    )


def _facts_of_packed(args: Any, formulas: dict[Hashable, int]) -> Any:
    """Return the arguments of the packed program, with a symbol in place of each array."""

    def symbol(*name: Hashable) -> int:
        return formulas.setdefault(name, len(formulas))

    nodes: list[Any] = jax.tree.leaves(args, is_leaf=is_packed)
    structure: Any = jax.tree.structure(args, is_leaf=is_packed)
    facts: list[Any] = []
    for number, node in enumerate(nodes):
        if not is_packed(node):
            facts.append(_Shared(symbol("array", number), np.ndim(node) == 0))
            continue
        vectors = {name: _Elements(_Leaf(name, 0), symbol("leaf", number)) for name in node.vectors}
        separate = jax.tree.leaves(node.separate)
        shared = [_Shared(symbol("other", number, n), np.ndim(leaf) == 0) for n, leaf in enumerate(separate)]
        facts.append(PackedTree(vectors, jax.tree.unflatten(jax.tree.structure(node.separate), shared), node.layout))
    return structure.unflatten(facts)


def _each_leaf(tree: PackedTree) -> Any:
    """Return a packed tree of symbols as a tree with a symbol for each leaf."""
    leaves, structure = tree.places()
    for group in tree.layout.groups:
        for place, number in enumerate(group.members):
            leaves[number] = _Elements(_Leaf(group.name, place), tree.vectors[group.name].formula)
    return structure.unflatten(leaves)


def _require_equal(packed_result: Any, single_result: Any, of_packed: _Evaluation, of_single: _Evaluation) -> None:
    """Raise an error unless both programs return the same formulas."""
    nodes: list[Any] = jax.tree.leaves(packed_result, is_leaf=is_packed)
    structure: Any = jax.tree.structure(packed_result, is_leaf=is_packed)
    try:
        parts = structure.flatten_up_to(single_result)
    except ValueError:
        raise _NotElementwiseError("its state has another structure for packed params") from None
    for node, part in zip(nodes, parts, strict=True):
        pairs: list[tuple[Hashable, Hashable]] = []
        if not is_packed(node):
            pairs.append((of_packed.formula(node), of_single.formula(part)))
        else:
            leaves = jax.tree.leaves(part)
            node_leaves, _ = node.places()
            for node_leaf, leaf in zip(node_leaves, leaves, strict=True):
                if not isinstance(node_leaf, InVector):
                    pairs.append((of_packed.formula(node_leaf), of_single.formula(leaf)))
            for group in node.layout.groups:
                of_vector = of_packed.formula_of(node.vectors[group.name], _Leaf(group.name, 0))
                for place, number in enumerate(group.members):
                    pairs.append((of_vector, of_single.formula_of(leaves[number], _Leaf(group.name, place))))
        if any(of_packed_leaf != of_single_leaf for of_packed_leaf, of_single_leaf in pairs):
            raise _NotElementwiseError("it treats params differently by their path, shape or number")


class _Evaluation:
    """The evaluation of one program on symbols.

    Args:
      formulas: the number of each formula, for both programs.
      sizes: the number of leaves in each group: 1 in the packed program.
    """

    def __init__(self, formulas: dict[Hashable, int], sizes: Mapping[str, int]) -> None:
        self._formulas = formulas
        self._sizes = sizes

    def result(self, program: Any, shapes: Any, facts: Any) -> Any:
        """Return the values of the results, in the structure of the results."""
        jaxpr, consts = opened(program)
        values = self._results(jaxpr, consts, jax.tree.leaves(facts))
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    def formula(self, value: _Value) -> int:
        """Return the formula of a value that all leaves share."""
        if isinstance(value, _Elements):
            raise _NotElementwiseError("it uses elements of one param in another param or in a number")
        return (self._closed(value) if isinstance(value, _Total) else value).formula

    def formula_of(self, value: _Value, leaf: _Leaf) -> tuple[str, int]:
        """Return the formula of the elements of ``leaf`` in a result."""
        if isinstance(value, _Elements):
            if value.leaf != leaf:
                raise _NotElementwiseError("it moves elements from one param to another")
            return "elements", value.formula
        if isinstance(value, _Shared) and not value.is_uniform:
            raise _NotElementwiseError("it computes arrays that depend on the shape of a param, such as noise")
        return "uniform", self.formula(value)

    def _number(self, *formula: Hashable) -> int:
        return self._formulas.setdefault(formula, len(self._formulas))

    def _constant(self, constant: Any) -> _Shared:
        elements = elements_of(constant)
        shape = np.shape(constant)
        content: Hashable = id(constant) if elements is None else elements.tobytes()
        return _Shared(self._number("constant", str(constant.dtype), shape, content), shape == ())

    def _results(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[_Value]) -> list[_Value]:
        constants = [self._constant(constant) for constant in consts]
        return interpreted(jaxpr, constants, values, self._equation, self._literal)

    def _literal(self, atom: Any) -> _Shared:
        return self._constant(np.asarray(atom.val, atom.aval.dtype))

    def _equation(self, eqn: Any, values: list[_Value]) -> Sequence[_Value]:
        name = eqn.primitive.name
        bodies = bodies_of(eqn)
        if bodies is not None and bodies.is_call and not bodies.is_per_device:
            return self._results(*opened(bodies.jaxprs[0]), values)
        if name in _IDENTITIES:
            return values
        shape = eqn.outvars[0].aval.shape if eqn.outvars else ()
        if name in _COMBINE and shape == ():
            return [self._combined(_COMBINE[name], values)]
        operands = [self._closed(value) if isinstance(value, _Total) else value for value in values]
        leaves = {operand.leaf for operand in operands if isinstance(operand, _Elements)}
        if not leaves:
            return self._shared(eqn, operands)
        return [self._of_leaf(eqn, operands, leaves)]

    def _of_leaf(self, eqn: Any, operands: Sequence[Any], leaves: set[_Leaf]) -> _Value:
        """Return the result of an operation on a leaf."""
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        shapes = {
            var.aval.shape for var, operand in zip(eqn.invars, operands, strict=True) if isinstance(operand, _Elements)
        }
        is_mixed = len(leaves) > 1 or any(
            isinstance(operand, _Shared) and not operand.is_uniform for operand in operands
        )
        if is_mixed or len(eqn.outvars) > 1:
            raise _NotElementwiseError(f"its operation {name!r} combines a param with another array")
        (leaf,) = leaves
        if name in _REDUCTIONS and shape == ():
            return _Total(_REDUCTIONS[name], ((leaf, operands[0].formula),), ())
        if shapes != {shape}:
            raise _NotElementwiseError(f"its operation {name!r} combines elements of a param")
        if name in _RESHAPES:
            return _Elements(leaf, operands[0].formula)
        if name not in _ELEMENTWISE:
            raise _NotElementwiseError(f"its operation {name!r} does not act on each element on its own")
        kinds = tuple((isinstance(operand, _Elements), operand.formula) for operand in operands)
        return _Elements(leaf, self._number(name, _params_of(eqn, _SHAPES), kinds))

    def _shared(self, eqn: Any, operands: Sequence[Any]) -> list[_Value]:
        """Return the results of an operation on values that all leaves share."""
        name = eqn.primitive.name
        of_operands = tuple(operand.formula for operand in operands)
        if operands and all(operand.is_uniform for operand in operands):
            if name in _RESHAPES:
                return [operands[0]]
            if name in _ELEMENTWISE:
                return [_Shared(self._number("shared", name, _params_of(eqn, _SHAPES), of_operands), True)]
        results: list[_Value] = []
        for place, var in enumerate(eqn.outvars):
            formula = self._number("shared", name, _params_of(eqn), of_operands, place, str(var.aval))
            results.append(_Shared(formula, np.ndim(var.aval) == 0))
        return results

    def _combined(self, kind: str, values: Sequence[_Value]) -> _Total:
        """Return the sum (or maximum, minimum …) of numbers."""
        leaves: list[tuple[_Leaf, int]] = []
        shared: list[int] = []
        for value in values:
            if isinstance(value, _Total) and value.kind == kind:
                leaves += value.leaves
                shared += value.shared
            else:
                shared.append(self.formula(value))
        return _Total(kind, tuple(leaves), tuple(shared))

    def _closed(self, total: _Total) -> _Shared:
        """Return a total as a number that all leaves share.

        The total has to combine the same formula of all leaves of a group.
        """
        formulas: dict[_Leaf, list[int]] = {}
        for leaf, formula in total.leaves:
            formulas.setdefault(leaf, []).append(formula)
        of_groups: dict[str, set[tuple[int, ...]]] = {}
        counts: dict[str, int] = {}
        for leaf, of_leaf in formulas.items():
            of_groups.setdefault(leaf.group, set()).add(tuple(sorted(of_leaf)))
            counts[leaf.group] = counts.get(leaf.group, 0) + 1
        for group, alternatives in of_groups.items():
            if len(alternatives) > 1 or counts[group] != self._sizes[group]:
                raise _NotElementwiseError("it computes a number from single params, such as the norm of each param")
        parts = tuple(sorted((group, *alternatives) for group, alternatives in of_groups.items()))
        return _Shared(self._number(total.kind, parts, tuple(sorted(total.shared))), True)


def _params_of(eqn: Any, without: frozenset[str] = frozenset()) -> Hashable:
    return tuple(sorted((name, str(value)) for name, value in eqn.params.items() if name not in without))
