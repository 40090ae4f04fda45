"""Measure the errors of the gradients of a loss under overrides, relative to float32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.cache_keys import policies_off
from jaxmp.base.dtypes import is_narrow
from jaxmp.engine.plan import cast_plan
from jaxmp.inspect._switched.gradient_program import GradientProgram, program_of_function
from jaxmp.inspect._switched.switched import Mask, Results, SwitchedProgram, results_under_policy
from jaxmp.inspect._tune.candidates import named_copy
from jaxmp.policy.policies import Policy
from jaxmp.program.walk import equations

_KEPT_PROGRAMS = 8
"""The number of traced programs that a search keeps, because it needs the last ones again."""


def without_policies(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fun`` with all its policies and autocasts turned off."""

    def plain(*args: Any) -> Any:
        with policies_off(True):
            return fun(*args)

    return plain


def with_folded_keys(args: Any, seed: int) -> Any:
    """Return the arguments with a seed folded into their typed PRNG keys.

    Raises:
      ValueError: there is no typed PRNG key.
    """
    if not any(map(_is_key, jax.tree.leaves(args))):
        raise ValueError(
            "seeds are folded into typed PRNG keys among the arguments, got none; pass jax.random.key(0), or seeds=1"
        )
    fold = jnp.vectorize(lambda key: jax.random.fold_in(key, seed))
    return jax.tree.map(lambda leaf: fold(leaf) if _is_key(leaf) else leaf, args)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class _Loss:
    """A loss function for arguments of one shape, and its switched program under the half policy."""

    def __init__(self, plain: Callable[..., Any], args: Sequence[Any], half: Policy) -> None:
        self._plain, self._args = plain, args
        self._traced = functools.lru_cache(_KEPT_PROGRAMS)(self._trace)
        self.program = SwitchedProgram(self.trace(half, {}))
        self.reference = self.program.no_rounding
        as_written = self.trace(None, None)
        variables = [var for eqn in equations(as_written.jaxpr) for var in eqn.outvars]
        if any(is_narrow(getattr(var.aval, "dtype", None)) for var in variables):
            # The casts to half in the code of the function stay in the reference.
            self.reference = self.program.mask_of(as_written)

    def trace(self, policy: Any, overrides: Mapping[str, str] | None) -> GradientProgram:
        """Return the program under a policy."""
        return self._traced(policy, tuple((overrides or {}).items()))

    def _trace(self, policy: Any, overrides: tuple[tuple[str, str], ...]) -> GradientProgram:
        return program_of_function(self._plain, self._args, policy, dict(overrides), 1.0)


class Measurement:
    """A measurement of the errors of a function under overrides.

    Args:
      plain: the function without policies.
      all_args: the arguments for each batch. The function is differentiated with respect to the first argument that has
        floating arrays.
      half: the half policy.
      loss_scale: the factor by which the loss is multiplied before the differentiation.

    Attributes:
      half: the half policy.
      evaluations: the number of programs that were traced in half precision and measured.
    """

    def __init__(
        self, plain: Callable[..., Any], all_args: Sequence[Sequence[Any]], half: Policy, loss_scale: float
    ) -> None:
        self._plain, self._all_args, self.half, self.loss_scale = plain, all_args, half, loss_scale
        self.evaluations = 0
        self._measured: dict[tuple[tuple[str, str], ...], tuple[list[float], float]] = {}
        losses: dict[Hashable, _Loss] = {}
        self._losses = []
        for args in all_args:
            leaves, structure = jax.tree.flatten(tuple(args))
            types = structure, *((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
            if types not in losses:
                losses[types] = _Loss(plain, args, half)
            self._losses.append(losses[types])
        batches = range(len(all_args))
        self._references = [self._run(batch, self._losses[batch].reference) for batch in batches]

    def program(self, batch: int) -> SwitchedProgram:
        """Return the switched program of a batch."""
        return self._losses[batch].program

    def batch_that_is_not_finite(self) -> int | None:
        """Return the index of the first batch that is not finite in float32, or None."""
        for batch, reference in enumerate(self._references):
            if not reference.is_finite:
                return batch
        return None

    def lower_loss_scale(self) -> None:
        """Lower the loss scale until the loss and the gradients are finite with half products.

        If they are not finite even at loss scale 1, the loss scale is not the cause, so the original one is kept.
        """
        scale = self.loss_scale
        while np.isinf(max(self._errors_of(lambda program: program.mask(lambda site: site.is_of_product)))):
            if self.loss_scale <= 1:
                self.loss_scale = scale
                return
            self.loss_scale = max(self.loss_scale / 2**5, 1.0)

    def floor(self) -> float:
        """Return the error if only the operands of half products are rounded.

        If it is not finite, operands that overflow in float16 are left out.
        """
        floor = max(self._errors_of(lambda program: program.operands_of_products))
        if np.isfinite(floor):
            return floor

        def mask(program: SwitchedProgram) -> Mask:
            _, overflows = program.counts()
            of_products = {site.part for site, count in zip(program.sites, overflows, strict=True) if count}
            return program.operands_of_products & program.mask(lambda site: site.part not in of_products)

        return max(self._errors_of(mask))

    def predicted(self, batch: int, mask: Mask) -> float:
        """Return the error of a batch with the roundings of a mask."""
        return self._run(batch, mask | self._losses[batch].reference).error(self._references[batch])

    def mask_of(self, batch: int, overrides: Mapping[str, str]) -> Mask:
        """Return the mask of a batch's program under overrides."""
        loss = self._losses[batch]
        return loss.program.mask_of(loss.trace(self.half, overrides))

    def errors(self, overrides: Mapping[str, str]) -> list[float]:
        """Return the error of each batch under overrides, measured in half precision.

        The error is infinite if a loss or a gradient is not finite.
        """
        return self._measure(overrides)[0]

    def error(self, overrides: Mapping[str, str]) -> float:
        """Return the largest error of all batches under overrides, measured in half precision."""
        return max(self.errors(overrides))

    def loss_error(self, overrides: Mapping[str, str]) -> float:
        """Return the largest relative change of the loss under overrides."""
        return self._measure(overrides)[1]

    def error_under(self, policy: Policy, scale: float) -> float:
        """Return the largest error of all batches under another policy and loss scale."""
        return max(self._errors(self._results_under(policy, {}, scale)))

    def _measure(self, overrides: Mapping[str, str]) -> tuple[list[float], float]:
        """Return the error of each batch, and the largest change of the loss."""
        key = tuple(overrides.items())
        if key not in self._measured:
            results = self._results_under(self.half, overrides, self.loss_scale)
            pairs = zip(results, self._references, strict=True)
            changes = [result.loss_error(reference) for result, reference in pairs]
            self._measured[key] = self._errors(results), max(changes)
        return self._measured[key]

    def half_flops(self, overrides: Mapping[str, str]) -> float:
        """Return the share of the products' FLOPs in half precision under overrides."""
        summary = cast_plan(self._plain, self.half, overrides)(*named_copy(self._all_args[0])).summary
        return summary.half_product_flops / summary.product_flops if summary.product_flops else 0.0

    def _results_under(self, policy: Policy, overrides: Mapping[str, str], scale: float) -> list[Results]:
        self.evaluations += 1
        programs = {id(loss): loss.trace(policy, overrides) for loss in self._losses}
        results = []
        for batch, loss in enumerate(self._losses):
            of_batch = results_under_policy(programs[id(loss)], self._inputs(batch, scale))
            results.append(Results(of_batch.loss, of_batch.gradients / scale))
        return results

    def _errors_of(self, mask: Callable[[SwitchedProgram], Mask]) -> list[float]:
        return [self.predicted(batch, mask(loss.program)) for batch, loss in enumerate(self._losses)]

    def _errors(self, results: Sequence[Results]) -> list[float]:
        return [result.error(reference) for result, reference in zip(results, self._references, strict=True)]

    def _run(self, batch: int, mask: Mask) -> Results:
        results = self._losses[batch].program.run(mask, self._inputs(batch, self.loss_scale))
        return Results(results.loss, results.gradients / self.loss_scale)

    def _inputs(self, batch: int, scale: float) -> list[Any]:
        return [*jax.tree.leaves(tuple(self._all_args[batch])), np.float32(scale)]
