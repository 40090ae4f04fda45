"""Measure the errors of a loss and its gradients, relative to float32.

A half policy computes in half precision (float16 or bfloat16). Overrides are exceptions to the policy: a mapping from
the path of a module, scope or operation to another policy.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.cache_keys import policies_off
from jaxmp.base.trees import widen
from jaxmp.engine.autocast import autocast
from jaxmp.engine.overrides import FIXED
from jaxmp.engine.plan import cast_plan
from jaxmp.inspect._tune.prediction import Prediction, is_half_operation, named_copy
from jaxmp.inspect._tune.rounded_products import Rounding, with_rounded_products
from jaxmp.inspect.program.calls import (
    differentiated,
    in_double_precision,
    loss_and_rest,
    named,
    options_of_few_runs,
    with_leaves,
)
from jaxmp.inspect.program.tracing import program_of
from jaxmp.policy.policies import Policy
from jaxmp.program.primitives import PRODUCTS, classify
from jaxmp.program.reading import read_program
from jaxmp.program.scopes import CALL_SCOPE, path_in

Result = tuple[float, np.ndarray]
"""A loss, and its gradients as one vector."""


@dataclass(frozen=True)
class Candidate:
    """A module, scope or operation that the search can switch to float32.

    Attributes:
      path: the path in the form of an override's key, such as ``"flow"`` or ``"flow:add"``.
      flops: the FLOPs of the candidate's products, without products in submodules.
      operations: the half operations of a module or scope, without those in submodules; empty for an operation.
    """

    path: str
    flops: int
    operations: tuple[Candidate, ...] = ()

    @property
    def is_product(self) -> bool:
        """Return whether the candidate is an operation, and a product."""
        return self.path.rpartition(":")[2] in PRODUCTS


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


def candidates_of(
    plain: Callable[..., Any], args: Sequence[Any], half: Policy, *, modules_only: bool = False
) -> list[Candidate]:
    """Return the modules and scopes with half operations, children before parents.

    With ``modules_only``, a named scope in a module counts as a part of the module. Without any module, the named
    scopes are the candidates.

    Raises:
      ValueError: no operation in a module or scope is half.
    """
    modules = _paths_of_modules(plain, args) if modules_only else set()
    flops: dict[str, dict[str, int]] = {}
    for row in cast_plan(plain, half)(*named_copy(args)).rows:
        key = _key_of_module(row.path, modules) if modules else glob.escape(row.path)
        if key and is_half_operation(row):
            by_name = flops.setdefault(key, {})
            if classify(row.primitive) not in (None, *FIXED):
                by_name.setdefault(row.primitive, 0)
                by_name[row.primitive] += row.flops if row.primitive in PRODUCTS else 0
    if not flops:
        raise ValueError(
            "tune needs half operations in modules or named scopes, got none; put jax.named_scope around the parts"
        )
    candidates = []
    for path in sorted(flops, key=lambda path: -path.count("/")):
        operations = tuple(Candidate(f"{path}:{name}", count) for name, count in flops[path].items())
        candidates.append(Candidate(path, sum(flops[path].values()), operations))
    return candidates


def _paths_of_modules(fun: Callable[..., Any], args: Sequence[Any]) -> set[str]:
    """Return the paths of the modules that a function calls."""
    jaxpr, _, _ = program_of(fun, *named_copy(args))
    paths = set()
    for equation in read_program(jaxpr).equations.values():
        for number, name in enumerate(equation.names):
            if name.startswith(CALL_SCOPE):
                paths.add(path_in(equation.names[:number]))
    return paths


def _key_of_module(path: str, modules: Collection[str]) -> str:
    """Return an override's key for the innermost module around a path; empty if there is none.

    A method of a Linen module has a scope such as ``"Model.encode"``, which is not the path of a module. The key of a
    module that the method calls begins with ``"**"``.
    """
    while path and (path not in modules or "." in path.rpartition("/")[2]):
        path = path.rpartition("/")[0]
    names = path.split("/")
    methods = [number for number, name in enumerate(names) if "." in name]
    if not methods:
        return glob.escape(path)
    module, inside = names[methods[-1]].partition(".")[0], names[methods[-1] + 1 :]
    if inside[0] == module:  # the method calls its module's __call__
        inside = inside[1:]
    return "**/" + glob.escape("/".join(inside)) if inside else ""


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
      compilations: the number of programs that were compiled.
    """

    def __init__(
        self, plain: Callable[..., Any], all_args: Sequence[Sequence[Any]], half: Policy, loss_scale: float
    ) -> None:
        self._plain, self._all_args, self._half = plain, all_args, half
        self.loss_scale = loss_scale
        self.compilations = 0
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
        if np.isfinite(floor) or self._half.compute_dtype != np.float16:
            return floor
        return self._error_of_rounded(Rounding.OPERANDS_TO_BFLOAT16) / 8

    def _error_of_rounded(self, rounding: Rounding) -> float:
        """Return the largest error of all batches if products are rounded, and all else is float32."""
        return max(self._errors(self._rounded(rounding, self.loss_scale)))

    def errors(self, overrides: Mapping[str, str]) -> list[float]:
        """Return the error of each batch under overrides.

        The error is infinite if a loss or a gradient is not finite.
        """
        cast = autocast(self._plain, self._half, overrides)
        gradient = self._compiled(self._scaled_loss_and_gradients(cast))
        results = []
        for args in self._all_args:
            results.append(self._result(gradient(jax.tree.leaves(tuple(args)), self.loss_scale), self.loss_scale))
        return self._errors(results)

    def error(self, overrides: Mapping[str, str]) -> float:
        """Return the largest error of all batches under overrides."""
        return max(self.errors(overrides))

    def error_of_result(self, batch: int, result: Result) -> float:
        """Return the error of the loss and the gradients of one batch."""
        (loss, gradient), (true_loss, true_gradient) = result, self._references[batch]
        return max(_relative(loss, true_loss, least=1.0), _relative(gradient, true_gradient))

    def _errors(self, results: Sequence[Result]) -> list[float]:
        return [self.error_of_result(batch, result) for batch, result in enumerate(results)]

    def prediction(self, batch: int) -> Prediction:
        """Return a prediction of the errors of one batch."""
        self.compilations += 1
        return Prediction(self._plain, self._all_args[batch], self._half, self.loss_scale)

    def half_flops(self, overrides: Mapping[str, str]) -> float:
        """Return the share of the products' FLOPs in half precision under overrides."""
        summary = cast_plan(self._plain, self._half, overrides)(*named_copy(self._all_args[0])).summary
        return summary.half_product_flops / summary.product_flops if summary.product_flops else 0.0

    def overrides(self, candidates: Sequence[Candidate], chosen: Collection[Candidate]) -> dict[str, str]:
        """Return overrides that give float32 to the chosen candidates and operations.

        Submodules of a chosen module keep the half policy, unless they are chosen too.
        """
        overrides = {}
        touched = {candidate for candidate in candidates if not {candidate, *candidate.operations}.isdisjoint(chosen)}
        for candidate in candidates:  # children come before parents, and the first pattern that matches wins
            if candidate in chosen:
                overrides[candidate.path] = "float32"
                continue
            overrides |= {operation.path: "float32" for operation in candidate.operations if operation in chosen}
            if _parent(candidate, candidates) in touched:
                overrides[candidate.path] = str(self._half)
        return overrides

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


def _parent(candidate: Candidate, candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the nearest candidate that encloses a candidate, or None."""
    above = [other for other in candidates if candidate.path.startswith(f"{other.path}/")]
    return max(above, key=lambda other: len(other.path), default=None)


def _relative(value: Any, true: Any, least: float = 0.0) -> float:
    """Return the L2 norm of the difference, divided by the L2 norm of the true value.

    If ``least`` is larger than the norm of the true value, the norm of the difference is divided by ``least``.
    """
    difference, size = float(np.linalg.norm(np.subtract(value, true))), max(float(np.linalg.norm(true)), least)
    if difference == 0:
        return 0.0
    return difference / size if size and np.isfinite(difference) else np.inf
