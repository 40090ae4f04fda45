"""A loss whose params are split over devices, written again so that each weight is gathered where it is used.

The loss is traced as it is, on whole params; policies, adapters and autocast have done their work by then. What was
traced says of each param in which dtype it is read in the end, behind all that only moves it: in that dtype it is
gathered, in the innermost body that holds all its uses, of a scan over layers in the body. So a weight is gathered once
in a pass.

What a device adds to the gradient of a weight (by its rows of a product, of a lookup, of a fused loss) is computed in
float32 from the rows that it has, and stays where it is until all uses have added theirs: this is what the *tap* of a
weight is for, zeros that nobody reads and whose cotangent has a part for each device. Then it is reduced once, in the
dtype that was asked for. XLA by itself would reduce each gradient in the dtype of the product that makes it. The first
axis of the activations that the devices divide is taken for the batch's: another would cost time, but give the same
numbers. All this is on axes of type Auto; a loss on Explicit ones is rebuilt for them before (``_mesh_types``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxmp import float8
from jaxmp import tree as _tree
from jaxmp._jaxpr import reading
from jaxmp._jaxpr.invariant import same_in_turns, same_results
from jaxmp._jaxpr.primitives import BROADCAST
from jaxmp._jaxpr.program import Program, arrays_in
from jaxmp._jaxpr.rebind import in_place_of
from jaxmp._jaxpr.rebuild import bound, is_body_alone, rebuilt
from jaxmp._jaxpr.walk import PRODUCTS, equations, interpreted, jaxprs_in, product_dtypes
from jaxmp._mesh_plan import COPIES, HalfSumError, Plan, while_tracing, wide
from jaxmp._mesh_products import computed_wide, goes_by_rows, in_float8, may_be_wide, product_by_rows
from jaxmp._mesh_weights import Source, Use, weight_of
from jaxmp._specs import require_specs, specs_in
from jaxmp.dtypes import is_half
from jaxmp.engine.classes import Class, classify
from jaxmp.marks import DECIDED, region_of

_FLOAT32 = np.dtype(np.float32)
_MOVES = frozenset({"reshape", "transpose", "squeeze", "rev", "copy", "name", "broadcast_in_dim", "slice", "split"})
_NO_RULE: Any = None  # calls, scans and branches have none
_ENTERED_CALLS = frozenset({"jit", "remat2"})
# What sums the cotangents of its operands by itself, in their dtype; of an unknown primitive nobody knows.
_SUMS = frozenset({Class.HALF, Class.ACCUMULATION, Class.LINALG, Class.RECURSE, None})
# What a weight alone goes through in float32 where it is half: the engine casts its operands as well.
_WIDENED = frozenset({Class.CLEAR, Class.WIDEST, Class.INFER, Class.POINTWISE, Class.ACCUMULATION})
_FILLS = frozenset({"pad"})  # with a scalar, whose cotangent is a sum
_PRODUCTS = PRODUCTS - {"ragged_dot_general"}
_ACCUMULATES = frozenset({"add_any", "scatter-add", "scatter-sub", "scatter-mul"})  # its operands, not their cotangents


class Held(NamedTuple):
    """Params with what was gathered of them before, and taps: a list of both, of floating params."""

    params: Any
    halves: Any
    taps: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """``loss_fn(params, …)`` that gathers weights of a plan where they are used; also takes a :class:`Held`."""

    plan: Plan
    loss_fn: Callable[..., Any]
    gathers_again: bool = True  # and not only where a body is computed again

    @property
    def is_split(self) -> bool:
        """Whether a batch is split over more than one device."""
        return self.plan.devices > 1

    def __call__(self, params: Any, *rest: Any) -> Any:
        if not self.is_split:
            return self.loss_fn(params, *rest)
        given: list[tuple[Any, Any]] = []
        if isinstance(params, Held):
            params, given = params.params, list(zip(params.halves, params.taps, strict=True))
        program, uses = self._uses(params, rest)
        for use, (half, tap) in zip(uses, given, strict=bool(given)):
            source = use.source
            source.half, source.tap, source.given, source.gathers_again = half, tap, True, False
        found = iter(uses)
        leaves = [next(found) if _tree.is_float_array(leaf) else leaf for leaf in jax.tree.leaves(params)]
        jaxpr, consts = program.jaxpr
        arrays = [*leaves, *arrays_in(jax.tree.leaves(rest))]
        known = len(leaves) + len(arrays_in(jax.tree.leaves(rest[:1])))  # the model state is the same for all, too
        results = _results(jaxpr, consts, arrays, [n < known for n in range(len(arrays))], _Loop())
        return program.unflatten(_plain(results, jaxpr))

    def hold(self, params: Any, *rest: Any) -> Held:
        """The params, all gathered."""
        _, uses = self._uses(params, rest)
        sources = [use.source for use in uses]
        halves = [self.plan.whole(each.param, each.spec, each.dtype) for each in sources]
        return Held(params, halves, [self.plan.zeros(each.param, each.spec) for each in sources])

    def released(self, params: Any, taps: Any) -> Any:
        """The gradients of params, of the cotangents of a held one."""
        leaves, tree = jax.tree.flatten(params)
        specs = specs_in(self.plan.specs)
        found = [n for n, leaf in enumerate(leaves) if _tree.is_float_array(leaf)]
        for n, parts in zip(found, taps, strict=True):
            leaves[n] += self.plan.reduced(parts, specs[n]).astype(leaves[n].dtype)
        return jax.tree.unflatten(tree, leaves)

    def _uses(self, params: Any, rest: tuple[Any, ...]) -> tuple[Program, list[Use]]:
        """What was traced, and each floating param in it."""
        plan = self.plan
        require_specs(params, plan.specs)
        with while_tracing(plan):
            program = Program(self.loss_fn, (params, *rest))
        jaxpr, _ = program.jaxpr
        products = map(np.dtype, product_dtypes(jaxpr))
        halves, uses = {dtype for dtype in products if is_half(dtype)}, []
        leaves = zip(jax.tree.leaves_with_path(params), specs_in(plan.specs), jaxpr.invars, strict=False)
        for (path, leaf), spec, var in leaves:
            if _tree.is_float_array(leaf):
                dtypes, results = _read_in(jaxpr, var)
                dtypes |= {np.dtype(jaxpr.outvars[end].aval.dtype) for end in results}
                known = dtypes - {None} or halves
                half = known.pop() if len(known) == 1 and plan.is_split(spec) else leaf.dtype
                dtype = half if is_half(half) else leaf.dtype
                name, is_alone = _tree.path_name(path), _is_alone(jaxpr, var)
                uses.append(Use(Source(plan, name, leaf, spec, dtype, is_alone, self.gathers_again)))
        return program, uses


# --- what reads a weight ---


def _is_move(eqn: Any) -> bool:
    """Whether an equation of a weight moves it, alike for all devices."""
    if eqn.primitive.name == "convert_element_type":
        return bool(jnp.issubdtype(eqn.params["new_dtype"], jnp.floating))
    return eqn.primitive.name in _MOVES and len(eqn.invars) == 1 and not _is_copying(eqn)


def _is_copying(eqn: Any) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and COPIES in reading.names_of(eqn)


def _readers(jaxpr: Any, var: Any) -> list[tuple[Any, int]]:
    """The equations that read a weight, moved or not, and as which operand; None for the results of the body."""
    moved, found = {var}, list[tuple[Any, int]]()
    for eqn in jaxpr.eqns:
        for position, atom in enumerate(eqn.invars):
            if not reading.is_literal(atom) and atom in moved:
                if _is_move(eqn):
                    moved.update(eqn.outvars)
                else:
                    found.append((eqn, position))
    results = enumerate(jaxpr.outvars)
    return found + [(None, n) for n, atom in results if not reading.is_literal(atom) and atom in moved]


def _is_alone(jaxpr: Any, var: Any) -> bool:
    readers = _readers(jaxpr, var)
    return len(readers) == 1 and readers[0][0] is not None


def _read_in(jaxpr: Any, var: Any, around: reading.Names = ()) -> tuple[set[Any], set[int]]:
    """The dtypes that a weight, or rows of it, is read in, in this body and those within; the results that it is.

    None among them are rows that autocast left as they were: it would look them up in half as well.
    """
    dtypes, results = set[Any](), set[int]()
    for eqn, position in _readers(jaxpr, var):
        bodies = None if eqn is None else reading.bodies_of(eqn)
        names = around if eqn is None else (*around, *reading.names_of(eqn))
        is_lookup = eqn is not None and eqn.primitive.name == "gather" and position == 0
        passed: list[Any] = []
        if eqn is None:
            results.add(position)
        elif is_lookup and DECIDED in names and region_of(names).level is None:
            dtypes.add(None)
        elif is_lookup or eqn.primitive.name == "dynamic_slice" or _is_copying(eqn):
            passed = eqn.outvars
        elif bodies is not None and (bodies.kind == "call" or _enters_scan(bodies, position)):
            inner, _ = reading.opened(bodies.jaxprs[0])
            found, ends = _read_in(inner, inner.invars[position], names)
            dtypes |= found
            passed = [eqn.outvars[end] for end in ends]
        else:
            aval = eqn.invars[position].aval
            dtypes.add(np.dtype(eqn.params["dtype"] if eqn.primitive.name == "cast_repeated" else aval.dtype))
        for one in passed:
            found, ends = _read_in(jaxpr, one, around)
            dtypes, results = dtypes | found, results | ends
    return dtypes, results


def _enters_scan(bodies: reading.Bodies, position: int) -> bool:
    return bodies.kind == "scan" and not bodies.start <= position < bodies.start + bodies.carry


# --- writing it again ---


@dataclasses.dataclass(eq=False)
class _Loop:
    """What turns of a loop have found, so that none is done again for it, however deep one stands in another."""

    weights: set[int] = dataclasses.field(default_factory=set)  # operands of its body that are weights in later turns
    is_tried: bool = False  # it, or one around it, was run for that before
    inside: dict[Any, _Loop] = dataclasses.field(default_factory=dict)

    def of(self, eqn: Any) -> _Loop:
        """An equation of its body."""
        return self.inside.setdefault(eqn, _Loop(is_tried=self.is_tried))


def _results(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], are_fixed: Sequence[bool], loop: _Loop
) -> list[Any]:
    """The results of a body, among which there may be uses of weights as there are among its arguments.

    Args:
      are_fixed: which of ``args`` are the same for all examples.
      loop: the body's.
    """

    def equation(eqn: Any, operands: list[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
        values = [value for value, _ in operands]
        known = [value.is_fixed if isinstance(value, Use) else is_fixed for value, is_fixed in operands]
        with in_place_of(eqn):
            if any(isinstance(value, Use) for value in values):
                return [(result, False) for result in _rewritten(eqn, values, known, loop)]
            return [(result, all(known)) for result in bound(eqn, values, eqn.params)]

    operands, constants = list(zip(args, are_fixed, strict=True)), [(const, True) for const in consts]
    return [value for value, _ in interpreted(jaxpr, constants, operands, equation, lambda atom: (atom.val, True))]


def _plain(values: Sequence[Any], jaxpr: Any) -> list[Any]:
    """The results of a body as arrays."""
    ends = zip(values, jaxpr.outvars, strict=True)
    return [value.read(atom.aval.dtype) if isinstance(value, Use) else value for value, atom in ends]


def _rewritten(eqn: Any, given: Sequence[Any], are_fixed: Sequence[bool], loop: _Loop) -> Sequence[Any]:
    """The results of an equation that reads weights; what is made of them for no example is a weight again."""
    name = eqn.primitive.name
    uses = [(position, value) for position, value in enumerate(given) if isinstance(value, Use)]
    position, use = uses[0]
    if _is_move(eqn):
        return use.followed(eqn)
    if _is_copying(eqn):
        return [use.copies(eqn.outvars[0].aval.dtype)]
    is_fixed, least = all(are_fixed), max(use.size for _, use in uses)
    if len(uses) == 1 and goes_by_rows(eqn, position):
        if not is_fixed:
            return [product_by_rows(eqn, position, use, given)]
        if name == "gather" and eqn.outvars[0].aval.size > least:  # positions, looked up for each example
            rows = product_by_rows(eqn, position, use, given)
            return [weight_of(use.source, rows, rows.dtype, True, least)]
    if (recipe := float8.recipe_of(eqn)) and (result := in_float8(eqn, recipe, given)) is not None:
        return [result]
    bodies = reading.bodies_of(eqn)
    if bodies is not None and is_body_alone(eqn):
        jaxpr, consts = reading.opened(bodies.jaxprs[0])
        for position, use in uses:
            use.source.is_alone &= _is_alone(jaxpr, jaxpr.invars[position])
        return _results(jaxpr, consts, given, are_fixed, loop.of(eqn))
    if bodies is not None and (bodies.kind in ("scan", "cond") or name in _ENTERED_CALLS):
        return _entered(eqn, bodies, given, are_fixed, loop.of(eqn))
    operands, of_weights = list(given), same_results(eqn, _are_weights(given, are_fixed))
    is_wide = name in _FILLS or (all(of_weights) and (name in _PRODUCTS or classify(name) in _WIDENED))
    is_wide = is_wide and may_be_wide(eqn)
    sums = not is_wide and name not in _ACCUMULATES and classify(name) in _SUMS
    for position, use in uses:
        if sums and not (is_fixed and all(var.aval.size <= eqn.invars[position].aval.size for var in eqn.outvars)):
            _require_wide(use, eqn, position)
        operands[position] = _read_whole(use, eqn, position, is_wide)

    def is_weight(n: int, result: Any) -> bool:
        """A slice by a loop's counter is one, and so is what has the elements of one, masked, with noise, scaled."""
        if of_weights[n] or name == "dynamic_slice":
            return True
        is_alike = (result.shape == eqn.invars[n].aval.shape and result.size == use.size for n, use in uses)
        is_split = use.source.plan.is_split(jax.typeof(result).sharding.spec)
        return classify(name) not in _SUMS and any(is_alike) and not is_split

    results = computed_wide(eqn, operands) if is_wide else bound(eqn, operands, eqn.params)
    is_fixed, least = name == "dynamic_slice" or is_fixed, math.inf if name in PRODUCTS else least
    return [
        weight_of(use.source, each, var.aval.dtype, is_fixed, least)
        if _tree.is_float_array(each) and is_weight(n, each)
        else (each.astype(var.aval.dtype) if is_wide else each)
        for n, (each, var) in enumerate(zip(results, eqn.outvars, strict=True))
    ]


def _read_whole(use: Use, eqn: Any, position: int, is_wide: bool = False) -> Any:
    """A weight for an equation that takes all of it."""
    aval, shapes = eqn.invars[position].aval, [var.aval.shape for var in eqn.outvars]
    repeats = eqn.primitive.name in BROADCAST and aval.shape != shapes[0]
    return use.read(wide(aval.dtype) if is_wide else aval.dtype, shapes[0] if repeats else None)


def _require_wide(use: Use, eqn: Any, position: int) -> None:
    """Raises if an equation sums the cotangents of a weight in half."""
    name, aval = eqn.primitive.name, eqn.invars[position].aval
    inside = (var.aval for jaxpr in jaxprs_in(eqn) for each in equations(jaxpr) for var in each.outvars)
    halves = [each.dtype.name for each in (aval, *inside) if is_half(getattr(each, "dtype", np.int32))]
    if halves and use.source.plan.reduce_dtype == _FLOAT32:
        guess = (
            f"; it may be activations of the shape {aval.shape}, which are taken for a weight, as one of that shape is "
            "in them: with another batch size they are not"
        )
        raise HalfSumError(
            f"the gradient of {use.source.name!r} cannot be reduced in float32: it goes in {aval.dtype.name} "
            f"into {name} at {reading.user_source_of(eqn)}, which computes it in {halves[0]}; compute in float32 "
            f"there, or make_train_step(…, reduce_dtype={halves[0]!r}){'' if use.is_fixed else guess}"
        )


def _are_weights(given: Sequence[Any], are_fixed: Sequence[bool]) -> list[bool]:
    return [known or isinstance(each, Use) for each, known in zip(given, are_fixed, strict=True)]


def _entered(
    eqn: Any, bodies: reading.Bodies, given: Sequence[Any], are_fixed: Sequence[bool], loop: _Loop
) -> Sequence[Any]:
    """The results of a call, a scan or a branch: what only it reads is gathered in it, and so are slices of a turn."""
    is_scan, is_cond = bodies.kind == "scan", bodies.kind == "cond"
    are_fixed = [is_cond or are_fixed[0], *are_fixed[1:]]  # the index picks one
    of_weights, are_same = same_results(eqn, _are_weights(given, are_fixed)), same_results(eqn, are_fixed)
    index, given, are_fixed = given[:is_cond], given[is_cond:], are_fixed[is_cond:]
    operands, inside, sliced = list(given), dict[int, Use](), set[int]()
    carry = range(bodies.start, bodies.start + bodies.carry)
    known = same_in_turns(bodies, are_fixed) if is_scan else are_fixed
    of = next(each.source for each in given if isinstance(each, Use))
    for position, use in enumerate(given):
        if not isinstance(use, Use):
            continue
        source = use.source
        is_turn = is_scan and position >= carry.stop
        if position in carry:
            operands[position] = _read_whole(use, eqn, position)
            continue
        inside[position], operands[position] = use, source.param
        if is_turn and (use.moves or any(source.spec[:1])):
            sliced.add(position)
            operands[position] = use.read(source.wide)
        elif is_turn:
            if source.given:
                half, tap = source.gathered()
                operands[position] = source.param, half, jnp.moveaxis(tap, 1, 0)
        elif is_scan or not source.is_alone:
            source.gathered()
            source.gathers_again &= eqn.primitive.name == "jit"  # or each turn would, and each remat

    outside, ends = dict[Source, Source](), list[Any]()

    def run(body: Any, *args: Any) -> list[Any]:
        jaxpr, consts = reading.opened(body)
        loop.weights.update(n for n in carry if known[n] and _tree.is_float_array(args[n]))

        def turn() -> list[Any]:
            values = list(args)
            for position, use in inside.items():
                source, var = use.source, jaxpr.invars[position]
                is_turn = is_scan and position >= carry.stop
                own = use
                if position in sliced:  # of whole weights: each is one of its own
                    own = dataclasses.replace(
                        weight_of(source, args[position], source.wide, use.is_fixed), rounded=use.rounded
                    )
                elif is_turn or source.half is None:
                    param, half, tap = args[position] if is_turn and source.given else (args[position], None, None)
                    alone, spec = _is_alone(jaxpr, var), PartitionSpec(*source.spec[1:]) if is_turn else source.spec
                    mine = dataclasses.replace(source, param=param, half=half, tap=tap, spec=spec, is_alone=alone)
                    mine.gathers_again &= eqn.primitive.name != "remat2"  # which frees what it saw
                    own = dataclasses.replace(use, source=mine)
                values[position], outside[own.source] = own, source
            for n in loop.weights:
                values[n] = weight_of(of, args[n], args[n].dtype, known[n])
            return _results(jaxpr, consts, values, known, loop)

        def settle(ends: list[Any]) -> list[Any]:
            """What a turn makes a weight is one in the next."""
            while made := {n for n, end in zip(carry, ends, strict=False) if isinstance(end, Use)} - loop.weights:
                loop.weights.update(made)
                ends = turn()
            return ends

        def thrown_away() -> None:
            settle(turn())

        if carry and jaxpr.effects and not loop.is_tried:  # which must happen once: in turns thrown away they do not
            loop.is_tried = True
            jax.eval_shape(thrown_away)
        ends[:] = settle(turn())
        for n in carry:
            if isinstance(given[n], Use) and n not in loop.weights:
                _require_wide(given[n], eqn, n)
        if is_cond:
            ends[:] = _plain(ends, jaxpr)
        if is_scan:
            return _plain(ends, jaxpr)
        return [end.source.param if isinstance(end, Use) else end for end in ends]

    def weight(end: Use, result: Any) -> Use:
        """What comes out is a weight still."""
        if is_scan:
            return weight_of(end.source, result, result.dtype, end.is_fixed)
        made = dataclasses.replace(end.source, param=result, half=None, tap=None)
        return dataclasses.replace(end, source=outside.get(end.source, made))

    functions = [functools.partial(run, body) for body in bodies.jaxprs]
    results = rebuilt(eqn, bodies, functions, _NO_RULE)(*index, *operands)
    return [
        weight(end, each)
        if isinstance(end, Use)
        else weight_of(of, each, each.dtype, is_same)
        if is_weight and _tree.is_float_array(each)
        else each
        for end, each, is_weight, is_same in zip(ends, results, of_weights, are_same, strict=True)
    ]
