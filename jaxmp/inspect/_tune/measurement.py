"""Measure the errors of the gradients of a loss, relative to float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.cache_keys import policies_off
from jaxmp.base.trees import widen
from jaxmp.engine.autocast import autocast
from jaxmp.engine.plan import cast_plan
from jaxmp.inspect._tune.prediction import Prediction, named_copy
from jaxmp.inspect._tune.rounded_products import Rounding, with_rounded_products
from jaxmp.inspect.gradient_error import relative_error
from jaxmp.inspect.program.calls import (
    differentiated,
    in_double_precision,
    loss_and_rest,
    named,
    options_of_few_runs,
    with_leaves,
)
from jaxmp.policy.policies import Policy

Result = tuple[float, np.ndarray]
"""A loss, and its gradients as one vector."""


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


class Measurement:
    """A measurement of the errors of a function under overrides.

    Args:
      plain: the function without policies.
      all_args: the arguments for each batch. The function is differentiated with respect to the first argument that has
        floating arrays.
      half: the half policy.
      loss_scale: the factor by which the loss is multiplied before the differentiation. The loss of the float32
        reference is not multiplied.

    Attributes:
      half: the half policy.
      compilations: the number of programs that were compiled.
    """

    def __init__(
        self, plain: Callable[..., Any], all_args: Sequence[Sequence[Any]], half: Policy, loss_scale: float
    ) -> None:
        self._plain, self._all_args, self.half = plain, all_args, half
        self.loss_scale = loss_scale
        self.compilations = 0
        self._measured: dict[tuple[tuple[str, str], ...], tuple[list[float], float]] = {}
        self._with_rounded_products = self._compiled(
            with_rounded_products(self._scaled_loss_and_gradients(plain), half.compute_dtype)
        )
        self._references = self._rounded(Rounding.NONE, 1.0)

    def batch_that_is_not_finite(self) -> int | None:
        """Return the index of the first batch that is not finite in float32, or None.

        A batch is finite if its loss and all its gradients are finite.
        """
        for n, (loss, gradient) in enumerate(self._references):
            if not (np.isfinite(loss) and np.isfinite(gradient).all()):
                return n
        return None

    def lower_loss_scale(self) -> None:
        """Lower the loss scale until the loss and the gradients are finite.

        The products are computed in float16, and all other operations in float32. If the values are not finite even at
        loss scale 1, the loss scale is not the cause, so the original loss scale is kept.
        """
        scale = self.loss_scale
        while np.isinf(self._error_of_rounded(Rounding.OPERANDS_AND_RESULTS)):
            if self.loss_scale <= 1:
                self.loss_scale = scale
                return
            self.loss_scale = max(self.loss_scale / 2**5, 1.0)

    def floor(self) -> float:
        """Return the error if only the operands of products are rounded to half.

        Products and all other operations are computed in float32.

        If float16 overflows, return the error of bfloat16 divided by 8, because the mantissa of float16 has three more
        bits.
        """
        floor = self._error_of_rounded(Rounding.OPERANDS)
        if np.isfinite(floor) or self.half.compute_dtype != np.float16:
            return floor
        return self._error_of_rounded(Rounding.OPERANDS_TO_BFLOAT16) / 8

    def _error_of_rounded(self, rounding: Rounding) -> float:
        """Return the largest error of all batches if products are rounded, and all else is float32."""
        return max(self._errors(self._rounded(rounding, self.loss_scale)))

    def errors(self, overrides: Mapping[str, str]) -> list[float]:
        """Return the error of each batch under overrides.

        The error is infinite if a loss or a gradient is not finite.
        """
        return self._measure(overrides)[0]

    def loss_error(self, overrides: Mapping[str, str]) -> float:
        """Return the largest relative change of the loss under overrides.

        A change is divided by the loss, or by 1 if that is larger.
        """
        return self._measure(overrides)[1]

    def _measure(self, overrides: Mapping[str, str]) -> tuple[list[float], float]:
        """Return the error of each batch, and the largest change of the loss."""
        key = tuple(overrides.items())
        if key not in self._measured:
            results = self._results_under(self.half, overrides, self.loss_scale)
            pairs = zip(results, self._references, strict=True)
            changes = [abs(loss - true_loss) / max(abs(true_loss), 1.0) for (loss, _), (true_loss, _) in pairs]
            self._measured[key] = self._errors(results), max(changes)
        return self._measured[key]

    def _results_under(self, policy: Policy, overrides: Mapping[str, str], scale: float) -> list[Result]:
        cast = autocast(self._plain, policy, overrides)
        gradient = self._compiled(self._scaled_loss_and_gradients(cast))
        return [self._result(gradient(jax.tree.leaves(tuple(args)), scale), scale) for args in self._all_args]

    def error_under(self, policy: Policy, scale: float) -> float:
        """Return the largest error of all batches under another policy, with a loss scale."""
        return max(self._errors(self._results_under(policy, {}, scale)))

    def error(self, overrides: Mapping[str, str]) -> float:
        """Return the largest error of all batches under overrides."""
        return max(self.errors(overrides))

    def error_of_result(self, batch: int, result: Result) -> float:
        """Return the error of the gradients of one batch; infinite if the loss is not finite."""
        loss, gradient = result
        return relative_error(gradient, self._references[batch][1]) if np.isfinite(loss) else np.inf

    def _errors(self, results: Sequence[Result]) -> list[float]:
        return [self.error_of_result(batch, result) for batch, result in enumerate(results)]

    def prediction(self, batch: int) -> Prediction:
        """Return a prediction of the errors of one batch."""
        self.compilations += 1
        return Prediction(self._plain, self._all_args[batch], self.half, self.loss_scale)

    def half_flops(self, overrides: Mapping[str, str]) -> float:
        """Return the share of the products' FLOPs in half precision under overrides."""
        summary = cast_plan(self._plain, self.half, overrides)(*named_copy(self._all_args[0])).summary
        return summary.half_product_flops / summary.product_flops if summary.product_flops else 0.0

    def has_float32_products(self) -> bool:
        """Return whether autocast keeps some products in float32, and others not."""
        return 0 < self.half_flops({}) < 1

    def _scaled_loss_and_gradients(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the arguments' arrays and the loss scale.

        It returns the loss, and the gradients of the scaled loss.
        """
        structure = jax.tree.structure(tuple(self._all_args[0]))
        numbers = differentiated(self._all_args[0])

        def scaled_loss(chosen: Sequence[Any], leaves: Sequence[Any], scale: Any) -> tuple[Any, Any]:
            all_leaves = with_leaves(leaves, numbers, chosen)
            loss, _ = loss_and_rest(fun(*named(jax.tree.unflatten(structure, all_leaves))))
            return widen(loss) * scale, loss

        def loss_and_gradients(leaves: Sequence[Any], scale: Any) -> tuple[Any, Any]:
            chosen = [leaves[number] for number in numbers]
            (_, loss), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(chosen, leaves, scale)
            return loss, gradients

        return loss_and_gradients

    def _compiled(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is compiled at its first call, for all batches."""
        self.compilations += 1
        return jax.jit(fun, compiler_options=options_of_few_runs())

    def _rounded(self, rounding: Rounding, scale: float) -> list[Result]:
        """Return the result of each batch in float32, with rounded products."""
        results = []
        for args in self._all_args:
            leaves = jax.tree.leaves(tuple(widen(args)))
            with jax.default_matmul_precision("highest"):
                results.append(self._result(self._with_rounded_products(int(rounding), leaves, scale), scale))
        return results

    def _result(self, loss_and_gradients: tuple[Any, Any], scale: float) -> Result:
        """Return a loss and its gradients, divided by the loss scale, in double precision.

        The gradients are one vector in float64, or in complex128 if a gradient is complex.
        """
        loss, gradients = loss_and_gradients
        flat = [in_double_precision(leaf).ravel() / scale for leaf in gradients]
        return float(loss), np.concatenate(flat)
