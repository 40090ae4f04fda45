"""Colouring: which values are half, decided on the whole graph, in the passes that README.md lists."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jaxmp._internals.jax.equations import size_of
from jaxmp._internals.jax.primitives import BROADCAST, COMBINES, MEETS, MONOTONE, PICKS
from jaxmp._internals.jax.walk import PRODUCTS, nested_cycles, turns, walk
from jaxmp.engine import groups
from jaxmp.engine.classes import CLEAR, FULL, HALF, INFER, JOIN, KEPT, SOURCE, STRICT, Kind
from jaxmp.engine.graph import Graph, Node, inputs_of, users_of

_FLOAT32, _JOINED, _ROUNDING = np.dtype(np.float32), frozenset({"concatenate", "stack"}), frozenset({FULL, INFER})


def decide(graph: Graph, dtypes: Sequence[Any], force: bool = False) -> None:
    """Gives every node the dtype that it will have, and the one that its operation computes in, if anything changes.

    Args:
      graph: its sources may have another ``dtype`` than they were written with.
      dtypes: those in which its results are wanted, None for as they come; what is wanted in half counts as read by a
        product.
      force: decide although there is no product: the body of a rule belongs to a larger program.
    """
    wanted = {node: dtype.itemsize for node, dtype in zip(graph.body.results, dtypes, strict=True) if node and dtype}
    graph.wanted = results = [node for node, size in wanted.items() if size == 2]
    for node in wanted.keys() - results:
        node.is_seen = True
    graph.groups = groups.find(graph)
    nodes = [node for node in graph.nodes if node.kind is not SOURCE]  # of whose dtypes nothing is to be decided
    products, named = [node for node in nodes if node.kind is HALF], [node for node in nodes if node.name in PRODUCTS]
    graph.changes = force or bool(products) or any(node.kind is FULL for node in named)
    if not graph.changes:
        return
    halves = [node for node in graph.nodes if node.kind is SOURCE and node.dtype.itemsize == 2]
    for node in halves:
        node.state = HALF
    written = [node for node in named if node.kind is KEPT and all(each.written.itemsize == 2 for each in node.inputs)]
    for node in walk([*products, *written, *halves], users_of):
        node.after_product = True
    products += groups.take_outer_products(named)
    for node in walk([node for node in nodes if node.is_looked_up], users_of):
        node.is_looked_up = True
    for node in reversed(nodes):  # rows that a batch repeats belong to no example: they are summed as a weight is
        if node.is_looked_up and not node.after_product and any(_grows(user, node) for user in node.users):
            node.is_looked_up = False
    for node in walk([*products, *written, *results], inputs_of):
        node.before_product = True
    narrowed = _put_casts_off(nodes)
    groups.find_activations(nodes)
    groups.extend(nodes, graph.groups)
    _hold_sums(graph, frozenset(written))
    _keep_decay(nodes)
    products = [node for node in products if node.kind is HALF]
    _find_readers([*narrowed, *(operand for node in products for operand in node.inputs), *results], nodes)
    _settle(nodes)
    groups.extend(nodes, graph.groups)  # also what feeds only what float32 was carried on to
    seen = walk([node for node in nodes if node.is_seen], lambda node: node.inputs if node.kind is CLEAR else ())
    rounded = {group.nodes[0] for group in graph.groups if group.rounded}.difference(seen)
    for node in nodes:
        node.compute, node.dtype = _dtypes(node, rounded)
    _move_casts(nodes)


def read_in(user: Node, operand: Node) -> np.dtype | None:
    """The dtype that an operation reads an operand in; None for the one that it has."""
    if user.compute is not None:
        return user.compute
    if user.kind in (CLEAR, JOIN):
        return None if user.late else operand.late
    return operand.written


def _hold_sums(graph: Graph, written: frozenset[Node]) -> None:
    """Makes float32 each carry that adds up, and all on its way round: half of the sum would be added to.

    One adds up if no product lies on the way round its own loop, but for ways by carries that a way past all products
    makes float32: it takes small steps or steps in time, or is asked to be so. What comes from ``written`` products,
    with none before the loop, is so as well.
    """
    nodes, steps = graph.nodes, {group.nodes[0].same for group in graph.groups if group.name == groups.SMALL_STEP}
    if not [node for node in nodes if node.kind is JOIN and node.name == "carry"]:
        return
    found, held = turns(nodes, _past_products, lambda node: node.name == "carry"), set[Node]()
    for cycle in [each for each in found if HALF not in _kinds(each)]:  # which a region or an override asks for
        reasons = {
            "is computed with in float32, as asked": any(node.asked for node in cycle),
            "takes small steps": not steps.isdisjoint([node.same for node in cycle]),
            "is computed with in each step of time": bool(_kinds(cycle) & _ROUNDING and graph.in_time & {*cycle}),
        }
        for reason in [each for each, holds in reasons.items() if holds][:1]:
            _hold(cycle, f"a carry that {reason}")
            held.update(cycle)

    def made_of(node: Node) -> Sequence[Node]:
        return () if node in held else inputs_of(node)

    for cycle in nested_cycles(nodes, made_of, lambda node: node.loop if node.name == "carry" else None):
        kinds, joins, is_written = _kinds(cycle), [node for node in cycle if node.kind is JOIN], written & {*cycle}
        # What comes in from no weight or argument is a stream of activations.
        flows = is_written and any(each.inputs[0].is_cast_once and each.inputs[0] not in cycle for each in joins)
        if HALF not in kinds and not flows and not kinds.isdisjoint(_ROUNDING):
            _hold(joins if is_written else cycle, "a carry that adds up, with no product on its way round")


def _past_products(node: Node) -> Sequence[Node]:
    return () if node.name in PRODUCTS else node.inputs


def _kinds(cycle: Sequence[Node]) -> set[Kind]:
    """The kinds of what lies on a way round a loop, but for what rounds nothing."""
    return {node.kind for node in cycle if node.kind is not INFER or node.name not in COMBINES}


def _keep_decay(nodes: Sequence[Node]) -> None:
    """Makes float32 what a loop multiplies with a number near 1 and carries on: a discount, a rate of decay."""
    ends = [end for node in nodes if node.name == "carry" for end in node.inputs[1:]]
    for node in walk(ends, _past_products):
        if node.loop and node.kind is INFER and groups.is_near_one(node):
            _hold([node], "a factor near 1, which half would round")


def _hold(cycle: Sequence[Node], reason: str) -> None:
    """Makes float32 what adds up, and multiplies, on a way round a loop."""
    for node in cycle:
        if node.kind in (JOIN, INFER):
            node.kind, node.reason = FULL, reason


def _find_readers(operands: Sequence[Node], nodes: Sequence[Node]) -> None:
    """Finds what exists in half although it is computed in float32: what products read, and activations before them."""
    for node in walk(operands, _moved_from):
        node.has_half_copy = True

    def made_of(node: Node) -> Sequence[Node]:
        return _moved_from(node) or [operand for operand in node.inputs if _is_elementwise(node, operand)]

    heading = walk(operands, made_of)  # each element to a product, by way of operations on single elements
    starts = [
        operand
        for node in nodes
        if node in heading and node.name not in ("add", "sub", "mul", "div")
        for operand in node.inputs
        # An epsilon would be lost again.
        if operand.activation_of and not operand.has_epsilon and _is_elementwise(node, operand)
    ]
    for node in walk(starts, _moved_from):
        node.has_half_copy = True


def _moved_from(node: Node) -> Sequence[Node]:
    """What is moved to make a node."""
    is_moved = node.kind is JOIN or (node.kind is CLEAR and node.name in MONOTONE)
    return node.inputs if is_moved else ()


def _is_elementwise(user: Node, operand: Node) -> bool:
    return user.kind is INFER and user.shape == operand.shape


def _settle(nodes: Sequence[Node]) -> None:
    """The state of every node: forwards once, and then round the loops until nothing changes any more."""
    waiting, carries = collections.OrderedDict[Node, None](), set[Node]()
    for node in nodes:
        if (state := _state(node)) is not node.state:
            node.state = state
            waiting.update(dict.fromkeys([user for user in node.users if user in carries] if carries else ()))
        if node.name == "carry":  # what comes round a loop is behind it
            carries.add(node)
    for _ in range(64 * len(nodes)):
        if not waiting:
            return
        node, _nothing = waiting.popitem(last=False)
        state = _state(node)
        if state is not node.state:
            node.state = state
            for user in node.users:
                waiting[user] = None
    for node in nodes:  # a loop that goes to and fro is float32
        if node.kind is JOIN and node in waiting:
            node.kind = FULL
            return _settle(nodes)


def _state(node: Node) -> Kind:
    kind = node.kind
    if kind is KEPT:
        return HALF if node.dtype.itemsize == 2 else SOURCE
    if kind is HALF or kind is FULL or kind is STRICT:
        return kind
    if node.late is not None:
        return HALF
    if kind is CLEAR:
        return max([operand.state for operand in node.inputs], default=SOURCE)
    # Where a product reads an operand too, there is a half copy of it.
    seen = [HALF if each.state is FULL and each.has_half_copy else each.state for each in node.inputs]
    highest = max(seen, default=SOURCE)
    if node.kind is JOIN and highest is not STRICT:
        if node.name == "carry" and seen[-1] is not SOURCE:
            return seen[-1]
        return HALF if HALF in seen else highest
    # A stream goes on in half beside a float32 operand, but for a statistic, a mean or a logarithm of a sum.
    if node.name == "add" and highest is FULL and HALF in seen:
        are_large = all([each.activation_of or not each.after_product for each in node.inputs])
        return HALF if are_large and not groups.are_of_one_product(node.inputs) else FULL
    return highest


def _dtypes(node: Node, rounded: Collection[Node]) -> tuple[np.dtype | None, np.dtype]:
    """The dtype that an operation computes in, None for the one it was written with, and that of its result."""
    kind = node.kind
    if kind is CLEAR:
        below = node.inputs[0] if node.inputs else node
        is_cast = node.late is not None or node.name == "convert_element_type"  # which readers make, or see through
        return None, below.dtype if is_cast else below.late or below.dtype
    if kind is KEPT:
        return None, node.written
    half = node.written if node.written.itemsize == 2 or node.half is None else node.half
    if node.state >= FULL:
        return _FLOAT32, half if node in rounded and node.has_half_copy else _FLOAT32
    if kind is HALF or (node.state is HALF and node.before_product):
        return half, half
    return None, node.written


def _put_casts_off(nodes: Sequence[Node]) -> list[Node]:
    """Leaves to each reader the author's casts of weights to half, through all that only moves them.

    The cotangents of a weight's elements, of its rows that many examples read, and of its uses are then summed in
    float32: a cast before them would have them summed in half.

    Returns:
      What the author casts to half, weights or not.
    """
    cast: list[Node] = []
    for node in nodes:
        if node.name == "convert_element_type" and node.kind is KEPT and node.written.itemsize == 2:
            cast += node.inputs
            are_weights = all(operand.written == _FLOAT32 and not operand.is_cast_once for operand in node.inputs)
            if are_weights and _varies(node) and not node.in_rule:
                node.kind, node.late = CLEAR, node.written
        elif node.kind is CLEAR and node.name in PICKS and len(node.inputs) == 1:
            node.late = node.inputs[0].late
        elif node.name in _JOINED and len(late := {operand.late for operand in node.inputs}) == 1 and None not in late:
            node.kind, node.late = CLEAR, late.pop()
    return cast


def _varies(node: Node) -> bool:
    """Whether a value is made of an argument, and not of constants only."""

    def made_of(each: Node) -> Sequence[Node]:
        return () if each.const is not None else each.inputs[: 1 if each.name == "carry" else None]

    return any(each.kind is SOURCE and each.const is None for each in walk([node], made_of))


def _move_casts(nodes: Sequence[Node]) -> None:
    """Casts before a move that its one reader wants in half: so a transposed weight is transposed by the product.

    A weight stays float32 up to what repeats it: several readers, the turns of a loop, a broadcast.
    """
    for node in reversed(nodes):
        is_moved = node.kind is CLEAR and node.name in MONOTONE and len(node.inputs) == 1 and not node.is_seen
        if not is_moved or node.dtype != _FLOAT32:
            continue
        wanted = {read_in(user, node) for user in node.users}
        dtype = wanted.pop() if len(wanted) == 1 else None
        # What meets it repeats it too, if only by a vmap from outside.
        repeats = (user.loop != node.loop or user.name in MEETS for user in node.users)
        repeated = not node.is_cast_once and (len(node.users) > 1 or any(repeats))
        if dtype is not None and dtype.itemsize == 2 and node.late in (None, dtype) and not repeated:
            node.compute, node.dtype, node.late = dtype, dtype, None


def _grows(user: Node, operand: Node) -> bool:
    """Whether a reader repeats what was looked up, or moves it on to one that does."""
    if user.kind is CLEAR and not user.is_looked_up:
        return True
    return user.name in (BROADCAST | {"broadcast_in_dim"}) and size_of(user.shape) > size_of(operand.shape)
