"""Measure the loss and the gradients of a function under overrides against float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmp._internals.jax.walk import PRODUCTS
from jaxmp.base.cache_keys import policies_off
from jaxmp.base.dtypes import is_half
from jaxmp.base.trees import widen
from jaxmp.engine.autocast import autocast
from jaxmp.engine.plan import cast_plan
from jaxmp.inspect.program.calls import AS_WRITTEN, differentiated, loss_and_rest, named
from jaxmp.policy.patterns import EVERY
from jaxmp.policy.policies import Policy
from jaxmp.policy.policy_map import get_policy

_PRODUCTS_ONLY = {"class:half": "half", EVERY: "float32"}


@dataclass(frozen=True)
class Candidate:
    """A module or scope with half operations of its own; ``flops`` are those of its own products."""

    path: str
    flops: int


def without_policies(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fun`` without the policies and autocasts inside of it, its NNX modules in scopes."""

    def plain(*args: Any) -> Any:
        with policies_off(True):
            return fun(*named(args))

    return plain


def candidates_of(plain: Callable[..., Any], args: Sequence[Any], half: Policy) -> list[Candidate]:
    """Return the modules and scopes with half operations, those below a module before it.

    Raises:
      ValueError: there are none.
    """
    flops: dict[str, int] = {}
    for row in cast_plan(plain, half)(*args).rows:
        if row.path and any(map(is_half, [*row.operands, *row.result.split(", ")])):
            flops.setdefault(row.path, 0)
            flops[row.path] += row.flops if row.primitive in PRODUCTS else 0
    if not flops:
        raise ValueError(
            "tune needs half operations in modules or named scopes, got none; put jax.named_scope around the parts"
        )
    paths = sorted(flops, key=lambda path: -path.count("/"))
    return [Candidate(path, flops[path]) for path in paths]


class Measurement:
    """The errors of a function by its overrides.

    Args:
      plain: the function without policies.
      all_args: arguments for each batch; their first floating argument is differentiated.
      half: the half policy.
      loss_scale: multiplies the loss before it is differentiated under autocast.
    """

    def __init__(
        self, plain: Callable[..., Any], all_args: Sequence[Sequence[Any]], half: Policy, loss_scale: float
    ) -> None:
        self._plain, self._all_args, self._half, self._loss_scale = plain, all_args, half, loss_scale
        with jax.default_matmul_precision("highest"):
            self._references = self._run(plain, [widen(args) for args in all_args], 1.0)
        self.evaluations = 0

    @property
    def is_reference_finite(self) -> bool:
        """Are loss and gradients finite in float32?"""
        return all(np.isfinite(loss) and np.isfinite(gradient).all() for loss, gradient in self._references)

    def floor(self) -> float:
        """Return the error with only the products in half.

        If float16 overflows, it is that of bfloat16 divided by 8, for float16's three more bits of mantissa.
        """
        floor = self.error(_PRODUCTS_ONLY)
        if np.isfinite(floor):
            return floor
        return self.error(_PRODUCTS_ONLY, get_policy("mixed_bfloat16")) / 8

    def error(self, overrides: Mapping[str, str], policy: Policy | None = None) -> float:
        """Return the largest error of all batches, infinite if something is not finite.

        Args:
          overrides: those of the autocast.
          policy: another one than that of the measurement.
        """
        self.evaluations += 1
        cast = autocast(self._plain, policy or self._half, overrides)
        found = self._run(cast, self._all_args, self._loss_scale)
        errors = [
            max(_relative(loss, true_loss), _relative(gradient, true_gradient))
            for (loss, gradient), (true_loss, true_gradient) in zip(found, self._references, strict=True)
        ]
        return max(errors)

    def half_flops(self, overrides: Mapping[str, str]) -> float:
        """Return the share of the products' FLOPs in half under overrides."""
        summary = cast_plan(self._plain, self._half, overrides)(*self._all_args[0]).summary
        return summary.half_product_flops / summary.product_flops if summary.product_flops else 0.0

    def overrides(self, candidates: Sequence[Candidate], chosen: Collection[Candidate]) -> dict[str, str]:
        """Return overrides that give float32 to the chosen candidates, and leave products below them in half."""
        half = str(self._half)
        overrides = {}
        for candidate in candidates:  # those below a module come before it, and the first that matches wins
            if candidate in chosen:
                overrides[candidate.path] = "float32"
            elif candidate.flops and any(candidate.path.startswith(f"{parent.path}/") for parent in chosen):
                overrides[candidate.path] = half
        return overrides

    def only(self, candidates: Sequence[Candidate], candidate: Candidate) -> dict[str, str]:
        """Return overrides under which a candidate alone is half."""
        below = {other.path: "float32" for other in candidates if other.path.startswith(f"{candidate.path}/")}
        return {**below, candidate.path: "half", EVERY: "float32"}

    def _run(
        self, fun: Callable[..., Any], all_args: Sequence[Sequence[Any]], scale: float
    ) -> list[tuple[float, np.ndarray]]:
        """Return loss and gradients, flat in float64, for each batch; the function is compiled once."""
        structure = jax.tree.structure(tuple(all_args[0]))
        numbers = differentiated(all_args[0])

        def scaled_loss(differentiated_leaves: Sequence[Any], leaves: Sequence[Any]) -> tuple[Any, Any]:
            leaves = list(leaves)
            for n, leaf in zip(numbers, differentiated_leaves, strict=True):
                leaves[n] = leaf
            loss, _ = loss_and_rest(fun(*jax.tree.unflatten(structure, leaves)))
            return widen(loss) * scale, loss

        gradient = jax.jit(jax.value_and_grad(scaled_loss, has_aux=True), compiler_options=AS_WRITTEN)
        results = []
        for args in all_args:
            leaves = jax.tree.leaves(tuple(args))
            (_, loss), gradients = gradient([leaves[n] for n in numbers], leaves)
            flat = [np.asarray(leaf).astype(np.float64).ravel() / scale for leaf in gradients]
            results.append((float(loss), np.concatenate(flat)))
        return results


def _relative(value: Any, true: Any) -> float:
    """Return the L2 norm of the difference over that of the truth, infinite if it is not finite."""
    difference, size = float(np.linalg.norm(np.subtract(value, true))), float(np.linalg.norm(true))
    if difference == 0:
        return 0.0
    return difference / size if size and np.isfinite(difference) else np.inf
