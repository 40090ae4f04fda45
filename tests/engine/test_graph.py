"""The graph recognises equal values that a program computes twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import compiled, half, normal, products

X, W = normal(0, 8, 8), jnp.eye(8)


def _embedded(x):
    return jnp.where(x > 0, 5 + x * jnp.arange(8).astype(x.dtype), jnp.tanh(x))


def _noisy(x):
    return 1 + x + 0.1 * jax.random.normal(jax.random.key(7), x.shape, "float32").astype(x.dtype)


def _sum_of_far(total, w):
    return total + _far(lambda x: x + w)(total), None


def _far(f):
    return lambda x: jnp.sum(f(x) ** 2, -1)[:, None] + jnp.sum(f(x) ** 2, -1) - 2 * f(x) @ f(x).T


def _fori(turns, h):
    return jax.lax.fori_loop(0, turns, lambda _, h: jnp.tanh(h + 1), h)


WRITTEN_TWICE = {
    "of calls": jax.jit(_far(jax.jit(_embedded))),
    "of remat": _far(jax.checkpoint(_embedded)),
    "of a cond": _far(lambda x: jax.lax.cond(x[0, 0] > 0, _embedded, jnp.sinh, x)),
    "of random numbers": _far(_noisy),
    "in a scan": lambda x: jax.lax.scan(_sum_of_far, 0 * x, x[0, :2])[0],
}


def test_a_value_that_is_computed_twice_is_the_same():
    dtypes = {name: set(products(half(fun), X)) for name, fun in WRITTEN_TWICE.items()}
    assert dtypes == {name: {"float32"} for name in WRITTEN_TWICE}


@pytest.mark.parametrize("spelling", ["of a cond", "in a scan"])
def test_differences_of_values_computed_twice_are_accurate(spelling):
    fun, x = WRITTEN_TWICE[spelling], (1 + 0.1 * X).astype(jnp.bfloat16).astype(jnp.float32)
    with jax.enable_x64(True):
        exact = np.asarray(compiled(fun)(x.astype(jnp.float64)))
    result = compiled(half(lambda x, w: (fun(x), w @ w)))(x, W)[0]
    np.testing.assert_allclose(result, exact, rtol=1e-3, atol=3e-4 * np.abs(exact).max())


DIFFERENT = {
    "another operand": lambda x: (jnp.tanh(x), jnp.tanh(2 * x)),
    "another parameter": lambda x: (jnp.roll(x, 1, 0) + 1, jnp.roll(x, 1, 1) + 1),
    "another constant": lambda x: (x + 1.0, x + 2.0),
    "another key": lambda x: tuple(x + jax.random.normal(jax.random.key(n), x.shape) for n in range(2)),
    "another body": lambda x: tuple(
        jax.lax.fori_loop(0, 3, turn, x) for turn in (lambda _, h: 1.5 * h, lambda _, h: 1.5 + h)
    ),
    "another branch": lambda x: tuple(jax.lax.cond(x[0, 0] > 0, jnp.sin, branch, x) for branch in (jnp.tanh, jnp.exp)),
    "an effect": lambda x: tuple(
        jax.experimental.io_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x) for _ in range(2)
    ),
    "a loop of more turns": lambda x: (_fori(3, x), _fori(5, x)),
    "a scan backwards": lambda x: tuple(
        jax.lax.scan(lambda h, row: (jnp.tanh(h + row), None), x, x, reverse=reverse)[0] for reverse in (False, True)
    ),
    "a loop until something else": lambda x: tuple(
        jax.lax.while_loop(lambda h, most=most: jnp.sum(h[0]) < most, lambda h: jnp.tanh(h) + 1, x)
        for most in (3.0, 9.0)
    ),
}


def test_operations_with_different_operands_or_parameters_are_not_the_same():
    def difference(x, y):  # it cancels if both are the same
        return jnp.sum(x**2, -1, keepdims=True) - 2 * y @ W

    dtypes = {
        name: products(half(lambda x, pair=pair: difference(*pair(x))), X)
        for name, pair in {**DIFFERENT, "none of these": lambda x: (jnp.tanh(x), jnp.tanh(x))}.items()
    }
    assert dtypes == {**{name: ["bfloat16"] for name in DIFFERENT}, "none of these": ["float32"]}
