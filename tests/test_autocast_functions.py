"""Functions between two products under both half policies, against float64 on the same numbers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_zoo import CASES, after_a_product, between_products, float64, ulps

import jaxmp
from jaxmp._jaxpr.walk import PRODUCTS, equations

POLICIES = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}

# optax, jax.scipy.stats and Flax's layers mix integers, float32 and half by themselves.
pytestmark = pytest.mark.usefixtures("standard_promotion")

# Compiled in a fraction of the time, and every rounding of the program is done: none is taken back by a fusion.
compiled = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
)


@pytest.fixture
def standard_promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def reference(name: str) -> list[np.ndarray]:
    return float64(CASES[name])


def arguments(name: str) -> list[jax.Array]:
    return [jnp.asarray(x) for x in (*CASES[name].inputs, *CASES[name].plain)]


def floats(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


def others(leaves: list[Any]) -> list[list[Any]]:
    return [leaf.tolist() for leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.floating)]


@pytest.mark.parametrize("name", CASES)
def test_a_function_between_two_products_errs_no_more_than_the_table_says(name: str) -> None:
    case, want = CASES[name], reference(name)
    both = compiled(lambda *args: [jaxmp.autocast(between_products(case), policy)(*args) for policy in POLICIES])
    for half, results in zip(POLICIES.values(), both(*arguments(name)), strict=True):
        got = jax.tree.leaves(results)
        assert {leaf.dtype.name for leaf in floats(got)} <= {"float32"}
        assert others(got) == others(want)
        errors = [ulps(a, b, half, case.tolerance.of) for a, b in zip(floats(got), floats(want), strict=True)]
        assert not errors or max(errors) <= case.tolerance.ulps, f"{half.__name__}: {max(errors):.3g} ulp"


def has_product(name: str) -> bool:
    jaxpr = jax.make_jaxpr(CASES[name].fun)(*arguments(name))
    return any(eqn.primitive.name in PRODUCTS for eqn in equations(jaxpr))


# float32's own error, and where a difference cancels what is left of it.
FLOAT32_ULPS = 16
RETURNED = [name for name in CASES if name.startswith("optax.") or "log" in name or "softmax" in name]


@pytest.mark.parametrize("name", RETURNED)
def test_what_is_returned_and_not_multiplied_has_float32_accuracy(name: str) -> None:
    if has_product(name):
        return
    case, want = CASES[name], reference(name)
    both = compiled(lambda *args: [jaxmp.autocast(after_a_product(case), policy)(*args) for policy in POLICIES])
    for results in both(*arguments(name)):
        for a, b in zip(jax.tree.leaves(results), want, strict=True):
            assert ulps(a, b, np.float32, "largest") <= FLOAT32_ULPS


def program(fun: Any, *args: Any) -> list[tuple[str, ...]]:
    """Each equation's primitive with the types of its operands and results."""
    found = equations(jax.make_jaxpr(fun)(*args))
    return [(eqn.primitive.name, *(str(atom.aval) for atom in (*eqn.invars, *eqn.outvars))) for eqn in found]


def test_a_function_without_a_product_is_left_alone() -> None:
    with jax.numpy_dtype_promotion("standard"):
        names = [name for name in CASES if not has_product(name)]
        for name in names:
            args = arguments(name)
            assert program(jaxmp.autocast(CASES[name].fun, "mixed_float16"), *args) == program(CASES[name].fun, *args)
    assert len(names) > 150


def test_the_table_has_at_least_150_functions_each_with_a_reason() -> None:
    assert len(CASES) >= 150
    assert all(case.tolerance.why for case in CASES.values())


# The specification's own figures.


@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_of_4096_uses_has_a_gradient_of_4096(policy: str) -> None:
    x = jnp.ones((1, 1))

    def inside(w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c + (x @ w)[0, 0], None), 0.0, None, length=4096)[0]

    def stacked(w: jax.Array) -> jax.Array:
        return jax.lax.map(lambda row: (row[None] @ w)[0, 0], jnp.ones((4096, 1))).sum()

    for fun in (inside, stacked):
        assert jax.grad(jaxmp.autocast(fun, policy))(x).item() == 4096
        assert jaxmp.autocast(jax.grad(fun), policy)(x).item() == 4096
        assert jaxmp.autocast(fun, policy)(x).item() == 4096


@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_of_600_uses_in_a_row_has_a_gradient_of_600(policy: str) -> None:
    x = jnp.ones((1, 1))

    def fun(w: jax.Array) -> jax.Array:
        return sum((x @ w).sum() for _ in range(600))

    assert jax.eval_shape(jaxmp.autocast(fun, policy), x).dtype == jnp.float32
    assert compiled(jax.grad(jaxmp.autocast(fun, policy)))(x).item() == 600
    assert compiled(jaxmp.autocast(jax.grad(fun), policy))(x).item() == 600


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradient_of_an_embedding_used_4096_times_is_4096(policy: str) -> None:
    def fun(table: jax.Array, w: jax.Array) -> jax.Array:
        return (table[jnp.zeros(4096, int)] @ w).sum()

    table, w = jnp.ones((2, 1)), jnp.ones((1, 1))
    for grad in (jax.grad(jaxmp.autocast(fun, policy)), jaxmp.autocast(jax.grad(fun), policy)):
        assert grad(table, w).tolist() == [[4096.0], [0.0]]


def masks(fill: float) -> Any:
    mask = jnp.arange(8) < 5
    return {
        "selected": lambda x: jnp.where(mask, x, fill),
        "added": lambda x: x + jnp.where(mask, 0.0, fill),
        "added twice": lambda x: x + jnp.where(mask, 0.0, fill) + jnp.where(mask[::-1][0], 0.0, fill),
        "all of a row": lambda x: jnp.where(jnp.zeros(8, bool), x, fill),
    }


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", masks(0))
def test_a_mask_of_float32_s_smallest_number_makes_no_nan(where: str, policy: str) -> None:
    masked = masks(float(jnp.finfo(jnp.float32).min))[where]

    def attend(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.softmax(masked(x @ w)) @ w

    x, w = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32), jnp.eye(8)
    got, want = jaxmp.autocast(attend, policy)(x, w), attend(x, w)
    if where != "added twice":  # whose sum is -inf in float32 too
        np.testing.assert_allclose(got, want, rtol=0.02, atol=1e-4)
    grads = jax.grad(lambda x: jaxmp.autocast(attend, policy)(x, w)[:, 0].sum())(x)
    expected = jax.grad(lambda x: attend(x, w)[:, 0].sum())(x)
    assert np.array_equal(np.isnan(grads), np.isnan(expected))
