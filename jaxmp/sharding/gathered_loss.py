"""A loss whose params are split over devices, rewritten so that each weight is gathered where it is used.

The loss is traced on whole params, after policies, adapters and autocast. Each param is gathered in the dtype in which
the program reads it, in the innermost body that holds all its uses: in the body of a scan over layers, for instance.

Every value is of one of two kinds:

* *Common* values are the same for all examples: params, the model state, constants, numbers (arrays without axes), and
  all that is computed from these alone. A common value of floats that params take part in is a *weight*.
* All other values are activations.

Each device computes what its examples add to the gradient of a weight, in float32. Nothing is reduced until all uses
of the weight have added their parts; the *tap* of a weight collects them: zeros whose cotangent has a part for each
device. The sum is then reduced once, in the dtype that the plan says. XLA by itself would reduce each gradient in the
dtype of the product that it comes from. Products of two activations may also sum over examples in their derivative:
they sum in float32 and round once, as on one device.

The first axis of activations that the devices divide is taken for the axis of the batch. Another axis would cost time,
but give the same numbers. All this is on axes of type Auto; ``mesh_types`` rebuilds a loss on Explicit axes for them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxmp._internals.jax.bodies import bound, is_body_alone, rebuilt
from jaxmp._internals.jax.equations import Bodies, bodies_of, opened
from jaxmp._internals.jax.invariants import same_in_turns, same_results
from jaxmp._internals.jax.primitives import BROADCAST
from jaxmp._internals.jax.program import TracedProgram, arrays_in
from jaxmp._internals.jax.rebind import in_place_of
from jaxmp._internals.jax.sources import user_source_of
from jaxmp._internals.jax.walk import PRODUCTS, equations, interpreted, jaxprs_in, product_dtypes
from jaxmp.base import trees as _tree
from jaxmp.base.dtypes import is_half
from jaxmp.engine.classes import Class, classify
from jaxmp.policy import float8
from jaxmp.sharding.plan import Plan, while_tracing, wide
from jaxmp.sharding.specs import require_specs, specs_in
from jaxmp.sharding.weight_products import computed_wide, goes_by_rows, in_float8, may_be_wide, product_by_rows
from jaxmp.sharding.weight_readers import dtypes_read, has_one_reader, is_copying, is_move
from jaxmp.sharding.weights import Source, Use, weight_of

_FLOAT32 = np.dtype(np.float32)
_NO_RULE: Any = None  # calls, scans and branches have none
_ENTERED_CALLS = frozenset({"jit", "remat2"})
# Classes of operations that sum the cotangents of their operands in the dtype of these; unknown primitives may.
_SUMS = frozenset({Class.HALF, Class.ACCUMULATION, Class.LINALG, Class.RECURSE, None})
# Classes that weights go through in float32 where they are half: the engine casts their operands as well.
_WIDENED = frozenset({Class.CLEAR, Class.WIDEST, Class.INFER, Class.POINTWISE, Class.ACCUMULATION})
_FILLS = frozenset({"pad"})  # with a scalar, whose cotangent is a sum
_PRODUCTS = PRODUCTS - {"ragged_dot_general"}
_ACCUMULATES = frozenset({"add_any", "scatter-add", "scatter-sub", "scatter-mul"})  # its operands, not their cotangents

Value = tuple[Any, bool]
"""An array, or the use of a weight, and whether it is common. Uses always are."""


class GatheredParams(NamedTuple):
    """Params that were gathered before the loss is called.

    Attributes:
      params: the params themselves.
      weights: for each floating param the weight that was gathered.
      taps: for each floating param its tap.
    """

    params: Any
    weights: list[Any]
    taps: list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """``loss_fn(params, …)`` that gathers the weights of a plan where they are used.

    It takes params, or :class:`GatheredParams`.
    """

    plan: Plan
    loss_fn: Callable[..., Any]
    gathers_again: bool = True  # for the backward pass, and not only where a body is computed again

    @property
    def is_split(self) -> bool:
        """Return whether a batch is split over more than one device."""
        return self.plan.devices > 1

    def __call__(self, params: Any, *rest: Any) -> Any:
        if not self.is_split:
            return self.loss_fn(params, *rest)
        before: list[tuple[Any, Any]] = []
        if isinstance(params, GatheredParams):
            before = list(zip(params.weights, params.taps, strict=True))
            params = params.params
        program, uses = self._uses(params, rest)
        for use, (weight, tap) in zip(uses, before, strict=bool(before)):
            source = use.source
            source.half, source.tap, source.is_gathered, source.gathers_again = weight, tap, True, False
        next_use = iter(uses)
        leaves = [next(next_use) if _tree.is_float_array(leaf) else leaf for leaf in jax.tree.leaves(params)]
        model_state = arrays_in(jax.tree.leaves(rest[:1]))
        examples = arrays_in(jax.tree.leaves(rest[1:]))
        values = [(value, True) for value in (*leaves, *model_state)] + [(value, False) for value in examples]
        jaxpr, consts = program.jaxpr
        results = _Rewriting(self.plan).results(jaxpr, consts, values)
        return program.unflatten(_arrays(results, jaxpr))

    def gather(self, params: Any, *rest: Any) -> GatheredParams:
        """Gather all params, for several calls."""
        _, uses = self._uses(params, rest)
        sources = [use.source for use in uses]
        weights = [self.plan.whole(source.param, source.spec, source.dtype) for source in sources]
        return GatheredParams(params, weights, [self.plan.zeros(source.param, source.spec) for source in sources])

    def reduced(self, gradients: Any, taps: Any) -> Any:
        """Return the gradients of params that were gathered before.

        Args:
          gradients: the cotangents of the params.
          taps: the cotangents of the taps.
        """
        leaves, tree = jax.tree.flatten(gradients)
        specs = specs_in(self.plan.specs)
        floats = [n for n, leaf in enumerate(leaves) if _tree.is_float_array(leaf)]
        for n, parts in zip(floats, taps, strict=True):
            leaves[n] += self.plan.reduced(parts, specs[n]).astype(leaves[n].dtype)
        return jax.tree.unflatten(tree, leaves)

    def _uses(self, params: Any, rest: tuple[Any, ...]) -> tuple[TracedProgram, list[Use]]:
        """Trace the loss, and return its program and the floating params in it."""
        require_specs(params, self.plan.specs)
        with while_tracing(self.plan):
            program = TracedProgram(self.loss_fn, (params, *rest))
        jaxpr, _ = program.jaxpr
        product_halves = {np.dtype(name) for name in product_dtypes(jaxpr) if is_half(np.dtype(name))}
        uses = []
        leaves = zip(jax.tree.leaves_with_path(params), specs_in(self.plan.specs), jaxpr.invars, strict=False)
        for (path, leaf), spec, var in leaves:
            if _tree.is_float_array(leaf):
                dtype = self._gathered_in(jaxpr, var, leaf, spec, product_halves)
                is_alone = has_one_reader(jaxpr, var)
                source = Source(self.plan, _tree.path_name(path), leaf, spec, dtype, is_alone, self.gathers_again)
                uses.append(Use(source))
        return program, uses

    def _gathered_in(self, jaxpr: Any, var: Any, param: Any, spec: Any, product_halves: set[Any]) -> Any:
        """Return the half dtype that all readers of a split param have in common, or else its dtype."""
        dtypes = dtypes_read(jaxpr, var) - {None} or product_halves
        if len(dtypes) == 1 and self.plan.is_split(spec):
            (dtype,) = dtypes
            if is_half(dtype):
                return dtype
        return param.dtype


@dataclasses.dataclass(frozen=True)
class _Rewriting:
    """The loss of a plan, rewritten equation by equation."""

    plan: Plan

    def results(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Value]) -> list[Value]:
        """Return the results of a body; ``values`` are its arguments."""

        def equation(eqn: Any, operands: list[Value]) -> list[Value]:
            with in_place_of(eqn):
                if self._is_rewritten(eqn, operands):
                    results = self._rewritten(eqn, operands)
                else:
                    is_common = all(known for _, known in operands)
                    arrays = bound(eqn, [value for value, _ in operands], eqn.params)
                    results = [(array, is_common) for array in arrays]
            return [(value, is_common or _is_number(value)) for value, is_common in results]

        known = [(value, is_common or _is_number(value)) for value, is_common in values]
        return interpreted(jaxpr, [(const, True) for const in consts], known, equation, lambda atom: (atom.val, True))

    def _is_rewritten(self, eqn: Any, operands: Sequence[Value]) -> bool:
        """Return whether an equation reads a weight, or is a product of activations that may sum over examples."""
        if any(isinstance(value, Use) for value, _ in operands):
            return True
        if self.plan.reduce_dtype != _FLOAT32 or all(is_common for _, is_common in operands):
            return False
        return _may_sum_examples(eqn, operands) or (_is_entered(eqn) and _has_loose_products(eqn))

    def _rewritten(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        """Return the results of an equation that :meth:`_is_rewritten`."""
        name = eqn.primitive.name
        uses = [(position, value) for position, (value, _) in enumerate(operands) if isinstance(value, Use)]
        if not uses:
            if _is_entered(eqn):
                return self._entered(eqn, operands)
            return [(array, False) for array in _computed_wide(eqn, [value for value, _ in operands])]
        position, use = uses[0]
        if is_move(eqn):
            return [(moved, True) for moved in use.followed(eqn)]
        if is_copying(eqn):
            return [(use.copies(eqn.outvars[0].aval.dtype), False)]
        values, is_common = [value for value, _ in operands], all(known for _, known in operands)
        if len(uses) == 1 and goes_by_rows(eqn, position):
            repeats_rows = name == "gather" and eqn.outvars[0].aval.size > eqn.invars[position].aval.size
            if not is_common or repeats_rows:
                return [_value(use, product_by_rows(eqn, position, use, values), is_common)]
        if (recipe := float8.recipe_of(eqn)) and (product := in_float8(eqn, recipe, values)) is not None:
            return [_value(use, product, is_common)]
        if _is_entered(eqn):
            return self._entered(eqn, operands)
        return _computed_whole(eqn, operands, uses)

    def _entered(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        """Return the results of a call, a scan or a branch; weights that it alone reads are gathered inside it."""
        bodies = bodies_of(eqn)
        assert bodies is not None
        if is_body_alone(eqn):
            jaxpr, consts = opened(bodies.jaxprs[0])
            for (value, _), var in zip(operands, jaxpr.invars, strict=True):
                if isinstance(value, Use):
                    value.source.is_alone &= has_one_reader(jaxpr, var)
            return self.results(jaxpr, consts, operands)
        return _Entered(self, eqn, bodies, operands).results()


class _Entered:
    """A call, a scan or a branch that weights enter.

    Args:
      rewriting: that of the loss.
      eqn: the equation.
      bodies: its bodies.
      operands: of the equation.
    """

    def __init__(self, rewriting: _Rewriting, eqn: Any, bodies: Bodies, operands: Sequence[Value]) -> None:
        self._rewriting, self._eqn, self._bodies = rewriting, eqn, bodies
        self._name, self._is_scan = eqn.primitive.name, bodies.kind == "scan"
        indices = int(bodies.kind == "cond")  # a number, and so common
        self._index, self._operands = operands[:indices], operands[indices:]
        self._carry = range(bodies.start, bodies.start + bodies.carry)
        are_common = [is_common for _, is_common in self._operands]
        # In all turns.
        self._are_common = same_in_turns(bodies, are_common) if self._is_scan else are_common
        self._uses = {n: value for n, (value, _) in enumerate(self._operands) if isinstance(value, Use)}
        self._any_use = next(iter(self._uses.values()), None)
        self._stacks = {n for n, use in self._uses.items() if self._is_in_turns(n) and self._is_whole_in_turns(use)}
        self._outside = dict[Source, Source]()  # by those of the body
        self._ends = list[list[Value]]()  # the results of each body

    def results(self) -> list[Value]:
        """Return the results of the equation."""
        arrays = [self._operand(n) if n in self._uses else value for n, (value, _) in enumerate(self._operands)]
        functions = [functools.partial(self._body, body) for body in self._bodies.jaxprs]
        index = [value for value, _ in self._index]
        results = rebuilt(self._eqn, self._bodies, functions, _NO_RULE)(*index, *arrays)
        return [self._result(n, result) for n, result in enumerate(results)]

    def _is_in_turns(self, position: int) -> bool:
        """Return whether each turn of a scan reads a slice of an operand."""
        return self._is_scan and position >= self._carry.stop

    def _is_whole_in_turns(self, use: Use) -> bool:
        """Return whether a stack of weights is gathered before the scan: slices of it are not those of the param."""
        return bool(use.moves) or any(use.source.spec[:1])

    def _operand(self, position: int) -> Any:
        """Return the operand of the rebuilt equation that stands for a weight."""
        use = self._uses[position]
        source = use.source
        if position in self._carry:
            return _read_whole(use, self._eqn, position + len(self._index))
        if position in self._stacks:
            return use.read(source.wide)
        if self._is_in_turns(position):
            if not source.is_gathered:
                return source.param
            weight, tap = source.gathered()
            return source.param, weight, jnp.moveaxis(tap, 1, 0)
        if self._is_scan or not source.is_alone:
            source.gathered()
            source.gathers_again &= self._name == "jit"  # or each turn would, and each remat
        return source.param

    def _body(self, body: Any, *args: Any) -> list[Any]:
        """Return the results of a rewritten body, as arrays."""
        jaxpr, consts = opened(body)
        arguments = [self._argument(n, arg, jaxpr) for n, arg in enumerate(args)]
        values = list(zip(arguments, self._are_common, strict=True))
        ends = self._rewriting.results(jaxpr, consts, values)
        self._ends.append(ends)
        if self._bodies.kind != "call":
            return _arrays(ends, jaxpr)
        return [end.source.param if isinstance(end, Use) else end for end, _ in ends]

    def _argument(self, position: int, arg: Any, jaxpr: Any) -> Any:
        """Return the value in a body that stands for one of its arguments."""
        if position in self._carry:
            return _value(self._any_use, arg, self._are_common[position])[0] if self._any_use else arg
        if position not in self._uses:
            return arg
        use = self._uses[position]
        if position in self._stacks:
            return dataclasses.replace(weight_of(use.source, arg, use.source.wide), rounded=use.rounded)
        inner = self._use_inside(position, arg, jaxpr)
        self._outside[inner.source] = use.source
        return inner

    def _use_inside(self, position: int, arg: Any, jaxpr: Any) -> Use:
        """Return the use of a weight in a body: gathered there, if it was not before."""
        use = self._uses[position]
        source, is_in_turns = use.source, self._is_in_turns(position)
        if source.half is not None and not is_in_turns:
            return use
        param, weight, tap = arg if is_in_turns and source.is_gathered else (arg, None, None)
        inner = dataclasses.replace(
            source,
            param=param,
            half=weight,
            tap=tap,
            spec=PartitionSpec(*source.spec[1:]) if is_in_turns else source.spec,
            is_alone=has_one_reader(jaxpr, jaxpr.invars[position]),
        )
        inner.gathers_again &= self._name != "remat2"  # which frees its values
        return dataclasses.replace(use, source=inner)

    def _result(self, n: int, result: Any) -> Value:
        """Return the value of a result of the equation."""
        end, _ = self._ends[-1][n]
        if self._bodies.kind == "call" and isinstance(end, Use):
            computed = dataclasses.replace(end.source, param=result, half=None, tap=None)
            return dataclasses.replace(end, source=self._outside.get(end.source, computed)), True
        is_common = self._are_common[self._carry[n]] if n < len(self._carry) else self._is_common_end(n)
        return _value(self._any_use, result, is_common) if self._any_use else (result, is_common)

    def _is_common_end(self, n: int) -> bool:
        """Return whether a result of all bodies is common."""
        return all(ends[n][1] for ends in self._ends)


def _computed_whole(eqn: Any, operands: Sequence[Value], uses: Sequence[tuple[int, Use]]) -> list[Value]:
    """Return the results of an equation that takes weights as a whole.

    Args:
      eqn: the equation.
      operands: its operands.
      uses: the weights among them, by their positions.

    Raises:
      ValueError: the equation would sum the gradient of a weight in half.
    """
    name, (_, first) = eqn.primitive.name, uses[0]
    are_common = same_results(eqn, [is_common for _, is_common in operands])
    is_wide = all(are_common) and (name in _PRODUCTS or classify(name) in _WIDENED)
    is_wide = (is_wide or name in _FILLS) and may_be_wide(eqn)
    sums = not is_wide and name not in _ACCUMULATES and classify(name) in _SUMS
    arrays = [value for value, _ in operands]
    for position, use in uses:
        if sums and not (all(are_common) and _repeats_nothing(eqn, position)):
            _require_float32(use, eqn, position)
        arrays[position] = _read_whole(use, eqn, position, is_wide)
    results = computed_wide(eqn, arrays) if is_wide else bound(eqn, arrays, eqn.params)
    values = list[Value]()
    for var, result, is_common in zip(eqn.outvars, results, are_common, strict=True):
        if is_common and _tree.is_float_array(result):  # in float32, so that the cotangents of its uses add up so
            values.append((weight_of(first.source, result, var.aval.dtype), True))
        else:
            values.append((result.astype(var.aval.dtype) if is_wide else result, is_common))
    return values


def _read_whole(use: Use, eqn: Any, position: int, is_wide: bool = False) -> Any:
    """Return a weight for an equation that takes all of it."""
    aval, shapes = eqn.invars[position].aval, [var.aval.shape for var in eqn.outvars]
    repeats = eqn.primitive.name in BROADCAST and aval.shape != shapes[0]
    return use.read(wide(aval.dtype) if is_wide else aval.dtype, shapes[0] if repeats else None)


def _repeats_nothing(eqn: Any, position: int) -> bool:
    """Return whether no result of an equation is larger than an operand."""
    return all(var.aval.size <= eqn.invars[position].aval.size for var in eqn.outvars)


def _require_float32(use: Use, eqn: Any, position: int) -> None:
    """Raise an error if an equation sums the cotangents of a weight in half."""
    avals = [eqn.invars[position].aval, *(var.aval for inner in _inside(eqn) for var in inner.outvars)]
    halves = [aval.dtype.name for aval in avals if is_half(getattr(aval, "dtype", np.int32))]
    if halves and use.source.plan.reduce_dtype == _FLOAT32:
        raise ValueError(
            f"the gradient of {use.source.name!r} cannot be summed in float32: {eqn.primitive.name} at "
            f"{user_source_of(eqn)} computes it in {halves[0]}; compute in float32 there, or pass "
            f"make_train_step(…, reduce_dtype={halves[0]!r})"
        )


def _may_sum_examples(eqn: Any, operands: Sequence[Value]) -> bool:
    """Return whether an equation is a half product of activations whose derivative may sum over examples."""
    return _is_loose_product(eqn) and not any(is_common for _, is_common in operands[:2])


def _has_loose_products(eqn: Any) -> bool:
    """Return whether a body of an equation has products as :func:`_is_loose_product` says."""
    return any(map(_is_loose_product, _inside(eqn)))


def _is_loose_product(eqn: Any) -> bool:
    """Return whether an equation is a half product without batch dimensions."""
    name = eqn.primitive.name
    if name not in _PRODUCTS or not may_be_wide(eqn):
        return False
    return name != "dot_general" or not eqn.params["dimension_numbers"][1][0]


def _inside(eqn: Any) -> list[Any]:
    """Return the equations of all bodies of an equation."""
    return [inner for jaxpr in jaxprs_in(eqn) for inner in equations(jaxpr)]


def _is_entered(eqn: Any) -> bool:
    """Return whether weights are gathered in the bodies of an equation."""
    bodies = bodies_of(eqn)
    if bodies is None:
        return False
    return is_body_alone(eqn) or bodies.kind in ("scan", "cond") or eqn.primitive.name in _ENTERED_CALLS


def _computed_wide(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Return the results of a product whose cotangents are summed in float32, and then rounded."""
    results = computed_wide(eqn, arrays)
    return [result.astype(var.aval.dtype) for result, var in zip(results, eqn.outvars, strict=True)]


def _value(of: Use, array: Any, is_common: bool) -> Value:
    """Return what was computed of a weight: a weight again, if it is common."""
    is_weight = is_common and _tree.is_float_array(array)
    return (weight_of(of.source, array, array.dtype), True) if is_weight else (array, is_common)


def _is_number(value: Any) -> bool:
    """Return whether an array is a number. A PRNG key is none: draws may differ between examples."""
    return not isinstance(value, Use) and np.ndim(value) == 0 and not jnp.issubdtype(value.dtype, jax.dtypes.extended)


def _arrays(values: Sequence[Value], jaxpr: Any) -> list[Any]:
    """Return the results of a body as arrays."""
    ends = zip(values, jaxpr.outvars, strict=True)
    return [value.read(atom.aval.dtype) if isinstance(value, Use) else value for (value, _), atom in ends]
