"""Rewrite a loss so that it gathers each split weight where it is used.

The loss is traced with params that are not split. Policies, adapters and autocast are applied before the rewriting.
Each param is gathered in the dtype in which the program reads the param. The gather happens in the innermost body that
contains all uses of the param, such as the body of a scan over layers. (A *body* is the jaxpr of a loss, loop, call or
branch. *Half* is short for half precision: float16 or bfloat16.)

The rewriting distinguishes two kinds of values:

* *Common* values are the same for all examples: params, the model state, constants, scalars, and values that are
  computed only from these. A common floating value that depends on params is a *weight*.
* All other values are *activations*.

Each device computes its part of a weight's gradient from its own examples, in float32. The *tap* of a weight is an
array of zeros that has a part for each device. The cotangent of the tap sums the gradients of all uses of the weight.
This sum is then reduced over the devices once, in the ``reduce_dtype`` of the :class:`Plan`. (Without the tap, XLA
would reduce the gradient of each use in the dtype of the product that uses the weight.) The derivative of a product of
two activations may also sum over examples. Such a derivative is summed in float32 and rounded once, as in a step on one
device.

The batch axis of an activation is assumed to be its first axis that is divisible by the number of devices. If the batch
is on another axis, the results are the same, but the step is slower. This module works on mesh axes of type Auto.
``mesh_types`` rebuilds a loss that was written for Explicit axes so that it runs on Auto axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base import trees as _tree
from jaxmp.base.dtypes import is_narrow
from jaxmp.policy.float8_product import recipe_of
from jaxmp.program.binding import bind_equation
from jaxmp.program.bodies import is_body_alone
from jaxmp.program.equations import Bodies, opened
from jaxmp.program.rewriting import Rewriter
from jaxmp.program.traced_program import TracedProgram, arrays_in
from jaxmp.program.walk import product_dtypes
from jaxmp.sharding.entered_bodies import EnteredBodies, bodies_to_enter
from jaxmp.sharding.mesh_plan import Plan, while_tracing
from jaxmp.sharding.specs import specs_in
from jaxmp.sharding.weight_products import (
    computed_wide,
    float8_row_product,
    goes_by_rows,
    may_be_wide,
    product_by_rows,
    product_inside,
)
from jaxmp.sharding.weight_readers import dtypes_read, has_one_reader, is_copying, only_moves_or_casts
from jaxmp.sharding.weights import RewrittenValue, Source, Use, as_value, results_as_arrays
from jaxmp.sharding.whole_weights import WIDE_PRODUCTS, computed_whole, equations_inside

_FLOAT32 = np.dtype(np.float32)


class GatheredParams(NamedTuple):
    """Params that were gathered before the call of the loss.

    Attributes:
      params: the params themselves.
      weights: the gathered weight of each floating param.
      taps: the tap of each floating param.
    """

    params: Any
    weights: list[Any]
    taps: list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """A loss function that gathers the weights of a plan where they are used.

    Call it as ``loss_fn(params, …)``, with params or :class:`GatheredParams`.
    """

    plan: Plan
    loss_fn: Callable[..., Any]
    gathers_again: bool = True  # whether the backward pass gathers weights again, even without rematerialisation

    @property
    def is_split(self) -> bool:
        """Return whether a batch is split over more than one device."""
        return self.plan.devices > 1

    def __call__(self, params: Any, *other_args: Any) -> Any:
        """Return the results of the loss function."""
        if not self.is_split:
            return self.loss_fn(params, *other_args)
        before: list[tuple[Any, Any]] = []
        if isinstance(params, GatheredParams):
            before = list(zip(params.weights, params.taps, strict=True))
            params = params.params
        program, uses = self._uses(params, other_args)
        for use, (weight, tap) in zip(uses, before, strict=bool(before)):
            source = use.source
            source.half, source.tap, source.is_gathered, source.gathers_again = weight, tap, True, False
        next_use = iter(uses)
        leaves = [next(next_use) if _tree.is_float_array(leaf) else leaf for leaf in jax.tree.leaves(params)]
        model_state = arrays_in(jax.tree.leaves(other_args[:1]))
        examples = arrays_in(jax.tree.leaves(other_args[1:]))
        values = [(value, True) for value in (*leaves, *model_state)] + [(value, False) for value in examples]
        jaxpr, consts = program.open_jaxpr
        results = _GatheringRewriter(self.plan).evaluate(jaxpr, consts, values)
        return program.unflatten(results_as_arrays(results, jaxpr))

    def gather(self, params: Any, *other_args: Any) -> GatheredParams:
        """Gather all params once, for several calls of the loss."""
        _, uses = self._uses(params, other_args)
        sources = [use.source for use in uses]
        weights = [self.plan.whole(source.param, source.spec, source.dtype) for source in sources]
        return GatheredParams(params, weights, [self.plan.zeros(source.param, source.spec) for source in sources])

    def reduced(self, gradients: Any, taps: Any) -> Any:
        """Return the gradients of gathered params, reduced over the devices.

        Args:
          gradients: the cotangents of the params.
          taps: the cotangents of the taps, which have a part for each device.
        """
        leaves, tree = jax.tree.flatten(gradients)
        specs = specs_in(self.plan.specs_for(gradients))
        floats = [n for n, leaf in enumerate(leaves) if _tree.is_float_array(leaf)]
        for n, parts in zip(floats, taps, strict=True):
            leaves[n] += self.plan.reduced(parts, specs[n]).astype(leaves[n].dtype)
        return jax.tree.unflatten(tree, leaves)

    def _uses(self, params: Any, other_args: tuple[Any, ...]) -> tuple[TracedProgram, list[Use]]:
        """Trace the loss; return its program, and a use of each floating param."""
        specs = specs_in(self.plan.specs_for(params))
        with while_tracing(self.plan):
            program = TracedProgram(self.loss_fn, (params, *other_args))
        jaxpr, _ = program.open_jaxpr
        product_halves = {np.dtype(name) for name in product_dtypes(jaxpr) if is_narrow(np.dtype(name))}
        uses = []
        leaves = zip(jax.tree.leaves_with_path(params), specs, jaxpr.invars, strict=False)
        for (path, leaf), spec, var in leaves:
            if _tree.is_float_array(leaf):
                dtype = self._gathered_in(jaxpr, var, leaf, spec, product_halves)
                is_alone = has_one_reader(jaxpr, var)
                source = Source(self.plan, _tree.path_name(path), leaf, spec, dtype, is_alone, self.gathers_again)
                uses.append(Use(source))
        return program, uses

    def _gathered_in(self, jaxpr: Any, var: Any, param: Any, spec: Any, product_halves: set[Any]) -> Any:
        """Return the dtype in which a param is gathered.

        A split param is gathered in half if all equations read it in the same half dtype. If these equations are only
        lookups whose dtype autocast left unchanged, the param is gathered in the half dtype of the program's products.
        All other params are gathered without a cast.
        """
        dtypes = dtypes_read(jaxpr, var) - {None} or product_halves
        if len(dtypes) == 1 and self.plan.is_split(spec):
            (dtype,) = dtypes
            if is_narrow(dtype):
                return dtype
        return param.dtype


@dataclasses.dataclass(frozen=True)
class _GatheringRewriter(Rewriter):
    """A rewriter of the loss of a plan.

    Its values are pairs: see :data:`jaxmp.sharding.weights.RewrittenValue`.
    """

    plan: Plan

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[RewrittenValue]) -> list[RewrittenValue]:
        return super().evaluate(jaxpr, [(const, True) for const in consts], list(map(_with_scalar, args)))

    def evaluate_literal(self, atom: Any) -> RewrittenValue:
        return atom.val, True

    def evaluate_equation(self, eqn: Any, operands: list[RewrittenValue]) -> list[RewrittenValue]:
        product = product_inside(eqn)
        if self._is_rewritten(product, operands):
            results = self._rewritten(product, operands)
        else:
            is_common = all(known for _, known in operands)
            arrays = bind_equation(eqn, [value for value, _ in operands], eqn.params)
            results = [(array, is_common) for array in arrays]
        return list(map(_with_scalar, results))

    def evaluate_bodies(self, eqn: Any, bodies: Bodies, operands: list[RewrittenValue]) -> list[RewrittenValue]:
        """Return the results of a call, a scan or a branch with rewritten bodies."""
        if not is_body_alone(eqn):
            return EnteredBodies(self, eqn, bodies, operands).results()
        jaxpr, consts = opened(bodies.jaxprs[0])
        for (value, _), var in zip(operands, jaxpr.invars, strict=True):
            if isinstance(value, Use):
                value.source.is_alone &= has_one_reader(jaxpr, var)
        return self.evaluate(jaxpr, consts, operands)

    def _is_rewritten(self, eqn: Any, operands: Sequence[RewrittenValue]) -> bool:
        """Return whether an equation reads a weight, or may sum over examples."""
        if any(isinstance(value, Use) for value, _ in operands):
            return True
        if self.plan.reduce_dtype != _FLOAT32 or all(is_common for _, is_common in operands):
            return False
        if bodies_to_enter(eqn) is not None:
            return any(map(_is_product_without_batch_axes, equations_inside(eqn)))
        is_of_activations = not any(is_common for _, is_common in operands[:2])
        return is_of_activations and _is_product_without_batch_axes(eqn)

    def _rewritten(self, eqn: Any, operands: list[RewrittenValue]) -> list[RewrittenValue]:
        """Return the results of an equation for which :meth:`_is_rewritten` is true."""
        name, entered = eqn.primitive.name, bodies_to_enter(eqn)
        uses = [(position, value) for position, (value, _) in enumerate(operands) if isinstance(value, Use)]
        if not uses:
            if entered is not None:
                return self.evaluate_bodies(eqn, entered, operands)
            return [(array, False) for array in _computed_wide(eqn, [value for value, _ in operands])]
        position, use = uses[0]
        if only_moves_or_casts(eqn):
            return [(moved, True) for moved in use.followed(eqn)]
        if is_copying(eqn):
            return [(use.copies(eqn.outvars[0].aval.dtype), False)]
        values, is_common = [value for value, _ in operands], all(known for _, known in operands)
        if len(uses) == 1 and goes_by_rows(eqn, position, self.plan):
            repeats_rows = name == "gather" and eqn.outvars[0].aval.size > eqn.invars[position].aval.size
            if not is_common or repeats_rows:
                return [as_value(use, product_by_rows(eqn, position, use, values), is_common)]
        if (recipe := recipe_of(eqn)) and (product := float8_row_product(eqn, recipe, values)) is not None:
            return [as_value(use, product, is_common)]
        if entered is not None:
            return self.evaluate_bodies(eqn, entered, operands)
        return computed_whole(eqn, operands, uses)


def _is_product_without_batch_axes(eqn: Any) -> bool:
    """Return whether an equation is a half product without batch dimensions.

    The derivative of such a product may sum over examples in half.
    """
    name = eqn.primitive.name
    if name not in WIDE_PRODUCTS or not may_be_wide(eqn):
        return False
    return name != "dot_general" or not eqn.params["dimension_numbers"][1][0]


def _computed_wide(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Compute a product, and sum its operands' cotangents in float32.

    The results and the sums are then rounded to the dtypes that they have in the program.
    """
    results = computed_wide(eqn, arrays)
    return [result.astype(var.aval.dtype) for result, var in zip(results, eqn.outvars, strict=True)]


def _with_scalar(known: RewrittenValue) -> RewrittenValue:
    """Mark a scalar as common, because it is the same for all examples.

    A PRNG key does not count as a scalar, because draws from it may differ between examples.
    """
    value, is_common = known
    if is_common or isinstance(value, Use):
        return known
    return value, np.ndim(value) == 0 and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
