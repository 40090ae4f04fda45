"""Functions between two products under a half policy, compared with float64."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import autocast_zoo as zoo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import compiled
from autocast_zoo import PARTS, Case, after_a_product, arguments, between_products, float64, table, ulps

import jaxmp
from jaxmp.program.equations import primitive_of
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.walk import equations

POLICIES = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
Function = Callable[[Case], Callable[..., Any]]

# optax, jax.scipy.stats and Flax's layers mix integers, float32 and half by themselves.
pytestmark = pytest.mark.usefixtures("standard_promotion")


@functools.cache
def reference(part: str) -> dict[str, list[np.ndarray]]:
    return float64(lambda case: case.fun, table(part).values())


@contextlib.contextmanager
def naming(case: Case) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {case.name!r} of the table")
        raise


def in_half(function: Function, cases: Iterable[Case]) -> Iterator[tuple[Case, Any, list[jax.Array]]]:
    """Yield each case with its half dtype and its results.

    The half dtypes alternate. All cases are one program, which compiles faster than many.
    """
    cases = list(zip(cases, itertools.cycle(POLICIES)))

    def program(args: dict[str, tuple[jax.Array, ...]]) -> dict[str, Any]:
        results = {}
        for case, policy in cases:
            with naming(case):
                results[case.name] = jaxmp.autocast(function(case), policy)(*args[case.name])
        return results

    results = compiled(program)({case.name: tuple(map(jnp.asarray, arguments(case))) for case, _ in cases})
    for case, policy in cases:
        yield case, POLICIES[policy], jax.tree.leaves(results[case.name])


def floats(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


def integers(leaves: list[Any]) -> list[list[Any]]:
    return [leaf.tolist() for leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.floating)]


def error(got: list[Any], want: list[np.ndarray], half: Any, of: str) -> float:
    return max((ulps(a, b, half, of) for a, b in zip(floats(got), floats(want), strict=True)), default=0.0)


@pytest.mark.parametrize("part", PARTS)
def test_errors_between_two_products_stay_within_the_table(part: str) -> None:
    wrong = []
    for case, half, got in in_half(between_products, table(part).values()):
        want, allowed = reference(part)[case.name], case.tolerance
        largest_error = error(got, want, half, allowed.of)
        if not largest_error <= allowed.ulps:
            wrong.append(f"{case.name} in {half.__name__}: {largest_error:.3g} ulp, {allowed.ulps} allowed")
        if not {leaf.dtype.name for leaf in floats(got)} <= {"float32"} or integers(got) != integers(want):
            wrong.append(f"{case.name} in {half.__name__}: other dtypes or other integers")
    assert not wrong, "\n".join(wrong)


@functools.cache
def without_a_product(part: str) -> dict[str, tuple[Case, list[tuple[str, ...]]]]:
    """Return the cases of a part that have no product, with their programs."""
    traced = {
        name: (case, jax.make_jaxpr(case.fun)(*map(jnp.asarray, arguments(case)))) for name, case in table(part).items()
    }
    return {
        name: (case, described(jaxpr))
        for name, (case, jaxpr) in traced.items()
        if not any(eqn.primitive.name in PRODUCTS for eqn in equations(jaxpr))
    }


# The error of float32 itself, which is larger where terms cancel.
FLOAT32_ULPS = 16


@pytest.mark.once
@pytest.mark.parametrize("part", ["softmaxes", "optax_losses"])
def test_results_that_no_product_reads_have_float32_accuracy(part: str) -> None:
    wrong = []
    for case, half, got in in_half(after_a_product, (case for case, _ in without_a_product(part).values())):
        largest_error = error(got, reference(part)[case.name], np.float32, "largest")
        if not largest_error <= FLOAT32_ULPS:
            wrong.append(f"{case.name} in {half.__name__}: {largest_error:.3g} ulp of float32")
    assert not wrong, "\n".join(wrong)


# The allowed error, relative to the largest entry of a gradient, in epsilons of the half dtype.
GRADIENT_EPSILONS = 2
GRADIENT_COSINE = {jnp.bfloat16: 0.9999, jnp.float16: 0.999999}
ALL_BUT: dict[str, set[str]] = {
    # The error of this gradient is larger, because JAX differentiates an associative scan.
    "softmaxes": {"cumlogsumexp"},
    "sums": {"sum of all", "mean of 4096", "4096 ones scattered", "convolve", "segment_sum", "scatter-add"},
}


@pytest.mark.once
@pytest.mark.parametrize("part", ALL_BUT)
def test_gradients_between_two_products_match_float64(part: str) -> None:
    cases = [case for name, case in table(part).items() if name not in ALL_BUT[part]]
    want = float64(zoo.gradient, cases)
    wrong = []
    for case, half, got in in_half(zoo.gradient, cases):
        a, b = (
            np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in leaves])
            for leaves in (got, want[case.name])
        )
        cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
        largest_error = np.abs(a - b).max() / np.abs(b).max() / float(jnp.finfo(half).eps)
        if not (cosine >= GRADIENT_COSINE[half] and largest_error <= GRADIENT_EPSILONS):
            wrong.append(
                f"{case.name} in {half.__name__}: cosine {cosine:.7f}, {largest_error:.3g} epsilons of the largest"
            )
    assert not wrong, "\n".join(wrong)


def described(jaxpr: Any) -> list[tuple[str, ...]]:
    """Return the primitive and the types of each equation with floats.

    Weak types, and conversions to the same dtype, do not affect the precision and are ignored.
    """
    rows = [
        (primitive_of(eqn), *(atom.aval.str_short().replace("~", "") for atom in (*eqn.invars, *eqn.outvars)))
        for eqn in equations(jaxpr)
    ]
    floating = [row for row in rows if any("float" in aval for aval in row[1:])]
    computing = [row for row in floating if row[0] != "convert_element_type" or row[1] != row[2]]
    return [*computing, *(("result", str(aval)) for aval in jaxpr.out_avals)]


def test_a_function_without_a_product_is_left_alone() -> None:
    for part in ("softmaxes", "sums"):
        cases = without_a_product(part).values()
        assert cases
        for case, program in cases:
            with naming(case):
                traced = jax.make_jaxpr(jaxmp.autocast(case.fun, "mixed_float16"))(*map(jnp.asarray, arguments(case)))
                assert described(traced) == program
