"""Gradients of params are summed in float32, however a program repeats a param."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import concrete
import flax.linen as nn
import gradient_zoo as zoo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import in_turn, products
from flax import nnx
from gradient_zoo import LAYERS, MODELS, TRANSFORMS, drawn, loss
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from linen_zoo import HALVES
from program_tools import half_sums, has_loops, with_exact_sums

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


def half_gradient(case: Any, way: str, policy: str, transform: Any = None) -> Any:
    """Return a function of params and input: ``jax.grad`` of a case's half loss."""
    apply = case(policy=policy if way == "apply_policy" else None).apply
    fun = loss(apply if transform is None else functools.partial(transform, apply))
    return jax.grad(jaxmp.autocast(fun, policy) if way == "autocast" else fun)


def half_of(number: int, way: str) -> tuple[str, str]:
    """Return a half policy and its dtype, which alternate between ways and cases."""
    return list(HALVES.items())[(number + WAYS.index(way)) % 2]


def half_of_case(name: str, way: str) -> tuple[str, str]:
    return half_of(list(CASES).index(name), way)


@functools.cache
def traced(name: str, way: str) -> Any:
    """Return the traced program of a case's gradients in one half dtype."""
    case = CASES[name]
    return compiled(half_gradient(case, way, half_of_case(name, way)[0])).trace(*case()[1:])


@functools.cache
def float64(name: str) -> Any:
    """Return a case's gradients in float64."""
    with jax.enable_x64(True):
        apply, *arguments = CASES[name](dtype=np.float64, param_dtype=np.float64)
        return compiled(jax.grad(loss(apply)))(*arguments)


@functools.cache
def with_float64_sums(name: str, way: str) -> Any:
    """Return a case's half gradients, with each sum computed in float64."""
    program = traced(name, way)
    with jax.enable_x64(True):
        gradients = compiled(with_exact_sums(program.jaxpr))(*CASES[name]()[1:])
    return jax.tree.unflatten(jax.tree.structure(program.out_info), gradients)


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


def sums_of(fun: Any, *args: Any, least: int = 257) -> list[tuple[str, str, float]]:
    """Return the half sums in the gradient of ``fun``, without their scopes."""
    return [row[:3] for row in half_sums(jax.make_jaxpr(jax.grad(fun))(*args), least)]


BY_HAND = {
    "Linen: Dense": [("reduce_sum", 600)],
    "Linen: PReLU": [("reduce_sum", 2400), ("reduce_sum", 600)],
    "Linen: nn.vmap": [("reduce_sum", 900)],
    "NNX: Embed": [("scatter-add", 600)],
    "NNX: nnx.scan": [("reduce_sum", 600)],
    "Linen: LayerNorm": [],
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
    "row": lambda state, w, x: jnp.tanh(state + lax.dynamic_index_in_dim(w, x.astype(int)[0, 0], keepdims=False)),
    "checkpoint": jax.checkpoint(lambda state, w, x: jnp.tanh(state @ w + x)),
    "inner loop": lambda state, w, x: lax.scan(lambda s, _: (jnp.tanh(s @ w), None), state, None, 3)[0] + x,
}


def test_half_sums_finds_a_weight_that_is_cast_before_a_loop():
    xs = concrete.zeros((300, 2, 4), jnp.bfloat16)
    for name, turn in TURNS.items():
        cast_outside = sums_of(lambda w, turn=turn: in_a_loop(w, xs, True, turn), concrete.eye(4))
        assert cast_outside == [("scan", "bfloat16", 300)], name
        assert sums_of(lambda w, turn=turn: in_a_loop(w, xs, False, turn), concrete.eye(4)) == [], name


def test_half_sums_ignores_residual_streams():
    def streamed(w, body):
        x = jnp.zeros((300, 4), jnp.bfloat16) + jnp.broadcast_to(w, (300, 4)).astype(jnp.bfloat16)
        return jnp.sum(lax.scan(lambda x, _: (body(x), None), x, None, 300)[0].astype(w.dtype))

    for body in (lambda x: x + jnp.tanh(x), jax.checkpoint(lambda x: x + jnp.tanh(x)), lambda x: 2 * x + jnp.sin(x)):
        assert sums_of(lambda w, body=body: streamed(w, body), concrete.ones(4)) == []
        cast_before = sums_of(lambda w, body=body: streamed(in_half(w), body), concrete.ones(4))
        assert cast_before == [("reduce_sum", "bfloat16", 300)]


def test_half_sums_looks_through_moves_casts_branches_and_rules():
    def used(w, fun, times=1):
        half = in_half(w)
        return jnp.sum(jnp.concatenate([fun(half) for _ in range(times)]).astype(w.dtype))

    def repeat(w):
        return jnp.sin(jnp.broadcast_to(w, (300, 4)))

    w, expected = concrete.ones(4), [("reduce_sum", "bfloat16", 300)]
    assert sums_of(lambda w: used(w, lambda w: repeat(w[::-1].reshape(2, 2).T.reshape(4))), w) == expected
    assert sums_of(lambda w: used(w, lambda w: repeat(w.astype(jnp.float32).astype(jnp.bfloat16))), w) == expected
    assert sums_of(lambda w: used(w, lambda w: lax.cond(w[0] > 0, repeat, lambda w: 2 * repeat(w), w)), w) == expected
    assert sums_of(lambda w: used(w, lambda w: zoo.doubled(repeat(w))), w) == expected
    assert sums_of(lambda w: used(w, lambda w: repeat(w) * -0.5), w) == expected
    assert sums_of(lambda w: used(w, lambda w: jnp.sin(jnp.cumsum(jnp.pad(w, (0, 300))))), w)[0][0] == "cumsum"
    assert sums_of(lambda w: used(w, jnp.sin, 270), w) == [("add_any", "bfloat16", 270)]
    assert sums_of(lambda w: used(w, jnp.sin, 200), w) == []
    assert sums_of(lambda w: used(w, jnp.sin, 200), w, least=2) == [("add_any", "bfloat16", 200)]


def test_half_sums_names_an_operation_that_it_does_not_know():
    with pytest.raises(AssertionError, match="unknown primitive lu"):
        half_sums(jax.make_jaxpr(lambda w: lax.linalg.lu(w)[0])(concrete.eye(4)))


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
    assert half_sums(jax.make_jaxpr(by_hand)(ONES), 22)
    gradients = both_orders(used_22_times, "mixed_bfloat16")
    for gradient in gradients:
        assert set(products(gradient, ONES)) == {"bfloat16"}
        assert not half_sums(jax.make_jaxpr(gradient)(ONES), 2)
    np.testing.assert_array_equal(compiled(gradients[0])(ONES), 277)


def test_a_weight_and_an_activation_do_not_share_the_program_of_a_jitted_body():
    uses = jax.jit(lambda w: used_22_times(w) + jnp.sum(jnp.exp(w)))

    def fun(w, v):
        return uses(lax.rsqrt(ONES * jnp.sum(EIGHTHS @ v))) * 0 + uses(w)

    gradient = jax.grad(jaxmp.autocast(fun, "mixed_bfloat16"))
    np.testing.assert_allclose(compiled(gradient)(ONES, ONES), 277 + np.exp(1.0), rtol=1e-5)


def test_the_gradient_of_a_table_is_summed_in_float32():
    def fun(table):
        return jnp.sum(table[jnp.zeros(4096, int)] @ jnp.eye(4))

    gradients = both_orders(fun, "mixed_float16")
    for result in compiled(lambda table: [gradient(table) for gradient in gradients])(concrete.zeros((10, 4))):
        np.testing.assert_array_equal(result, concrete.zeros((10, 4)).at[0].set(4096))


# --- every layer and every model, under a policy and under autocast ---------------------------------------------------

NAMES = {
    "sums over rows": ["Dense", "DenseGeneral", "Linear", "LinearGeneral", "Einsum", "LoRA", "LoRALinear", "PReLU"],
    "sums over pixels": ["Conv", "ConvLocal", "ConvTranspose"],
    "tables and attention": ["Embed", "Embed.attend", "MultiHeadDotProductAttention", "MultiHeadAttention"],
    "norms": ["LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "InstanceNorm", "WeightNorm", "SpectralNorm"],
    "lifted": ["nn.scan over layers", "nn.scan of one layer", "nn.vmap", "nn.remat", "nn.jit"],
    "lifted by NNX": ["nnx.scan", "nnx.vmap", "nnx.remat", "nnx.jit"],
    "models": ["Linear of the zoo", "Tied of the zoo", "NextToken", "Scale of the zoo", "CNN"],
}
GROUPS: dict[str, list[tuple[str, str]]] = {}
OTHER_API: list[tuple[str, str]] = []
for group, names in NAMES.items():
    # A layer of both libraries is traced in one of them, in turn. Each case is under a policy or under autocast.
    GROUPS[group] = []
    for n, name in enumerate(names):
        apis = [api for api in (("Linen", "NNX"), ("NNX", "Linen"))[n % 2] if f"{api}: {name}" in CASES]
        cases = [(f"{api}: {name}", WAYS[n % 4 == 3]) for api in apis]
        GROUPS[group].append(cases[0])
        OTHER_API += cases[1:]
GROUPS["the other library"] = OTHER_API
GROUPS["cells"] = [
    *(("Linen: RNN of MGUCell", "apply_policy"), ("Linen: RNN of ConvLSTMCell", "autocast")),
    ("NNX: RNN of SimpleCell, many turns", "apply_policy"),
]
GROUPS["other cells"] = [
    (name, WAYS[n % 2])
    for n, name in enumerate(sorted({*LAYERS} - {name for group in GROUPS.values() for name, _ in group}))
]
GROUPS["what people write"] = [
    *((f"{('Linen', 'NNX')[n % 2]}: {name}", WAYS[n // 2 % 2]) for n, name in enumerate(zoo.WRITTEN)),
    *(("Linen: behind a custom rule", "apply_policy"), ("NNX: norm by hand", "autocast")),
]
GROUPS["language models"] = [("Linen: GPT2", "autocast"), ("Linen: GPT2 with remat", "apply_policy")]
SLOW = pytest.mark.slow("whole models, many recurrent cells, and layers that are traced in the other library")
SLOW_GROUPS = ("cells", "other cells", "models", "language models", "the other library")
EACH = [pytest.param(group, marks=[SLOW] * (group in SLOW_GROUPS)) for group in GROUPS]


@pytest.mark.parametrize("group", EACH)
def test_no_half_sum_of_more_than_256_terms_leads_to_a_params_gradient(group):
    wrong = {f"{name}, {way}": half_sums(traced(name, way).jaxpr) for name, way in GROUPS[group]}
    assert wrong and not {name: sums for name, sums in wrong.items() if sums}


OVER_A_BATCH = {
    "implied by +": lambda rows, x: x + rows,
    "written out": lambda rows, x: x + jnp.broadcast_to(rows, x.shape),
    "after a move": lambda rows, x: x + rows.reshape(1, *rows.shape),
    "times a scale": lambda rows, x: x * (2 * rows),
}


@pytest.mark.parametrize("is_cast", [False, True], ids=["as it is", "cast by its author"])
def test_table_rows_that_a_batch_repeats_have_float32_gradient_sums(is_cast):
    def loss(table, x, w, ids, repeated):
        rows = (table.astype(jnp.bfloat16) if is_cast else table)[ids].astype(jnp.float32)
        return jnp.sum(repeated(rows, x @ w) @ w)

    args = (concrete.ones((10, 8)), concrete.ones((300, 6, 8)), concrete.eye(8), concrete.arange(6))
    for name, repeated in OVER_A_BATCH.items():
        fun = functools.partial(loss, repeated=repeated)
        for gradient in (
            jax.grad(jaxmp.autocast(fun, "mixed_bfloat16")),
            jaxmp.autocast(jax.grad(fun), "mixed_bfloat16"),
        ):
            assert not half_sums(jax.make_jaxpr(gradient)(*args)), name


def lora_in_a_loop(p, x):
    w = p["w"] + p["left"] @ p["right"]
    return lax.scan(lambda total, row: (total + (row[None] @ w).sum(), None), 0.0, x.reshape(-1, 8))[0]


def transitions_in_a_loop(p, x):  # the loop reads a param, because the softmax is inside
    return lax.scan(lambda total, row: (total + (row @ jax.nn.softmax(p["w"]))[0], None), 0.0, x.reshape(-1, 8))[0]


def hidden_markov(p, x):
    transitions = jax.nn.softmax(p["w"])
    return lax.scan(lambda total, row: (total + (row @ transitions)[0], None), 0.0, x.reshape(-1, 8))[0]


COMPUTED = {
    "weight in a loop": lora_in_a_loop,
    "softmax in a loop": hidden_markov,
    "softmax in the body of a loop": transitions_in_a_loop,
    "vector added to all pixels": lambda p, x: jnp.sum((x @ p["w"] + p["v"] @ p["w"]) @ p["w"]),
    "a row of each image": lambda p, x: jnp.sum(x @ p["w"] * jnp.tanh(x.mean((1, 2)) @ p["w"])[:, None, None] @ p["w"]),
    "a number": lambda p, x: jnp.sum((p["w"][0] @ p["w"] @ p["v"]) * jnp.tanh(x @ p["w"]) @ p["w"]),
    "table looked up": lambda p, x: jnp.sum((p["w"] @ p["w"])[jnp.arange(1024) % 8] @ p["w"]),
}


def halves_in_turn(names: Any) -> list[tuple[Any, str]]:
    """Return each name with a half dtype; the half dtypes alternate."""
    return [(name, ("bfloat16", "float16")[n % 2]) for n, name in enumerate(names)]


@pytest.mark.parametrize(("name", "half"), halves_in_turn(COMPUTED))
def test_repeated_values_computed_from_params_have_float32_gradient_sums(name, half):
    rng = np.random.default_rng(0)
    params = {param: jnp.asarray(rng.uniform(size=(8, 8)), jnp.float32) for param in ("w", "left", "right")}
    args = {**params, "v": concrete.full(8, 0.5)}, jnp.asarray(rng.uniform(size=(2, 16, 32, 8)), jnp.float32)

    def fun(p, x):
        return COMPUTED[name](p, x) / 1024

    gradients = [jax.grad(jaxmp.autocast(fun, f"mixed_{half}")), jaxmp.autocast(jax.grad(fun), f"mixed_{half}")]
    number = list(COMPUTED).index(name)
    program = compiled(gradients[number // 2 % 2]).trace(*args)
    assert not half_sums(program.jaxpr)
    assert not half_sums(jax.make_jaxpr(gradients[1 - number // 2 % 2])(*args))
    if number in (0, 3, 4):
        true = compiled(jax.grad(fun))(*args)
        assert not wrong_params(program.lower().compile()(*args), true, half)


jitted_twice = jax.jit(lambda bias, x, w: x + jax.jit(lambda bias, x, w: jnp.tanh(x @ w + bias))(2 * bias, x, w))
on_one_device = jax.jit(jitted_twice, in_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def in_turns(bias, x, w, start=None):
    def turn(state, row):
        return jnp.tanh((state + row) @ w) + bias, state

    return lax.scan(turn, jnp.zeros(8) if start is None else start, x)[0]


def in_turns_of_turns(bias, x, w):
    return lax.scan(lambda state, row: (in_turns(bias, row + x, w, state), row), jnp.zeros(8), x)[0]


def add_behind(move, v, x, w):
    v, x = move((v, x))
    return x @ w + v


def turns_of(x):
    """Return two numbers: all examples share the first one, but not the second one."""
    return lax.while_loop(lambda pair: pair[0] < 3, lambda pair: (pair[0] + 1, 2 * pair[1]), (0.0, x[0, 0]))


# Functions of params and one example, of shape (6, 8). All examples share a param, or a value computed from params.
SHARED = {
    "a class token": lambda p, x: jnp.concatenate([p["v"][None], x @ p["w"]]) @ p["w"],
    "a mask token": lambda p, x: jnp.where((x > 0.5).any(1, keepdims=True), p["v"], x @ p["w"]) @ p["w"],
    "a row of a stack": lambda p, x: jnp.stack([p["v"], x[0] @ p["w"]]) @ p["w"],
    "a row written": lambda p, x: (x @ p["w"]).at[0].set(p["v"]) @ p["w"],
    "a row at a place": lambda p, x: lax.dynamic_update_slice_in_dim(x @ p["w"], p["v"][None], 2, 0) @ p["w"],
    "a bound": lambda p, x: jnp.minimum(x @ p["w"], p["v"]) @ p["w"],
}
COMPUTED_FOR_ALL = {
    "a computed bias": lambda p, x: jnp.tanh(x @ p["w"] + p["v"] @ p["w"]) @ p["w"],
    "a computed token": lambda p, x: jnp.concatenate([jnp.tanh(p["v"] @ p["w"])[None], x @ p["w"]]) @ p["w"],
    "a computed table": lambda p, x: (p["w"] @ p["w"])[(8 * x[:, 0]).astype(int)] * x @ p["w"],
    "a row of a computed table": lambda p, x: (p["w"] @ p["w"])[(8 * x[0, 0]).astype(int)] * x @ p["w"],
    "a slice of a computed table": lambda p, x: (
        lax.dynamic_slice_in_dim(p["w"] @ p["w"], (2 * x[0, 0]).astype(int), 6) * x @ p["w"]
    ),
    "computed, or each its own": lambda p, x: jnp.where(x > 0.5, p["v"] @ p["w"], x @ p["w"]) @ p["w"],
    "computed bounds": lambda p, x: jnp.clip(x @ p["w"], p["v"] @ p["w"], p["v"] @ p["w"] + 0.3) @ p["w"],
    "a jitted layer for a device": lambda p, x: on_one_device(p["v"] @ p["w"], x, p["w"]) @ p["w"],
    "in each turn": lambda p, x: in_turns(p["v"] @ p["w"], x, p["w"]) @ p["w"],
    "in turns of turns": lambda p, x: in_turns_of_turns(p["v"] @ p["w"], x, p["w"]) @ p["w"],
    "coefficients": lambda p, x: jnp.polyval(p["v"] @ p["w"] / 8, x @ p["w"] / 8) @ p["w"],
    "a first state": lambda p, x: in_turns(p["v"], x, p["w"], p["v"] @ p["w"]) @ p["w"],
    "a carry that comes to be each one's": lambda p, x: lax.fori_loop(
        0, 3, lambda n, pair: (pair[1], jnp.tanh((pair[1] + x[n]) @ p["w"])), (p["v"] @ p["w"], p["w"] @ p["v"])
    )[0],
    "in a branch": lambda p, x: lax.cond(p["v"][0] < 1, jnp.add, jnp.multiply, x @ p["w"], p["v"] @ p["w"]) @ p["w"],
    "in a branch for each": lambda p, x: (
        lax.switch((3 * x[0, 0]).astype(int), [jnp.add, jnp.subtract, jnp.multiply], x @ p["w"], p["v"] @ p["w"])
        @ p["w"]
    ),
    "moved": lambda p, x: add_behind(jax.device_put, p["v"] @ p["w"], x, p["w"]) @ p["w"],
    "behind a barrier, again": lambda p, x: (
        jax.checkpoint(lambda v, x, w: add_behind(lax.optimization_barrier, v, x, w))(p["v"] @ p["w"], x, p["w"])
        @ p["w"]
    ),
    "beside a while loop, again": lambda p, x: (
        jax.checkpoint(lambda v, x, w: x @ w + turns_of(x)[0] * v)(p["v"] @ p["w"], x, p["w"]) @ p["w"]
    ),
    "computed again": lambda p, x: jax.checkpoint(jitted_twice)(p["v"] @ p["w"], x, p["w"]) @ p["w"],
    "with a constant": lambda p, x: jnp.concatenate([x @ p["w"] + p["v"] @ p["w"], jnp.full((2, 8), 0.3)]) @ p["w"],
}


def long_half_sums(program):
    """Return all half sums of more than 256 terms in a program.

    Unlike ``half_sums``, this finds sums even if a product lies between them and the params.
    """
    sums = [eqn for eqn in equations(program) if eqn.primitive.name in ("reduce_sum", "scatter-add")]
    terms = [(eqn, eqn.invars[-1].aval.size / eqn.outvars[0].aval.size) for eqn in sums]
    return [eqn for eqn, count in terms if count > 256 and eqn.outvars[0].aval.dtype.itemsize == 2]


def mapped_gradient(fun, is_ensemble):
    examples = jax.vmap(fun, (None, 0))
    mapped = jax.vmap(examples, (0, None)) if is_ensemble else examples
    return jax.grad(lambda p, x: mapped(p, x).sum() / 16)


def check_mapped_from_outside(fun, is_ensemble, half, also_jitted, is_measured):
    rng, members = np.random.default_rng(0), (1,) * is_ensemble  # an ensemble has one member
    x, w = rng.uniform(size=(4096, 6, 8)), rng.uniform(size=(*members, 8, 8)) / 4
    args = {"w": jnp.asarray(w, jnp.float32), "v": jnp.full((*members, 8), 0.5)}, jnp.asarray(x, jnp.float32)
    funs = [jaxmp.autocast(fun, f"mixed_{half}"), jax.jit(jaxmp.autocast(fun, f"mixed_{half}"))][: 1 + also_jitted]
    programs = [compiled(mapped_gradient(fun, is_ensemble)).trace(*args) for fun in funs]
    for program in programs:
        assert not half_sums(program.jaxpr)
        assert not long_half_sums(program.jaxpr)
    if is_measured:
        true = compiled(mapped_gradient(fun, is_ensemble))(*args)
        assert not wrong_params(programs[0].lower().compile()(*args), true, half)


@pytest.mark.parametrize("half", HALVES.values())
def test_params_under_an_outer_vmap_have_float32_gradient_sums(half):
    is_ensemble = half == "float16"
    for name in list(SHARED)[is_ensemble::2]:
        check_mapped_from_outside(SHARED[name], is_ensemble, half, True, name in ("a row written", "a row of a stack"))


# Inside of a jit, jaxmp cannot know whether a later `jax.vmap` maps over a value, so this test does not use jit.
@pytest.mark.parametrize(("name", "half"), halves_in_turn(COMPUTED_FOR_ALL))
def test_shared_values_under_an_outer_vmap_have_float32_gradient_sums(name, half):
    number = list(COMPUTED_FOR_ALL).index(name)
    check_mapped_from_outside(COMPUTED_FOR_ALL[name], number // 2 % 2 == 1, half, False, number % 10 == 0)


DERIVATIVES = {
    "value and gradient": lambda fun: lambda p, x: jax.value_and_grad(fun, 1)(p, x),
    "forwards": lambda fun: lambda p, x: jax.jvp(lambda x: fun(p, x), (x,), (jnp.ones_like(x),)),
    "of the second order": lambda fun: lambda p, x: (fun(p, x), jax.hessian(fun, 1)(p, x)),
}


@pytest.mark.parametrize(("name", "half"), halves_in_turn(DERIVATIVES))
def test_per_example_derivatives_have_float32_gradient_sums(name, half):
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
    program = gradient(jaxmp.autocast(fun, f"mixed_{half}"))
    assert not half_sums(jax.make_jaxpr(program)(*args))
    if name == "of the second order":  # compiles slowly, and the sums were checked above
        return
    true = compiled(gradient(fun))(*args)
    assert not wrong_params(compiled(program)(*args), true, half)


@pytest.mark.parametrize(
    ("half", "is_mapped", "columns"),
    [("float16", False, "columns"), ("bfloat16", True, "columns")],
)
def test_gradient_sums_on_explicit_axes_are_float32(half, is_mapped, columns):
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def on_mesh(value, *spec):
        return jax.device_put(value, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    def fun(p, x):
        return jnp.tanh(x @ p["w"] + p["b"]) * p["b"][None, None]

    def gradient(fun):
        fun = jax.vmap(fun, (None, 0)) if is_mapped else fun
        return jax.grad(lambda p, x: fun(p, x).astype(jnp.float32).sum() / 64)

    rng = np.random.default_rng(0)
    w, x = rng.uniform(size=(8, 8)) / 4, rng.uniform(size=(2,) * is_mapped + (64, 64, 8))
    args = {"w": jnp.asarray(w, jnp.float32), "b": concrete.full(8, 0.5)}, jnp.asarray(x, jnp.float32)
    true = compiled(gradient(fun))(*args)
    with jax.set_mesh(mesh):
        rows = (None,) * is_mapped + ("rows",)
        placed = (
            {"w": on_mesh(args[0]["w"], None, columns), "b": on_mesh(args[0]["b"], columns)},
            on_mesh(args[1], *rows),
        )
        program = gradient(jaxmp.autocast(fun, f"mixed_{half}"))
        assert not long_half_sums(jax.make_jaxpr(program)(*placed))
        got = compiled(program)(*placed)
        assert got["b"].sharding.spec == jax.sharding.PartitionSpec(columns)
        assert not wrong_params(got, true, half)


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
    assert not long_half_sums(jax.make_jaxpr(program)(*args))
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
    assert not long_half_sums(jax.make_jaxpr(program)(*args))
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

    for name, half in halves_in_turn(EXTREMES):
        in_float32 = smallest_of_messages if name == "smallest" else largest_of_messages
        exact = jax.grad(functools.partial(loss, extreme=in_float32))
        gradient = jax.grad(jaxmp.autocast(functools.partial(loss, extreme=EXTREMES[name]), f"mixed_{half}"))
        if name in ("largest", "smallest"):
            true, got = compiled(lambda *args, both=(exact, gradient): [fun(*args) for fun in both])(w, x)
            assert np.linalg.norm(got - true) < 0.02 * np.linalg.norm(true), name
        counts = [eqn for eqn in equations(jax.make_jaxpr(gradient)(w, x)) if eqn.primitive.name == "scatter-add"]
        assert {eqn.outvars[0].aval.dtype.name for eqn in counts} == {"float32"}, name


def test_extremes_of_few_messages_are_float32_too():
    fun = jaxmp.autocast(lambda w, x: largest_of_messages(x @ w) @ w, "mixed_bfloat16")
    eqns = equations(jax.make_jaxpr(fun)(concrete.eye(8), concrete.ones((2, 8))))
    assert [eqn.outvars[0].aval.dtype.name for eqn in eqns if eqn.primitive.name == "scatter-max"] == ["float32"]


TRANSFORMED = [
    ("Linen: MLP", "jit", "autocast"),
    ("NNX: CNN", "vmap over examples", "apply_policy"),
    ("Linen: norm by hand", "checkpoint", "apply_policy"),
    ("NNX: lookup", "scan over microbatches", "autocast"),
    ("Linen: MLP", "scan over microbatches", "apply_policy"),
]


def test_transformed_models_have_float32_gradient_sums():
    for name, transform, way in TRANSFORMED:
        case, (policy, _) = CASES[name], half_of_case(name, way)
        gradient = half_gradient(case, way, policy, TRANSFORMS[transform])
        assert not half_sums(jax.make_jaxpr(gradient)(*case()[1:])), (name, transform, way)


def test_half_cotangents_are_rounded_before_their_sum_for_a_bias():
    """Without the rounding, XLA would drop both casts and write float32 cotangents."""
    layers = [nn.Dense(8), nn.gelu, nn.Dense(8), nn.gelu, nn.Dense(8)]  # the bias of the last is added in float32
    model = jaxmp.linen.apply_policy(nn.Sequential(layers), "mixed_bfloat16")
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(jax.grad(loss(model.apply)))(params, X))]
    assert names.count("reduce_precision") == 2


# These programs are run, because XLA may compute something else than the traced programs that are checked above.
MEASURED = [
    *((f"Linen: {name}", "apply_policy") for name in ("Conv", "MultiHeadDotProductAttention")),
    ("NNX: LayerNorm", "apply_policy"),
    *((f"Linen: {name}", "autocast") for name in ("weights in a loop", "lookup")),
    pytest.param("Linen: GPT2", "autocast", marks=pytest.mark.slow("a whole model in three precisions")),
]


@pytest.mark.once
@pytest.mark.parametrize(("name", "way"), MEASURED)
def test_gradients_match_float64_up_to_rounding(name, way):
    got = traced(name, way).lower().compile()(*CASES[name]()[1:])
    want, (_, half) = float64(name), half_of_case(name, way)
    wrong = {param: error for param, error in errors(got, want).items() if error > LIMITS[half]}
    if wrong and not has_loops(traced(name, way).jaxpr):
        explained = errors(with_float64_sums(name, way), want)
        wrong = {param: (error, explained[param]) for param, error in wrong.items() if error > 3 * explained[param]}
    assert not wrong, half


def test_the_table_has_every_flax_layer_with_params():
    without = {"Dropout", "Sequential", "RNNCellBase", "Module", "Dict", "List", "RoPE"}
    eight_bits = {"Fp8DirectDotGeneralOp", "Fp8DotGeneral", "Fp8DotGeneralOp", "Fp8Einsum", "NANOOFp8DotGeneralOp"}
    aliases = {"MultiHeadAttention", "SelfAttention"}
    for api, module, named, left_out in (
        ("Linen", nn, zoo.LINEN, without | eight_bits | aliases),
        ("NNX", nnx, zoo.NNX, without),
    ):
        text = " ".join(named)
        layers = {name for name, c in vars(module).items() if isinstance(c, type) and issubclass(c, module.Module)}
        assert {name for name in layers - left_out if name not in text} == set(), api
    assert all("RNN" in name or "Bidirectional" in name for name, _ in GROUPS["other cells"])


# --- half results of layers that code between layers repeats ----------------------------------------------------------


def vmapped_twice(t, x):
    return jax.vmap(jax.vmap(lambda pixel: pixel + t[0]))(x)


# Functions that repeat the half result of a layer, `t` of the shape (8, 1). No product reads the repeated values.
AS_WRITTEN = {
    "table looked up": lambda t, x: t[jnp.arange(4096) % 8],
    "sliced at a place": lambda t, x: jax.vmap(lambda n: lax.dynamic_slice_in_dim(t, n, 4))(jnp.arange(4096) % 4),
    "in each turn": lambda t, x: lax.scan(lambda c, _: (c, c * t), x[0, 0], length=4096)[1],
    "in turns of turns": lambda t, x: lax.scan(
        lambda c, _: (c, lax.scan(lambda c, _: (c, c * t), c, length=64)[1]), x[0, 0], length=64
    )[1],
    "often in each turn": lambda t, x: lax.scan(
        lambda c, n: (c, jnp.stack([jnp.tanh(t * n + k) for k in range(8)])),
        x[0, 0],
        jnp.arange(40).astype(t.dtype) / 40,
    )[1],
    "looked up in each turn": lambda t, x: lax.scan(lambda c, _: (c, c * t[jnp.arange(200) % 2]), x[0, 0], length=200)[
        1
    ],
    "one row of it in each turn": lambda t, x: lax.scan(lambda c, row: (c, row * t[0]), x[0, 0], x[:, :200])[1],
    "a time added to all pixels": lambda t, x: x + t[0],
    "tiled": lambda t, x: jnp.tile(t, (4096, 1)),
    "under two vmaps": vmapped_twice,
    "in a checkpoint": lambda t, x: jax.checkpoint(lambda t: x + t[0])(t),
    "the largest of equals": lambda t, x: jax.ops.segment_max(t[jnp.arange(4096) % 8], jnp.arange(4096) % 8, 8),
}


def as_written(layer: Any, case: str) -> jax.Array:
    t = layer(jnp.eye(8))
    return jnp.sum(AS_WRITTEN[case](t, jnp.ones((8, 512, 1), t.dtype)).astype(jnp.float32))


class RepeatedInLinen(nn.Module):
    case: str

    @nn.compact
    def __call__(self) -> jax.Array:
        return as_written(nn.Dense(1, name="layer"), self.case)


class RepeatedInNNX(nnx.Module):
    def __init__(self, case: str) -> None:
        self.case, self.layer = case, nnx.Linear(8, 1, rngs=nnx.Rngs(0))

    def __call__(self) -> jax.Array:
        return as_written(self.layer, self.case)


def summed(api: str, case: str, params: Any, policy: str | None) -> jax.Array:
    if api == "Linen":
        linen = RepeatedInLinen(case)
        linen = linen if policy is None else jaxmp.linen.apply_policy(linen, policy)
        return linen.apply({"params": {"layer": params}})
    model = RepeatedInNNX(case)
    model.layer.kernel[...], model.layer.bias[...] = params["kernel"], params["bias"]
    return (model if policy is None else jaxmp.nnx.apply_policy(model, policy))()


@pytest.mark.parametrize(("api", "policy"), [("Linen", "mixed_bfloat16"), ("NNX", "mixed_float16")])
def test_half_values_repeated_between_layers_have_float32_gradient_sums(api, policy):
    params = {"kernel": concrete.full((8, 1), 0.125), "bias": concrete.zeros(1)}
    cases = list(AS_WRITTEN)[api == "NNX" :: 2]

    def gradients(params: Any, under: str | None) -> Any:
        return {case: jax.grad(functools.partial(summed, api, case, policy=under))(params) for case in cases}

    program = compiled(lambda params: (gradients(params, None), gradients(params, policy))).trace(params)
    assert not half_sums(program.jaxpr)
    true, got = program.lower().compile()(params)
    for case in cases:
        assert not wrong_params(got[case], true[case], HALVES[policy]), case


# --- sums over devices ------------------------------------------------------------------------------------------------

IDS = np.random.default_rng(0).integers(0, 5, (16, 3))


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.tanh(nn.Dense(8)(nn.LayerNorm()(x))), None


class LinenShared(nn.Module):
    """A table, a scan over rematerialised layers, and a head."""

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        layers = nn.scan(nn.remat(LinenLayer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(4)(layers()(nn.Embed(5, 8)(ids), None)[0])


class NNXShared(nnx.Module):
    """The same model with one layer and without a norm.

    A norm of NNX would round the gradients of its params.
    """

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(5, 8, rngs=rngs)
        self.layer, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table(ids)
        return self.head(x + nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(self.layer, x))


def linen_shared() -> tuple[Callable[[Any, Any], Any], Any]:
    model = jaxmp.linen.apply_policy(LinenShared(), "mixed_bfloat16")
    return model.apply, drawn(jax.eval_shape(model.init, jax.random.key(0), IDS))


def nnx_shared() -> tuple[Callable[[Any, Any], Any], Any]:
    graphdef, params = nnx.split(nnx.eval_shape(lambda: jaxmp.nnx.apply_policy(NNXShared(), "mixed_float16")))
    return lambda params, ids: nnx.merge(graphdef, params)(ids), drawn(nnx.as_pure(params))


@pytest.mark.parametrize(("make", "is_run"), [(linen_shared, False), (nnx_shared, True)])
def test_gradients_of_shared_params_are_summed_over_devices_in_float32(make, is_run):
    apply, params = make()

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        return jnp.sum(apply(params, ids) * (1 + ids[..., None] / 7))

    mesh = Mesh(jax.devices(), ("d",))
    shared, split = PartitionSpec(), PartitionSpec("d")
    gradient = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(shared, split), out_specs=shared)

    program = jax.make_jaxpr(gradient)(params, IDS)
    sums = [eqn.invars[0].aval.dtype for eqn in equations(program) if eqn.primitive.name.startswith("psum")]
    assert len(sums) == len(jax.tree.leaves(params)) and set(sums) == {np.dtype("float32")}
    if not is_run:
        return

    on_each_device = jax.jit(lambda params, parts: lax.map(lambda ids: jax.grad(loss)(params, ids), parts))
    parts = on_each_device(params, IDS.reshape(mesh.size, -1, *IDS.shape[1:]))
    want = jax.tree.map(lambda part: np.asarray(part, np.float64).sum(0), parts)
    got = jax.jit(gradient)(params, IDS)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5 * abs(w).max()), got, want)


# --- a vmap after the trace -------------------------------------------------------------------------------------------

INNER = {"jit": jax.jit, "checkpoint": jax.checkpoint}


def _example(weight: jax.Array, bias: jax.Array, row: jax.Array) -> jax.Array:
    return ((row @ weight + bias) @ weight).sum()


@pytest.mark.parametrize(
    ("inner", "order", "half"),
    [("jit", "inside", "bfloat16"), ("checkpoint", "inside", "float16"), ("checkpoint", "outside", "bfloat16")],
)
def test_a_vmap_after_the_trace_has_float32_gradient_sums(inner, order, half):
    def wrapped(fun):
        policy = f"mixed_{half}"
        return (
            jaxmp.autocast(INNER[inner](fun), policy)
            if order == "inside"
            else INNER[inner](jaxmp.autocast(fun, policy))
        )

    def loss_of(bias):
        return jax.vmap(jax.vmap(lambda row: wrapped(_example)(jnp.eye(4), bias, row)))(X).mean()

    sums = [
        eqn.outvars[0].aval.dtype
        for eqn in equations(jax.make_jaxpr(jax.grad(loss_of))(concrete.zeros(4)))
        if eqn.primitive.name in ("reduce_sum", "add_any")
    ]
    assert sums and half not in [dtype.name for dtype in sums]
    np.testing.assert_allclose(compiled(jax.grad(loss_of))(concrete.zeros(4)), np.ones(4), rtol=1e-2)


def test_per_example_gradients_of_a_bias_equal_float32():
    half = jaxmp.autocast(_example, "mixed_bfloat16")

    def gradients(rows):
        by_rows = [
            jax.vmap(jax.grad(fun, 1), (None, None, 0))(jnp.eye(4), jnp.zeros(4), rows) for fun in (_example, half)
        ]
        return *by_rows, jax.vmap(lambda row: jax.jacfwd(lambda bias: half(jnp.eye(4), bias, row))(jnp.zeros(4)))(rows)

    expected, *results = compiled(gradients)(concrete.arange(12.0).reshape(3, 4))
    for result in results:
        np.testing.assert_array_equal(result, expected)
