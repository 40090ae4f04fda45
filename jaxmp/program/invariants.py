"""Find values that are the same in all iterations of a loop or for all examples.

An example is one element of the axis over which a ``jax.vmap`` maps. The argument ``are_same`` of the functions here
tells for each operand whether it is equal for all examples.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmp._internals.jax.core import partial_eval_jaxpr_custom
from jaxmp.program.equations import Bodies, bodies_of, evaluate, is_literal, opened
from jaxmp.program.primitives import Trait, with_trait


def hoisted(
    fun: Callable[..., Any], fixed: Any, args: tuple[Any, ...], is_kept: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``fun`` as a function of ``args``, and compute its invariant part now.

    The invariant part depends only on ``fixed``, so it can be computed once, before a loop over ``args``. Invariant
    parts of calls, scans and recomputations are included, but not those of custom derivative rules.

    Args:
      fun: a function of arrays.
      fixed: the argument that is the same in each iteration. The invariant part is not differentiated with respect to
        ``fixed``.
      args: arguments with the shapes of one iteration.
      is_kept: a policy for ``jax.checkpoint``.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(fixed, *args)
    (jaxpr, consts), known = opened(closed), jax.tree.leaves(fixed)
    varies = [n >= len(known) for n in range(len(jaxpr.invars))]
    before, turn, *_ = partial_eval_jaxpr_custom(jaxpr, varies, True, True, True, is_kept)
    # Equations without results have effects, such as prints. Each iteration must run these effects.
    before = before.replace(eqns=[eqn for eqn in before.eqns if eqn.outvars])
    before, turn = (dce_jaxpr(body, [True] * len(body.outvars), True)[0] for body in (before, turn))
    results, tree = evaluate(before, consts, known), jax.tree.structure(shapes)
    turn = turn if results else jaxpr  # JAX's split would mark recomputations as differentiated
    return lambda *args: jax.tree.unflatten(tree, evaluate(turn, consts, [*results, *jax.tree.leaves(args)]))


_ONE_BY_ONE = with_trait(Trait.IDENTITY)
_PER_DEVICE = with_trait(Trait.PER_DEVICE)


def same_results(eqn: Any, are_same: Sequence[bool]) -> list[bool]:
    """Return which results of an equation are equal for all examples."""
    bodies = bodies_of(eqn)
    if eqn.primitive.name in _PER_DEVICE:
        return [False] * len(eqn.outvars)
    if eqn.primitive.name in _ONE_BY_ONE:
        return list(are_same)
    if bodies is None:
        return [all(are_same)] * len(eqn.outvars)
    if bodies.kind == "while":
        return list(same_inside(bodies, are_same)[1][-bodies.carry :])
    if bodies.kind == "cond" and not are_same[0]:  # examples may take different branches
        return [False] * len(eqn.outvars)
    return [
        all(answers) for answers in zip(*map(_same_ends, bodies.jaxprs, same_inside(bodies, are_same)), strict=True)
    ]


def same_inside(bodies: Bodies, are_same: Sequence[bool]) -> list[Sequence[bool]]:
    """Return which operands of each loop body or branch are equal for all examples.

    An operand of a loop body must be equal for all examples in all iterations.
    """
    if bodies.kind == "while":
        first, rest = are_same[: bodies.consts], are_same[bodies.consts :]
        turned = same_in_turns(bodies, rest)
        carry = turned[len(rest) - bodies.carry :]
        if not all(_same_ends(bodies.jaxprs[0], [*first, *carry])):  # examples differ in their number of iterations
            carry = [False] * bodies.carry
        return [[*first, *carry], [*rest[: -bodies.carry], *carry]]
    if bodies.kind == "scan":
        return [same_in_turns(bodies, are_same)]
    if bodies.kind == "cond":  # with a batched index, each example runs all branches
        are_same = [are_same[0] and is_same for is_same in are_same[1:]]
    return [are_same] * len(bodies.jaxprs)


def same_values(jaxpr: Any, are_same: Sequence[bool]) -> Collection[Any]:
    """Return the variables of an open jaxpr that are equal for all examples."""
    known, key = _KNOWN.setdefault(jaxpr, {}), tuple(are_same)
    if key not in known:
        known[key] = _same_values(jaxpr, are_same)
    return known[key]


_KNOWN: Any = weakref.WeakKeyDictionary()  # equal layers share a jaxpr


def _same_values(jaxpr: Any, are_same: Sequence[bool]) -> Collection[Any]:
    known = {*jaxpr.constvars, *(var for var, is_same in zip(jaxpr.invars, are_same, strict=True) if is_same)}
    for eqn in jaxpr.eqns:
        ends = same_results(eqn, [is_literal(atom) or atom in known for atom in eqn.invars])
        known.update(var for var, is_same in zip(eqn.outvars, ends, strict=True) if is_same)
    return known


def _same_ends(body: Any, are_same: Sequence[bool]) -> list[bool]:
    jaxpr, _ = opened(body)
    same = same_values(jaxpr, are_same)
    return [is_literal(atom) or atom in same for atom in jaxpr.outvars]


def same_in_turns(bodies: Bodies, are_same: Sequence[bool]) -> list[bool]:
    """Return which operands of a loop body all examples share in all iterations."""
    before, now, start = list[bool](), list(are_same), bodies.start - bodies.consts
    while now != before:
        before, ends = now, _same_ends(bodies.jaxprs[-1], now)
        stop = start + bodies.carry
        carry = [a and b for a, b in zip(now[start:stop], ends, strict=False)]
        now = [*now[:start], *carry, *now[stop:]]
    return now


def passed_on(program: Any) -> list[int | None]:
    """Return for each result of a program the number of the argument that it equals.

    The number is None if the result equals no argument.
    """
    jaxpr, _ = opened(program)
    numbers = {var: n for n, var in enumerate(jaxpr.invars)}

    def number_of(atom: Any) -> int | None:
        return None if is_literal(atom) else numbers.get(atom)

    for eqn in jaxpr.eqns:
        for var, operand in zip(eqn.outvars, _operands_passed_on(eqn), strict=True):
            if operand is not None and (number := number_of(eqn.invars[operand])) is not None:
                numbers[var] = number
    return [number_of(atom) for atom in jaxpr.outvars]


# The body of a `shard_map` has parts of the arrays. A custom rule may give an identity function another derivative.
_NEVER_PASSED_ON = with_trait(Trait.CUSTOM_DERIVATIVE) | {"shard_map"}


def unchanged(bodies: Bodies) -> Collection[int]:
    """Return the positions of a scan's carries that no iteration changes."""
    if bodies.kind != "scan":
        return ()
    jaxpr, _ = opened(bodies.jaxprs[0])
    if (numbers := _UNCHANGED.get(jaxpr)) is None:  # cached, because callers ask for each operand
        ends = enumerate(passed_on(jaxpr)[: bodies.carry])
        numbers = _UNCHANGED[jaxpr] = frozenset(n for n, operand in ends if operand == bodies.start + n)
    return numbers


_UNCHANGED: Any = weakref.WeakKeyDictionary()


def _operands_passed_on(eqn: Any) -> list[int | None]:
    bodies = bodies_of(eqn)
    if bodies is None or eqn.primitive.name in _NEVER_PASSED_ON:
        return [None] * len(eqn.outvars)
    ends = [passed_on(body) for body in (bodies.jaxprs if bodies.kind == "cond" else bodies.jaxprs[-1:])]
    if bodies.kind == "call":
        return ends[0]
    if bodies.kind == "cond":  # its first operand picks a branch
        return [None if len({*end}) > 1 or end[0] is None else end[0] + 1 for end in zip(*ends, strict=True)]

    def is_same(n: int, operand: int) -> bool:
        """Return whether a result is the carry at its position, or a scanned element."""
        return operand == bodies.start + n if n < bodies.carry else operand >= bodies.start + bodies.carry

    turn = [None if end is None else end + bodies.consts for end in ends[-1]]
    return [end if end is not None and is_same(n, end) else None for n, end in enumerate(turn)]
