"""Gather weights in the bodies of remats, scans and branches.

:class:`_Gather` lists the places where a weight in a body is gathered. ``gathered_loss.py`` defines weights, taps and
common values. ``weights.py`` has :class:`Source` and :class:`Use`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxmp.program.bodies import is_body_alone, rebuild
from jaxmp.program.equations import Bodies, bodies_of, opened
from jaxmp.program.invariants import SAME_FOR_EXAMPLES
from jaxmp.program.rewriting import Rewriter
from jaxmp.sharding.weight_readers import has_one_reader
from jaxmp.sharding.weights import RewrittenValue, Use, as_value, results_as_arrays, weight_of
from jaxmp.sharding.whole_weights import read_whole


class _Gather(enum.Enum):
    """The place where a weight that enters a body is gathered."""

    CARRY = enum.auto()  # before a scan whose carry starts with the weight
    STACK = enum.auto()  # before a scan over slices of the weight, all slices at once
    SLICES = enum.auto()  # in each iteration of a scan, the slice of this iteration
    BEFORE = enum.auto()  # before the equation: the weight has other readers, or every iteration reads all of it
    INSIDE = enum.auto()  # in the body


def bodies_to_enter(eqn: Any) -> Bodies | None:
    """Return the bodies of an equation if weights are gathered inside them."""
    bodies = bodies_of(eqn)
    if bodies is None or not bodies.has_gradient:
        return None
    return bodies if not bodies.is_call or bodies.is_recomputed or is_body_alone(eqn) else None


class EnteredBodies:
    """A remat, a scan or a branch whose arguments include weights.

    Args:
      rewriter: the rewriter of the bodies. Its values are rewritten values.
      eqn: the equation.
      bodies: the bodies of the equation.
      operands: the operands of the equation.
    """

    def __init__(self, rewriter: Rewriter, eqn: Any, bodies: Bodies, operands: Sequence[RewrittenValue]) -> None:
        self._rewriter, self._eqn, self._bodies = rewriter, eqn, bodies
        self._operands = bodies.inputs(0, operands)
        # The index that selects a branch is a scalar, so it is common.
        self._index = operands[: len(operands) - len(self._operands)]
        self._carries = bodies.carries
        self._are_common = SAME_FOR_EXAMPLES.solve_inputs(bodies, [is_common for _, is_common in operands])[0]
        self._uses = {n: value for n, (value, _) in enumerate(self._operands) if isinstance(value, Use)}
        self._any_use = next(iter(self._uses.values()), None)
        self._gathers = {n: self._place_of_gather(n, use) for n, use in self._uses.items()}
        self._are_ends_common = list[list[bool]]()  # for each body, whether its results are common

    def results(self) -> list[RewrittenValue]:
        """Return the results of the equation."""
        arrays = [self._operand(n) if n in self._uses else value for n, (value, _) in enumerate(self._operands)]
        functions = [functools.partial(self._body, body) for body in self._bodies.jaxprs]
        index = [value for value, _ in self._index]
        results = rebuild(self._eqn, self._bodies, functions)(*index, *arrays)
        return [self._value(result, self._is_common_result(n)) for n, result in enumerate(results)]

    def _place_of_gather(self, position: int, use: Use) -> _Gather:
        """Return where the weight at ``position`` is gathered."""
        source = use.source
        if position in self._carries:
            return _Gather.CARRY
        if self._bodies.is_loop and position >= self._carries.stop:
            # A reshaped stack has other slices than the param. A device may lack slices of a stack split along axis 0.
            return _Gather.STACK if use.moves or any(source.spec[:1]) else _Gather.SLICES
        if self._bodies.is_loop or not source.is_alone or source.half is not None:
            return _Gather.BEFORE
        return _Gather.INSIDE

    def _operand(self, position: int) -> Any:
        """Return the rebuilt equation's operand for the weight at ``position``."""
        use, gather = self._uses[position], self._gathers[position]
        source = use.source
        if gather is _Gather.CARRY:
            return read_whole(use, self._eqn, position)
        if gather is _Gather.STACK:
            return use.read(source.sum_dtype)
        if gather is _Gather.SLICES and source.is_gathered:
            weight, tap = source.gathered()
            return source.param, weight, jnp.moveaxis(tap, 1, 0)
        if gather is _Gather.BEFORE:
            source.gathered()
            source.gathers_again = False  # the body would gather again in each run
        return source.param

    def _body(self, body: Any, *args: Any) -> list[Any]:
        """Return the results of a rewritten body, as arrays."""
        jaxpr, consts = opened(body)
        arguments = [self._argument(n, arg, jaxpr) for n, arg in enumerate(args)]
        ends = self._rewriter.evaluate(jaxpr, consts, list(zip(arguments, self._are_common, strict=True)))
        self._are_ends_common.append([is_common for _, is_common in ends])
        return results_as_arrays(ends, jaxpr)

    def _argument(self, position: int, arg: Any, jaxpr: Any) -> Any:
        """Return the value that the rewritten body reads for an argument."""
        if position in self._carries:
            return self._value(arg, self._are_common[position])[0]
        if position not in self._uses:
            return arg
        use, gather = self._uses[position], self._gathers[position]
        source = use.source
        if gather is _Gather.STACK:
            return dataclasses.replace(weight_of(source, arg, source.sum_dtype), rounded=use.rounded)
        if gather is _Gather.BEFORE:
            return use
        is_alone = has_one_reader(jaxpr, jaxpr.invars[position])
        if gather is _Gather.SLICES:
            param, weight, tap = arg if source.is_gathered else (arg, None, None)
            spec = PartitionSpec(*source.spec[1:])
            inner = dataclasses.replace(source, param=param, half=weight, tap=tap, spec=spec, is_alone=is_alone)
        else:
            inner = dataclasses.replace(source, param=arg, is_alone=is_alone)
            inner.gathers_again &= not self._bodies.is_recomputed  # a remat already frees the gathered weight
        return dataclasses.replace(use, source=inner)

    def _value(self, array: Any, is_common: bool) -> RewrittenValue:
        """Return an array of the equation as a rewritten value."""
        return as_value(self._any_use, array, is_common) if self._any_use else (array, is_common)

    def _is_common_result(self, n: int) -> bool:
        """Return whether result ``n`` of the equation is common."""
        if n < len(self._carries):
            return self._are_common[self._carries[n]]
        return all(are_common[n] for are_common in self._are_ends_common)
