"""A loss whose params are split over devices, written again so that each weight is gathered where it is used.

The loss is traced as it is, on whole params; policies, adapters and autocast have done their work by then. What was
traced says of each param in which dtype it is read in the end, behind all that only moves it: in that dtype it is
gathered, in the innermost body that holds all its uses, of a scan over layers in the body. So a weight is gathered once
in a pass.

What a device adds to the gradient of a weight (by its rows of a product, of a lookup, of a fused loss) is computed in
float32 from the rows that it has, and stays where it is until all uses have added theirs: this is what the *tap* of a
weight is for, zeros that nobody reads and whose cotangent has a part for each device. Then it is reduced once, in the
dtype that was asked for. XLA by itself would reduce each gradient in the dtype of the product that makes it. That a
part is of some rows is known of axes of type Explicit by their types; elsewhere the first axis of the activations that
the devices divide is taken, as the batch is: another would cost time, but give the same numbers.
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
from jax.extend.core import get_opaque_trace_state
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp import float8
from jaxmp import tree as _tree
from jaxmp._jaxpr import reading
from jaxmp._jaxpr.invariant import same_in_turns, same_results
from jaxmp._jaxpr.places import Places
from jaxmp._jaxpr.rebuild import bound, is_body_alone, params_in_dtype, rebuilt
from jaxmp._jaxpr.walk import PRODUCTS, equations, interpreted, jaxprs_in, product_dtypes
from jaxmp._mesh_plan import COPIES, Plan, while_tracing, wide
from jaxmp._specs import as_tuple, require_specs, specs_in
from jaxmp.dtypes import is_half
from jaxmp.engine.classes import Class, classify
from jaxmp.engine.marks import DECIDED, region_of
from jaxmp.engine.rules import BROADCAST
from jaxmp.engine.trace import Program, arrays_in

_FLOAT32 = np.dtype(np.float32)
_MOVES = frozenset({"reshape", "transpose", "squeeze", "rev", "copy", "name", "broadcast_in_dim", "slice", "split"})
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

    def _uses(self, params: Any, rest: tuple[Any, ...]) -> tuple[Program, list[_Use]]:
        """What was traced, and each floating param in it."""
        plan, shapes = self.plan, params
        require_specs(params, plan.specs)
        if plan.is_explicit:  # as whole arrays, which they are where the loss uses them
            on_all = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_all), params)
        with while_tracing(plan):
            program = Program(self.loss_fn, (shapes, *rest))
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
                uses.append(_Use(_Source(plan, name, leaf, spec, dtype, is_alone, self.gathers_again)))
        return program, uses


@dataclasses.dataclass(eq=False)
class _Source:
    """A param in a body, gathered there when it is first used."""

    plan: Plan
    name: str
    param: Any
    spec: PartitionSpec
    dtype: np.dtype  # that it is gathered in
    is_alone: bool  # one equation of the body reads it
    gathers_again: bool  # the backward pass does, for what was gathered before is freed
    given: bool = False  # it was gathered before
    is_made: bool = False  # of weights, by the loss
    half: Any = None
    tap: Any = None
    _again: Any = dataclasses.field(default=None, init=False)  # see gathered_again

    def gathered_again(self, param: Any) -> Any:
        """The weight, for the backward pass: once for all uses whose derivatives are in one trace."""
        trace = get_opaque_trace_state()
        if self._again is None or self._again[0] is not param or self._again[1] != trace:
            # Without a barrier XLA would keep what the forward pass gathered.
            half = self.plan.whole(jax.lax.optimization_barrier(param), self.spec, self.dtype)
            self._again = param, trace, half
        return self._again[2]

    def gathered(self) -> tuple[Any, Any]:
        """The weight, and its tap."""
        if self.half is None:
            self.half = self.plan.whole(self.param, self.spec, self.dtype)
        if self.tap is None:
            self.tap = self.plan.tap(self.param, self.spec)
        return self.half, self.tap

    @property
    def wide(self) -> np.dtype:
        """What its cotangents are computed in."""
        return wide(self.param.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _Use:
    """What a variable stands for: a weight, moved, and rounded by the author."""

    source: _Source
    moves: tuple[tuple[Any, int], ...] = ()  # equations, and which of their results
    rounded: np.dtype | None = None
    least: float = math.inf  # the fewest elements that it had on its way
    is_fixed: bool = True  # the same for all examples for sure; with noise, it may be one of each example

    @property
    def size(self) -> float:
        """The elements that it has of its own, not counting copies."""
        return min(self.source.param.size, self.least)

    def followed(self, eqn: Any) -> list[_Use]:
        """The results of an equation that only moves it."""
        if eqn.primitive.name == "convert_element_type":
            new = np.dtype(eqn.params["new_dtype"])
            is_rounding = new.itemsize < (self.rounded or self.source.wide).itemsize
            return [dataclasses.replace(self, rounded=new) if is_rounding else self]
        return [
            dataclasses.replace(self, moves=(*self.moves, (eqn, number)), least=min(self.least, var.aval.size))
            for number, var in enumerate(eqn.outvars)
        ]

    def moved(self, value: Any, is_named: bool = True) -> Any:
        for eqn, number in self.moves:
            if is_named or eqn.primitive.name != "name":
                value = bound(eqn, [value], _anywhere(eqn.params))[number]
        return value

    def cast(self, value: Any, dtype: Any) -> Any:
        return (value if self.rounded is None else value.astype(self.rounded)).astype(dtype)

    def moved_back(self, cotangent: Any) -> Any:
        """The cotangent of the weight, of that of the moved one."""
        if not self.moves:
            return cotangent
        whole = jax.ShapeDtypeStruct(self.source.param.shape, cotangent.dtype)
        moved = functools.partial(self.moved, is_named=False)  # JAX cannot transpose a name
        return jax.linear_transpose(moved, whole)(cotangent)[0]

    def read(self, dtype: Any, shape: Sequence[int] | None = None) -> Any:
        """The value, for whatever operation: its gradient comes whole, and each device keeps its part."""
        source, half = self.source, self.source.gathered()[0]
        plan, spec, param = source.plan, source.spec, source.param

        @jax.custom_vjp
        def value(param: Any, half: Any) -> Any:
            return self.cast(half, source.wide)  # which rounds no cotangent

        def backward(_: None, cotangent: Any) -> tuple[Any, None]:
            # XLA reduces what reaches a made weight where it reaches one that is split.
            cotangent = cotangent if source.is_made and not plan.is_explicit else plan.put(cotangent, spec)
            return cotangent.astype(param.dtype), None

        value.defvjp(lambda param, half: (value(param, half), None), backward)
        moved = self.moved(value(param, half))
        return (moved if shape is None else jnp.broadcast_to(moved, shape)).astype(dtype)

    def copies(self, dtype: Any) -> Any:
        """(devices, …), see :meth:`Plan.copies`."""
        half, tap = self.source.gathered()
        plan = self.source.plan

        @jax.custom_vjp
        def copies(half: Any, tap: Any) -> Any:
            weight = self.cast(self.moved(half), dtype)
            return plan.by_rows(jnp.broadcast_to(weight, (plan.devices, *weight.shape)))

        def backward(_: None, parts: Any) -> tuple[None, Any]:
            return None, plan.of_parts(jax.vmap(self.moved_back)(parts.astype(self.source.wide)), self.source.spec)

        copies.defvjp(lambda half, tap: (copies(half, tap), None), backward)
        return copies(half, tap)


def _anywhere(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters that do not say where the result lies."""
    return {name: None if name in ("sharding", "out_sharding") else value for name, value in params.items()}


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
    places = Places()

    def equation(eqn: Any, operands: list[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
        given = [value for value, _ in operands]
        known = [value.is_fixed if isinstance(value, _Use) else is_fixed for value, is_fixed in operands]
        places.at(eqn)
        if any(isinstance(value, _Use) for value in given):
            return [(each, False) for each in places.within(_rewritten, eqn, given, known, loop)]
        return [(each, all(known)) for each in places.repeated(given)]

    operands, constants = list(zip(args, are_fixed, strict=True)), [(const, True) for const in consts]
    return [value for value, _ in interpreted(jaxpr, constants, operands, equation, lambda atom: (atom.val, True))]


def _plain(values: Sequence[Any], jaxpr: Any) -> list[Any]:
    """The results of a body as arrays."""
    ends = zip(values, jaxpr.outvars, strict=True)
    return [value.read(atom.aval.dtype) if isinstance(value, _Use) else value for value, atom in ends]


def _rewritten(eqn: Any, given: Sequence[Any], are_fixed: Sequence[bool], loop: _Loop) -> Sequence[Any]:
    """The results of an equation that reads weights; what is made of them for no example is a weight again."""
    name = eqn.primitive.name
    uses = [(position, value) for position, value in enumerate(given) if isinstance(value, _Use)]
    position, use = uses[0]
    if _is_move(eqn):
        return use.followed(eqn)
    if _is_copying(eqn):
        return [use.copies(eqn.outvars[0].aval.dtype)]
    is_fixed, least = all(are_fixed), max(use.size for _, use in uses)
    if len(uses) == 1 and (name == "dot_general" or (name, position) in _BY_ROWS):
        if not is_fixed:
            return [_by_rows(eqn, position, use, given)]
        if name == "gather" and eqn.outvars[0].aval.size > least:  # positions, looked up for each example
            rows = _by_rows(eqn, position, use, given)
            return [_weight(use.source, rows, rows.dtype, True, least)]
    if (recipe := float8.recipe_of(eqn)) and (result := _in_float8(eqn, recipe, given)) is not None:
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

    results = _computed_wide(eqn, operands) if is_wide else bound(eqn, operands, eqn.params)
    is_fixed, least = name == "dynamic_slice" or is_fixed, math.inf if name in PRODUCTS else least
    return [
        _weight(use.source, each, var.aval.dtype, is_fixed, least)
        if _tree.is_float_array(each) and is_weight(n, each)
        else each.astype(var.aval.dtype)
        for n, (each, var) in enumerate(zip(results, eqn.outvars, strict=True))
    ]


def _computed_wide(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The results in float32 of an equation of half operands: so are the sums of their cotangents.

    A product is computed in half, the products of its derivative have results in float32.
    """
    avals, name = [atom.aval for atom in eqn.invars], eqn.primitive.name
    if not any(is_half(getattr(aval, "dtype", np.int32)) for aval in avals) or reading.names_a_dtype(eqn):
        return bound(eqn, operands, eqn.params)
    dtypes = [wide(aval.dtype) if jnp.issubdtype(aval.dtype, jnp.floating) else aval.dtype for aval in avals]
    operands = [jnp.asarray(value, dtype) for value, dtype in zip(operands, dtypes, strict=True)]
    if name not in _PRODUCTS:
        return bound(eqn, operands, params_in_dtype(eqn, _FLOAT32, False))

    @jax.custom_vjp
    def product(*operands: Any) -> Any:
        halves = [value.astype(aval.dtype) for value, aval in zip(operands, avals, strict=True)]
        return bound(eqn, halves, eqn.params)[0].astype(dtypes[0])

    def forward(*operands: Any) -> tuple[Any, Any]:
        return product(*operands), [value.astype(aval.dtype) for value, aval in zip(operands, avals, strict=True)]

    def backward(kept: list[Any], cotangent: Any) -> tuple[Any, ...]:
        def of_operand(n: int) -> Any:
            def computed(value: Any) -> Any:
                return bound(eqn, [*kept[:n], value, *kept[n + 1 :]], _anywhere(eqn.params))[0]

            pull = jax.linear_transpose(computed, avals[n])
            half = cotangent.astype(eqn.outvars[0].aval.dtype)
            return _in_wide(lambda cotangent: pull(cotangent)[0], half, dtypes[n], is_whole=True)

        return tuple(map(of_operand, range(len(kept))))

    product.defvjp(forward, backward)
    return [product(*operands)]


def _read_whole(use: _Use, eqn: Any, position: int, is_wide: bool = False) -> Any:
    """A weight for an equation that takes all of it."""
    aval, shapes = eqn.invars[position].aval, [var.aval.shape for var in eqn.outvars]
    repeats = eqn.primitive.name in BROADCAST and aval.shape != shapes[0]
    return use.read(wide(aval.dtype) if is_wide else aval.dtype, shapes[0] if repeats else None)


def _require_wide(use: _Use, eqn: Any, position: int) -> None:
    """Raises if an equation sums the cotangents of a weight in half."""
    name, aval = eqn.primitive.name, eqn.invars[position].aval
    inside = (var.aval for jaxpr in jaxprs_in(eqn) for each in equations(jaxpr) for var in each.outvars)
    halves = [each.dtype.name for each in (aval, *inside) if is_half(getattr(each, "dtype", np.int32))]
    if halves and use.source.plan.reduce_dtype == _FLOAT32:
        raise ValueError(
            f"the gradient of {use.source.name!r} cannot be reduced in float32: it goes in {aval.dtype.name} "
            f"into {name} at {reading.user_source_of(eqn)}, which computes it in {halves[0]}; compute in float32 "
            f"there, or make_train_step(…, reduce_dtype={halves[0]!r})"
        )


def _are_weights(given: Sequence[Any], are_fixed: Sequence[bool]) -> list[bool]:
    return [known or isinstance(each, _Use) for each, known in zip(given, are_fixed, strict=True)]


def _weight(of: _Source, value: Any, dtype: np.dtype, is_fixed: bool, least: float = math.inf) -> _Use:
    """What has the values of ``dtype``, in float32, in which the cotangents of all its uses are added."""
    value = value.astype(wide(value.dtype))
    source = _Source(of.plan, of.name, value, PartitionSpec(), dtype, False, False, is_made=True)
    return _Use(source, rounded=dtype if dtype.itemsize < value.dtype.itemsize else None, least=least, is_fixed=is_fixed)


def _entered(
    eqn: Any, bodies: reading.Bodies, given: Sequence[Any], are_fixed: Sequence[bool], loop: _Loop
) -> Sequence[Any]:
    """The results of a call, a scan or a branch: what only it reads is gathered in it, and so are slices of a turn."""
    is_scan, is_cond = bodies.kind == "scan", bodies.kind == "cond"
    of_weights, are_same = same_results(eqn, _are_weights(given, are_fixed)), same_results(eqn, are_fixed)
    index, given, are_fixed = given[:is_cond], given[is_cond:], are_fixed[is_cond:]
    operands, inside, sliced = list(given), dict[int, _Use](), set[int]()
    carry = range(bodies.start, bodies.start + bodies.carry)
    known = same_in_turns(bodies, are_fixed) if is_scan else are_fixed
    of = next(each.source for each in given if isinstance(each, _Use))
    for position, use in enumerate(given):
        if not isinstance(use, _Use):
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

    outside, ends = dict[_Source, _Source](), list[Any]()

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
                        _weight(source, args[position], source.wide, use.is_fixed), rounded=use.rounded
                    )
                elif is_turn or source.half is None:
                    param, half, tap = args[position] if is_turn and source.given else (args[position], None, None)
                    alone, spec = _is_alone(jaxpr, var), PartitionSpec(*source.spec[1:]) if is_turn else source.spec
                    mine = dataclasses.replace(source, param=param, half=half, tap=tap, spec=spec, is_alone=alone)
                    mine.gathers_again &= eqn.primitive.name != "remat2"  # which frees what it saw
                    own = dataclasses.replace(use, source=mine)
                values[position], outside[own.source] = own, source
            for n in loop.weights:
                values[n] = _weight(of, args[n], args[n].dtype, known[n])
            return _results(jaxpr, consts, values, known, loop)

        def settle(ends: list[Any]) -> list[Any]:
            """What a turn makes a weight is one in the next."""
            while made := {n for n, end in zip(carry, ends, strict=False) if isinstance(end, _Use)} - loop.weights:
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
            if isinstance(given[n], _Use) and n not in loop.weights:
                _require_wide(given[n], eqn, n)
        if is_cond:
            ends[:] = _plain(ends, jaxpr)
        if is_scan:
            return _plain(ends, jaxpr)
        return [end.source.param if isinstance(end, _Use) else end for end in ends]

    def weight(end: _Use, result: Any) -> _Use:
        """What comes out is a weight still."""
        if is_scan:
            return _weight(end.source, result, result.dtype, end.is_fixed)
        made = dataclasses.replace(end.source, param=result, half=None, tap=None)
        return dataclasses.replace(end, source=outside.get(end.source, made))

    functions = [functools.partial(run, body) for body in bodies.jaxprs]
    results = rebuilt(eqn, bodies, functions, _NO_RULE)(*index, *operands)
    return [
        weight(end, each)
        if isinstance(end, _Use)
        else _weight(of, each, each.dtype, is_same)
        if is_weight and _tree.is_float_array(each)
        else each
        for end, each, is_weight, is_same in zip(ends, results, of_weights, are_same, strict=True)
    ]


_NO_RULE: Any = None  # calls, scans and branches have none
_BY_ROWS = frozenset({("gather", 0), ("conv_general_dilated", 1)})


def _by_rows(eqn: Any, position: int, use: _Use, given: Sequence[Any]) -> Any:
    """The result of a product or a lookup; the gradient of the weight by the rows that each device has."""
    plan, name = use.source.plan, eqn.primitive.name
    aval, out = eqn.invars[position].aval, eqn.outvars[0].aval
    others = [value for n, value in enumerate(given) if n != position]
    dims = _rows_of(eqn, position, others[0], plan)
    half, tap = use.source.gathered()

    def computed(weight: Any, others: Sequence[Any], params: Any) -> Any:
        return bound(eqn, [*others[:position], weight, *others[position:]], params)[0]

    def forward(half: Any, others: Sequence[Any]) -> Any:
        weight = use.moved(half)
        weight = use.cast(weight, half.dtype if name == "gather" else aval.dtype)  # rows are looked up in half
        return computed(weight, others, eqn.params).astype(out.dtype)

    def of_weight(cotangent: Any, *others: Any) -> Any:
        dtype = aval.dtype if name != "gather" else use.source.wide
        weight = jax.ShapeDtypeStruct(aval.shape, dtype)
        pull = jax.linear_transpose(lambda weight: computed(weight, others, _anywhere(eqn.params)), weight)
        cotangent = cotangent.astype(dtype) if name == "gather" else cotangent
        wide = use.source.wide
        return use.moved_back(_in_wide(lambda cotangent: pull(cotangent)[0], cotangent, wide, dims is None))

    source = use.source
    keeps = not (source.gathers_again and plan.is_split(source.spec))

    @jax.custom_vjp
    def by_rows(target: Any, half: Any, param: Any, *others: Any) -> Any:
        return forward(half, others)

    def forward_and_kept(target: Any, half: Any, param: Any, *others: Any) -> tuple[Any, Any]:
        return forward(half, others), (half if keeps else param, others)

    def backward(kept: Any, cotangent: Any) -> tuple[Any, ...]:
        half, others = kept
        half = half if keeps else source.gathered_again(half)
        floats = [n for n, value in enumerate(others) if _tree.is_float_array(value)]

        def of_floats(*values: Any) -> Any:
            filled = dict(zip(floats, values, strict=True))
            return forward(half, [filled.get(n, value) for n, value in enumerate(others)])

        rest: list[Any] = [None] * len(others)
        if floats:
            pulled = jax.vjp(of_floats, *(others[n] for n in floats))[1](cotangent)
            for n, value in zip(floats, pulled, strict=True):
                rest[n] = value
        if dims is None:  # one sum over all rows, whoever has them
            gradient = plan.put(of_weight(cotangent, *others), use.source.spec).astype(use.source.param.dtype)
        else:
            parts = plan.over_rows(of_weight, dims, (cotangent, *others))
            gradient = plan.of_parts(parts, use.source.spec)
        return gradient, None, None, *rest

    by_rows.defvjp(forward_and_kept, backward)
    return by_rows(source.param if dims is None else tap, half, None if keeps else source.param, *others)


def _in_float8(eqn: Any, recipe: Any, given: Sequence[Any]) -> Any | None:
    """The result of a product in float8, the gradient of the weight by the rows that each device has, in float32.

    None where there are two weights, or nothing that the devices divide.
    """
    product = next(each for each in equations(eqn.params["call_jaxpr"]) if each.primitive.name == "dot_general")
    both = zip(given, eqn.invars, strict=True)
    operands = [value.read(atom.aval.dtype) if isinstance(value, _Use) else value for value, atom in both]
    sides = [side for side in (0, 1) if isinstance(given[3 * side], _Use)]
    if len(sides) != 1:
        return None
    side, use = sides[0], given[3 * sides[0]]
    other, *cast = operands[3 - 3 * side :][:3]
    plan, dims = use.source.plan, _rows_of(product, side, other, use.source.plan)
    if dims is None:
        return None
    operands[3 * side] = jax.lax.stop_gradient(operands[3 * side])
    is_exact = recipe.weight_gradient == "compute"
    precision = jax.lax.Precision.DEFAULT if is_exact or recipe.accumulate == "fast" else jax.lax.Precision.HIGHEST
    params = {**_anywhere(product.params), "precision": precision}

    def of_weight(cotangent: Any, scale: Any, other: Any, other_scale: Any) -> Any:
        if is_exact:
            cotangent, other = cotangent.astype(jnp.bfloat16), other.astype(jnp.bfloat16)
        else:
            cotangent = float8.dequantised((None, cotangent, scale), recipe.gradient)
            other = float8.dequantised((None, other, other_scale), recipe.forward)
        factors = [other, other]

        def multiplied(weight: Any) -> Any:
            factors[side] = weight
            return bound(product, factors, params)[0]

        pull = jax.linear_transpose(multiplied, jax.ShapeDtypeStruct(product.invars[side].aval.shape, other.dtype))
        return use.moved_back(_in_wide(lambda cotangent: pull(cotangent)[0], cotangent, use.source.wide))

    @jax.custom_vjp
    def adding(result: Any, tap: Any, *kept: Any) -> Any:
        return result

    def backward(kept: tuple[Any, ...], cotangent: Any) -> tuple[Any, ...]:
        # It is quantised for the gradient of the other operand too: XLA does it once.
        of_result = (cotangent, kept[1]) if is_exact else float8.quantised(cotangent, recipe.gradient)[1:]
        parts = plan.over_rows(of_weight, (dims[0], 0, dims[1], 0), (*of_result, *kept))
        return cotangent, plan.of_parts(parts, use.source.spec), None, None

    adding.defvjp(lambda result, tap, *kept: (result, kept), backward)
    kept = jax.lax.stop_gradient((other, cast[1]) if is_exact else tuple(cast))
    return adding(bound(eqn, operands, eqn.params)[0], use.source.gathered()[1], *kept)


def _rows_of(eqn: Any, position: int, other: Any, plan: Plan) -> tuple[int, int] | None:
    """The axis of the result, and that of the operand that is no weight, along which the batch is split."""
    name, params = eqn.primitive.name, eqn.params
    shape = eqn.invars[1 - position].aval.shape
    pairs: list[tuple[int, int]] = []
    if name == "dot_general":
        contracting, batch = params["dimension_numbers"]
        bound_dims = [[*contracting[n], *batch[n]] for n in (0, 1)]
        free = [dim for dim in range(len(shape)) if dim not in bound_dims[1 - position]]
        weight = len(eqn.invars[position].aval.shape) - len(bound_dims[position])
        first = len(batch[0]) + (weight if position == 0 else 0)
        pairs = [(first + n, dim) for n, dim in enumerate(free)]
    elif name == "gather" and not params["dimension_numbers"].operand_batching_dims:
        offsets = params["dimension_numbers"].offset_dims
        rows = [dim for dim in range(len(eqn.outvars[0].aval.shape)) if dim not in offsets]
        pairs = [(dim, n) for n, dim in enumerate(rows)]
    elif name == "conv_general_dilated" and params["batch_group_count"] == 1:
        numbers = params["dimension_numbers"]
        pairs = [(numbers.out_spec[0], numbers.lhs_spec[0])]
    pairs = [pair for pair in pairs if shape[pair[1]] % plan.devices == 0]
    if plan.is_explicit:
        spec = jax.typeof(other).sharding.spec
        known = [pair for pair in pairs if set(as_tuple(spec[pair[1]])) & set(plan.axes)]
        pairs = known or pairs
    return pairs[0] if pairs else None


def _of_matrices(eqn: Any, operands: Sequence[Any], dtype: np.dtype) -> Any:
    """A product over several axes as one of matrices: XLA's CPU has no others with float32 results of half operands."""
    matrices, shape = [], list[int]()
    for value, summed in zip(operands, eqn.params["dimension_numbers"][0], strict=True):
        kept = [dim for dim in range(value.ndim) if dim not in summed]
        shape += [value.shape[dim] for dim in kept]
        matrices.append(value.transpose(*summed, *kept).reshape(math.prod(value.shape[dim] for dim in summed), -1))
    params = {**eqn.params, "dimension_numbers": (((0,), (0,)), ((), ())), "preferred_element_type": dtype}
    return bound(eqn, matrices, params)[0].reshape(shape)


def _in_wide(fun: Callable[..., Any], cotangent: Any, dtype: np.dtype, is_whole: bool = False) -> Any:
    """``fun``, the transpose of a product, with results in ``dtype``, float32 or wider, of half operands.

    Convolutions have half results, as cuDNN makes no others; those over the rows of all devices (``is_whole``), which
    XLA divides, are computed in ``dtype``.
    """
    jaxpr, consts = reading.opened(jax.make_jaxpr(fun)(cotangent))

    def equation(eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "convert_element_type":
            return operands
        if name == "conv_general_dilated" and is_whole:
            operands = [value.astype(dtype) for value in operands]
        elif name != "dot_general":
            return bound(eqn, operands, eqn.params)
        elif len((dims := eqn.params["dimension_numbers"])[0][0]) > 1 and not dims[1][0]:
            return [_of_matrices(eqn, operands, dtype)]
        return bound(eqn, operands, {**eqn.params, "preferred_element_type": dtype})

    return interpreted(jaxpr, consts, [cotangent], equation)[0].astype(dtype)
