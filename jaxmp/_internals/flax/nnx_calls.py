"""NNX objects among the arguments of a function that is traced: their arrays go in, and what is written comes out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.errors import TraceContextError
from flax.nnx.graphlib import IndexMap, NoUpdate, RefMap

from jaxmp._internals.flax.nnx import NODES, OWN, STATE, are_data, check_may_change, has_int_keys
from jaxmp._internals.flax.nnx_variables import PLAIN, is_node, is_pytree, is_variable
from jaxmp._internals.jax.program import is_array
from jaxmp._internals.jax.traces import is_tracing


class ArrayCall(NamedTuple):
    """A call of a function of NNX objects, as one of a function without any."""

    pure: Callable[..., Any]  # returns what the function returns and, apart from that, what it wrote to its arguments
    arguments: tuple[Any, ...]  # what ``pure`` takes
    write: Callable[..., Any]  # takes both results, changes the objects of this call, returns what the function returns
    key: Any  # what ``pure`` depends on besides the function and ``arguments``; not in a program that is traced


def of_arrays(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArrayCall:
    """A call of ``fun`` as one of a function without NNX objects, which changes them as NNX's transforms do.

    Writing to an object that was made outside of the transformation that runs now is an error of NNX.
    """
    # The steps of nnx.update_context: split outside, merge inside, split inside, merge outside.
    plain, objects, fill, tree = _parted((args, kwargs), lambda node: True)
    outside, graphdef, leaves, numbers, merge = (_taken_apart(objects) if is_tracing() else None) or _flattened(objects)

    def pure(plain: dict[int, Any], values: list[Any]) -> Any:
        inside = IndexMap()
        copies, snapshot = merge(values, inside)
        given = {index: _held(node) for index, node in inside.items() if is_variable(node)}
        args, kwargs = fill(plain, copies)
        results, made, fill_results, _ = _parted(fun(*args, **kwargs), _may_change)

        if numbers and snapshot and not made and _unchanged(snapshot):  # most calls change only Variables
            own = [(inside[index], given[index]) for index in numbers]
            written = {n: value_of(var) for n, (var, old) in enumerate(own) if _is_new(var, old)}
            return (results, [], _Changes(None, numbers, None, fill_results)), written

        maps: dict[str, Any] = {"ref_index": RefMap(), "ref_outer_index": RefMap.from_indexmap(inside), "graph": True}
        structure, after = nnx.flatten(copies, **maps)
        made_structure, made_state = nnx.flatten(made, **maps)
        indices = [maps["ref_outer_index"].get(leaf) for _, leaf in after]
        written = {
            n: value_of(leaf)
            for n, (index, (_, leaf)) in enumerate(zip(indices, after, strict=True))
            if index is None or _is_new(leaf, given[index])
        }
        same: dict[str, Any] = {"ref_index": RefMap(), "ref_outer_index": RefMap.from_indexmap(outside), "graph": True}
        before = graphdef.with_same_outer_index() if graphdef else nnx.flatten(objects, **same)[0]
        is_same = None not in indices and structure == before
        changes = _Changes(None if is_same else structure, indices, made_structure, fill_results)
        return (results, [value_of(leaf) for _, leaf in made_state], changes), written

    def write(results: Any, written: dict[int, Any]) -> Any:
        results, made, changes = results
        return changes.carry_out(outside, results, made, written)

    return ArrayCall(pure, (plain, [value_of(leaf) for leaf in leaves]), write, (tree, graphdef))


@dataclasses.dataclass(frozen=True, eq=False)
class _Changes:
    """What a traced function did to its objects, apart from arrays."""

    structure: Any  # of its arguments afterwards; None if only Variables have changed
    indices: list[Any]  # of the leaves of the arguments, the numbers that they had before
    made: Any  # the structure of the objects among its results; None if there are none
    fill: Callable[..., Any]  # makes its results of what is no object and of objects

    def carry_out(self, outside: IndexMap, results: Any, made: list[Any], written: dict[int, Any]) -> Any:
        """Changes the objects of a call by their numbers, and returns its results."""
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
        if self.made is None:
            return self.fill(results, {})
        return self.fill(
            results, nnx.unflatten(self.made, made, index_ref=IndexMap(known), outer_index_outer_ref=outside)
        )


def _parted(tree: Any, may_change: Callable[[Any], bool]) -> tuple[dict[int, Any], dict[int, Any], Any, Any]:
    """A tree in parts: what is no NNX object, the objects that may change, what fills both in again, the structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_node)
    parts: tuple[dict[int, Any], ...] = ({}, {}, {})
    for n, leaf in enumerate(leaves):
        parts[0 if not is_node(leaf) else 1 if may_change(leaf) else 2][n] = leaf
    plain, objects, fixed = parts

    def fill(plain: dict[int, Any], objects: dict[int, Any]) -> Any:
        filled = plain | objects | fixed
        return jax.tree.unflatten(structure, [filled[n] for n in range(len(filled))])

    return plain, objects, fill, structure


_Apart = tuple[IndexMap, Any, list[Any], list[int], Callable[[list[Any], IndexMap], Any]]
"""Objects by their numbers, their structure if it is known, their leaves, the numbers of these, and what makes copies
with other values, notes their numbers, and tells what these are made of."""


def _flattened(objects: dict[int, Any]) -> _Apart:
    """All objects in some, taken apart by Flax."""
    refs = RefMap()
    graphdef, state = nnx.flatten(objects, ref_index=refs, graph=True)
    outside, leaves = IndexMap.from_refmap(refs), [leaf for _, leaf in state]
    are_known = all(map(is_node, outside.values())) and all(map(_is_plain_variable, leaves))

    def merge(values: list[Any], inside: IndexMap) -> Any:
        copies = nnx.unflatten(graphdef, values, index_ref=inside)
        return copies, _snapshot(inside.values()) if are_known else None

    return outside, graphdef, leaves, [refs[leaf] for leaf in leaves] if are_known else [], merge


def _taken_apart(objects: dict[int, Any]) -> _Apart | None:
    """As :func:`_flattened`, at a fraction of the cost; None if more is in one than objects and what no copy changes.

    Flax wraps, sorts and describes each attribute, so that structures can be compared: a trace has no use for that.
    """
    outside, found, leaves = IndexMap(), dict[int, Any](), list[int]()
    stack = [*objects.values()][::-1]
    while stack:
        node = stack.pop()
        if id(node) in found:
            continue
        parts: list[tuple[str, Any]] | None = None
        if is_variable(node):
            if node.ref:
                return None
            leaves.append(len(outside))
        elif (parts := _parts_of(node)) is None:
            return None
        else:
            stack += [part for _, part in reversed(parts) if is_node(part)]
        outside[len(outside)] = node
        found[id(node)] = node, parts

    def merge(values: list[Any], inside: IndexMap) -> Any:
        copies, snapshot, rest = dict[int, Any](), _Snapshot(), iter(values)
        for key, (node, parts) in found.items():
            own = node.get_metadata() if parts is None else dict(vars(node))
            copy = node.var_type.from_metadata(next(rest), own) if parts is None else object.__new__(type(node))
            copies[key] = inside[len(inside)] = copy
            snapshot.append((copy, own))
        for (copy, own), (_, parts) in zip(snapshot, found.values(), strict=True):
            if parts is not None:
                for name, part in parts:  # what is no object says in which trace it was made
                    own[name] = copies[id(part)] if id(part) in copies else jax.tree.map(id, part)
                vars(copy).update(own)
        return {n: copies[id(node)] for n, node in objects.items()}, snapshot

    return outside, None, [outside[number] for number in leaves], leaves, merge


def _parts_of(node: Any) -> list[tuple[str, Any]] | None:
    """The attributes that a copy of an object has copies of; None if others hold arrays, objects or what may change."""
    if not is_pytree(node):
        return None
    found, data = list[tuple[str, Any]](), are_data(node)
    for name, value in vars(node).items():
        if type(value) in PLAIN or name == NODES:
            continue
        if is_node(value) or name == STATE:
            found.append((name, value))
        elif data.get(name) or not _is_fixed(value) or any(map(_is_traced, jax.tree.leaves(value, is_leaf=is_node))):
            return None
    return sorted(found, key=lambda part: (len(part[0]) if has_int_keys(node) else 0, part[0]))  # as Flax does


def _is_traced(leaf: Any) -> bool:
    return is_node(leaf) or is_array(leaf)


def _may_change(node: Any) -> bool:
    """Whether all of ``node`` was made in the transformation that runs now."""
    try:
        for _, part in nnx.iter_graph(node, graph=True):
            _check_may_change(part)
    except TraceContextError:
        return False
    return True


def _check_may_change(node: Any) -> None:
    if is_variable(node):
        node.set_raw_value(node.get_raw_value())
    elif isinstance(node, nnx.Pytree):
        check_may_change(node)


def _is_plain_variable(leaf: Any) -> bool:
    return is_variable(leaf) and not leaf.ref


_Snapshot = list[tuple[Any, dict[str, Any]]]
"""Objects, and what they are made of but for the values of Variables."""


def _snapshot(nodes: Iterable[Any]) -> _Snapshot | None:
    """The attributes of objects; None if a part of one may change by itself, as a list does."""
    found = [(node, _attributes_of(node)) for node in nodes]
    for node, own in found:
        for name, value in own.items() if not is_variable(node) else ():
            if type(value) not in PLAIN and not name.startswith(OWN) and not _is_fixed(value):
                return None
    return found


def _attributes_of(node: Any) -> dict[str, Any]:
    return node.get_metadata() if is_variable(node) else dict(vars(node))


def _is_fixed(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return type(value) in PLAIN or is_node(value) or jax.tree_util.all_leaves([value])


def _unchanged(snapshot: _Snapshot) -> bool:
    """Whether objects still have these attributes."""
    pairs = [(_attributes_of(node), old) for node, old in snapshot]
    return all(
        new.keys() == old.keys() and all([value is old[name] for name, value in new.items()]) for new, old in pairs
    )


def value_of(leaf: Any) -> Any:
    """What a Variable holds; what is none holds itself."""
    return leaf.get_raw_value() if is_variable(leaf) else leaf


def _held(leaf: Any) -> list[Any]:
    value = value_of(leaf)
    return [value] if isinstance(value, jax.core.Tracer) else jax.tree.leaves(value)


def _is_new(leaf: Any, before: list[Any]) -> bool:
    """Whether a leaf holds other arrays than ``before``."""
    return any([new is not old for new, old in itertools.zip_longest(_held(leaf), before)])
