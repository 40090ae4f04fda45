"""Carries that add up small terms, and carries that do not change, are float32."""

from __future__ import annotations

import contextlib
import functools

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_tools import compiled, half, in_turn, normal

import jaxmp

TURNS = 200
X, B = normal(0, 8, 8), concrete.array(np.linspace(-1, 1, 8))
PARAMS = {"w": normal(1, 8, 8, scale=0.3), "t": normal(2, 8, 8, scale=0.3), "dt": jnp.float32(1 / TURNS)}
XS = normal(3, TURNS, 8, 8)
SPANS = concrete.array(np.linspace(0.5, 2, 8))  # one for each example
WITHIN = {"mixed_bfloat16": 0.02, "mixed_float16": 0.003}


def turns(body, *start, xs=None):
    """Return the last carry of a scan."""
    init = start[0] if len(start) == 1 else start
    return jax.lax.scan(lambda c, x: (body(c, x), None), init, xs, length=TURNS)[0]


def layer(p, h, w="w"):
    return jnp.tanh(h @ p[w] + B)


def error(w, x):
    return jnp.sum((jnp.tanh(x @ w) - jnp.sin(x)) ** 2)


def off(result, expected):
    """Return the relative L2 error of a tree of arrays."""
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    parts = [(np.ravel(np.float64(a)), np.ravel(np.float64(b))) for a, b in pairs]
    a, b = (np.concatenate(side) for side in zip(*parts, strict=True))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def all_hold(runs, args, within):
    """Check that all functions have the results and gradients of the last one."""

    def with_gradient(run):
        return jax.grad(lambda *args: (jnp.mean((out := run(*args)) ** 2), out), has_aux=True)

    *pairs, expected = compiled(lambda *args: [with_gradient(run)(*args) for run in runs])(*args)
    for gradient, result in pairs:
        assert off(result, expected[1]) < within
        assert off(gradient, expected[0]) < within


def hold(fun, policy):
    """Check that autocast keeps the results and the gradients of a function."""
    all_hold([half(fun, policy), fun], (PARAMS,), WITHIN[policy])


@functools.cache
def rows_of_plan(fun):
    return jaxmp.cast_plan(fun, "mixed_bfloat16")(PARAMS).rows


def dtypes_of(name, fun, overrides=None):
    rows = jaxmp.cast_plan(fun, "mixed_bfloat16", overrides)(PARAMS).rows if overrides else rows_of_plan(fun)
    return [row.result for row in rows if row.primitive == name]


# -- sums ------------------------------------------------------------------------------------------------------------


def in_layers(inner):
    """Return a scan of two layers that apply ``inner`` to the result of a product."""
    return lambda p: jax.lax.scan(lambda h, w: (h + inner(jnp.tanh(h @ w)), None), X, jnp.stack([p["w"], p["t"]]))[0]


# A product reads each of these sums, but no product lies on the cycle of its carry.
SUMS = {
    "a mean of params": lambda p: turns(lambda s, _: 0.999 * s + 0.01 * p["t"], jnp.zeros((8, 8))) @ p["w"],
    "a masked sum": lambda p: turns(lambda s, x: jnp.where(x > -1, s + 0.01 * x * x, s), 0 * X, xs=XS) @ p["w"],
    "read in each turn": lambda p: jax.lax.scan(
        lambda s, x: (0.99 * s + 0.01 * x * x, s @ p["w"]), jnp.zeros((8, 8)), XS
    )[1].mean(0),
    "decayed in each layer": in_layers(
        lambda u: turns(lambda s, x: (a := jax.nn.sigmoid(u + 5)) * s + (1 - a) * jnp.abs(x), 0 * X, xs=XS)
    ),
    "in a loop in each layer": in_layers(
        lambda u: turns(lambda s, _: s + turns(lambda s, x: s + 1e-4 * jnp.abs(x) * u, 0 * X, xs=XS), 0 * X)
    ),
}


@pytest.mark.parametrize("case", SUMS)
def test_an_accumulating_carry_is_float32_even_if_a_product_reads_it(case):
    layers = 1 if case.endswith("in each layer") else 0  # the carry of the layers is a half stream
    assert {carries.partition(",")[0] for carries in dtypes_of("scan", SUMS[case])[layers:]} == {"float32"}


def test_layers_around_a_sum_stay_half():
    """The residual stream passes through products, and then through the sum."""
    layers = in_layers(lambda u: turns(lambda s, x: s + 0.01 * jnp.abs(x) * u, 0 * X, xs=XS))
    assert sorted(dtypes_of("scan", layers)) == ["bfloat16", "float32"]
    assert set(dtypes_of("dot_general", layers)) == {"bfloat16"}


# -- steps in time ---------------------------------------------------------------------------------------------------


def gated(h, w):
    return (z := jax.nn.sigmoid(h @ w - 5)) * B - (1 - z) * h


STEPS = {
    "Euler": lambda p: turns(lambda h, _: h + layer(p, h) / TURNS, X),
    "a leaky neuron": lambda p: turns(lambda h, x: 0.99 * h + 0.01 * jnp.tanh(h @ p["w"] + x), 0 * X, xs=XS),
    "Heun's method": lambda p: turns(
        lambda h, dt: h + dt / 2 * ((k := layer(p, h)) + layer(p, h + dt * k)),
        X,
        xs=p["dt"] * jnp.linspace(SPANS, SPANS[::-1], TURNS)[..., None],
    ),
    "a time for each mapped example": lambda p: jax.vmap(
        lambda h, dt: turns(lambda h, _: h + dt * layer(p, h), h),
    )(X, p["dt"] * SPANS),
    "couplings": lambda p: turns(
        lambda c, _: (c[1], c[0] * jnp.exp((s := 0.05 * layer(p, jnp.tile(c[1], 2)))[:, :4]) + s[:, 4:]),
        X[:, :4],
        X[:, 4:],
    )[0],
    "minibatches": lambda p: X @ turns(lambda w, x: w - p["dt"] * jax.grad(error)(w, x), p["w"], xs=XS),
    "minibatches by number": lambda p: (
        X @ jax.lax.fori_loop(0, TURNS, lambda n, w: w - p["dt"] * jax.grad(error)(w, XS[n]), p["w"])
    ),
    "a rate that is carried": lambda p: (
        X @ turns(lambda c, x: (c[0] - c[1] * jax.grad(error)(c[0], x), 0.99 * c[1]), p["w"], p["dt"], xs=XS)[0]
    ),
    # The scanned vector `u` differs in each iteration, but that does not make `w` the weight of a layer.
    "weights scaled by an input": lambda p: turns(
        lambda h, u: h + p["dt"] * layer({"w": p["w"] * jnp.cos(u)}, h), X, xs=XS[:, 0]
    ),
    "attention": lambda p: turns(lambda h, _: h + p["dt"] * (jax.nn.softmax(h @ h.T) @ h), X),
    "weights of a call": lambda p: turns(lambda h, _: gated(*jax.jit(lambda h, w: (-h, -w))(h, p["w"])), X),
    "added in place, in a checkpoint": lambda p: turns(
        jax.checkpoint(lambda h, _: h.at[1:].add(p["dt"] * layer(p, h)[1:])), X
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_in_time_are_added_in_float32(case):
    assert {*dtypes_of("scan", STEPS[case])[0].split(", ")} - {"int32"} == {"float32"}
    assert set(dtypes_of("dot_general", STEPS[case])) == {"bfloat16"}


FORWARD = {
    "a loop of unknown length": lambda p: jax.lax.fori_loop(
        0, jnp.int32(TURNS), lambda _, h: h + p["dt"] * layer(p, h), X
    ),
    "a discount": lambda p: turns(lambda v, _: X[:, :1] + 0.993 * jax.nn.softmax(p["w"]) @ v, 0 * X[:, :1]),
}


@pytest.mark.parametrize("case", FORWARD)
def test_autocast_loses_no_step_in_time(case):
    runs = half(FORWARD[case], "mixed_bfloat16"), FORWARD[case]
    assert off(*compiled(lambda p: [run(p) for run in runs])(PARAMS)) < 0.02


OPTIMIZERS = {"momentum": optax.sgd(1e-3, 0.9), "means": optax.rmsprop(1e-3, 0.9)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_params_and_optimizer_state_in_a_loop_are_float32(name):
    """The products lie on the cycle of the params, but not on that of the state."""

    def descended(p):
        def turn(carry, x):
            updates, state = OPTIMIZERS[name].update(jax.grad(error)(carry[0], x), carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(turn, (p["w"], OPTIMIZERS[name].init(p["w"])), jnp.tile(XS, (4, 1, 1)))[0]

    assert dtypes_of("scan", descended) == ["float32, float32"]
    assert set(dtypes_of("dot_general", descended)) == {"bfloat16"}
    runs = half(descended, "mixed_bfloat16"), descended
    (weights, state), (expected, full) = compiled(lambda p: [run(p) for run in runs])(PARAMS)
    assert off(weights - PARAMS["w"], expected - PARAMS["w"]) < 0.01
    if name != "momentum":  # the terms of a momentum change their sign, so its relative error is large
        assert off(state, full) < 0.01


def test_autocast_inside_of_vmap_handles_mapped_rates():
    def train(p, rate):
        return turns(lambda w, x: w - rate * jax.grad(error)(w, x), p["w"], xs=XS) - p["w"]

    rates = PARAMS["dt"] * SPANS
    runs = [jax.vmap(run, (None, 0)) for run in (jaxmp.autocast(train, "mixed_bfloat16"), train)]
    result, expected = compiled(lambda *args: [run(*args) for run in runs])(PARAMS, rates)
    assert off(result, expected) < 0.02


class Ode(nn.Module):
    @nn.compact
    def __call__(self, h):
        def turn(f, h, _):
            return h + jnp.tanh(f(h)).astype(h.dtype) / TURNS, None

        f = nn.Dense(8)
        loop = nn.scan(turn, variable_broadcast="params", split_rngs={"params": False}, length=TURNS)
        return nn.Dense(3)(loop(f, h, None)[0])


@pytest.mark.once
def test_an_integrator_of_linen_layers_adds_in_float32():
    model, policy = Ode(), "mixed_float16"
    models = (jaxmp.linen.apply_policy(model, policy), jaxmp.linen.autocast(model, policy), model)
    all_hold([under.apply for under in models], (jax.jit(model.init)(jax.random.key(0), X), X), WITHIN[policy])


# -- layers, regions and overrides -----------------------------------------------------------------------------------


def stacked(body, xs=None):
    """Return a scan over 12 layers, each with its own weights."""
    return lambda p: jax.lax.scan(
        lambda h, x: (body({**p, "w": x[0]}, h, x[1]), None), X, (jnp.stack([p["w"]] * 12), xs), length=12
    )[0]


LAYERS = {
    "masks of numbers": stacked(lambda p, h, m: h + m.astype(jnp.float32)[:, None] * layer(p, h), XS[:12, :, 0] > 0),
    "a mask that each layer makes": stacked(lambda p, h, _: h + jnp.tril(jnp.ones((8, 8))) @ layer(p, h)),
    "layers by their number": lambda p: jax.lax.fori_loop(
        0, 12, lambda n, h: h + layer({"w": jnp.stack([p["w"]] * 12)[n]}, h), X
    ),
    "gelu": lambda p: jax.nn.gelu(jax.nn.gelu(X @ p["w"]) @ p["w"]) @ p["w"],
    "a gated layer of each microbatch": lambda p: jax.lax.map(
        lambda x: (x @ p["w"] + p["dt"] * layer(p, x)) @ p["w"], XS
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_residual_streams_of_layers_are_half(case):
    assert set(dtypes_of("add", LAYERS[case])) - {"int32"} == {"bfloat16"}


def test_layers_with_a_shared_output_layer_stay_half():
    """In deep supervision, each layer also feeds a shared output layer."""

    def layers(p):
        def body(carry, w):
            h, loss = carry
            h = h + jnp.tanh(h @ w)
            layer_loss = jnp.mean(jnp.tanh(h @ p["t"]) ** 2)
            return (h, loss + layer_loss), layer_loss

        return jax.lax.scan(body, (X, jnp.float32(0)), jnp.stack([p["w"]] * 12))

    assert dtypes_of("scan", layers)[0].split(", ")[:2] == ["bfloat16", "float32"]


def memory(p):
    """Return the outputs of a memory that each iteration updates by the delta rule."""
    keys, values, gates = (jnp.tanh(XS[:, 0] @ w) for w in (p["w"], p["t"], 0.1 * p["w"].T))

    def write(s, x):
        key, value, gate = x
        s = s + jnp.outer(gate * key, value - key @ s)
        return s, key @ s

    return jax.lax.scan(write, jnp.zeros((8, 8)), (keys, values, gates))[1]


def test_a_memory_with_a_product_on_its_cycle_is_carried_in_float32():
    assert dtypes_of("scan", memory) == ["float32, float32"]


WAYS_TO_ASK = {  # a context around the addition, and overrides
    "a region": (lambda level: jaxmp.precision(level), lambda level: None),
    "a scope": (lambda level: jax.named_scope("step"), lambda level: {"**/step": level}),
    "an operation": (lambda level: contextlib.nullcontext(), lambda level: {"primitive:add": level}),
}


@pytest.mark.parametrize("way", WAYS_TO_ASK)
def test_a_carry_has_the_dtype_requested_for_its_sum(way):
    around, overrides = WAYS_TO_ASK[way]

    def added(h, step, level):
        with around(level) if level else contextlib.nullcontext():
            return h + step

    def carried(make, level):
        fun = make(lambda p, h, _: added(h, layer(p, h), level))
        return dtypes_of("scan", fun, level and overrides(level))

    def integrated(body):
        return lambda p: turns(lambda h, _: body(p, h, None), X)

    assert [carried(stacked, level) for level in (None, "float32")] == [["bfloat16"], ["float32"]]
    assert [carried(integrated, level) for level in (None, "half")] == [["float32"], ["bfloat16"]]


# -- carries that do not change --------------------------------------------------------------------------------------


def adds(c, _):
    total, passed = c
    return 0.999 * total + 0.01 * passed, passed


def inner(c, x):
    return jax.lax.scan(lambda c, x: (adds(c, x), None), c, None, length=3)[0]


PASSED_ON = {
    "a param": lambda p: turns(jax.checkpoint(adds), jnp.zeros((8, 8)), p["t"])[0] @ p["w"],
    "in a loop inside": lambda p: turns(jax.checkpoint(inner), 0 * X, X @ p["w"])[0] @ p["w"],
    "and returned, in a jit": lambda p: sum(turns(jax.jit(adds), 0 * X, X @ p["w"])) @ p["w"],
}


@pytest.mark.parametrize(("case", "policy"), in_turn(PASSED_ON))
def test_gradients_of_a_carry_that_no_iteration_changes_are_summed_in_float32(case, policy):
    hold(PASSED_ON[case], policy)


def test_a_carry_that_no_iteration_changes_is_returned_as_it_was():
    @jax.checkpoint  # otherwise JAX itself takes the carry out of the loop
    def added(c, _):
        first, passed, last = c
        return first + passed, passed, last - passed

    def fun(x):
        return turns(added, jnp.zeros((8, 8)), x @ x, jnp.zeros((8, 8)))[1]

    np.testing.assert_array_equal(jax.jit(half(fun))(X), jax.jit(half(lambda x: x @ x))(X))


@pytest.mark.slow("compiles a loop and its gradient, in half and in float32, for each way of adding")
def test_sums_in_loops_and_their_gradients_match_float32():
    for case, policy in in_turn({**SUMS, **STEPS}):
        hold({**SUMS, **STEPS}[case], policy)


@jax.custom_vjp
def by_vjp(w):
    return w


by_vjp.defvjp(lambda w: (w, None), lambda _, cotangent: (0.5 * cotangent,))


@jax.custom_jvp
def by_jvp(w):
    return w


by_jvp.defjvp(lambda primals, tangents: (primals[0], 0.5 * tangents[0]))


@pytest.mark.parametrize(("halved", "around"), [(by_vjp, jax.checkpoint), (by_jvp, jax.jit)])
def test_a_carry_behind_an_identity_with_a_derivative_rule_counts_as_changed(halved, around):
    def fun(p):
        return turns(around(lambda c, _: (jnp.tanh(c[0] @ halved(c[1]) + B), halved(c[1]))), X, p["w"])[0] @ p["t"]

    hold(fun, "mixed_bfloat16")


def test_the_coefficients_of_runge_kutta_stages_are_not_weights_of_layers():
    """diffrax picks a row of the tableau by a counter, which vmap turns into a batch."""

    def solve(tableau, w, y):
        def stage(carry):
            n, slopes = carry
            at = y_of_turn[0] + (tableau[n] @ slopes) / TURNS
            return n + 1, slopes.at[n].set(jnp.tanh(at @ w))

        def turn(y, _):
            y_of_turn[0] = y
            first = jnp.where(y[0] > 1e9, 1, 0)
            _, slopes = jax.lax.while_loop(lambda carry: carry[0] < 2, stage, (first, jnp.zeros((2, 8))))
            return y + slopes.mean(0) / TURNS, None

        y_of_turn = [y]
        return jax.lax.scan(turn, y, length=TURNS)[0]

    tableau = jnp.array([[0.0, 0.0], [1.0, 0.0]])
    program = jax.make_jaxpr(jax.vmap(half(solve, "mixed_bfloat16"), (None, None, 0)))(tableau, PARAMS["w"], X)
    scans = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert [eqn.outvars[0].aval.dtype for eqn in scans] == [jnp.float32]
