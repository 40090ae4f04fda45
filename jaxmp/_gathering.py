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

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmp import tree as _tree
from jaxmp._jaxpr import reading
from jaxmp._jaxpr.places import Places
from jaxmp._jaxpr.rebuild import bound, rebuilt
from jaxmp._jaxpr.walk import product_dtypes
from jaxmp._specs import Mesh, as_tuple, fitting, following, names_of, require_specs, specs_in, without
from jaxmp.dtypes import canonical_dtype, is_half
from jaxmp.engine.marks import DECIDED, region_of
from jaxmp.engine.rules import BROADCAST
from jaxmp.engine.trace import Program, arrays_in

BATCH_AXES = ("data", "fsdp")
"""The axes of a mesh over which a batch is split."""
_COPIES = "jaxmp.copies"
_FLOAT32 = np.dtype(np.float32)
_MOVES = frozenset({"reshape", "transpose", "squeeze", "rev", "copy", "name", "broadcast_in_dim", "slice", "split"})
_CALLS = frozenset({"jit", "closed_call", "call", "remat2"})
_tracing: ContextVar[Plan | None] = ContextVar("jaxmp_gathering", default=None)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Where the params of a train step lie, and in which dtype their gradients are reduced.

    Raises:
      ValueError: the mesh has no axis for the batch, or such axes of several types; the dtype is none to reduce in.
    """

    mesh: Mesh
    specs: Any
    reduce_dtype: np.dtype

    def __post_init__(self) -> None:
        sizes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        if not self.axes:
            raise ValueError(
                f"a batch is split over the axes 'data' and 'fsdp' of a mesh, of which this one ({sizes}) has none; "
                "make it with jax.make_mesh((…,), ('fsdp',))"
            )
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if len(kinds := {types[name] for name in self.axes}) > 1 or AxisType.Manual in kinds:
            raise ValueError(
                "the axes that a batch is split over must all be of type Auto or all of type Explicit, got "
                f"{', '.join(f'{name!r} of type {types[name].name}' for name in self.axes)}; make the mesh with the "
                "same of axis_types for them, and call the step outside of shard_map"
            )
        if self.reduce_dtype.itemsize > 4:
            raise ValueError(
                f"gradients are reduced in float32 or a half dtype, got reduce_dtype={self.reduce_dtype.name!r}; pass "
                "reduce_dtype='float32'"
            )

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """Those of the mesh over which the batch is split."""
        return tuple(name for name in BATCH_AXES if name in self.mesh.shape)

    @functools.cached_property
    def devices(self) -> int:
        """The parts of a batch."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    @property
    def is_explicit(self) -> bool:
        """Whether types say where arrays lie, in what is traced now."""
        mesh: Mesh = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if mesh.empty else mesh
        return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[self.axes[0]] is AxisType.Explicit

    @functools.cached_property
    def rows(self) -> PartitionSpec:
        """That of an array whose axis 0 has a part for each device."""
        return PartitionSpec(self.axes if len(self.axes) > 1 else self.axes[0])

    def set(self) -> contextlib.AbstractContextManager[Any]:
        """Within it the mesh is that of what is traced and called."""
        if reading.is_tracing() or isinstance(self.mesh, jax.sharding.AbstractMesh):
            return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)
        return jax.set_mesh(self.mesh)

    def shardings(self, state: Any) -> Any:
        """Where each leaf of a train state lies.

        Raises:
          ValueError: the specs are of another tree than its params, or do not fit them.
        """
        require_specs(state.params, self.specs)
        for (path, leaf), spec in zip(jax.tree.leaves_with_path(state.params), specs_in(self.specs), strict=True):
            name = _tree.path_name(path)
            fitting(spec, name, name, tuple(leaf.shape), self.mesh)
        specs = following(state, state.params, self.specs, self.mesh)
        return jax.tree.map(lambda _, spec: NamedSharding(self.mesh, spec), state, specs)

    def shardings_of_batch(self, batch: Any, microbatches: int) -> Any:
        """Where each leaf of a batch lies: its examples over all devices; a scalar on each.

        Raises:
          ValueError: devices times microbatches do not divide the examples.
        """

        def placed(path: Any, leaf: Any) -> Any:
            if not np.ndim(leaf):
                return NamedSharding(self.mesh, PartitionSpec())
            if np.shape(leaf)[0] % (parts := self.devices * microbatches):
                each = f" for each of {microbatches} microbatches" if microbatches > 1 else ""
                raise ValueError(
                    f"the {self.devices} devices of {', '.join(map(repr, self.axes))} must divide the batch{each}, got "
                    f"{np.shape(leaf)[0]} examples in batch entry {_tree.path_name(path)!r}; use a batch of "
                    f"{parts * (np.shape(leaf)[0] // parts + 1)}, say"
                )
            return NamedSharding(self.mesh, self.rows)

        return jax.tree.map_with_path(placed, batch)

    def put(self, value: Any, spec: PartitionSpec) -> Any:
        """``value``, laid out so."""
        return jax.sharding.reshard(value, spec) if self.is_explicit else jax.lax.with_sharding_constraint(value, spec)

    def is_split(self, spec: PartitionSpec) -> bool:
        """Whether devices with other rows of the batch hold other parts."""
        return not set(names_of(spec)).isdisjoint(self.axes)

    def whole(self, param: Any, spec: PartitionSpec, dtype: np.dtype) -> Any:
        """A param on each device, in ``dtype``; nothing to differentiate."""
        param = jax.lax.stop_gradient(param)
        if not self.is_split(spec):
            return param.astype(dtype)
        # With the second alone XLA gathers some weights before it casts them.
        return self.put(self.put(param.astype(dtype), spec), PartitionSpec(*without(spec, self.axes)))

    def tap(self, param: Any, spec: PartitionSpec) -> Any:
        """Zeros (devices, …) whose cotangent, summed over the devices, is that of ``param``."""

        @jax.custom_vjp
        def tap(param: Any) -> Any:
            return self.zeros(param)

        tap.defvjp(
            lambda param: (self.zeros(param), None), lambda _, parts: (self.reduced(parts, spec).astype(param.dtype),)
        )
        return tap(param)

    def zeros(self, param: Any) -> Any:
        """Those of a tap."""
        return self.put(jnp.zeros((self.devices, *param.shape), _FLOAT32), self.rows)

    def reduced(self, parts: Any, spec: PartitionSpec) -> Any:
        """The sum over axis 0, of which each device has one part, split as ``spec`` says."""
        own = [[name for name in as_tuple(entry) if name in self.axes] for entry in spec]
        rest = tuple(name for name in self.axes if name not in names_of(spec))

        def reduce(parts: Any) -> Any:
            part = parts[0].astype(self.reduce_dtype)
            part = jax.lax.psum(part, rest) if rest else part
            for dim, names in enumerate(own):
                if names:
                    part = jax.lax.psum_scatter(part, tuple(names), scatter_dimension=dim, tiled=True)
            return part

        return self.over_rows(reduce, PartitionSpec(*(tuple(names) or None for names in own)))(parts)

    def over_rows(self, fun: Callable[..., Any], out: PartitionSpec, *dims: int) -> Callable[..., Any]:
        """``fun`` of the part that each device has of its arguments, split along these axes; by default 0."""

        def run(*args: Any) -> Any:
            where = dims or (0,) * len(args)
            specs = tuple(PartitionSpec(*[None] * dim, *self.rows) for dim in where)
            args = tuple(map(self.put, args, specs))
            names = set(self.axes)
            return jax.shard_map(fun, in_specs=specs, out_specs=out, axis_names=names, check_vma=False)(*args)

        return run

    # --- for losses that sum over rows by themselves ---

    def parts(self, array: Any) -> Any:
        """``array`` (rows, …) as (devices, rows of each, …)."""
        shape = (self.devices, array.shape[0] // self.devices, *array.shape[1:])
        if self.is_explicit:
            return jax.lax.reshape(
                array, shape, out_sharding=NamedSharding(jax.sharding.get_abstract_mesh(), self.rows)
            )
        return self.put(array.reshape(shape), self.rows)

    def copies(self, weight: Any) -> Any:
        """``weight`` as (devices, …): the cotangent has a part for each device, and is reduced with all others."""
        with jax.named_scope(_COPIES):
            return jax.lax.broadcast_in_dim(weight, (self.devices, *weight.shape), range(1, weight.ndim + 1))


def spread() -> Plan | None:
    """The plan of the loss that is traced; None where no batch is split, or none is known to be."""
    return _tracing.get()


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
        for use, (half, tap) in zip(uses, given, strict=False):
            source = use.source
            source.half, source.tap, source.given, source.gathers_again = half, tap, True, False
        found = iter(uses)
        leaves = [next(found) if _tree.is_float_array(leaf) else leaf for leaf in jax.tree.leaves(params)]
        jaxpr, consts = program.jaxpr
        others = arrays_in(jax.tree.leaves(rest))
        are_fixed = [True] * (len(leaves) + len(arrays_in(jax.tree.leaves(rest[:1]))))  # the model state's too
        return program.unflatten(_results(jaxpr, consts, [*leaves, *others], are_fixed))

    def is_typed(self, *args: Any) -> bool:
        """Whether JAX can tell where all that the loss computes lies; Flax says it of no embedding."""
        try:
            self._uses(args[0], args[1:])
        except Exception as error:
            if type(error).__name__ != "ShardingTypeError":
                raise
            return False
        return True

    def hold(self, params: Any, *rest: Any) -> Held:
        """The params, all gathered."""
        _, uses = self._uses(params, rest)
        sources = [use.source for use in uses]
        halves = [self.plan.whole(each.param, each.spec, each.dtype) for each in sources]
        return Held(params, halves, [self.plan.zeros(each.param) for each in sources])

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
        with _while_tracing(plan):
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


@contextlib.contextmanager
def _while_tracing(plan: Plan) -> Iterator[None]:
    token = _tracing.set(plan)
    try:
        yield
    finally:
        _tracing.reset(token)


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
    half: Any = None
    tap: Any = None

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
        return max(_FLOAT32, np.dtype(self.param.dtype), key=lambda dtype: dtype.itemsize)


@dataclasses.dataclass(frozen=True, eq=False)
class _Use:
    """What a variable stands for: a weight, moved, and rounded by the author."""

    source: _Source
    moves: tuple[Callable[[Any], Any], ...] = ()
    rounded: np.dtype | None = None

    def followed(self, eqn: Any) -> list[_Use]:
        """The results of an equation that only moves it."""
        if eqn.primitive.name == "convert_element_type":
            new = np.dtype(eqn.params["new_dtype"])
            is_rounding = new.itemsize < (self.rounded or self.source.wide).itemsize
            return [dataclasses.replace(self, rounded=new) if is_rounding else self]
        moves = (functools.partial(_moved, eqn, number) for number in range(len(eqn.outvars)))
        return [dataclasses.replace(self, moves=(*self.moves, move)) for move in moves]

    def moved(self, value: Any) -> Any:
        for move in self.moves:
            value = move(value)
        return value

    def cast(self, value: Any, dtype: Any) -> Any:
        return (value if self.rounded is None else value.astype(self.rounded)).astype(dtype)

    def moved_back(self, cotangent: Any) -> Any:
        """The cotangent of the weight, of that of the moved one."""
        if not self.moves:
            return cotangent
        whole = jax.ShapeDtypeStruct(self.source.param.shape, cotangent.dtype)
        return jax.linear_transpose(self.moved, whole)(cotangent)[0]

    def read(self, dtype: Any, shape: Sequence[int] | None = None) -> Any:
        """The value, for whatever operation: its gradient comes whole, and each device keeps its part."""
        source, half = self.source, self.source.gathered()[0]
        plan, spec, param = source.plan, source.spec, source.param

        @jax.custom_vjp
        def value(param: Any, half: Any) -> Any:
            return half.astype(source.wide)

        def backward(_: None, cotangent: Any) -> tuple[Any, None]:
            return plan.put(cotangent, spec).astype(param.dtype), None

        value.defvjp(lambda param, half: (half.astype(source.wide), None), backward)
        moved = self.moved(value(param, half))
        return self.cast(moved if shape is None else jnp.broadcast_to(moved, shape), dtype)

    def copies(self, dtype: Any) -> Any:
        """(devices, …), see :meth:`Plan.copies`."""
        half, tap = self.source.gathered()
        plan = self.source.plan

        @jax.custom_vjp
        def copies(half: Any, tap: Any) -> Any:
            weight = self.cast(self.moved(half), dtype)
            return plan.put(jnp.broadcast_to(weight, (plan.devices, *weight.shape)), plan.rows)

        def backward(_: None, parts: Any) -> tuple[None, Any]:
            return None, jax.vmap(self.moved_back)(parts.astype(_FLOAT32))

        copies.defvjp(lambda half, tap: (copies(half, tap), None), backward)
        return copies(half, tap)


def _moved(eqn: Any, number: int, value: Any) -> Any:
    return bound(eqn, [value], _anywhere(eqn.params))[number]


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
    return eqn.primitive.name == "broadcast_in_dim" and _COPIES in reading.names_of(eqn)


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
    return len(_readers(jaxpr, var)) == 1


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
        elif is_lookup or _is_copying(eqn):
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


def _results(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], are_fixed: Sequence[bool]) -> list[Any]:
    """The results of a body, among whose arguments are uses of weights; which are the same for all examples."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if reading.is_literal(atom) else env[atom]

    fixed = {*jaxpr.constvars, *(var for var, is_fixed in zip(jaxpr.invars, are_fixed, strict=False) if is_fixed)}
    places = Places()
    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        known = [
            isinstance(value, _Use) or reading.is_literal(atom) or atom in fixed
            for value, atom in zip(given, eqn.invars, strict=True)
        ]
        places.at(eqn)
        if any(isinstance(value, _Use) for value in given):
            results = places.within(_rewritten, eqn, given, known)
        else:
            results = places.repeated(given)
            fixed.update(eqn.outvars if all(known) else ())
        env.update(zip(eqn.outvars, results, strict=True))
    return [_plain(read(atom), atom.aval.dtype) for atom in jaxpr.outvars]


def _plain(value: Any, dtype: Any) -> Any:
    return value.read(dtype) if isinstance(value, _Use) else value


def _rewritten(eqn: Any, given: Sequence[Any], are_fixed: Sequence[bool]) -> Sequence[Any]:
    """The results of an equation that reads weights; what is made of weights alone is a weight again."""
    name = eqn.primitive.name
    uses = [(position, value) for position, value in enumerate(given) if isinstance(value, _Use)]
    position, use = uses[0]
    if _is_move(eqn):
        return use.followed(eqn)
    if _is_copying(eqn):
        return [use.copies(eqn.outvars[0].aval.dtype)]
    if len(uses) == 1 and (name == "dot_general" or (name, position) in _BY_ROWS):
        return [_by_rows(eqn, position, use, given)]
    bodies = reading.bodies_of(eqn)
    if bodies is not None and (bodies.kind == "scan" or name in _CALLS):
        return _entered(eqn, bodies, given, are_fixed)
    operands, plan = list(given), use.source.plan
    for position, use in uses:
        aval = eqn.invars[position].aval
        if bodies is not None and not all(are_fixed) and is_half(aval.dtype) and plan.reduce_dtype == _FLOAT32:
            raise ValueError(
                f"the gradient of {use.source.name!r} cannot be reduced in float32: it goes in {aval.dtype.name} "
                f"into {name} at {reading.user_source_of(eqn)}, which computes it in that dtype; pass it in float32 "
                f"there, or make_train_step(…, reduce_dtype={aval.dtype.name!r})"
            )
        repeats = name in BROADCAST and aval.shape != eqn.outvars[0].aval.shape
        operands[position] = use.read(aval.dtype, eqn.outvars[0].aval.shape if repeats else None)
    results = bound(eqn, operands, eqn.params)
    if not all(are_fixed):
        return results
    return [_weight(plan, use.source.name, each) if _tree.is_float_array(each) else each for each in results]


def _weight(plan: Plan, name: str, value: Any) -> _Use:
    return _Use(_Source(plan, name, value, PartitionSpec(), value.dtype, False, False))


def _entered(eqn: Any, bodies: reading.Bodies, given: Sequence[Any], are_fixed: Sequence[bool]) -> Sequence[Any]:
    """The results of a call or a scan: what only it reads is gathered in its body, and so are slices of a turn."""
    jaxpr, consts = reading.opened(bodies.jaxprs[0])
    operands, inside = list(given), dict[int, _Use]()
    for position, use in enumerate(given):
        if not isinstance(use, _Use):
            continue
        source, spec = use.source, use.source.spec
        is_turn = bodies.kind == "scan" and position >= bodies.start + bodies.carry
        is_carried = bodies.kind == "scan" and not _enters_scan(bodies, position)
        if is_carried or (is_turn and (use.moves or any(spec[:1]))):
            operands[position] = use.read(eqn.invars[position].aval.dtype)
            continue
        inside[position], operands[position] = use, source.param
        if is_turn:
            if source.given:
                half, tap = source.gathered()
                operands[position] = source.param, half, jnp.moveaxis(tap, 1, 0)
        elif bodies.kind == "scan" or not source.is_alone:
            source.gathered()
            source.gathers_again &= bodies.kind != "scan"  # or each turn would

    def run(*args: Any) -> list[Any]:
        values = list(args)
        for position, use in inside.items():
            source, var = use.source, jaxpr.invars[position]
            is_turn = bodies.kind == "scan" and position >= bodies.start + bodies.carry
            values[position] = use
            if is_turn or source.half is None:
                param, half, tap = args[position] if is_turn and source.given else (args[position], None, None)
                own = dataclasses.replace(source, param=param, is_alone=_is_alone(jaxpr, var), half=half, tap=tap)
                if is_turn:
                    own.spec = PartitionSpec(*source.spec[1:])
                own.gathers_again &= eqn.primitive.name != "remat2"  # which frees what it saw
                values[position] = dataclasses.replace(use, source=own)
        is_carried = [bodies.kind == "scan" and not _enters_scan(bodies, n) for n in range(len(values))]
        return _results(jaxpr, consts, values, [f and not c for f, c in zip(are_fixed, is_carried, strict=True)])

    return rebuilt(eqn, bodies, [run], _NO_RULE)(*operands)


_NO_RULE: Any = None  # there are none in calls and scans
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
        dtype = aval.dtype if name != "gather" else _FLOAT32
        weight = jax.ShapeDtypeStruct(aval.shape, dtype)
        pull = jax.linear_transpose(lambda weight: computed(weight, others, _anywhere(eqn.params)), weight)
        cotangent = cotangent.astype(_FLOAT32) if name == "gather" else cotangent
        return use.moved_back(_in_float32(lambda cotangent: pull(cotangent)[0], cotangent))

    source = use.source
    keeps = not (source.gathers_again and plan.is_split(source.spec))

    @jax.custom_vjp
    def by_rows(target: Any, half: Any, param: Any, *others: Any) -> Any:
        return forward(half, others)

    def forward_and_kept(target: Any, half: Any, param: Any, *others: Any) -> tuple[Any, Any]:
        return forward(half, others), (half if keeps else param, others)

    def backward(kept: Any, cotangent: Any) -> tuple[Any, ...]:
        half, others = kept
        if not keeps:
            half = jax.lax.optimization_barrier(half)  # or XLA would keep the first
            half = plan.whole(half, source.spec, source.dtype)
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
            row, *rows = dims
            part = plan.over_rows(lambda *args: of_weight(*args)[None], plan.rows, row, *rows)
            gradient = part(cotangent, *others)
        return gradient, None, None, *rest

    by_rows.defvjp(forward_and_kept, backward)
    return by_rows(source.param if dims is None else tap, half, jax.lax.stop_gradient(source.param), *others)


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


def _in_float32(fun: Callable[[Any], Any], cotangent: Any) -> Any:
    """``fun``, the transpose of a product, with float32 results of half operands."""
    jaxpr, consts = reading.opened(jax.make_jaxpr(fun)(cotangent))
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, cotangent], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if reading.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name == "dot_general":
            results = bound(eqn, operands, {**eqn.params, "preferred_element_type": _FLOAT32})
        elif eqn.primitive.name == "convert_element_type":
            results = operands
        else:
            results = bound(eqn, operands, eqn.params)
        env.update(zip(eqn.outvars, results, strict=True))
    return read(jaxpr.outvars[0]).astype(_FLOAT32)


def plan_of(mesh: Any, specs: Any, reduce_dtype: Any) -> Plan:
    """A plan for what a user asks for.

    Raises:
      ValueError, TypeError: it is none.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}; make it with jax.make_mesh((8,), ('fsdp',))")
    return Plan(mesh, specs, canonical_dtype(reduce_dtype))
