"""Turn functions that take NNX objects into pure functions of arrays.

The pure function also returns the values that were written to the objects.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.errors import TraceContextError
from flax.nnx.graphlib import IndexMap, NoUpdate, RefMap

from jaxmp._internals.flax.nnx import check_may_change
from jaxmp._internals.flax.nnx_variables import is_node
from jaxmp.base.dtypes import AsComputed


class ArrayCall(NamedTuple):
    """A call with NNX objects, in the form of a pure function of arrays.

    Attributes:
      pure: a function that returns two values: the results of the call, and the new values of the changed objects.
      arguments: the arguments of ``pure``.
      write: a function that takes the two values from ``pure``, changes the objects, and returns the results of the
        call.
    """

    pure: Callable[..., Any]
    arguments: tuple[Any, ...]
    write: Callable[..., Any]


def make_array_call(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArrayCall:
    """Return a call of ``fun`` as a pure function of arrays.

    Its ``write`` changes the NNX objects in the same way as NNX's transforms. If ``fun`` writes to an object that was
    created outside of the current transformation, NNX raises a TraceContextError.
    """
    # The code follows the steps of nnx.update_context: split outside, merge inside, split inside, merge outside.
    plain, objects, fill = _split((args, kwargs), lambda node: True)
    refs = RefMap()
    graphdef, state = nnx.flatten(objects, ref_index=refs, graph=True)
    outside = IndexMap.from_refmap(refs)

    def pure(plain: dict[int, Any], values: list[Any]) -> Any:
        inside = IndexMap()
        copies = nnx.unflatten(graphdef, values, index_ref=inside)
        arrays = {index: _arrays_of(node) for index, node in inside.items() if isinstance(node, nnx.Variable)}
        args, kwargs = fill(plain, copies)
        results, new_objects, fill_results = _split(fun(*args, **kwargs), _may_change)

        maps: dict[str, Any] = {"ref_index": RefMap(), "ref_outer_index": RefMap.from_indexmap(inside), "graph": True}
        structure, after = nnx.flatten(copies, **maps)
        new_structure, new_state = nnx.flatten(new_objects, **maps) if new_objects else (None, [])
        indices = [maps["ref_outer_index"].get(leaf) for _, leaf in after]
        written = {}
        for n, (index, (_, leaf)) in enumerate(zip(indices, after, strict=True)):
            if index is None or _has_changed(leaf, arrays[index]):
                written[n] = _mark_intermediates(leaf)
        is_same = None not in indices and structure == graphdef.with_same_outer_index()
        changes = _Changes(None if is_same else structure, indices, new_structure, fill_results)
        return (results, [_mark_intermediates(leaf) for _, leaf in new_state], changes), written

    def write(results: Any, written: dict[int, Any]) -> Any:
        results, new_objects, changes = results
        return changes.carry_out(outside, results, new_objects, written)

    return ArrayCall(pure, (plain, [value_of(leaf) for _, leaf in state]), write)


@dataclasses.dataclass(frozen=True, eq=False)
class _Changes:
    """The changes that a traced function made to NNX objects, apart from arrays.

    Attributes:
      structure: the structure of the function's arguments after the call; None if only Variables have changed.
      indices: for each leaf of the arguments after the call, its number before the call; None if the call created the
        leaf.
      new_structure: the structure of the new objects among the results; None if there are no new objects.
      fill: a function that inserts the new objects into the other results.
    """

    structure: Any
    indices: list[Any]
    new_structure: Any
    fill: Callable[..., Any]

    def carry_out(self, outside: IndexMap, results: Any, new_objects: list[Any], written: dict[int, Any]) -> Any:
        """Change the objects of a call, and return the call's results."""
        known: Any = outside
        if self.structure is None:
            for n, value in written.items():
                if not isinstance(value, NoUpdate):  # an array reference, which has changed already
                    outside[self.indices[n]].set_raw_value(value)
        else:
            for node in outside.values():
                _check_may_change(node)
            known = IndexMap()
            values = [written[n] if n in written else outside[index] for n, index in enumerate(self.indices)]
            nnx.unflatten(self.structure, values, index_ref=known, outer_index_outer_ref=outside)
        if self.new_structure is None:
            return self.fill(results, {})
        return self.fill(
            results,
            nnx.unflatten(self.new_structure, new_objects, index_ref=IndexMap(known), outer_index_outer_ref=outside),
        )


def _split(tree: Any, may_change: Callable[[Any], bool]) -> tuple[dict[int, Any], dict[int, Any], Any]:
    """Split a tree into NNX objects and other leaves.

    Return three values:

    - the leaves that are not NNX objects
    - the NNX objects that may change
    - a function that rebuilds the tree from these leaves and objects
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_node)
    plain, objects, fixed = dict[int, Any](), dict[int, Any](), dict[int, Any]()
    for n, leaf in enumerate(leaves):
        if not is_node(leaf):
            plain[n] = leaf
        elif may_change(leaf):
            objects[n] = leaf
        else:
            fixed[n] = leaf

    def fill(plain: dict[int, Any], objects: dict[int, Any]) -> Any:
        filled = plain | objects | fixed
        return jax.tree.unflatten(structure, [filled[n] for n in range(len(filled))])

    return plain, objects, fill


def _may_change(node: Any) -> bool:
    """Return whether all of ``node`` was created in the current transformation."""
    try:
        for _, part in nnx.iter_graph(node, graph=True):
            _check_may_change(part)
    except TraceContextError:
        return False
    return True


def _check_may_change(node: Any) -> None:
    """Raise Flax's TraceContextError if an outer transformation made ``node``."""
    if isinstance(node, nnx.Variable):
        node.set_raw_value(node.get_raw_value())
    elif isinstance(node, nnx.Pytree):
        check_may_change(node)


def value_of(leaf: Any) -> Any:
    """Return the value of a Variable, or any other leaf itself."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _mark_intermediates(leaf: Any) -> Any:
    """Return the value of a leaf, for the results of a traced function.

    Intermediates keep the dtypes in which they are computed.
    """
    value = value_of(leaf)
    return jax.tree.map(AsComputed, value) if isinstance(leaf, nnx.Intermediate) else value


def _arrays_of(leaf: Any) -> list[Any]:
    """Return the arrays of a Variable or of any other leaf."""
    value = value_of(leaf)
    return [value] if isinstance(value, jax.core.Tracer) else jax.tree.leaves(value)


def _has_changed(leaf: Any, before: list[Any]) -> bool:
    """Return whether a leaf has other arrays than ``before``, compared by identity."""
    return any([new is not old for new, old in itertools.zip_longest(_arrays_of(leaf), before)])
