"""Warn if the optimizer gets gradients that are multiplied or divided by the loss scale.

The optimizer takes true gradients. While ``jax.jit`` traces a step, the program up to ``tx.update`` says how often the
loss scale is a factor of each gradient. Its power is 0 for true gradients, 1 for gradients of the scaled loss, and -1
for gradients that were unscaled twice. Clipping hides the power: it divides a gradient by its norm only if the norm is
large. So the program also says whether a gradient is ever divided by the loss scale.
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
from jaxmp.program.primitives import CAST, COMBINATIONS, MOVES, POWERS, PRODUCTS, SUMS, Trait, with_trait

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
      was_divided: whether the value is computed from one that was divided by a function of the loss scale.
      origin: the inputs from which the value is computed.
    """

    power: _Power
    was_multiplied: bool = False
    was_divided: bool = False
    origin: int = 0


_CONSTANTS, _SCALE, _OTHERS = range(3)
"""The origin of a value: constants only, the loss scale and constants, or other inputs too."""


_MULTIPLIES = PRODUCTS | with_trait(Trait.MULTIPLIES)
_ROOTS = with_trait(Trait.SQUARE_ROOT)
_SUMS = frozenset(name for name, kind in COMBINATIONS.items() if kind == "add")
# The power of the result is that of the floating operands.
_KEEPS_POWER = MOVES | SUMS | _SUMS | with_trait(Trait.KEEPS_MAGNITUDE) | {CAST}


class _FactorOfScale(Analysis[_Factor]):
    """The loss scale as a factor of each value."""

    constant = _Factor(0)

    def solve_equation(self, eqn: Any, operands: Sequence[_Factor]) -> Sequence[_Factor]:
        atoms = zip(eqn.invars, operands, strict=True)
        operands = [_Factor(_ANY) if _is_unchanged(atom) else factor for atom, factor in atoms]
        combined = _factor(0, operands)
        if combined.origin != _SCALE and all(factor == _Factor(0, origin=factor.origin) for factor in operands):
            return [combined] * len(eqn.outvars)  # most of the forward pass: its bodies need not be read
        factors = super().solve_equation(eqn, operands)
        return [
            factor if _is_floating(var) else self.constant for var, factor in zip(eqn.outvars, factors, strict=True)
        ]

    def transfer(self, eqn: Any, operands: Sequence[_Factor]) -> Sequence[_Factor]:
        name = eqn.primitive.name
        factors = [factor for atom, factor in zip(eqn.invars, operands, strict=True) if _is_floating(atom)]
        power = self._power_of_operation(eqn, [factor.power for factor in factors])
        result = _factor(power, factors)
        if name == "div":  # a divisor makes the power smaller
            result = result._replace(was_multiplied=factors[0].was_multiplied)
        is_divided = name in _MULTIPLIES and result.origin == _OTHERS and _divides(name, factors)
        return [result._replace(was_divided=result.was_divided or is_divided)] * len(eqn.outvars)

    def _power_of_operation(self, eqn: Any, powers: Sequence[_Power]) -> _Power:
        name = eqn.primitive.name
        if name in _MULTIPLIES and len(powers) == 2:
            return _quotient(*powers) if name == "div" else _product(*powers)
        if name in _KEEPS_POWER:
            start: _Power = _ANY if powers else 0
            return reduce(_common_power, powers, start)
        if name in _ROOTS | POWERS and len(powers) == 1:
            return _raised(powers[0], _exponent(eqn))
        return 0 if all(power in (0, _ANY) for power in powers) else None

    def join(self, first: _Factor, second: _Factor) -> _Factor:
        return _factor(_common_power(first.power, second.power), [first, second])


_FACTORS = _FactorOfScale()


def _factor(power: _Power, sources: Sequence[_Factor]) -> _Factor:
    """Return the factor of a value with this power that is computed from ``sources``."""
    was_multiplied = any(source.was_multiplied for source in sources)
    was_divided = any(source.was_divided for source in sources)
    return _Factor(power, was_multiplied, was_divided, max((source.origin for source in sources), default=_CONSTANTS))


def _divides(name: str, factors: Sequence[_Factor]) -> bool:
    """Return whether a product or a quotient may divide a value by a function of the loss scale."""
    for number, factor in enumerate(factors):
        is_multiplier = isinstance(factor.power, int) and factor.power > 0
        is_divisor = name == "div" and number == 1
        if factor.origin == _SCALE and (is_divisor or not is_multiplier):
            return True
    return False


def _exponent(eqn: Any) -> float:
    """Return the exponent of a root or of a power with a constant exponent."""
    if eqn.primitive.name in _ROOTS:
        return -0.5 if eqn.primitive.name == "rsqrt" else 0.5
    return float(eqn.params.get("y", 2))


def _raised(power: _Power, exponent: float) -> _Power:
    if not isinstance(power, int):
        return power
    return int(power * exponent) if (power * exponent).is_integer() else None


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
    inputs = [
        _Factor(1, True, origin=_SCALE) if var is program.outvars[0] else _Factor(0, origin=_OTHERS)
        for var in program.invars
    ]
    for factor in _FACTORS.solve(program, inputs).results[1:]:
        mistake = _mistake(factor)
        if mistake is not None:
            warn_user(
                f"the optimizer takes true gradients, but got gradients {mistake};\nwrite loss, grads = "
                "jaxmp.value_and_grad(loss_fn, opt_state)(params), or for NNX jaxmp.nnx.value_and_grad(loss_fn,\n"
                "optimizer)(model), with the plain loss, and do not scale or unscale anything yourself"
            )
            return


def _mistake(factor: _Factor) -> str | None:
    """Return what is wrong with a gradient, or None."""
    if not factor.was_multiplied or factor.power in (0, _ANY):
        return None
    if factor.power is None:
        return None if factor.was_divided else "that were multiplied by the loss scale and never divided by it"
    if isinstance(factor.power, int) and factor.power > 0:
        return "that are still multiplied by the loss scale"
    return "that were divided by the loss scale once too often"
