"""Warn if the optimizer gets gradients that are multiplied or divided by the loss scale.

The optimizer takes true gradients. While ``jax.jit`` traces a step, the program up to ``tx.update`` says how often the
loss scale is a factor of each gradient. Its power is 0 for true gradients, 1 for gradients of the scaled loss, and -1
for gradients that were unscaled twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.traces import is_staged, program_so_far
from jaxmp.base.user_warnings import warn_user
from jaxmp.optim.loss_scale import LossScale
from jaxmp.program.equations import aval_of, is_literal
from jaxmp.program.facts import Analysis
from jaxmp.program.primitives import CAST, COMBINATIONS, MOVES, PRODUCTS, SUMS, Trait, with_trait

_ANY: Final = "any"
_Power = int | str | None
"""The power of the loss scale in a value.

It is None if it is unknown, and ``"any"`` for zeros, infinities and NaN, which no factor changes.
"""


class _Factor(NamedTuple):
    """The loss scale as a factor of a value.

    Attributes:
      power: the power of the loss scale.
      was_multiplied: whether the value is computed from one in which the loss scale is a factor.
    """

    power: _Power
    was_multiplied: bool = False


_MULTIPLIES = PRODUCTS | with_trait(Trait.MULTIPLIES)
_SUMS = frozenset(name for name, kind in COMBINATIONS.items() if kind == "add")
# The power of the result is that of the floating operands.
_KEEPS_POWER = MOVES | SUMS | _SUMS | with_trait(Trait.KEEPS_MAGNITUDE) | {CAST}


class _FactorOfScale(Analysis[_Factor]):
    """The loss scale as a factor of each value."""

    constant = _Factor(0)

    def solve_equation(self, eqn: Any, operands: Sequence[_Factor]) -> Sequence[_Factor]:
        atoms = zip(eqn.invars, operands, strict=True)
        operands = [_Factor(_ANY) if _is_unchanged(atom) else factor for atom, factor in atoms]
        if all(factor == self.constant for factor in operands):  # most of the forward pass: its bodies need not be read
            return [self.constant] * len(eqn.outvars)
        factors = super().solve_equation(eqn, operands)
        return [
            factor if _is_floating(var) else self.constant for var, factor in zip(eqn.outvars, factors, strict=True)
        ]

    def transfer(self, eqn: Any, operands: Sequence[_Factor]) -> Sequence[_Factor]:
        name = eqn.primitive.name
        factors = [factor for atom, factor in zip(eqn.invars, operands, strict=True) if _is_floating(atom)]
        power = self._power_of_operation(name, [factor.power for factor in factors])
        sources = factors[:1] if name == "div" else factors  # a divisor makes the power smaller
        return [_factor(power, sources)] * len(eqn.outvars)

    def _power_of_operation(self, name: str, powers: Sequence[_Power]) -> _Power:
        if name in _MULTIPLIES and len(powers) == 2:
            return _quotient(*powers) if name == "div" else _product(*powers)
        if name in _KEEPS_POWER:
            start: _Power = _ANY if powers else 0
            return reduce(_common_power, powers, start)
        return 0 if all(power in (0, _ANY) for power in powers) else None

    def join(self, first: _Factor, second: _Factor) -> _Factor:
        return _factor(_common_power(first.power, second.power), [first, second])


_FACTORS = _FactorOfScale()


def _factor(power: _Power, sources: Sequence[_Factor]) -> _Factor:
    """Return the factor of a value with this power that is computed from ``sources``."""
    return _Factor(power, any(source.was_multiplied for source in sources))


def _common_power(first: _Power, second: _Power) -> _Power:
    if first == _ANY or second == _ANY:
        return second if first == _ANY else first
    return first if first == second else None


def _product(first: _Power, second: _Power) -> _Power:
    if _ANY in (first, second):
        return _ANY
    return first + second if isinstance(first, int) and isinstance(second, int) else None


def _quotient(first: _Power, second: _Power) -> _Power:
    return _product(first, -second if isinstance(second, int) else second)


def _is_floating(atom: Any) -> bool:
    return bool(jnp.issubdtype(getattr(atom.aval, "dtype", np.int32), np.inexact))


def _is_unchanged(atom: Any) -> bool:
    """Return whether an operand is a literal that no positive factor changes."""
    if not is_literal(atom) or np.ndim(atom.val) or aval_of(atom).dtype == jax.dtypes.float0:
        return False
    return bool(atom.val == 0 or not np.isfinite(atom.val))


def warn_if_scaled(grads: Any, loss_scale: LossScale) -> None:
    """Warn if traced gradients are multiplied or divided by the loss scale.

    The program must multiply by the loss scale itself. A program that only divides is quiet: its gradients may be those
    of the scaled loss, computed by another jitted function.
    """
    scale: Any = loss_scale.loss_scale
    leaves = [leaf for leaf in jax.tree.leaves(grads) if is_staged(leaf)] if is_staged(scale) else []
    program = program_so_far([scale, *leaves]) if leaves else None
    if program is None:
        return
    is_scale = [_Factor(1, True) if var is program.outvars[0] else _Factor(0) for var in program.invars]
    for power, was_multiplied in _FACTORS.solve(program, is_scale).results[1:]:
        if was_multiplied and isinstance(power, int) and power != 0:
            warn_user(
                f"the optimizer takes true gradients, but got gradients {_described(power)};\nwrite loss, grads = "
                "jaxmp.value_and_grad(loss_fn, opt_state)(params), or for NNX jaxmp.nnx.value_and_grad(loss_fn,\n"
                "optimizer)(model), with the plain loss, and do not scale or unscale anything yourself"
            )
            return


def _described(power: int) -> str:
    if power > 0:
        return "that are still multiplied by the loss scale"
    return "that were divided by the loss scale once too often"
