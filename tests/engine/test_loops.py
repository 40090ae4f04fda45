"""Loops and conditionals: the dtypes of carries and results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import both, compiled, cosine, half, layer_norm, normal, products

from jaxmp.program.equations import bodies_of
from jaxmp.program.walk import equations

X, W = normal(0, 4, 8), normal(1, 8, 8, scale=0.3)


def carries(fun, *args):
    """Return the dtypes of the floating carries of all loops in the traced ``fun``."""
    dtypes = []
    for eqn in equations(jax.make_jaxpr(fun)(*args)):
        if eqn.primitive.name in ("scan", "while"):
            bodies = bodies_of(eqn)
            dtypes += [var.aval.dtype.name for var in eqn.outvars[: bodies.carry] if var.aval.dtype != jnp.int32]
    return dtypes


def test_a_residual_stream_is_carried_in_half_and_a_running_loss_in_float32():
    def fun(x, weights):
        def body(carry, layer):
            x, loss = carry
            up, down = layer
            x = x + jax.nn.gelu(layer_norm(x) @ up) @ down
            return (x, loss + jnp.mean(x**2)), None

        (x, loss), _ = jax.lax.scan(body, (x, jnp.float32(0)), weights)
        return x @ W, loss

    args = (X, (jnp.stack([W] * 3), jnp.stack([W.T] * 3)))
    assert carries(half(fun), *args) == ["bfloat16", "float32"]
    assert set(products(half(fun), *args)) == {"bfloat16"}
    for result, expected in zip(*both(fun, "mixed_bfloat16", *args), strict=True):
        assert np.allclose(result, expected, rtol=0.05, atol=0.05)


def test_a_stream_through_convolutions_is_carried_in_half():
    def fun(image, kernels):
        def body(x, kernel):
            return x + jax.nn.relu(jax.lax.conv(x, kernel, (1, 1), "SAME")), None

        return jax.lax.conv(jax.lax.scan(body, image, kernels)[0], kernels[0], (1, 1), "SAME")

    assert carries(half(fun), normal(0, 1, 2, 4, 4), normal(1, 3, 2, 2, 3, 3)) == ["bfloat16"]


@pytest.mark.parametrize("is_in_a_loop", [False, True])
def test_rows_of_a_table_start_a_half_residual_stream(is_in_a_loop):
    def loss(table, ids):
        x = table[ids]
        x = x + jax.nn.relu(layer_norm(x) @ W) @ W.T
        return jnp.mean(layer_norm(x) @ W)

    def fun(table, ids):
        return jax.lax.map(lambda ids: loss(table, ids), ids[None]) if is_in_a_loop else loss(table, ids)

    program = jax.make_jaxpr(half(fun))(normal(3, 10, 8), jnp.zeros(4, int))
    adds = [eqn.outvars[0].aval for eqn in equations(program) if eqn.primitive.name == "add"]
    assert [aval.dtype.name for aval in adds if aval.shape == (4, 8)] == ["bfloat16"]


STEPS = jnp.float32(0.002)
SMALL_STEPS = {
    "a factor": lambda h, f: h + 0.002 * f,
    "a divisor": lambda h, f: h - f / 500,
    "a constant array": lambda h, f: h + STEPS * f,
    "a moving average": lambda h, f: (1 - 0.002) * h + 0.002 * f,
}


@pytest.mark.parametrize("step", SMALL_STEPS)
def test_a_carry_to_which_each_layer_adds_a_small_constant_part_is_float32(step):
    """A neural ODE whose weights change over time is an example."""

    def moved(h, weights):
        start = h
        h, _ = jax.lax.scan(lambda h, w: (SMALL_STEPS[step](h, jnp.tanh(h @ w)), None), h, weights)
        return h - start

    args = (X, normal(2, 64, 8, 8, scale=0.3))
    assert carries(half(moved), *args) == ["float32"]
    assert products(half(moved), *args) == ["bfloat16"]
    result, expected = both(moved, "mixed_bfloat16", *args)
    assert np.linalg.norm(result - expected) < 0.01 * np.linalg.norm(expected)


def test_a_mean_of_many_elements_is_no_small_part_of_a_stream():
    def fun(x, weights):
        x, _ = jax.lax.scan(lambda x, w: (layer_norm(x + 0.1 * jax.nn.relu(x @ w)), None), x, weights)
        return x @ weights[0]

    assert carries(half(fun), normal(0, 4, 128), normal(1, 3, 128, 128)) == ["bfloat16"]


def test_weights_in_a_carry_stay_float32():
    def fun(x, w):
        def body(carry):
            n, x, w, v = carry
            return n + 1, jnp.tanh(x @ w), v, w

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x, w, 2 * w))[1] @ w

    assert carries(half(fun), X, W) == ["float32"] * 3


FLOWS = {
    "switch": lambda x, w: jax.lax.switch(1, [lambda h: h @ w, lambda h: jnp.exp(h), lambda h: h + 1], x @ w),
    "map": lambda x, w: jax.lax.map(lambda row: jax.nn.softmax(row @ w), x),
    "associative_scan": lambda x, w: jax.lax.associative_scan(jnp.add, x @ w),
    "reverse, unrolled": lambda x, w: jax.lax.scan(
        lambda h, r: (jnp.tanh(h @ w + r), h), x[0], x, reverse=True, unroll=2
    )[1],
    "cond in scan": lambda x, w: jax.lax.scan(
        lambda h, n: (jax.lax.cond(n > 1, lambda h: jnp.tanh(h @ w), lambda h: h * 2, h), None), x, jnp.arange(3)
    )[0],
}


@pytest.mark.parametrize("flow", FLOWS)
def test_control_flow_agrees_with_float32(flow):
    def fun(x, w):
        return jnp.sum(jnp.tanh(FLOWS[flow](x, w)) @ w)

    assert set(products(half(fun), X, W)) == {"bfloat16"}
    programs = (*(jax.value_and_grad(f, (0, 1)) for f in (fun, half(fun))), half(jax.grad(fun, (0, 1))))
    outcomes = compiled(lambda x, w: [program(x, w) for program in programs])(X, W)
    (expected, gradient), (result, gradient_of_half), half_of_gradient = outcomes
    assert np.isclose(result, expected, rtol=0.05, atol=0.05)
    assert cosine(gradient_of_half, gradient) > 0.999
    assert cosine(half_of_gradient, gradient) > 0.998


def test_branches_return_the_same_dtype():
    def fun(x, w):
        h = x @ w
        return jax.lax.cond(x[0, 0] > 0, lambda h: jnp.exp(h), lambda h: h, h) @ w

    (eqn,) = (eqn for eqn in equations(jax.make_jaxpr(half(fun))(X, W)) if eqn.primitive.name == "cond")
    assert eqn.outvars[0].aval.dtype == jnp.bfloat16


def test_a_while_loop_whose_condition_reads_its_product_is_float32():
    def fun(x, w):
        return jax.lax.while_loop(lambda h: jnp.sum(h**2) > 0.1, lambda h: jnp.tanh(h @ w) * 0.5, x) @ w

    assert carries(half(fun), X, W) == ["float32"]
    assert products(half(fun), X, W) == ["float32", "bfloat16"]


def test_a_loop_that_ends_when_it_has_converged_is_float32():
    def fun(x, w):
        def body(carry):
            z, _, n = carry
            new = jnp.tanh(z @ w + x)
            return new, jnp.max(jnp.abs(new - z)), n + 1

        return jax.lax.while_loop(lambda carry: (carry[1] > 1e-6) & (carry[2] < 500), body, (x, jnp.float32(1), 0))[2]

    turns, expected = both(fun, "mixed_bfloat16", X, W)
    assert turns == expected < 500


def test_a_loop_that_ends_by_a_flag_when_it_has_converged_is_float32():
    def fun(x, w):
        def body(carry):
            z, _, n = carry
            new = jnp.tanh(z @ w + x)
            return new, jnp.max(jnp.abs(new - z)) < 1e-6, n + 1

        return jax.lax.while_loop(lambda carry: ~carry[1] & (carry[2] < 500), body, (x, False, 0))[2]

    turns, expected = both(fun, "mixed_bfloat16", X, W)
    assert turns == expected < 500


def test_a_decoder_that_stops_at_a_token_is_half():
    def fun(x, w):
        def body(carry):
            h, _, n = carry
            h = jnp.tanh(h @ w)
            return h, jax.jit(lambda h: jnp.argmax(h @ w) == 3)(h), n + 1

        return jax.lax.while_loop(lambda carry: ~carry[1] & (carry[2] < 5), body, (x, False, 0))[0] @ w

    assert set(products(half(fun), X, W)) == {"bfloat16"}


@pytest.mark.parametrize("join", ["carry", "branches"])
def test_a_mask_that_starts_a_carry_or_ends_a_branch_stays_finite(join):
    def filled(h):
        lowest = jnp.full(h.shape, -1e30)
        if join == "branches":
            return jax.lax.cond(h[0, 0] > 1e9, lambda h: h, lambda h: lowest, h)
        return jax.lax.scan(lambda c, n: (c.at[n].set(h[n]), None), lowest, jnp.arange(2))[0]

    def fun(x, w):
        return jax.nn.softmax(filled(x @ w)) @ w

    np.testing.assert_allclose(*both(fun, "mixed_float16", X, W), atol=2e-3)


def test_a_stack_of_layers_with_a_masked_stream_stays_finite():
    def fun(scores, weights):
        def layer(scores, w):
            return scores + jnp.where(jnp.arange(4)[:, None] != 2, jnp.tanh(scores @ w), -1e9), None

        return jax.nn.softmax(jax.lax.scan(layer, scores, weights)[0]) @ weights[0]

    result, expected = both(fun, "mixed_float16", X, normal(1, 3, 8, 8, scale=0.3))
    np.testing.assert_allclose(result, expected, atol=0.02)


def test_a_loop_over_float_time_is_half():
    def fun(x, w):
        return jax.lax.while_loop(lambda c: c[0] < 1.0, lambda c: (c[0] + 0.3, jnp.tanh(c[1] @ w)), (0.0, x))[1] @ w

    assert set(products(half(fun), X, W)) == {"bfloat16"}


TIMES = {
    "a step that a product makes": lambda c, h: (c[0] + jnp.mean(h**2) + 0.1, c[1]),
    "two times in turn": lambda c, h: (c[1], jnp.minimum(c[1] + jnp.mean(h**2) + 0.1, 9.0)),
    "a step that may be refused": lambda c, h: (jnp.where(h[0, 0] > 0.5, c[0], c[0] + jnp.mean(h**2) + 0.1), c[1]),
}
RESIDUALS = {
    "a step": lambda c, h: (1 / jnp.mean(h**2), c[1]),
    "an average": lambda c, h: (0.5 * c[0] + 0.5 / (1 + jnp.mean(h**2)), c[1]),
    "a rate of change": lambda c, h: ((c[1] + jnp.mean(h**2) - c[1]) / 2, c[1] + jnp.mean(h**2)),
    "a smallest error": lambda c, h: (jnp.maximum(c[0], 1 - jnp.mean(h**2)), c[1]),
    "a step that may be refused": lambda c, h: (jnp.where(h[0, 0] > 0.5, c[0], jnp.mean(h**2)), c[1]),
}


def test_a_loop_until_a_time_is_half_and_a_loop_until_convergence_is_float32():
    def dtype_of_its_product(until):
        def fun(x, w):
            def turn(carry):
                times, h, n = carry
                h = jnp.tanh(h @ w)
                return until(times, h), h, n + 1

            return jax.lax.while_loop(lambda c: (c[0][0] < 0.9) & (c[2] < 20), turn, ((0.0, 0.1), x, 0))[1]

        return products(half(fun), X, W)

    for untils, dtype in ((TIMES, "bfloat16"), (RESIDUALS, "float32")):
        dtypes = {name: dtype_of_its_product(until) for name, until in untils.items()}
        assert dtypes == {name: [dtype] for name in untils}


def test_examples_of_an_inner_vmap_may_differ_in_their_iterations():
    def fun(x, least):
        smallest = jnp.exp(-1.5 * least.astype(jnp.float32))

        def goes_on(carry):
            return carry[2] > smallest

        def turn(carry):
            n, h, _ = carry
            new = jnp.tanh(h @ W + x)
            return n + 1, new, jnp.max(jnp.abs(new - h))

        n, h, _ = jax.lax.while_loop(goes_on, turn, (0, x, jnp.float32(1)))
        return n, h

    def examples(x, least):
        return jax.vmap(fun, (None, 0))(x, least)

    (turns, results), (expected_turns, expected) = both(examples, "mixed_bfloat16", X, jnp.arange(4))
    assert len(set(turns.tolist())) == 4
    np.testing.assert_array_equal(turns, expected_turns)
    np.testing.assert_allclose(results, expected, atol=0.02)


def test_a_carry_that_another_scan_stacks_from_a_row_changes():
    """Only the scan that picks a row may stack it again to the same array."""

    def spread(_, row):
        return jax.lax.scan(lambda carry, _: (carry, row), 0.0, None, length=8)[1], None

    def turn(carry, _):
        rows, h = carry
        return (jax.lax.scan(spread, rows, rows)[0], jnp.tanh(h @ W @ W)), None

    x = jnp.arange(8.0)
    half_rows, rows = both(lambda x: jax.lax.scan(turn, (x, x), None, length=2)[0][0], "mixed_bfloat16", x)
    assert set(rows.tolist()) == set(half_rows.tolist()) == {7.0}
