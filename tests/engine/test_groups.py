"""Patterns that are accurate only if all of their operations are float32."""

from __future__ import annotations

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import HALVES, both, compiled, dtypes_of, half, normal, products

import jaxmp

W = concrete.eye(8)
LOWEST = jnp.finfo(jnp.float32).min


def between(fun):
    """Return ``fun`` between two products with ``w``, an identity matrix."""
    return lambda x, w: fun(x @ w) @ w


def test_only_the_result_of_a_softmax_is_rounded():
    assert dtypes_of("div", half(between(jax.nn.softmax)), normal(0, 4, 8), W) == ["float32"]
    program = jax.make_jaxpr(half(between(lambda x: jax.nn.softmax(x))))(normal(0, 4, 8), W)
    end = next(n for n, eqn in enumerate(program.eqns) if eqn.primitive.name == "div")
    assert program.eqns[end + 1].params.get("new_dtype") == jnp.bfloat16


def test_a_softmax_with_a_logarithm_is_not_rounded():
    def fun(x, w):
        p = jax.nn.softmax(x @ w)
        return p @ w, jnp.log(p + 1e-12)

    x = 12 * concrete.eye(8)[:2]  # a probability that bfloat16 rounds to 1
    result, expected = both(fun, "mixed_bfloat16", x, W)
    np.testing.assert_allclose(result[1], expected[1], rtol=1e-3)


@pytest.mark.parametrize(
    ("loss", "policy"),
    [
        (jax.nn.log_softmax, "mixed_float16"),
        (jax.nn.logsumexp, "mixed_bfloat16"),
        (lambda x: jnp.mean((x - 1.001) ** 2), "mixed_float16"),
    ],
)
def test_losses_have_the_accuracy_of_float32(loss, policy):
    x = (normal(1, 4, 8) * 5).astype(HALVES[policy]).astype(jnp.float32)
    # The products of the gradient follow the loss. Without them, operations would be float32 for another reason.
    with_gradient = half(jax.value_and_grad(lambda w, x: jnp.sum(loss(x @ w))), policy)
    assert set(products(with_gradient, W, x)) == {HALVES[policy]}
    (result, _), exact = compiled(lambda w, x: (with_gradient(w, x), loss(x)))(W, x)
    assert np.isclose(result, np.asarray(exact, np.float64).sum(), rtol=1e-5, atol=1e-4)


def test_a_loss_of_a_product_and_its_target_does_not_round_the_target():
    def loss(w, x, target):
        return jnp.mean((x @ w - target) ** 2)

    x, target = normal(0, 4, 8), normal(1, 4, 8)
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    exact = np.mean((np.asarray(rounded) - target) ** 2)
    funs = half(loss), half(jax.value_and_grad(loss))
    value, (value_with_gradient, _) = compiled(lambda *args: [fun(*args) for fun in funs])(W, x, target)
    np.testing.assert_allclose([value, value_with_gradient], exact, rtol=1e-6)


def test_a_tiny_epsilon_does_not_vanish_in_float16():
    # A literal of the program, a constant, and a constant with small and large elements.
    epsilons = 1e-12, jnp.float32(1e-12), np.array([2.0, 1e-12] * 4, np.float32)
    funs = [half(between(lambda x, e=epsilon: x / (jnp.abs(x) + e)), "mixed_float16") for epsilon in epsilons]
    for result in compiled(lambda x, w: [fun(x, w) for fun in funs])(concrete.zeros((2, 8)), W):
        np.testing.assert_array_equal(result, 0)


MASKS = {
    "selected": lambda s, keep: jnp.where(keep, s, LOWEST),
    "a number": lambda s, keep: s + (1.0 - keep.astype(jnp.float32)) * -1e9,
    "a constant": lambda s, keep: s + np.where(np.arange(8) < 3, 0, LOWEST).astype(np.float32),
    "an argument": lambda s, keep: s + jnp.where(keep, 0.0, LOWEST),
}


def test_masks_of_the_lowest_float32_stay_finite_in_float16():
    keep, x = np.arange(8) < 3, np.concatenate([normal(3, 3, 8), np.zeros((1, 8), np.float32)])

    def outcomes(mask, x, w, keep):
        def attend(x, w):
            return jax.nn.softmax(mask(x @ w, keep)) @ w

        cast = half(attend, "mixed_float16")
        return cast(x, w), attend(x, w), jax.grad(lambda w: cast(x, w).sum())(w)

    results = compiled(lambda *args: {name: outcomes(mask, *args) for name, mask in MASKS.items()})(x, W, keep)
    for name, (result, expected, slope) in results.items():
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=2e-3, err_msg=name)
        assert np.isfinite(slope).all(), name


def test_masked_scores_that_are_returned_stay_finite():
    def fun(x, w):
        scores = x @ w + jnp.where(jnp.arange(8) < 3, 0.0, LOWEST)
        return jax.nn.softmax(scores) @ w, scores

    assert bool(jnp.isfinite(half(fun, "mixed_float16")(concrete.ones((1, 8)), W)[1]).all())


def test_the_fill_value_of_a_gather_is_not_rounded():
    def fun(x, w):
        rows = [jnp.take(x @ w, jnp.array([0, 99]), axis=0, mode="fill", fill_value=fill) for fill in (-1e30, 1e-12)]
        return [1 / row for row in rows]

    x = concrete.ones((4, 8))
    result, expected = both(fun, "mixed_float16", x, W)
    np.testing.assert_allclose(result, expected, rtol=1e-3)


def test_a_statistic_is_rounded_only_for_the_product_that_reads_it():
    def norms(x, w):
        return jnp.sqrt(jnp.sum((x @ w) ** 2, -1)) @ jnp.eye(8)

    def variances(x, w):
        h = x @ w
        return (jnp.mean(h * h, -1) - jnp.mean(h, -1) ** 2) @ jnp.eye(8)

    assert np.allclose(compiled(half(norms, "mixed_float16"))(concrete.full((8, 8, 8), 300.0), W), 848.5)
    x = (100 + normal(7, 8, 8, 8)).astype(jnp.bfloat16).astype(jnp.float32)
    assert np.allclose(*both(variances, "mixed_bfloat16", x, W), rtol=0.01)


def test_a_logsumexp_in_a_difference_is_float32():
    def softmax(x, w):
        h = x @ w
        return jnp.exp(h - jax.nn.logsumexp(h, -1, keepdims=True)) @ w

    x = (normal(8, 4, 8) * 5).astype(jnp.bfloat16).astype(jnp.float32)
    result, expected = compiled(lambda x, w: (half(softmax)(x, w), jax.nn.softmax(x)))(x, W)
    assert np.allclose(result, expected, rtol=2**-8)


def test_a_difference_before_a_float32_scale_is_float32():
    def fun(x, mean, scale, w):
        return (x @ w - mean) * jax.lax.rsqrt(scale) @ w

    x = (10 + 0.3 * normal(10, 4, 8)).astype(jnp.bfloat16).astype(jnp.float32)
    args = (x, concrete.full(8, 10.03), concrete.full(8, 0.1), W)
    assert np.allclose(*both(fun, "mixed_bfloat16", *args), rtol=2**-8)


def test_a_float8_product_of_the_author_does_not_change():
    codes = concrete.ones((16, 16), jnp.float8_e4m3fn)

    def fun(x, w):
        product = jax.lax.dot_general(codes, codes, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return product + x @ w

    result = jaxmp.autocast(fun, "mixed_bfloat16")(concrete.ones((16, 16)), concrete.ones((16, 16)))
    np.testing.assert_array_equal(np.asarray(result), 32)
