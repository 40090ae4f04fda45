"""Weights in a body of a rewritten loss, which are gathered at their first use.

``gathered_loss.py`` defines weights, taps and bodies. A *move* is an equation that only rearranges a weight, such as a
reshape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state
from jax.sharding import PartitionSpec

from jaxmp.base.dtypes import at_least_float32
from jaxmp.base.trees import is_float_array
from jaxmp.engine.marks import WIDE_SUMS
from jaxmp.program.binding import bind_equation
from jaxmp.program.equations import primitive_of
from jaxmp.sharding.mesh_plan import Plan

RewrittenValue = tuple[Any, bool]
"""An array or a :class:`Use`, and whether this value is common.

``gathered_loss.py`` defines common values. A use is always common.
"""


@dataclasses.dataclass(eq=False)
class Source:
    """A param in a body, which is gathered at its first use."""

    plan: Plan
    name: str
    param: Any
    spec: PartitionSpec
    dtype: np.dtype  # of the gathered weight
    is_alone: bool  # whether only one equation of the body reads the param
    gathers_again: bool  # whether the gathered weight is freed, and the backward pass gathers it again
    is_gathered: bool = False  # whether the param was gathered before the call of the loss
    is_computed: bool = False  # whether the loss computes the param from weights
    half: Any = None  # the gathered weight, None before the gather
    tap: Any = None
    _again: Any = dataclasses.field(default=None, init=False)  # see gathered_again

    def gathered_again(self, param: Any) -> Any:
        """Return the weight for the backward pass, gathered once per trace."""
        trace = get_opaque_trace_state()
        if self._again is None or self._again[0] is not param or self._again[1] != trace:
            # Without a barrier XLA would keep the gathered weight of the forward pass.
            half = self.plan.whole(jax.lax.optimization_barrier(param), self.spec, self.dtype)
            self._again = param, trace, half
        return self._again[2]

    def gathered(self) -> tuple[Any, Any]:
        """Return the weight and its tap."""
        if self.half is None:
            self.half = self.plan.whole(self.param, self.spec, self.dtype)
        if self.tap is None:
            self.tap = self.plan.tap(self.param, self.spec)
        return self.half, self.tap

    @property
    def sum_dtype(self) -> np.dtype:
        """Return the dtype in which the cotangents of the param are summed."""
        return at_least_float32(self.param.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """A variable of the program that is a weight after some moves and casts."""

    source: Source
    moves: tuple[tuple[Any, int], ...] = ()  # each equation, with the position of the moved weight in its results
    rounded: np.dtype | None = None  # the narrowest dtype that the author casts the weight to

    def followed(self, eqn: Any) -> list[Use]:
        """Return the results of an equation that only moves or casts the weight."""
        if primitive_of(eqn) == "name":
            return [self]  # JAX cannot transpose checkpoint_name
        if eqn.primitive.name == "convert_element_type":
            new = np.dtype(eqn.params["new_dtype"])
            is_rounding = new.itemsize < (self.rounded or self.source.sum_dtype).itemsize
            return [dataclasses.replace(self, rounded=new) if is_rounding else self]
        return [dataclasses.replace(self, moves=(*self.moves, (eqn, number))) for number, _ in enumerate(eqn.outvars)]

    def moved(self, value: Any) -> Any:
        """Return ``value`` after the moves of the weight."""
        for eqn, number in self.moves:
            value = bind_equation(eqn, [value], anywhere(eqn.params))[number]
        return value

    def cast(self, value: Any, dtype: Any) -> Any:
        """Return ``value`` in ``dtype``, rounded as the author rounded the weight."""
        with jax.named_scope(WIDE_SUMS):
            return (value if self.rounded is None else value.astype(self.rounded)).astype(dtype)

    def moved_back(self, cotangent: Any) -> Any:
        """Return the cotangent of the weight from the cotangent of the moved weight."""
        if not self.moves:
            return cotangent
        weight_type = jax.ShapeDtypeStruct(self.source.param.shape, cotangent.dtype)
        return jax.linear_transpose(self.moved, weight_type)(cotangent)[0]

    def read(self, dtype: Any, shape: Sequence[int] | None = None) -> Any:
        """Return the weight as an array, broadcast to ``shape`` if that is not None.

        A gradient of the full shape is computed, and each device keeps its part of the gradient.
        """
        source, half = self.source, self.source.gathered()[0]
        plan, spec, param = source.plan, source.spec, source.param

        @jax.custom_vjp
        def value(param: Any, half: Any) -> Any:
            return self.cast(half, source.sum_dtype)  # so that cotangents have this dtype

        def backward(_: None, cotangent: Any) -> tuple[Any, None]:
            # XLA reduces the cotangent of a computed weight when the cotangent reaches a split param.
            cotangent = cotangent if source.is_computed else plan.put(cotangent, spec)
            return cotangent.astype(param.dtype), None

        value.defvjp(lambda param, half: (value(param, half), None), backward)
        moved = self.moved(value(param, half))
        return (moved if shape is None else jnp.broadcast_to(moved, shape)).astype(dtype)

    def copies(self, dtype: Any) -> Any:
        """Return copies (devices, …) of the weight, see :meth:`Plan.copies`."""
        half, tap = self.source.gathered()
        plan = self.source.plan

        @jax.custom_vjp
        def copies(half: Any, tap: Any) -> Any:
            weight = self.cast(self.moved(half), dtype)
            return plan.by_rows(jnp.broadcast_to(weight, (plan.devices, *weight.shape)))

        def backward(_: None, parts: Any) -> tuple[None, Any]:
            return None, plan.of_parts(jax.vmap(self.moved_back)(parts.astype(self.source.sum_dtype)), self.source.spec)

        copies.defvjp(lambda half, tap: (copies(half, tap), None), backward)
        return copies(half, tap)


def weight_of(origin: Source, value: Any, dtype: np.dtype) -> Use:
    """Return a float32 weight for a value that is computed from weights.

    The cotangents of the value are then summed in float32.

    Args:
      origin: the source of one of these weights.
      value: the value.
      dtype: the dtype of the value in the program.
    """
    with jax.named_scope(WIDE_SUMS):
        value = value.astype(at_least_float32(value.dtype))
    source = Source(origin.plan, origin.name, value, PartitionSpec(), dtype, False, False, is_computed=True)
    return Use(source, rounded=dtype if dtype.itemsize < value.dtype.itemsize else None)


def as_value(use: Use, array: Any, is_common: bool) -> RewrittenValue:
    """Return an array that was computed from a weight, as a rewritten value.

    If the array is common and floating, it is a weight again.
    """
    is_weight = is_common and is_float_array(array)
    return (weight_of(use.source, array, array.dtype), True) if is_weight else (array, is_common)


def results_as_arrays(values: Sequence[RewrittenValue], jaxpr: Any) -> list[Any]:
    """Return the results of a body as arrays."""
    arrays = []
    for (value, _), atom in zip(values, jaxpr.outvars, strict=True):
        arrays.append(value.read(atom.aval.dtype) if isinstance(value, Use) else value)
    return arrays


def anywhere(params: dict[str, Any]) -> dict[str, Any]:
    """Return an equation's parameters without the sharding of the result."""
    return {name: None if name in ("sharding", "out_sharding") else value for name, value in params.items()}
