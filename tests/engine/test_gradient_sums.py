"""Gradients of params are summed in float32, however a program repeats a param."""

from __future__ import annotations

import functools
from typing import Any

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import in_turn, products
from flax import nnx
from gradient_zoo import LAYERS, MODELS, drawn, loss
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from linen_zoo import HALVES
from program_tools import half_additions, half_sums

import jaxmp
from jaxmp.program.walk import equations

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Flax's norms and cells add half and float32

# These options make compilation fast and keep every rounding of the program. They also exclude the CPU kernels of JAX
# 0.12 whose products accumulate in half.
compiled = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_allow_excess_precision": False,
        "xla_cpu_experimental_ynn_fusion_type": "",
    },
)
WAYS = ("apply_policy", "autocast")
LIMITS = {"bfloat16": 0.02, "float16": 0.003}
CASES = {**LAYERS, **MODELS}
X = concrete.ones((20, 30, 4))


def half_of_case(name: str, way: str) -> tuple[str, str]:
    """Return a half policy and its dtype, which alternate between ways and cases."""
    return list(HALVES.items())[(list(CASES).index(name) + WAYS.index(way)) % 2]


@functools.cache
def traced(name: str, way: str) -> Any:
    """Return the traced program of a case's gradients in one half dtype."""
    case, (policy, _) = CASES[name], half_of_case(name, way)
    fun = loss(case(policy=policy if way == "apply_policy" else None).apply)
    return compiled(jax.grad(jaxmp.autocast(fun, policy) if way == "autocast" else fun)).trace(*case()[1:])


@functools.cache
def float64(name: str) -> Any:
    """Return a case's gradients in float64."""
    with jax.enable_x64(True):
        apply, *arguments = CASES[name](dtype=np.float64, param_dtype=np.float64)
        return compiled(jax.grad(loss(apply)))(*arguments)


def errors(got: Any, want: Any) -> dict[str, float]:
    """Return the relative L2 error of each gradient, except gradients that are zero.

    The exact gradient of a bias of attention keys is zero, for example.
    """
    wide = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(want)}
    total = np.linalg.norm([np.linalg.norm(leaf) for leaf in wide.values()])
    pairs = zip(wide.items(), jax.tree.leaves(got), strict=True)
    return {
        name: float(np.linalg.norm(np.asarray(gradient, np.float64) - leaf) / np.linalg.norm(leaf))
        for (name, leaf), gradient in pairs
        if np.linalg.norm(leaf) > 1e-6 * total
    }


def wrong_params(got: Any, true: Any, half: str) -> set[str]:
    """Return the params whose gradient has an error above the half dtype's limit."""
    norm = np.linalg.norm
    return {
        name
        for name, value in true.items()
        if not norm(jax.device_get(got[name]) - jax.device_get(value)) <= LIMITS[half] * norm(value)
    }


# --- half_sums finds the half sums of gradients -----------------------------------------------------------------------


def sums_of(fun: Any, *args: Any) -> list[tuple[str, str, float]]:
    """Return the half sums in the gradient of ``fun``."""
    return [tuple(item) for item in half_sums(jax.make_jaxpr(jax.grad(fun))(*args))]


BY_HAND = {
    "Linen: Dense": [("reduce_sum", 600)],
    "Linen: PReLU": [("reduce_sum", 2400), ("reduce_sum", 600)],
    "Linen: nn.vmap": [("reduce_sum", 900)],
    "NNX: Embed": [("scatter-add", 600)],
    "NNX: nnx.scan": [("reduce_sum", 600)],
    "NNX: LayerNorm": [],
}


def test_half_sums_finds_the_sums_of_flax_with_half_dtypes():
    for name, sums in BY_HAND.items():
        _, half = half_of_case(name, "apply_policy")
        apply, *arguments = CASES[name](dtype=half)
        assert sums_of(loss(apply), *arguments) == [(primitive, half, terms) for primitive, terms in sums], name


def in_half(x: Any) -> Any:
    return x.astype(jnp.bfloat16)


def in_a_loop(w: Any, xs: Any, cast_outside: bool, turn: Any) -> Any:
    """Loop over ``xs`` and read ``w``, cast before the loop or inside of it."""
    outside = in_half(w) if cast_outside else w
    return jnp.sum(lax.scan(lambda state, x: (turn(state, in_half(outside), x), None), xs[0], xs)[0].astype(w.dtype))


TURNS = {
    "product": lambda state, w, x: jnp.tanh(state @ w + x),
    "bias": lambda state, w, x: jnp.tanh(state + w[0] + x),
    "checkpoint": jax.checkpoint(lambda state, w, x: jnp.tanh(state @ w + x)),
    "inner loop": lambda state, w, x: lax.scan(lambda s, _: (jnp.tanh(s @ w), None), state, None, 3)[0] + x,
}


def test_half_sums_finds_a_weight_that_is_cast_before_a_loop():
    xs = concrete.zeros((300, 2, 4), jnp.bfloat16)
    for name, turn in TURNS.items():
        cast_outside = sums_of(lambda w, turn=turn: in_a_loop(w, xs, True, turn), concrete.eye(4))
        assert cast_outside == [("scan", "bfloat16", 300)], name
        assert sums_of(lambda w, turn=turn: in_a_loop(w, xs, False, turn), concrete.eye(4)) == [], name


# --- many uses of a weight --------------------------------------------------------------------------------------------

# Each use of the weight adds 1 to each element of its gradient. (The contracted axis has two elements or more, because
# a contraction of one element is not a product.)
EIGHTHS, ONES = concrete.full((8, 8), 1 / 8), concrete.ones((8, 8))
LOOPS = {
    "fori": lambda w: lax.fori_loop(0, 4096, lambda _, c: c + jnp.sum(EIGHTHS @ w), 0.0),
    "scan's results": lambda w: lax.scan(lambda c, _: (c, EIGHTHS @ w), 0.0, None, length=4096)[1].sum(),
    "nested": lambda w: lax.scan(
        lambda c, _: (c + lax.scan(lambda d, _: (d + jnp.sum(EIGHTHS @ w), None), 0.0, None, length=64)[0], None),
        0.0,
        None,
        length=64,
    )[0],
}


def both_orders(fun: Any, policy: str) -> tuple[Any, Any]:
    """Return the gradient of autocast, and the gradient under autocast."""
    return jax.grad(jaxmp.autocast(fun, policy)), jaxmp.autocast(jax.grad(fun), policy)


@pytest.mark.parametrize(("loop", "policy"), in_turn(LOOPS))
def test_4096_uses_of_a_weight_have_a_gradient_of_4096(loop, policy):
    gradients = both_orders(LOOPS[loop], policy)
    for gradient in gradients:
        assert set(products(gradient, ONES)) == {HALVES[policy]}
    np.testing.assert_array_equal(compiled(lambda w: [gradient(w) for gradient in gradients])(ONES), 4096)


def test_the_sum_over_a_loop_is_float32_for_a_weight_that_the_author_casts():
    def loop(w):
        cast = w.astype(jnp.bfloat16)
        return lax.scan(lambda c, _: (c + (in_half(EIGHTHS) @ cast).sum().astype(w.dtype), None), 0.0, None, 4096)[0]

    gradients = jax.grad(loop), jax.grad(jaxmp.autocast(loop, "mixed_bfloat16"))
    by_hand, ours = compiled(lambda w: [gradient(w) for gradient in gradients])(ONES)
    assert jnp.all(by_hand < 4096)  # summed in half
    np.testing.assert_array_equal(ours, 4096)


def used_22_times(w):
    """Use ``w`` once with the gradient 256, and 21 times with the gradient 1.

    The sum, 277, is not a bfloat16 number.
    """
    return jnp.sum(256 * EIGHTHS.astype(w.dtype) @ w) + sum(jnp.sum(EIGHTHS.astype(w.dtype) @ w) for _ in range(21))


def test_22_uses_without_a_loop_have_the_gradient_of_float32():
    by_hand = jax.grad(lambda w: used_22_times(in_half(w)).astype(w.dtype))
    assert half_additions(jax.make_jaxpr(by_hand)(ONES)) >= 21
    gradients = both_orders(used_22_times, "mixed_bfloat16")
    for gradient in gradients:
        assert set(products(gradient, ONES)) == {"bfloat16"}
        assert not half_additions(jax.make_jaxpr(gradient)(ONES))
    np.testing.assert_array_equal(compiled(gradients[0])(ONES), 277)


def test_a_weight_and_an_activation_do_not_share_the_program_of_a_jitted_body():
    uses = jax.jit(lambda w: used_22_times(w) + jnp.sum(jnp.exp(w)))

    def fun(w, v):
        return uses(lax.rsqrt(ONES * jnp.sum(EIGHTHS @ v))) * 0 + uses(w)

    gradient = jax.grad(jaxmp.autocast(fun, "mixed_bfloat16"))
    np.testing.assert_allclose(compiled(gradient)(ONES, ONES), 277 + np.exp(1.0), rtol=1e-5)


# --- every layer and every model, under a policy and under autocast ---------------------------------------------------


@pytest.mark.parametrize("group", [LAYERS, MODELS], ids=["layers", "models"])
def test_no_half_sum_of_more_than_256_terms_is_in_a_gradient(group):
    cases = [(name, WAYS[n % 3 == 2]) for n, name in enumerate(group)]
    wrong = {f"{name}, {way}": half_sums(traced(name, way).jaxpr) for name, way in cases}
    assert wrong and not {name: sums for name, sums in wrong.items() if sums}


def test_the_table_has_every_flax_layer_with_params():
    without = {"Dropout", "Sequential", "RNNCellBase", "Module", "Dict", "List", "RoPE"}
    eight_bits = {"Fp8DirectDotGeneralOp", "Fp8DotGeneral", "Fp8DotGeneralOp", "Fp8Einsum", "NANOOFp8DotGeneralOp"}
    text = " ".join(LAYERS)
    for module in (nn, nnx):
        layers = {name for name, c in vars(module).items() if isinstance(c, type) and issubclass(c, module.Module)}
        assert {name for name in layers - without - eight_bits - {"SelfAttention"} if name not in text} == set()


# These programs are run, because XLA may compute something else than the traced programs that are checked above.
MEASURED = [
    *((f"Linen: {name}", "apply_policy") for name in ("Conv", "MultiHeadDotProductAttention")),
    ("NNX: LayerNorm", "apply_policy"),
    *((f"Linen: {name}", "autocast") for name in ("weights in a loop", "lookup", "GPT2")),
]


@pytest.mark.once
@pytest.mark.parametrize(("name", "way"), MEASURED)
def test_gradients_match_float64_up_to_rounding(name, way):
    got = traced(name, way).lower().compile()(*CASES[name]()[1:])
    half = half_of_case(name, way)[1]
    assert not {param: error for param, error in errors(got, float64(name)).items() if not error <= LIMITS[half]}


def test_half_cotangents_are_rounded_before_their_sum_for_a_bias():
    """Without the rounding, XLA would drop both casts and write float32 cotangents."""
    layers = [nn.Dense(8), nn.gelu, nn.Dense(8), nn.gelu, nn.Dense(8)]  # the bias of the last is added in float32
    model = jaxmp.linen.apply_policy(nn.Sequential(layers), "mixed_bfloat16")
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(jax.grad(loss(model.apply)))(params, X))]
    assert names.count("reduce_precision") == 2


# --- values that many examples, rows or iterations share --------------------------------------------------------------

jitted_twice = jax.jit(lambda bias, x, w: x + jax.jit(lambda bias, x, w: jnp.tanh(x @ w + bias))(2 * bias, x, w))
on_one_device = jax.jit(jitted_twice, in_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


def place(x):
    return (2 * x[0, 0]).astype(int)


def in_turns(t, x, w, start):
    return lax.scan(lambda state, row: (jnp.tanh((state + row) @ w) + t[0], state), start.astype(x.dtype), x)[0]


def in_turns_of_turns(t, x, w):
    return lax.scan(lambda state, row: (in_turns(t, row + x, w, state), row), x[0], x)[0]


def becoming_its_own(t, x, w):
    """Use a carry that all examples share at first."""
    start = t[0].astype(x.dtype), t[1].astype(x.dtype)
    return lax.fori_loop(0, 3, lambda n, pair: (pair[1], jnp.tanh((pair[1] + x[n]) @ w)), start)[0]


def added_behind(move, t, x):
    t, x = move((t, x))
    return x + t[0]


def turns_of(x):
    """Return two numbers: all examples share the first one, but not the second one."""
    return lax.while_loop(lambda pair: pair[0] < 3, lambda pair: (pair[0] + 1, 2 * pair[1]), (0.0, x[0, 0]))


# Functions of a table, which all examples share, of one example and of a weight. All three have rows of 8 numbers.
SHARED = {
    "an addend": lambda t, x, w: x + t[0],
    "an addend, broadcast": lambda t, x, w: x + jnp.broadcast_to(t[0], x.shape),
    "an addend, reshaped": lambda t, x, w: x + t[0].reshape(1, 8),
    "a scale": lambda t, x, w: x * (2 * t[0]),
    "a number": lambda t, x, w: (t[0] @ t[1]) * x,
    "sums": lambda t, x, w: jnp.cumsum(t[:6], 0) + x,
    "coefficients": lambda t, x, w: jnp.polyval(t[0] / 8, x / 8),
    "a token": lambda t, x, w: jnp.concatenate([jnp.tanh(t[:1]), x]),
    "a mask token": lambda t, x, w: jnp.where((x > 0.5).any(1, keepdims=True), t[0], x),
    "some numbers of a row": lambda t, x, w: jnp.where(x > 0.5, t[0], x),
    "a row of a stack": lambda t, x, w: jnp.stack([t[0], x[0]]),
    "a row written": lambda t, x, w: x.at[0].set(t[0]),
    "a row at a place": lambda t, x, w: lax.dynamic_update_slice_in_dim(x, t[:1].astype(x.dtype), 2, 0),
    "a row and a constant": lambda t, x, w: jnp.concatenate([x + t[0], jnp.full((2, 8), 0.3, x.dtype)]),
    "a bound": lambda t, x, w: jnp.minimum(x, t[0]),
    "two bounds": lambda t, x, w: jnp.clip(x, t[0], t[0] + 0.3),
    "a tiled row": lambda t, x, w: jnp.tile(t[:1], (6, 1)) * x,
    "a table": lambda t, x, w: t[(8 * x[:, 0]).astype(int)] * x,
    "a row of a table": lambda t, x, w: t[place(x)] * x,
    "a slice of a table": lambda t, x, w: lax.dynamic_slice_in_dim(t, place(x), 6) * x,
    "a jitted layer": lambda t, x, w: jitted_twice(t[0], x, w),
    "a jitted layer for a device": lambda t, x, w: on_one_device(t[0], x, w),
    "computed again": lambda t, x, w: jax.checkpoint(jitted_twice)(t[0], x, w),
    "before a custom rule": lambda t, x, w: doubled(jax.nn.silu(x + t[0])),
    "in each turn": lambda t, x, w: in_turns(t, x, w, x[0]),
    "in turns of turns": in_turns_of_turns,
    "a first state": lambda t, x, w: in_turns(t, x, w, t[0]),
    "a carry that comes to be each one's": becoming_its_own,
    "in a branch": lambda t, x, w: lax.cond(w[0, 0] < 1, jnp.add, jnp.multiply, x, t[0]),
    "in a branch for each": lambda t, x, w: lax.switch(
        (3 * x[0, 0]).astype(int), [jnp.add, jnp.subtract, jnp.multiply], x, t[0]
    ),
    "moved": lambda t, x, w: added_behind(jax.device_put, t, x),
    "behind a barrier, again": lambda t, x, w: jax.checkpoint(
        functools.partial(added_behind, lax.optimization_barrier)
    )(t, x),
    "beside a while loop, again": lambda t, x, w: jax.checkpoint(lambda t, x: x + turns_of(x)[0] * t[0])(t, x),
}
TABLES = {
    "a param": lambda p: p["t"],
    "cast by its author": lambda p: p["t"].astype(jnp.bfloat16),
    "computed": lambda p: p["t"] @ p["w"],
}


def of_examples(shared, table, mapped):
    """Return a function of params and many examples, under ``mapped`` in place of ``jax.vmap``."""

    def example(p, x):
        return jnp.sum(SHARED[shared](TABLES[table](p), x @ p["w"], p["w"]) @ p["w"])

    return lambda p, x: mapped(example, (None, 0))(p, x).sum() / 1024


def under_vmap(policy, wrap=lambda fun: fun):
    """Return a vmap of functions that run under autocast."""
    return lambda fun, axes: jax.vmap(wrap(jaxmp.autocast(fun, policy)), axes)


def over_vmap(policy):
    """Return an autocast of functions under vmap."""
    return lambda fun, axes: jaxmp.autocast(jax.vmap(fun, axes), policy)


RNG = np.random.default_rng(0)
P = {name: jnp.asarray(RNG.uniform(size=(8, 8)) / 4, jnp.float32) for name in ("t", "w")}
EXAMPLES = jnp.asarray(RNG.uniform(size=(4096, 6, 8)), jnp.float32)


@pytest.mark.parametrize(("table", "policy"), in_turn(TABLES))
def test_values_that_examples_share_have_float32_gradient_sums(table, policy):
    ways = [under_vmap(policy), over_vmap(policy)]
    if table == "a param":  # inside of a jit, jaxmp cannot know whether a vmap maps over computed values
        ways += [under_vmap(policy, jax.jit), under_vmap(policy, jax.checkpoint)]
    for shared in SHARED:
        for way in ways:
            assert not half_sums(jax.make_jaxpr(jax.grad(of_examples(shared, table, way)))(P, EXAMPLES)), shared


@pytest.mark.once
def test_gradients_of_values_that_examples_share_match_float32():
    policies = {"bfloat16": under_vmap("mixed_bfloat16"), "float16": over_vmap("mixed_float16")}
    halves = {shared: list(policies)[n % 2] for n, shared in enumerate(SHARED)}

    def both(p, x):
        return {
            shared: [jax.grad(of_examples(shared, "computed", way))(p, x) for way in (jax.vmap, policies[half])]
            for shared, half in halves.items()
        }

    for shared, (true, got) in compiled(both)(P, EXAMPLES).items():
        assert not wrong_params(got, true, halves[shared]), shared


def in_each_turn(t, turn, length=4096):
    """Return the results of iterations that read the half table ``t``."""
    return lax.scan(lambda c, n: (c, turn(t, n)), 0.0, jnp.arange(length))[1]


# Functions of a table and of 1,024 rows.
IN_LOOPS = {
    "in each turn": lambda t, x: in_each_turn(t, lambda t, n: t[0] * 0.3),
    "in turns of turns": lambda t, x: in_each_turn(t, lambda t, n: in_each_turn(t, lambda t, n: t * 0.3, 64), 64),
    "often in each turn": lambda t, x: in_each_turn(
        t, lambda t, n: jnp.stack([jnp.tanh(t * n.astype(t.dtype) / 100 + k / 8) for k in range(8)]), 100
    ),
    "looked up in each turn": lambda t, x: in_each_turn(t, lambda t, n: t[jnp.arange(200) % 2] * 0.3, 200),
    "a weight in a loop": lambda t, x: lax.scan(lambda c, row: (c + row @ t, None), jnp.zeros(8), x)[0],
    "a softmax before a loop": lambda t, x: IN_LOOPS["a weight in a loop"](jax.nn.softmax(t), x),
    "a softmax in a loop": lambda t, x: lax.scan(lambda c, row: (c + row @ jax.nn.softmax(t), None), x[0], x)[0],
    "under two vmaps": lambda t, x: jax.vmap(jax.vmap(lambda row: row + t[0]))(x.reshape(32, 32, 8)),
}


@pytest.mark.parametrize(("name", "policy"), in_turn(IN_LOOPS))
def test_values_in_loops_have_float32_gradient_sums(name, policy):
    def fun(p, x):
        return (IN_LOOPS[name](p["t"] @ p["w"], x).astype(jnp.float32) ** 2).sum() / 1024

    args, exact = (P, EXAMPLES[:1024, 0]), jax.grad(fun)
    programs = jax.grad(jaxmp.autocast(fun, policy)), jaxmp.autocast(jax.grad(fun), policy)
    for program in programs:
        assert not half_sums(jax.make_jaxpr(program)(*args))
    true, got = compiled(lambda *args: (exact(*args), programs[0](*args)))(*args)
    assert not wrong_params(got, true, HALVES[policy])


DERIVATIVES = {
    "value and gradient": lambda fun: lambda p, x: jax.value_and_grad(fun, 1)(p, x),
    "forwards": lambda fun: lambda p, x: jax.jvp(lambda x: fun(p, x), (x,), (jnp.ones_like(x),)),
    "of the second order": lambda fun: lambda p, x: (fun(p, x), jax.hessian(fun, 1)(p, x)),
}


@pytest.mark.parametrize(("name", "policy"), in_turn(DERIVATIVES))
def test_per_example_derivatives_have_float32_gradient_sums(name, policy):
    # The loss reads the network's value and derivatives at each point, as for a differential equation.
    def fun(p, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ p["w"] + p["v"]) @ p["w"] + p["v"] @ p["w"]) @ p["w"])

    def gradient(fun):
        points = jax.vmap(jax.vmap(DERIVATIVES[name](fun), (None, 0)), (None, 0))

        def loss(p, x):
            value, derivative = points(p, x)
            return jnp.mean((value + 2) ** 2) + jnp.mean(derivative**2)

        return jax.grad(loss)

    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.uniform(size=(8, 8)) / 4, jnp.float32), "v": concrete.full(8, 0.5)}
    args = params, jnp.asarray(rng.uniform(size=(64, 64, 8)), jnp.float32)
    true, got = compiled(lambda *args: [gradient(fun)(*args) for fun in (fun, jaxmp.autocast(fun, policy))])(*args)
    assert not wrong_params(got, true, HALVES[policy])


def test_gradient_sums_on_explicit_axes_are_float32():
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def on_mesh(value, *spec):
        return jax.device_put(value, jax.sharding.NamedSharding(mesh, PartitionSpec(*spec)))

    def fun(p, x):
        return jnp.tanh(x @ p["w"] + p["b"]) * p["b"][None, None]

    def gradient(fun):
        return jax.grad(lambda p, x: jax.vmap(fun, (None, 0))(p, x).astype(jnp.float32).sum() / 64)

    rng = np.random.default_rng(0)
    w, x = rng.uniform(size=(8, 8)) / 4, rng.uniform(size=(2, 64, 64, 8))
    args = {"w": jnp.asarray(w, jnp.float32), "b": concrete.full(8, 0.5)}, jnp.asarray(x, jnp.float32)
    true = compiled(gradient(fun))(*args)
    with jax.set_mesh(mesh):
        placed = (
            {"w": on_mesh(args[0]["w"], None, "columns"), "b": on_mesh(args[0]["b"], "columns")},
            on_mesh(args[1], None, "rows"),
        )
        program = gradient(jaxmp.autocast(fun, "mixed_bfloat16"))
        assert not half_sums(jax.make_jaxpr(program)(*placed))
        got = compiled(program)(*placed)
        assert got["b"].sharding.spec == PartitionSpec("columns")
        assert not wrong_params(got, true, "bfloat16")


def test_results_of_a_collective_have_float32_gradient_sums():
    def fun(p, x):
        h = x @ p["w"]
        return (h + lax.pmean(h[0], "examples") @ p["w"]) @ p["w"]

    def gradient(fun):
        return jax.grad(lambda p, x: jax.vmap(fun, (None, 0), axis_name="examples")(p, x).sum() / 64)

    args = (
        {"w": concrete.eye(8) / 2 + 0.01},
        jnp.asarray(np.random.default_rng(0).uniform(size=(512, 8, 8)), jnp.float32),
    )
    program = gradient(jaxmp.autocast(fun, "mixed_bfloat16"))
    assert not half_sums(jax.make_jaxpr(program)(*args))
    true, got = compiled(lambda *args: (gradient(fun)(*args), program(*args)))(*args)
    assert not wrong_params(got, true, "bfloat16")


def test_values_shared_by_groups_of_examples_have_float32_gradient_sums():
    def fun(p, group, x):
        of_group = jnp.tanh(group @ p["w"]) * (p["v"] @ p["w"]) + (p["w"] @ p["w"])[(8 * group[0]).astype(int)]
        return jax.checkpoint(lambda of_group, x, w: x @ w * (of_group + w[0] @ w))(of_group, x, p["w"]) @ p["w"]

    def gradient(fun):
        groups = jax.vmap(jax.vmap(fun, (None, None, 0)), (None, 0, 0))
        return jax.grad(lambda p, group, x: groups(p, group, x).sum() / 16)

    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.uniform(size=(8, 8)) / 4, jnp.float32), "v": concrete.full(8, 0.5)}
    args = params, *(jnp.asarray(rng.uniform(size=(4096, *shape)), jnp.float32) for shape in [(8,), (3, 8)])
    true, program = compiled(gradient(fun))(*args), gradient(jaxmp.autocast(fun, "mixed_bfloat16"))
    assert not half_sums(jax.make_jaxpr(program)(*args))
    assert not wrong_params(compiled(program)(*args), true, "bfloat16")


def test_up_to_64_repetitions_are_not_rewritten():
    fun = jaxmp.autocast(lambda w, v, x: (x @ w + v @ w) @ w, "mixed_bfloat16")
    for rows, count in ((64, 0), (65, 1)):
        program = jax.make_jaxpr(fun)(concrete.eye(8), concrete.ones(8), concrete.ones((rows, 8)))
        assert [eqn.primitive.name for eqn in equations(program)].count("cast_repeated") == count


def largest_of_messages(messages):
    return jax.ops.segment_max(messages, np.zeros(len(messages), int), 2)[0]


def smallest_of_messages(messages):
    return jax.ops.segment_min(messages, np.zeros(len(messages), int), 2)[0]


EXTREMES = {
    "largest": largest_of_messages,
    "smallest": smallest_of_messages,
    "of each graph": lambda messages: jax.vmap(largest_of_messages)(messages[None])[0],
    "of half messages": lambda messages: largest_of_messages(messages.astype(jnp.bfloat16)),
}


def test_equal_messages_in_a_segment_extreme_are_counted_in_float32():
    rng = np.random.default_rng(0)  # all nodes are equal, as in a graph without features
    x = jnp.asarray(np.repeat(rng.standard_normal((1, 8), np.float32), 4096, 0))
    w = jnp.asarray(rng.standard_normal((8, 8), np.float32))

    def loss(w, x, extreme):
        return jnp.sum((extreme(x @ w) @ w) ** 2)

    for name, policy in in_turn(EXTREMES):
        in_float32 = smallest_of_messages if name == "smallest" else largest_of_messages
        exact = jax.grad(functools.partial(loss, extreme=in_float32))
        gradient = jax.grad(jaxmp.autocast(functools.partial(loss, extreme=EXTREMES[name]), policy))
        if name in ("largest", "smallest"):
            true, got = compiled(lambda *args, both=(exact, gradient): [fun(*args) for fun in both])(w, x)
            assert np.linalg.norm(got - true) < 0.02 * np.linalg.norm(true), name
        counts = [eqn for eqn in equations(jax.make_jaxpr(gradient)(w, x)) if eqn.primitive.name == "scatter-add"]
        assert {eqn.outvars[0].aval.dtype.name for eqn in counts} == {"float32"}, name


def test_extremes_of_few_messages_are_float32_too():
    fun = jaxmp.autocast(lambda w, x: largest_of_messages(x @ w) @ w, "mixed_bfloat16")
    eqns = equations(jax.make_jaxpr(fun)(concrete.eye(8), concrete.ones((2, 8))))
    assert [eqn.outvars[0].aval.dtype.name for eqn in eqns if eqn.primitive.name == "scatter-max"] == ["float32"]


# --- sums over devices ------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """A table, one layer with a residual connection, and a head."""

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(5, 8)(ids)
        return nn.Dense(4)(x + nn.tanh(nn.remat(nn.Dense)(8)(x)))


def test_gradients_of_shared_params_are_summed_over_devices_in_float32():
    ids = np.random.default_rng(0).integers(0, 5, (16, 3))
    model = jaxmp.linen.apply_policy(Shared(), "mixed_float16")
    params = drawn(jax.eval_shape(model.init, jax.random.key(0), ids))

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        return jnp.sum(model.apply(params, ids) * (1 + ids[..., None] / 7))

    mesh, shared, split = Mesh(jax.devices(), ("d",)), PartitionSpec(), PartitionSpec("d")
    gradient = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(shared, split), out_specs=shared)

    program = jax.make_jaxpr(gradient)(params, ids)
    sums = [eqn.invars[0].aval.dtype for eqn in equations(program) if eqn.primitive.name.startswith("psum")]
    assert len(sums) == len(jax.tree.leaves(params)) and set(sums) == {np.dtype("float32")}

    on_each_device = jax.jit(lambda params, parts: lax.map(lambda ids: jax.grad(loss)(params, ids), parts))
    parts = on_each_device(params, ids.reshape(mesh.size, -1, *ids.shape[1:]))
    want = jax.tree.map(lambda part: np.asarray(part, np.float64).sum(0), parts)
    got = jax.jit(gradient)(params, ids)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5 * abs(w).max()), got, want)


def test_per_example_gradients_of_a_bias_equal_float32():
    def example(weight, bias, row):
        return ((row @ weight + bias) @ weight).sum()

    half = jaxmp.autocast(example, "mixed_bfloat16")

    def gradients(rows):
        by_rows = [
            jax.vmap(jax.grad(fun, 1), (None, None, 0))(jnp.eye(4), jnp.zeros(4), rows) for fun in (example, half)
        ]
        return *by_rows, jax.vmap(lambda row: jax.jacfwd(lambda bias: half(jnp.eye(4), bias, row))(jnp.zeros(4)))(rows)

    expected, *results = compiled(gradients)(concrete.arange(12.0).reshape(3, 4))
    for result in results:
        np.testing.assert_array_equal(result, expected)
