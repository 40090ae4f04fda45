"""Measure the errors of a loss and its gradients, relative to float32.

A half policy computes in half precision (float16 or bfloat16). Overrides are exceptions to the policy: a mapping from
the path of a module, scope or operation to another policy.
"""

from __future__ import annotations

import functools
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
from jaxmp.inspect._tune.rounded_products import with_rounded_operands
from jaxmp.inspect.program.calls import (
    differentiated,
    in_double_precision,
    loss_and_rest,
    named,
    options_of_few_runs,
    with_leaves,
)
from jaxmp.inspect.program.tracing import program_of
from jaxmp.policy.patterns import EVERY
from jaxmp.policy.policies import Policy
from jaxmp.program.primitives import PRODUCTS, classify
from jaxmp.program.reading import read_program
from jaxmp.program.scopes import CALL_SCOPE, path_in

_HALF = {"float16", "bfloat16"}
_PRODUCTS_ONLY = {"class:half": "half", EVERY: "float32"}


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


def without_policies(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fun`` with all its policies and autocasts turned off."""

    def plain(*args: Any) -> Any:
        with policies_off(True):
            return fun(*args)

    return plain


def named_copy(args: Sequence[Any]) -> Any:
    """Return a copy of arguments in which each call of an NNX module has a scope."""
    leaves, structure = jax.tree.flatten(tuple(args))
    return named(jax.tree.unflatten(structure, leaves))


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
        if key and _HALF.intersection([*row.operands, *row.result.split(", ")]):
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
    """

    def __init__(
        self, plain: Callable[..., Any], all_args: Sequence[Sequence[Any]], half: Policy, loss_scale: float
    ) -> None:
        self._plain, self._all_args, self._half = plain, all_args, half
        self.loss_scale = loss_scale
        with jax.default_matmul_precision("highest"):
            self._references = self._run(plain, [widen(args) for args in all_args], 1.0)
        self.evaluations = 0

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
        while np.isinf(self.error(_PRODUCTS_ONLY)):
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
        floor = self._floor(self._half.compute_dtype)
        return floor if np.isfinite(floor) else self._floor(np.dtype(jnp.bfloat16)) / 8

    def _floor(self, half: np.dtype) -> float:
        self.evaluations += 1
        round_products = functools.partial(with_rounded_operands, half=half)
        all_args = [widen(args) for args in self._all_args]
        return self._largest_error(self._run(self._plain, all_args, self.loss_scale, round_products))

    def error(self, overrides: Mapping[str, str]) -> float:
        """Return the largest error of all batches under overrides.

        The error is infinite if a loss or a gradient is not finite.
        """
        self.evaluations += 1
        cast = autocast(self._plain, self._half, overrides)
        return self._largest_error(self._run(cast, self._all_args, self.loss_scale))

    def error_of_half_products(self, candidates: Sequence[Candidate]) -> float:
        """Return the error if all half operations except products are float32.

        Products that autocast keeps in float32 stay float32.
        """
        operations = [operation for candidate in candidates for operation in candidate.operations]
        chosen = [operation for operation in operations if operation.path.rpartition(":")[2] not in PRODUCTS]
        return self.error(self.overrides(candidates, chosen))

    def _largest_error(self, results: Sequence[tuple[float, np.ndarray]]) -> float:
        errors = [0.0]
        for (loss, gradient), (true_loss, true_gradient) in zip(results, self._references, strict=True):
            errors += [_relative(loss, true_loss, least=1.0), _relative(gradient, true_gradient)]
        return max(errors)

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

    def _run(
        self,
        fun: Callable[..., Any],
        all_args: Sequence[Sequence[Any]],
        scale: float,
        transform: Callable[..., Any] = lambda gradient: gradient,
    ) -> list[tuple[float, np.ndarray]]:
        """Return the loss and the gradients of each batch.

        The gradients of a batch are one vector in float64, or in complex128 if a gradient is complex. ``transform`` is
        applied to the gradient function, which is compiled once for all batches.
        """
        structure = jax.tree.structure(tuple(all_args[0]))
        numbers = differentiated(all_args[0])

        def scaled_loss(differentiated_leaves: Sequence[Any], leaves: Sequence[Any], scale: Any) -> tuple[Any, Any]:
            all_leaves = with_leaves(leaves, numbers, differentiated_leaves)
            loss, _ = loss_and_rest(fun(*named(jax.tree.unflatten(structure, all_leaves))))
            return widen(loss) * scale, loss

        differentiated_loss = transform(jax.value_and_grad(scaled_loss, has_aux=True))
        gradient = jax.jit(differentiated_loss, compiler_options=options_of_few_runs())
        results = []
        for args in all_args:
            leaves = jax.tree.leaves(tuple(args))
            (_, loss), gradients = gradient([leaves[n] for n in numbers], leaves, scale)
            flat = [in_double_precision(leaf).ravel() / scale for leaf in gradients]
            results.append((float(loss), np.concatenate(flat)))
        return results


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
