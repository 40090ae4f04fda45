"""Derivatives under autocast: custom rules are kept, and run under the policy."""

from __future__ import annotations

import functools

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import compiled, cosine, half, in_turn, layer_norm, normal, operations, products

import jaxmp
from jaxmp.program.walk import equations

X, W = normal(0, 4, 8), normal(1, 8, 8, scale=0.3)


def network(w):
    return jnp.sum(jax.nn.softmax(jnp.tanh(X @ w) @ w) @ w)


DERIVATIVES = {
    "jvp": lambda f: lambda w: jax.jvp(f, (w,), (w + 1.0,))[1],
    "vjp": lambda f: lambda w: jax.vjp(f, w)[1](jnp.float32(2)),
    "hessian": jax.hessian,
}


def test_derivatives_agree_with_float32():
    pairs = compiled(lambda w: {name: (of(network)(w), of(half(network))(w)) for name, of in DERIVATIVES.items()})(W)
    for name, (expected, result) in pairs.items():
        assert jax.tree.leaves(result)[0].dtype == jnp.float32, name
        assert cosine(result, expected) > 0.999, name


def test_integer_leaves_have_float0_tangents_and_gradients_as_in_jax():
    params = {"w": W, "columns": concrete.arange(3)}
    zeros = np.zeros(3, jax.dtypes.float0)

    def fun(params):
        return jnp.tanh(X @ params["w"])[:, params["columns"]].sum()

    def tangent(fun):
        return lambda params, zeros: jax.jvp(fun, (params,), ({"w": W, "columns": zeros},))

    def gradient(fun):
        return lambda params, zeros: jax.grad(fun, allow_int=True)(params)

    for derivative in (tangent, gradient):
        expected = derivative(fun)(params, zeros)
        for result in (half(derivative(fun))(params, zeros), derivative(half(fun))(params, zeros)):
            assert jax.tree.map(lambda leaf: leaf.dtype, result) == jax.tree.map(lambda leaf: leaf.dtype, expected)
            floating = [[x for x in jax.tree.leaves(tree) if x.dtype != zeros.dtype] for tree in (result, expected)]
            assert cosine(*floating) > 0.999


def test_the_gradient_of_autocast_and_the_autocast_gradient_have_the_same_products():
    inner, outer = products(jax.grad(half(network)), W), products(half(jax.grad(network)), W)
    assert sorted(inner) == sorted(outer) == ["bfloat16"] * 8
    assert cosine(*compiled(lambda w: [jax.grad(half(network))(w), half(jax.grad(network))(w)])(W)) > 0.999


def recorded(log, optimize_remat=False):
    """Return a product whose custom derivative rule appends its calls to ``log``."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def forward(x, w):
        log.append("forward")
        return x @ w, (x, w)

    def backward(residuals, g):
        log.append("backward")
        x, w = residuals
        return 2 * (g @ w.T), x.T @ g  # twice the true gradient of x, so that the value shows which rule ran

    product.defvjp(forward, backward, optimize_remat=optimize_remat)
    return product


def test_the_rule_of_a_function_that_returns_its_argument_is_half():
    same = jax.custom_vjp(lambda x, w: x)
    same.defvjp(lambda x, w: (x, w), lambda w, g: (g @ w.T, None))
    assert products(jax.grad(half(lambda x: jnp.sum(same(x, W) @ W))), X) == ["bfloat16"] * 3


@pytest.mark.parametrize("optimize_remat", [False, True])
def test_a_custom_vjp_keeps_its_rule_and_the_rule_is_half(optimize_remat):
    log: list[str] = []
    product = recorded(log, optimize_remat)

    def fun(w):
        return jnp.sum(jnp.tanh(product(product(X, w), w)))

    assert products(jax.grad(half(fun)), W) == ["bfloat16"] * 6
    assert log.count("forward") and log.count("backward")
    expected, *gradients = compiled(
        lambda w: [gradient(w) for gradient in (jax.grad(fun), jax.grad(half(fun)), half(jax.grad(fun)))]
    )(W)
    assert min(cosine(gradient, expected) for gradient in gradients) > 0.9999
    assert ("custom_vjp_call", "bfloat16") in operations(half(fun), W)


def test_a_loop_in_a_custom_vjp_reads_a_half_array_in_half():
    def looped(x, w):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, length=200)[0]

    with_rule = jax.custom_vjp(looped)
    with_rule.defvjp(lambda x, w: (looped(x, w), (x, w)), lambda residuals, cotangent: residuals)

    def dtype_read(loop):
        program = jax.make_jaxpr(half(lambda x, w: loop(x @ w, w @ w)))(X, W)
        (scan,) = (eqn for eqn in equations(program) if eqn.primitive.name == "scan")
        return scan.invars[0].aval.dtype

    # JAX differentiates only the loop without the rule, and sums the cotangents of 200 iterations.
    assert (dtype_read(with_rule), dtype_read(looped)) == (jnp.bfloat16, jnp.float32)


def test_a_custom_vjp_that_closes_over_an_array_has_the_right_gradients_in_each_body():
    constants = normal(3, 8)

    @jax.custom_vjp
    def scaled(x, y):
        return jnp.tanh(x) * y * constants

    def backward(saved, ct):
        x, y = saved
        return ct * (1 - jnp.tanh(x) ** 2) * y * constants, ct * jnp.tanh(x) * constants

    scaled.defvjp(lambda x, y: (scaled(x, y), (x, y)), backward)
    bodies = {
        "none": scaled,
        "jit": jax.jit(scaled),
        "scan": lambda x, y: jax.lax.scan(lambda carry, _: (scaled(carry, y), None), x, length=2)[0],
        "checkpoint": jax.checkpoint(scaled),
        "cond": lambda x, y: jax.lax.cond(x[0] > 0, scaled, jnp.add, x, y),
    }

    def loss(w, body):
        return jnp.sum(jax.vmap(lambda x: bodies[body](x @ w, x) @ w)(X))

    def gradients(w, body):
        fun = functools.partial(loss, body=body)
        return jax.grad(fun)(w), jax.grad(half(fun))(w)

    for name, pair in compiled(lambda w: {body: gradients(w, body) for body in bodies})(W).items():
        assert cosine(*pair) > 0.999, name


def test_a_custom_vjp_may_have_integers_and_static_arguments():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def layer(activation, x, w, n):
        return activation(x @ w) * n.astype(jnp.float32)

    def forward(activation, x, w, n):
        return layer(activation, x, w, n), (x, w, n)

    def backward(activation, residuals, g):
        x, w, n = residuals
        _, pullback = jax.vjp(lambda x, w: activation(x @ w) * n.astype(jnp.float32), x, w)
        return (*pullback(g), None)

    layer.defvjp(forward, backward)

    def fun(w, n):
        return jnp.sum(layer(jnp.tanh, layer(jnp.tanh, X, w, n), w, n))

    n = concrete.arange(8) + 1
    assert cosine(*compiled(lambda w, n: [jax.grad(run)(w, n) for run in (half(fun), fun)])(W, n)) > 0.999
    assert set(products(jax.grad(half(fun)), W, n)) == {"bfloat16"}


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_custom_jvp_keeps_its_rule_and_the_rule_is_half(symbolic):
    @jax.custom_jvp
    def layer(x, w, n):
        return jnp.tanh(x @ w) * n

    def rule(primals, tangents):
        x, w, n = primals
        dx, dw, _ = (
            jnp.zeros_like(p) if isinstance(t, jax.custom_derivatives.SymbolicZero) else t
            for p, t in zip(primals, tangents, strict=True)
        )
        y = layer(x, w, n)
        return y, (1 - (y / n) ** 2) * n * (dx @ w + x @ dw) * 2.0  # twice the true tangent

    layer.defjvp(rule, symbolic_zeros=symbolic)

    def fun(w):
        return jnp.sum(layer(layer(X, w, jnp.float32(2)), w, jnp.float32(3)))

    result, expected = compiled(lambda w: [jax.grad(run)(w) for run in (half(fun), fun)])(W)
    assert cosine(result, expected) > 0.999
    assert np.isclose(np.linalg.norm(result), np.linalg.norm(expected), rtol=0.02)
    assert set(products(jax.grad(half(fun)), W)) == {"bfloat16"}
    assert ("custom_jvp_call", "bfloat16") in operations(half(fun), W)


def test_the_compiled_program_keeps_recomputations():
    def fun(w):
        block = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w))
        return jnp.sum(block(block(X)))

    def count(f):
        return jax.jit(f).lower(W).as_text().count("optimization_barrier")

    assert count(half(jax.grad(fun))) == count(jax.grad(fun)) > 0
    assert count(jax.grad(half(fun))) == count(jax.grad(fun))


def test_residuals_are_saved_in_half():
    def fun(w):
        return jnp.sum(jax.nn.gelu(jax.nn.gelu(X @ w) @ w) @ w)

    _, pullback = jax.vjp(half(fun), W)
    saved = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == X.shape]
    assert saved and {leaf.dtype.name for leaf in saved} <= {"bfloat16", "bool"}


def test_inputs_of_a_checkpoint_are_saved_in_half():
    def fun(w):
        block = jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)
        return jnp.sum(block(jnp.cumsum(X @ w, 0)))

    _, pullback = jax.vjp(half(fun), W)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(pullback) if leaf.shape == X.shape} == {"bfloat16"}


def test_calling_the_function_elsewhere_changes_no_bit_of_its_gradients():
    fun = half(network)
    expected = jax.grad(fun)(W)
    fun(W)
    assert jnp.array_equal(jax.grad(fun)(W), expected)

    def with_evaluation(w):
        return fun(w) + 0 * jax.lax.stop_gradient(fun(w))

    assert jnp.array_equal(jax.grad(with_evaluation)(W), expected)
    assert cosine(jax.grad(half(lambda w: network(w) + 0 * jax.lax.stop_gradient(network(w))))(W), expected) > 0.9999


def test_a_region_around_a_jitted_rule_applies_to_its_backward_pass():
    @jax.custom_vjp
    def layer(x, w):
        return jnp.exp(x @ w)

    layer.defvjp(lambda x, w: (layer(x, w), (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))
    jitted = jax.jit(layer)

    def fun(w):
        h = jitted(X, w)
        with jaxmp.precision("float32"):
            return jnp.sum(jitted(h, w))

    assert sorted(products(jax.grad(half(fun)), W)) == ["bfloat16"] * 3 + ["float32"] * 3


def test_a_rule_may_keep_a_part_in_float32():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def backward(residuals, g):
        x, w = residuals
        return half(lambda g: g @ w.T, "float32")(g), x.T @ g

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    gradient = jax.grad(half(lambda x, w: jnp.sum(product(jnp.sin(x), w) @ w)), (0, 1))
    assert sorted(products(gradient, X, W)) == ["bfloat16"] * 5 + ["float32"]


def test_a_custom_vjp_receives_symbolic_zeros():
    perturbed, zeros = [], []

    @jax.custom_vjp
    def product(x, w):
        return x @ w, x

    def forward(x, w):
        perturbed.append((x.perturbed, w.perturbed))
        return (x.value @ w.value, x.value), (x.value, w.value)

    def backward(residuals, cotangents):
        zeros.append([isinstance(ct, jax.custom_derivatives.SymbolicZero) for ct in cotangents])
        x, w = residuals
        return cotangents[0] @ w.T, x.T @ cotangents[0]

    product.defvjp(forward, backward, symbolic_zeros=True)
    gradient = jax.grad(half(lambda w: jnp.sum(product(X, w)[0])))(W)
    assert (False, True) in perturbed and [False, True] in zeros
    assert cosine(gradient, jax.grad(lambda w: jnp.sum(X @ w))(W)) > 0.9999


def test_a_rule_may_save_python_values():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def backward(residuals, g):
        x, w, scale, wanted = residuals
        return scale * (g @ w.T), x.T @ g if wanted else None

    product.defvjp(lambda x, w: (x @ w, (x, w, 2.0, True)), backward)
    for transform in (lambda f: f, jax.jit):
        gradient = transform(jax.grad(half(lambda w: jnp.sum(product(X, w)))))(W)
        assert cosine(gradient, jax.grad(lambda w: jnp.sum(X @ w))(W)) > 0.9999


def test_the_gradient_of_one_example_is_half_both_ways():
    def fun(w):
        return jnp.sum(jnp.tanh(X[0] @ w))

    assert products(jax.grad(half(fun)), W) == products(half(jax.grad(fun)), W) == ["bfloat16"] * 2


LIMITS = {
    "clip": lambda h: jnp.clip(h, -0.3, 0.3),
    "maximum of two": lambda h: jnp.maximum(h, 0.3 * h[::-1]),
    "a learned bound": lambda h: jnp.minimum(h, jnp.mean(jnp.abs(h), -1, keepdims=True)),
    "max": lambda h: h + jnp.max(h, -1, keepdims=True),
}


def test_limits_of_float32_values_pass_the_right_gradient():
    def loss(w, limit):
        return jnp.mean((limit(layer_norm(X @ w)) @ W) ** 2)

    def gradients(w, limit, policy):
        fun = functools.partial(loss, limit=limit)
        return [way(w) for way in (jax.grad(fun), jax.grad(half(fun, policy)), half(jax.grad(fun), policy))]

    results = compiled(lambda w: {name: gradients(w, LIMITS[name], policy) for name, policy in in_turn(LIMITS)})(W)
    for name, (expected, *half_gradients) in results.items():
        assert min(cosine(gradient, expected) for gradient in half_gradients) > 0.995, name


@pytest.mark.parametrize("is_rule_first", [False, True])
def test_a_jitted_function_inside_and_outside_of_a_rule_has_two_programs(is_rule_first):
    scale = jax.jit(lambda b, y: b * y)

    @jax.custom_jvp
    def by_rule(b, y):
        return scale(b, y)

    @by_rule.defjvp
    def _(primals, tangents):
        (b, y), (of_b, of_y) = primals, tangents
        return scale(b, y), scale(b, of_y) + of_b * y

    def fun(b, w, x):
        y = x @ w
        first, second = (by_rule, scale)[:: 1 if is_rule_first else -1]
        return jnp.sum((first(b, y) + second(b, y)) @ w)

    def total(run):
        return lambda b: jnp.sum(jax.vmap(jax.jit(run), (None, None, 0))(b, W, jnp.tile(X, (250, 1))))

    result, expected = compiled(lambda b: [jax.grad(total(run))(b) for run in (half(fun), fun)])(concrete.ones(8))
    assert jnp.linalg.norm(result - expected) < 0.02 * jnp.linalg.norm(expected)


def test_a_jitted_function_has_a_program_for_each_dtype_of_its_operands():
    """Differentiate ``clip`` for float32 operands in a loop, and for half ones later."""
    w = normal(2, 8, 8, scale=0.3)

    def turns(body, start):
        return jax.lax.scan(lambda c, _: (body(c), None), start, None, length=3)[0]

    def loss(w):
        y = turns(lambda c: jnp.tanh(c @ w), X)
        clipped = jnp.clip(turns(lambda c: jnp.clip(jnp.tanh(c) + 0.5 * c, -3, 3), y), -3, 3)
        return jnp.sum(clipped + jnp.clip(jax.nn.softmax(y @ X.T) @ X, -3, 3))

    result, expected = compiled(lambda w: (half(jax.grad(loss))(w), jax.grad(loss)(w)))(w)
    assert jnp.linalg.norm(result - expected) < 0.02 * jnp.linalg.norm(expected)
