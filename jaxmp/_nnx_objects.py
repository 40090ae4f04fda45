"""NNX objects among the arguments of a function that is traced: their arrays go in, and what is written comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError
from flax.nnx.graphlib import IndexMap, RefMap


def of_arrays(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[..., Any]]:
    """``fun`` as a function without NNX objects, to be traced once, which changes them as NNX's transforms do.

    An object that was made outside of the transformation that runs now is handed on as it is: reading its Variables is
    possible, writing to them an error of NNX.

    Returns:
      pure: takes ``arguments``; returns what ``fun`` returns and, apart from that, what it wrote to its arguments.
      arguments: what ``pure`` takes.
      write: takes both results of ``pure``; changes the arguments of ``fun`` and returns what that returns.
    """
    # The steps of nnx.update_context: split outside, merge inside, split inside, merge outside.
    plain, objects, fill = _parted((args, kwargs))
    indices = RefMap()
    graphdef, state = nnx.flatten(objects, ref_index=indices, graph=True)
    outside = IndexMap.from_refmap(indices)
    merge: Callable[..., Any]

    def pure(plain: dict[int, Any], values: list[Any]) -> Any:
        nonlocal merge
        inside = IndexMap()
        copies = nnx.unflatten(graphdef, values, index_ref=inside)
        given = {index: _identity(node) for index, node in inside.items() if isinstance(node, nnx.Variable)}
        args, kwargs = fill(plain, copies)
        results, made, fill_results = _parted(fun(*args, **kwargs))

        refs: dict[str, Any] = {"ref_index": RefMap(), "ref_outer_index": RefMap.from_indexmap(inside), "graph": True}
        structure, after = nnx.flatten(copies, **refs)
        made_structure, made_state = nnx.flatten(made, **refs)
        indices = [refs["ref_outer_index"].get(leaf) for _, leaf in after]
        written = {
            n: _value(leaf)
            for n, (index, (_, leaf)) in enumerate(zip(indices, after, strict=True))
            if index is None or _identity(leaf) != given[index]
        }

        def merge(results: Any, made: list[Any], written: dict[int, Any]) -> Any:
            values = [written[n] if n in written else outside[index] for n, index in enumerate(indices)]
            refs: dict[str, Any] = {"index_ref": IndexMap(), "outer_index_outer_ref": outside}
            nnx.unflatten(structure, values, **refs)
            return fill_results(results, nnx.unflatten(made_structure, made, **refs))

        return (results, [_value(leaf) for _, leaf in made_state]), written

    return pure, (plain, [_value(leaf) for _, leaf in state]), lambda results, written: merge(*results, written)


def _parted(tree: Any) -> tuple[dict[int, Any], dict[int, Any], Callable[..., Any]]:
    """What is no NNX object in a tree, the objects that may change, and what puts others in the places of both."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_object)
    parts: tuple[dict[int, Any], ...] = ({}, {}, {})
    for n, leaf in enumerate(leaves):
        parts[0 if not _is_object(leaf) else 1 if _may_change(leaf) else 2][n] = leaf
    plain, objects, fixed = parts

    def fill(plain: dict[int, Any], objects: dict[int, Any]) -> Any:
        filled = plain | objects | fixed
        return jax.tree.unflatten(structure, [filled[n] for n in range(len(filled))])

    return plain, objects, fill


def _is_object(node: Any) -> bool:
    return isinstance(node, (nnx.Pytree, nnx.Variable))


def _may_change(node: Any) -> bool:
    """Whether all of ``node`` was made in the transformation that runs now."""
    try:
        for _, part in nnx.iter_graph(node, graph=True):
            if isinstance(part, nnx.Variable):
                part.set_raw_value(part.get_raw_value())
            elif isinstance(part, nnx.Pytree):
                part._check_valid_context(lambda: "")
    except TraceContextError:
        return False
    return True


def _value(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _identity(leaf: Any) -> list[int]:
    return [id(value) for value in jax.tree.leaves(_value(leaf))]
