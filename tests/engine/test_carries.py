"""What a loop adds to its carry in small parts, and what it passes on unchanged: nothing is lost to half precision."""

from __future__ import annotations

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_tools import HALVES, half, in_turn, normal
from flax import nnx

import jaxmp

TURNS = 200
X, B = normal(0, 4, 8), jnp.linspace(-1, 1, 8)
PARAMS = {"w": normal(1, 8, 8, scale=0.3), "t": normal(2, 8, 8, scale=0.3), "dt": jnp.float32(1 / TURNS)}
XS, TIMES = normal(3, TURNS, 4, 8), jnp.linspace(0, 1, TURNS + 1)
SPANS, RATES, MASKS = jnp.linspace(0.5, 2, 4), jnp.linspace(1, 4, 8), XS[..., 0] > 0  # of examples, features, turns
WITHIN = {"mixed_bfloat16": 0.02, "mixed_float16": 0.003}


def turns(body, *start, xs=None):
    """The last carry of a scan, or its parts."""
    init = start[0] if len(start) == 1 else start
    return jax.lax.scan(lambda c, x: (body(c, x), None), init, xs, length=TURNS)[0]


def layer(p, h, w="w"):
    return jnp.tanh(h @ p[w] + B)


def off(result, expected):
    """How far off a tree of arrays is, in relative L2."""
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    parts = [(np.ravel(np.float64(a)), np.ravel(np.float64(b))) for a, b in pairs]
    a, b = (np.concatenate(side) for side in zip(*parts, strict=True))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def model_of(fun):
    class Model(nn.Module):
        @nn.compact
        def __call__(self):
            return fun({name: self.param(name, lambda _, p=p: p) for name, p in PARAMS.items()})

    return Model()


def hold(fun, policy):
    """The results and the gradients of all params, by autocast and by a policy, are as those of float32."""
    model = jaxmp.linen.apply_policy(model_of(fun), policy)
    for run in (half(fun, policy), lambda p: model.apply({"params": p})):
        assert off(run(PARAMS), fun(PARAMS)) < WITHIN[policy]
        given, expected = (jax.grad(lambda p, f=f: jnp.mean(f(p) ** 2))(PARAMS) for f in (run, fun))
        assert off(given, expected) < WITHIN[policy]


def in_layers(inner):
    """Two scanned layers with ``inner`` of what a product makes in each."""
    return lambda p: jax.lax.scan(lambda h, w: (h + inner(jnp.tanh(h @ w)), None), X, jnp.stack([p["w"], p["t"]]))[0]


# Each is read by a product, and no product lies on its way round.
SUMS = {
    "a sum of params": lambda p: turns(lambda s, _: s + 0.01 * p["t"], jnp.zeros((8, 8))) @ p["w"],
    "a mean of params": lambda p: turns(lambda s, _: 0.999 * s + 0.01 * p["t"], jnp.zeros((8, 8))) @ p["w"],
    "a sum of arguments": lambda p: turns(lambda s, x: s + 0.01 * x * x, 0 * X, xs=XS) @ p["w"],
    "a masked sum": lambda p: turns(lambda s, x: jnp.where(x > -1, s + 0.01 * x * x, s), 0 * X, xs=XS) @ p["w"],
    "read in each turn": lambda p: jax.lax.scan(
        lambda s, x: (0.99 * s + 0.01 * x * x, s @ p["w"]), jnp.zeros((4, 8)), XS
    )[1].mean(0),
    "fori_loop": lambda p: jax.lax.fori_loop(0, TURNS, lambda n, s: s + 0.01 * XS[n] ** 2, 0 * X) @ p["w"],
    "in each layer": in_layers(lambda u: turns(lambda s, x: s + 0.01 * jnp.abs(x) * u, 0 * X, xs=XS)),
    "decayed in each layer": in_layers(
        lambda u: turns(lambda s, x: (a := jax.nn.sigmoid(u + 5)) * s + (1 - a) * jnp.abs(x), 0 * X, xs=XS)
    ),
    "in a loop in each layer": in_layers(
        lambda u: turns(lambda s, _: s + turns(lambda s, x: s + 1e-4 * jnp.abs(x) * u, 0 * X, xs=XS), 0 * X)
    ),
}


@pytest.mark.parametrize(("case", "policy"), in_turn(SUMS))
def test_what_adds_up_is_float32_although_a_product_reads_it(case, policy):
    hold(SUMS[case], policy)


def test_layers_round_a_sum_stay_half():
    """The stream of the layers goes through the sum, and comes to it by products."""
    rows = jaxmp.cast_plan(SUMS["in each layer"], "mixed_bfloat16")(PARAMS).rows
    assert sorted(row.result for row in rows if row.primitive == "scan") == ["bfloat16", "float32"]
    assert {row.operands for row in rows if row.primitive == "dot_general"} == {("bfloat16", "bfloat16")}


def error(w, x):
    return jnp.sum((jnp.tanh(x @ w) - jnp.sin(x)) ** 2)


def scanned(body, p, h):
    """``h`` after a turn for each of two weights."""
    return jax.lax.scan(lambda h, w: (body(w, h), None), h, jnp.stack([p["w"], p["t"]]))[0]


def gated(h, w):
    return (z := jax.nn.sigmoid(h @ w - 5)) * B - (1 - z) * h


def cosine(time):
    """The rate of a schedule, 1 at first and 0 in the end."""
    return 0.5 * (1 + jnp.cos(jnp.pi * time**2))


def descended(p, rate, xs):
    """``X @ w`` after a step for each minibatch."""
    return X @ turns(lambda w, x: w - rate(x[0]) * jax.grad(error)(w, x[1]), p["w"], xs=(xs, XS))


STEPS = {
    "Euler": lambda p: turns(lambda h, _: h + layer(p, h) / TURNS, X),
    "a midpoint": lambda p: turns(lambda h, _: h + (d := 1 / TURNS) * layer(p, h + d / 2 * layer(p, h)), X),
    "minus a gradient": lambda p: turns(
        lambda h, _: h - 0.005 * jax.grad(lambda h: jnp.sum((h @ p["w"] - X) ** 2))(h), 0 * X
    ),
    "a leaky neuron": lambda p: turns(lambda h, x: 0.99 * h + 0.01 * jnp.tanh(h @ p["w"] + x), 0 * X, xs=XS),
    "towards a layer": lambda p: turns(lambda h, _: h + (layer(p, h) - h) / TURNS, X),
    "two states": lambda p: turns(lambda c, _: (c[0] + 0.005 * c[1], c[1] - 0.005 * layer(p, c[0], "t")), X, X + 1)[0],
    "an activation in between": lambda p: turns(lambda h, _: jax.nn.relu(h + 0.005 * layer(p, h)), X),
    "an argument": lambda p: turns(lambda h, _: h + p["dt"] * layer(p, h), X),
    "times": lambda p: turns(lambda h, t: h + (t[1] - t[0]) * layer(p, h), X, xs=(TIMES[:-1], TIMES[1:])),
    "durations": lambda p: turns(lambda h, dt: h + dt * layer(p, h), X, xs=jnp.diff(TIMES)),
    "a time for each example": lambda p: turns(lambda h, _: h + (p["dt"] * SPANS)[:, None] * layer(p, h), X),
    "times of examples": lambda p: turns(
        lambda h, dt: h + dt[:, None] * layer(p, h), X, xs=p["dt"] * jnp.linspace(SPANS, SPANS[::-1], TURNS)
    ),
    "Heun's method": lambda p: turns(
        lambda h, dt: h + dt / 2 * ((k := layer(p, h)) + layer(p, h + dt * k)),
        X,
        xs=p["dt"] * jnp.linspace(SPANS, SPANS[::-1], TURNS)[..., None],
    ),
    "a time for each mapped example": lambda p: jax.vmap(
        lambda h, dt: turns(lambda h, _: h + dt * layer(p, h), h),
    )(X, p["dt"] * SPANS),
    "a bounded step": lambda p: turns(lambda h, _: h + jnp.clip(0.005 * layer(p, h), -0.1, 0.1), X),
    "a masked step": lambda p: turns(lambda h, m: h + jnp.where(m[:, None], 0.005 * layer(p, h), 0.0), X, xs=MASKS),
    "rates of decay": lambda p: turns(
        lambda h, x: (r := 1 - p["dt"] * RATES) * h + (1 - r) * jnp.tanh(h @ p["w"] + x), 0 * X, xs=XS
    ),
    "a rate for each feature": lambda p: turns(lambda h, _: h + p["dt"] * RATES * (layer(p, h) - h), X),
    "a slow decay": lambda p: turns(lambda h, _: 0.998 * h + layer(p, h / 100), X),
    "a gate": lambda p: turns(lambda h, _: h + jax.nn.sigmoid(h @ p["t"] - 5) * (layer(p, h) - h), X),
    "a step of one length": lambda p: turns(
        lambda h, _: h - 0.005 * (g := layer(p, h)) / (jnp.linalg.norm(g) + 0.1), X
    ),
    "couplings": lambda p: turns(
        lambda c, _: (c[1], c[0] * jnp.exp((s := 0.05 * layer(p, jnp.tile(c[1], 2)))[:, :4]) + s[:, 4:]),
        X[:, :4],
        X[:, 4:],
    )[0],
    "minibatches": lambda p: X @ turns(lambda w, x: w - p["dt"] * jax.grad(error)(w, x), p["w"], xs=XS),
    "rates of a schedule before the loop": lambda p: descended(p, lambda rate: rate, p["dt"] * cosine(TIMES[1:])),
    "rates of a schedule": lambda p: descended(p, lambda t: p["dt"] * cosine(t), TIMES[1:]),
    "a rate that is carried": lambda p: (
        X @ turns(lambda c, x: (c[0] - c[1] * jax.grad(error)(c[0], x), 0.99 * c[1]), p["w"], p["dt"], xs=XS)[0]
    ),
    "gradients that are bounded by their norm": lambda p: (
        X @ turns(lambda w, x: w - p["dt"] / (1 + jnp.linalg.norm(g := jax.grad(error)(w, x))) * g, p["w"], xs=XS)
    ),
    "a small number before what a step is divided by": lambda p: (
        X @ turns(lambda w, x: w - 1e-3 * (g := jax.grad(error)(w, x)) / (jnp.abs(g) + 0.1), p["w"], xs=XS)
    ),
    "a rate before factors that differ": lambda p: (
        X @ turns(lambda w, x: w - p["dt"] * (g := jax.grad(error)(w, x)) * jax.lax.rsqrt(g**2 + 1), p["w"], xs=XS)
    ),
    "added by scatter": lambda p: X @ turns(lambda w, x: w.at[:].add(-5e-3 * jax.grad(error)(w, x)), p["w"], xs=XS),
    "taken off by scatter": lambda p: (
        X @ turns(lambda w, x: w.at[:].subtract(5e-3 * jax.grad(error)(w, x)), p["w"], xs=XS)
    ),
    "minibatches by number": lambda p: (
        X @ jax.lax.fori_loop(0, TURNS, lambda n, w: w - p["dt"] * jax.grad(error)(w, XS[n]), p["w"])
    ),
    "weights of the time": lambda p: turns(
        lambda h, t: h + p["dt"] * layer({"w": p["w"] * jnp.cos(t)}, h), X, xs=TIMES[1:]
    ),
    "attention": lambda p: turns(lambda h, _: h + p["dt"] * (jax.nn.softmax(h @ h.T) @ h), X),
    "weights of a call": lambda p: turns(lambda h, _: gated(*jax.jit(lambda h, w: (-h, -w))(h, p["w"])), X),
    "added in place": lambda p: turns(lambda h, _: h.at[1:].add(p["dt"] * layer(p, h)[1:]), X),
    "factors": lambda p: turns(lambda h, _: h * (1 + p["dt"] * layer(p, h)), X),
    "the sum of a stack": lambda p: turns(lambda h, _: jnp.stack([h, p["dt"] * layer(p, h)]).sum(0), X),
    "a checkpoint": lambda p: turns(jax.checkpoint(lambda h, _: h + layer(p, h) / TURNS), X),
    "a jit": lambda p: turns(jax.jit(lambda h, _: h + layer(p, h) / TURNS), X),
}


@pytest.mark.parametrize(("case", "policy"), in_turn(STEPS))
def test_steps_in_time_are_added_in_float32(case, policy):
    hold(STEPS[case], policy)
    products = [row for row in jaxmp.cast_plan(STEPS[case], policy)(PARAMS).rows if row.primitive == "dot_general"]
    assert {row.result for row in products} == {HALVES[policy]}


OPTIMIZERS = {"momentum": optax.sgd(1e-3, 0.9), "sums": optax.adagrad(1e-2), "means": optax.rmsprop(1e-3, 0.9)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_optimizers_add_up_beside_params_in_small_steps_is_float32(name):
    """Their state reads the gradient, which reads the params: the products lie on the way round of these alone."""

    def descended(p):
        def turn(carry, x):
            updates, state = OPTIMIZERS[name].update(jax.grad(error)(carry[0], x), carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(turn, (p["w"], OPTIMIZERS[name].init(p["w"])), jnp.tile(XS, (4, 1, 1)))[0]

    rows = jaxmp.cast_plan(descended, "mixed_bfloat16")(PARAMS).rows
    assert {row.result for row in rows if row.primitive == "scan"} == {"float32, float32"}
    assert {row.result for row in rows if row.primitive == "dot_general"} == {"bfloat16"}
    (weights, state), (expected, full) = (run(PARAMS) for run in (half(descended, "mixed_bfloat16"), descended))
    assert off(weights - PARAMS["w"], expected - PARAMS["w"]) < 0.01
    if name != "momentum":  # a sum of what has another sign in each turn
        assert off(state, full) < 0.01


@pytest.mark.parametrize("case", ["an operation", "a scope", "a region", "a region of a small step"])
def test_a_step_that_is_asked_to_be_float32_is_so(case):
    scope = {"a scope": lambda: jax.named_scope("step")}.get(case, lambda: jaxmp.precision("float32"))

    def body(p, h):
        step = (1 / TURNS if "small" in case else p["dt"]) * layer(p, h)
        with scope() if case != "an operation" else contextlib.nullcontext():
            return h + step

    def fun(p):
        return turns(lambda h, _: body(p, h), X)

    overrides = {"an operation": {"primitive:add": "float32"}, "a scope": {"**/step": "float32"}}.get(case)
    assert off(jaxmp.autocast(fun, "mixed_bfloat16", overrides)(PARAMS), fun(PARAMS)) < 0.02


def test_a_sum_with_a_product_on_its_way_round_is_carried_in_float32_if_that_is_asked():
    """A memory that is written to by the delta rule: its products take what each turn has of its own."""

    def memory(p):
        keys, values, gates = (jnp.tanh(XS[:, 0] @ w) for w in (p["w"], p["t"], 0.1 * p["w"].T))

        def write(s, x):
            key, value, gate = x
            s = s + jnp.outer(gate * key, value - key @ s)
            return s, key @ s

        return jax.lax.scan(write, jnp.zeros((8, 8)), (keys, values, gates))[1]

    exceptions = {None: "float32, bfloat16", "add": "float32, bfloat16"}
    for name, carried in exceptions.items():
        overrides = name and {f"primitive:{name}": "float32"}
        rows = jaxmp.cast_plan(memory, "mixed_bfloat16", overrides)(PARAMS).rows
        assert [row.result for row in rows if row.primitive == "scan"] == [carried]


@pytest.mark.parametrize("overrides", [None, {"primitive:sub": "float32"}], ids=["a region", "an operation"])
def test_params_take_large_steps_in_float32_where_these_are_asked_to_be_so(overrides):
    def turn(w, x):
        step = 0.1 * jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - jnp.sin(x)) ** 2))(w)
        with contextlib.nullcontext() if overrides else jaxmp.precision("float32"):
            return w - step

    def fun(p):
        return turns(turn, p["w"], xs=XS) - p["w"]

    assert off(jaxmp.autocast(fun, "mixed_bfloat16", overrides)(PARAMS), fun(PARAMS)) < 0.02


def test_rates_that_are_mapped_over_are_known_by_autocast_inside_of_vmap():
    def train(p, rate):
        return turns(lambda w, x: w - rate * jax.grad(error)(w, x), p["w"], xs=XS) - p["w"]

    rates = PARAMS["dt"] * SPANS
    given, expected = (jax.vmap(f, (None, 0))(PARAMS, rates) for f in (jaxmp.autocast(train, "mixed_bfloat16"), train))
    assert off(given, expected) < 0.02


FORWARD = {
    "a loop of turns that are not known": lambda p: jax.lax.fori_loop(
        0, jnp.int32(TURNS), lambda _, h: h + p["dt"] * layer(p, h), X
    ),
    "weights": lambda p: X @ turns(lambda w, _: w - 0.1 * jax.grad(lambda w: jnp.mean((X @ w - X) ** 2))(w), p["w"]),
    "a discount": lambda p: turns(lambda v, _: X[:, :1] + 0.993 * jax.nn.softmax(p["w"][:4, :4]) @ v, 0 * X[:, :1]),
}


@pytest.mark.parametrize("case", FORWARD)
def test_no_step_in_time_is_lost(case):
    assert off(half(FORWARD[case], "mixed_bfloat16")(PARAMS), FORWARD[case](PARAMS)) < 0.02


def stacked(body, xs=None):
    """The last of 12 layers that a scan runs over, each with weights of its own."""
    return lambda p: jax.lax.scan(
        lambda h, x: (body({**p, "w": x[0]}, h, x[1]), None), X, (jnp.stack([p["w"]] * 12), xs), length=12
    )[0]


LAYERS = {
    "a residual stream": stacked(lambda p, h, _: h + layer(p, h)),
    "masked layers": stacked(lambda p, h, m: h + jnp.where(m[:, None], layer(p, h), 0.0), MASKS[:12]),
    "masks of numbers": stacked(lambda p, h, m: h + m.astype(jnp.float32)[:, None] * layer(p, h), MASKS[:12]),
    "a scale for each feature": stacked(lambda p, h, s: h + s * layer(p, h), XS[:12, 0]),
    "a mask that each layer makes": stacked(lambda p, h, _: h + jnp.tril(jnp.ones((4, 4))) @ layer(p, h)),
    "half of each layer": stacked(lambda p, h, _: 0.5 * h + 0.5 * layer(p, h)),
    "layers by their number": lambda p: jax.lax.fori_loop(
        0, 12, lambda n, h: h + layer({"w": jnp.stack([p["w"]] * 12)[n]}, h), X
    ),
    "gelu": lambda p: jax.nn.gelu(jax.nn.gelu(X @ p["w"]) @ p["w"]) @ p["w"],
    "a gated layer of each microbatch": lambda p: jax.lax.map(lambda x: (x + p["dt"] * layer(p, x)) @ p["w"], XS),
    "a low-rank update": lambda p: (X @ p["w"] + 0.03 * ((X @ p["t"][:, :2]) @ p["w"][:2])) @ p["w"],
    "a fifth and a half": lambda p: (0.5 * (h := X @ p["t"]) + 0.2 * layer(p, h)) @ p["w"],
    "a scaled product": lambda p: (0.04 * (X @ p["w"]) + B) @ p["w"],
    "a tenth": lambda p: ((h := X @ p["t"]) + 0.1 * layer(p, h)) @ p["w"],
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_are_no_small_steps(case):
    plan = jaxmp.cast_plan(LAYERS[case], "mixed_bfloat16")(PARAMS)
    assert {row.result for row in plan.rows if row.primitive == "add"} - {"int32"} == {"bfloat16"}


@pytest.mark.parametrize("is_carried", [False, True])
def test_layers_with_an_output_layer_that_they_share_stay_half(is_carried):
    """Deep supervision: what it makes is not what the layers go on with."""

    def layers(p):
        def body(carry, w):
            h, loss = carry
            h = h + jnp.tanh(h @ w)
            own = jnp.mean(jnp.tanh(h @ p["t"]) ** 2)
            return (h, loss + own if is_carried else loss), own

        return jax.lax.scan(body, (X, jnp.float32(0)), jnp.stack([p["w"]] * 12))

    rows = jaxmp.cast_plan(layers, "mixed_bfloat16")(PARAMS).rows
    carried = next(row.result for row in rows if row.primitive == "scan")
    assert carried.split(", ")[:2] == ["bfloat16", "float32"]


class Ode(nn.Module):
    @nn.compact
    def __call__(self, h):
        def turn(f, h, _):
            return h + jnp.tanh(f(h)).astype(h.dtype) / TURNS, None

        f = nn.Dense(8)
        loop = nn.scan(turn, variable_broadcast="params", split_rngs={"params": False}, length=TURNS)
        return nn.Dense(3)(loop(f, h, None)[0])


class NnxOde(nnx.Module):
    def __init__(self, rngs):
        self.f, self.out = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, h):
        return self.out(jax.lax.fori_loop(0, TURNS, lambda _, h: h + jnp.tanh(self.f(h)).astype(h.dtype) / TURNS, h))


@pytest.mark.parametrize("policy", HALVES)
def test_an_integrator_of_layers_adds_in_float32(policy):
    model = Ode()
    params = model.init(jax.random.key(0), X)
    for under in (jaxmp.linen.apply_policy(model, policy), jaxmp.linen.autocast(model, policy)):
        assert off(under.apply(params, X), model.apply(params, X)) < WITHIN[policy]
        given, expected = (jax.grad(lambda p, m=m: jnp.mean(m.apply(p, X) ** 2))(params) for m in (under, model))
        assert off(given, expected) < WITHIN[policy]
    other = NnxOde(nnx.Rngs(0))
    for under in (jaxmp.nnx.apply_policy(other, policy), jaxmp.nnx.autocast(other, policy)):
        assert off(under(X), other(X)) < WITHIN[policy]


def adds(c, _):
    total, passed = c
    return 0.999 * total + 0.01 * passed, passed


def inner(c, x):
    return jax.lax.scan(lambda c, x: (adds(c, x), None), c, None, length=3)[0]


PASSED_ON = {
    "under checkpoint": lambda p: turns(jax.checkpoint(adds), 0 * X, X @ p["w"])[0] @ p["w"],
    "in a jit": lambda p: turns(jax.jit(adds), 0 * X, X @ p["w"])[0] @ p["w"],
    "a param": lambda p: turns(jax.checkpoint(adds), jnp.zeros((8, 8)), p["t"])[0] @ p["w"],
    "in a loop inside": lambda p: turns(jax.checkpoint(inner), 0 * X, X @ p["w"])[0] @ p["w"],
    "and returned": lambda p: sum(turns(jax.checkpoint(adds), 0 * X, X @ p["w"])) @ p["w"],
}


@jax.custom_vjp
def by_vjp(w):
    return w


by_vjp.defvjp(lambda w: (w, None), lambda _, cotangent: (0.5 * cotangent,))


@jax.custom_jvp
def by_jvp(w):
    return w


by_jvp.defjvp(lambda primals, tangents: (primals[0], 0.5 * tangents[0]))


@pytest.mark.parametrize("around", [lambda fun: fun, jax.checkpoint, jax.jit])
@pytest.mark.parametrize("halved", [by_vjp, by_jvp])
def test_an_identity_with_a_derivative_rule_is_no_passing_on(halved, around):
    def fun(p):
        return turns(around(lambda c, _: (jnp.tanh(c[0] @ halved(c[1]) + B), halved(c[1]))), X, p["w"])[0] @ p["t"]

    hold(fun, "mixed_bfloat16")


@pytest.mark.parametrize(("case", "policy"), in_turn(PASSED_ON))
def test_gradients_of_what_a_loop_passes_on_unchanged_are_summed_in_float32(case, policy):
    hold(PASSED_ON[case], policy)
