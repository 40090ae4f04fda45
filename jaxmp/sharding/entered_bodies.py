"""Gather weights in the bodies of calls, scans and branches.

A weight is gathered before the equation (a call, a scan or a branch) if other equations read the weight too. A weight
is also gathered before a scan that reads all of the weight in every iteration. ``gathered_loss.py`` defines weights,
taps and common values. ``weights.py`` has :class:`Source` and :class:`Use`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxmp._internals.jax.bodies import is_body_alone, rebuilt
from jaxmp._internals.jax.equations import Bodies, bodies_of, opened
from jaxmp._internals.jax.invariants import same_in_turns
from jaxmp.sharding.weight_readers import has_one_reader
from jaxmp.sharding.weights import RewrittenValue, Source, Use, as_value, results_as_arrays, weight_of
from jaxmp.sharding.whole_weights import read_whole

_NO_RULE: Any = None  # calls, scans and branches have no custom derivative rule
_ENTERED_CALLS = frozenset({"jit", "remat2"})

Rewrite = Callable[[Any, Sequence[Any], Sequence[RewrittenValue]], list[RewrittenValue]]


def is_entered(eqn: Any) -> bool:
    """Return whether weights are gathered inside the bodies of an equation."""
    bodies = bodies_of(eqn)
    if bodies is None:
        return False
    return is_body_alone(eqn) or bodies.kind in ("scan", "cond") or eqn.primitive.name in _ENTERED_CALLS


class EnteredBodies:
    """A call, a scan or a branch whose arguments include weights.

    Args:
      rewrite: a function that returns the results of a body, given its jaxpr, constants and arguments.
      eqn: the equation.
      bodies: the bodies of the equation.
      operands: the operands of the equation.
    """

    def __init__(self, rewrite: Rewrite, eqn: Any, bodies: Bodies, operands: Sequence[RewrittenValue]) -> None:
        self._rewrite, self._eqn, self._bodies = rewrite, eqn, bodies
        self._name, self._is_scan = eqn.primitive.name, bodies.kind == "scan"
        indices = int(bodies.kind == "cond")  # the index that selects a branch is a scalar, so it is common
        self._index, self._operands = operands[:indices], operands[indices:]
        self._carry = range(bodies.start, bodies.start + bodies.carry)
        are_common = [is_common for _, is_common in self._operands]
        self._are_common = same_in_turns(bodies, are_common) if self._is_scan else are_common
        self._uses = {n: value for n, (value, _) in enumerate(self._operands) if isinstance(value, Use)}
        self._any_use = next(iter(self._uses.values()), None)
        self._whole_stacks = {n for n, use in self._uses.items() if self._is_sliced(n) and _is_stack_whole(use)}
        self._outer_sources = dict[Source, Source]()  # from the source of a weight inside a body to its source outside
        self._results_of_bodies = list[list[RewrittenValue]]()

    def results(self) -> list[RewrittenValue]:
        """Return the results of the equation."""
        arrays = [self._operand(n) if n in self._uses else value for n, (value, _) in enumerate(self._operands)]
        functions = [functools.partial(self._body, body) for body in self._bodies.jaxprs]
        index = [value for value, _ in self._index]
        results = rebuilt(self._eqn, self._bodies, functions, _NO_RULE)(*index, *arrays)
        return [self._result(n, result) for n, result in enumerate(results)]

    def _is_sliced(self, position: int) -> bool:
        """Return whether each iteration of a scan reads a slice of an operand."""
        return self._is_scan and position >= self._carry.stop

    def _operand(self, position: int) -> Any:
        """Return the rebuilt equation's operand for the weight at ``position``."""
        use = self._uses[position]
        source = use.source
        if position in self._carry:
            return read_whole(use, self._eqn, position + len(self._index))
        if position in self._whole_stacks:
            return use.read(source.sum_dtype)
        if self._is_sliced(position):
            if not source.is_gathered:
                return source.param
            weight, tap = source.gathered()
            return source.param, weight, jnp.moveaxis(tap, 1, 0)
        if self._is_scan or not source.is_alone:
            source.gathered()
            source.gathers_again &= self._name == "jit"  # other bodies would gather again in each run
        return source.param

    def _body(self, body: Any, *args: Any) -> list[Any]:
        """Return the results of a rewritten body, as arrays."""
        jaxpr, consts = opened(body)
        arguments = [self._argument(n, arg, jaxpr) for n, arg in enumerate(args)]
        values = list(zip(arguments, self._are_common, strict=True))
        ends = self._rewrite(jaxpr, consts, values)
        self._results_of_bodies.append(ends)
        if self._bodies.kind != "call":
            return results_as_arrays(ends, jaxpr)
        return [end.source.param if isinstance(end, Use) else end for end, _ in ends]

    def _argument(self, position: int, arg: Any, jaxpr: Any) -> Any:
        """Return the value that the rewritten body reads for an argument."""
        if position in self._carry:
            return as_value(self._any_use, arg, self._are_common[position])[0] if self._any_use else arg
        if position not in self._uses:
            return arg
        use = self._uses[position]
        if position in self._whole_stacks:
            return dataclasses.replace(weight_of(use.source, arg, use.source.sum_dtype), rounded=use.rounded)
        inner = self._use_inside(position, arg, jaxpr)
        self._outer_sources[inner.source] = use.source
        return inner

    def _use_inside(self, position: int, arg: Any, jaxpr: Any) -> Use:
        """Return the use of a weight in a body.

        The body gathers the weight, unless the weight was gathered before the equation.
        """
        use = self._uses[position]
        source, is_sliced = use.source, self._is_sliced(position)
        if source.half is not None and not is_sliced:
            return use
        param, weight, tap = arg if is_sliced and source.is_gathered else (arg, None, None)
        inner = dataclasses.replace(
            source,
            param=param,
            half=weight,
            tap=tap,
            spec=PartitionSpec(*source.spec[1:]) if is_sliced else source.spec,
            is_alone=has_one_reader(jaxpr, jaxpr.invars[position]),
        )
        inner.gathers_again &= self._name != "remat2"  # a remat already frees the gathered weight
        return dataclasses.replace(use, source=inner)

    def _result(self, n: int, result: Any) -> RewrittenValue:
        """Return result ``n`` of the equation, from its array ``result``."""
        end, _ = self._results_of_bodies[-1][n]
        if self._bodies.kind == "call" and isinstance(end, Use):
            computed = dataclasses.replace(end.source, param=result, half=None, tap=None)
            return dataclasses.replace(end, source=self._outer_sources.get(end.source, computed)), True
        is_common = self._are_common[self._carry[n]] if n < len(self._carry) else self._is_common_end(n)
        return as_value(self._any_use, result, is_common) if self._any_use else (result, is_common)

    def _is_common_end(self, n: int) -> bool:
        """Return whether result ``n`` is common in all bodies."""
        return all(ends[n][1] for ends in self._results_of_bodies)


def _is_stack_whole(use: Use) -> bool:
    """Return whether a stack of weights must be gathered before a scan.

    It must if the stack was moved (for example reshaped), or if the axis that the scan slices is split over devices.
    """
    return bool(use.moves) or any(use.source.spec[:1])
