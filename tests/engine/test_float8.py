"""Products of weights are float8 under a float8 policy, whatever the API."""

from __future__ import annotations

import functools
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from linen_zoo import numbers
from nnx_zoo import module_with_numbers

import jaxmp
from jaxmp.policy import float8, float8_product
from jaxmp.program.walk import jaxprs_in
from jaxmp.sharding import devices
from tests.tools.autocast_tools import compiled, cosine, normal
from tests.tools.plan_tools import doubled, plan, shape

SMALL = "params=float32,compute=bfloat16,output=float32,float8(min_dim=16,min_tokens=16)"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FORWARD, BACKWARD, HALF = (E4M3, E4M3), {E4M3, E5M2}, ("bfloat16", "bfloat16")


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("JAXMP_FLOAT8", "emulate")


def told(fun, *args, policy=SMALL, overrides=None):
    """Return the operand dtypes of each product, and the plan's reason."""
    rows = plan(fun, *args, policy=policy, overrides=overrides).rows
    return [(row.operands, row.why) for row in rows if row.cls == "half"]


def multiplied(fun, *args):
    """Return the operand dtypes of each product of a traced function."""
    return [product.operands for product in jaxmp.inspect.audit(fun, compile=False)(*args).products]


def in_float8(fun, *args):
    """Count float8 and other products, in the forward and in the backward pass."""
    products = jaxmp.inspect.audit(fun, compile=False)(*args).products
    counts = {"forward": [0, 0], "backward": [0, 0]}
    for product in products:
        formats = FORWARD if product.phase == "forward" else BACKWARD
        counts[product.phase][set(product.operands) != set(formats)] += 1
    return counts["forward"], counts["backward"]


def tied(table, w, tokens, rows=lambda table, tokens: table[tokens]):
    return jnp.tanh(rows(table, tokens) @ w) @ table.T


def one_hot_rows(table, tokens):
    return jax.nn.one_hot(tokens, len(table)) @ table


def layer(x, w):
    return jnp.tanh(x @ w)


def dispatched(x, w):
    """Pick rows of a layer's result and of ``x`` by a product with a mask from that result."""
    h = layer(x, w)
    mask = jax.nn.one_hot(jnp.argmax(h, -1), 16)
    return mask.T @ h, mask.T @ x


TABLE = [shape(32, 16), shape(16, 16), shape(16, dtype="int32")]


WHICH = {
    "a weight": (jnp.matmul, [shape(2, 16, 16), shape(16, 32)], [None]),
    "on the left": (lambda w, x: w @ jnp.tanh(x), [shape(32, 16), shape(16, 16)], [None]),
    "two contracted": (
        lambda x, w: jnp.einsum("bthd,hdk->btk", jnp.tanh(x), w),
        [shape(2, 8, 2, 8), shape(2, 8, 16)],
        [None],
    ),
    "of two": (lambda x, a, b: jnp.tanh(x) @ jnp.concatenate([a.T, b], 1), [shape(16, 16)] * 3, [None]),
    "small": (layer, [shape(16, 16), shape(16, 8)], ["8 < 16"]),
    "few tokens": (layer, [shape(8, 16), shape(16, 16)], ["8 tokens < 16"]),
    "no multiple": (layer, [shape(16, 24), shape(24, 16)], ["24 % 16"]),
    "no weight": (lambda x, w: jnp.tanh(x) @ jnp.tanh(w), [shape(16, 16)] * 2, ["two activations"]),
    "batched": (lambda x, w: jnp.einsum("bij,bjk->bik", jnp.tanh(x), w), [shape(2, 16, 16)] * 2, ["batched"]),
    "tied": (tied, TABLE, [None, "tied"]),
    "tied and scaled": (functools.partial(tied, rows=lambda table, ids: (table * 4.0)[ids]), TABLE, [None, "tied"]),
    "tied by one-hot": (functools.partial(tied, rows=one_hot_rows), TABLE, ["a mask or integers", None, "tied"]),
    "one-hot by where": (
        lambda table, w, ids: jnp.where(ids[:, None] == jnp.arange(32), 1.0, 0.0) @ table,
        TABLE,
        ["a mask or integers"],
    ),
    "rows of a table": (lambda table, w, ids: table[ids] @ jnp.tanh(w), TABLE, ["two activations"]),
    "one of a stack": (
        lambda x, w, i: layer(layer(x, w[0]), jnp.take(w, i, axis=0)),
        [shape(16, 16), shape(3, 16, 16), shape(dtype="int32")],
        [None, None],
    ),
    "zeros": (lambda x, w: jnp.tanh(jnp.zeros((16, 16)) @ w + x) @ w, [shape(16, 16)] * 2, [None, None]),
    "of an argmax": (dispatched, [shape(16, 16)] * 2, [None, "two activations", "a mask or integers"]),
    "of int8": (
        lambda x, w: jnp.tanh(x) @ w.astype(x.dtype),
        [shape(16, 16), shape(16, 16, dtype="int8")],
        ["two activations"],
    ),
    "convolution": (
        lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"),
        [shape(1, 16, 8, 8), shape(16, 16, 3, 3)],
        ["a convolution"],
    ),
    "derivative rule": (doubled, [shape(16, 16)] * 2, ["in a function with a derivative rule"]),
    "derivative": (
        jax.grad(lambda w, x: jnp.sum(layer(x, w))),
        [shape(16, 16)] * 2,
        [None, "a derivative that is spelled out"],
    ),
    "scan": (
        lambda x, w: jax.lax.scan(lambda x, w: (layer(x, w), None), x, w),
        [shape(16, 16), shape(3, 16, 16)],
        [None],
    ),
    "checkpoint": (lambda x, w: jax.checkpoint(layer)(x, w), [shape(16, 16)] * 2, [None]),
}


class TestWhichProducts:
    def test_the_plan_shows_which_products_are_float8_and_why_others_are_not(self):
        for name, (fun, args, reasons) in WHICH.items():
            rows = told(fun, *args)
            assert [operands for operands, _ in rows] == [HALF if reason else FORWARD for reason in reasons], name
            assert [why.partition("; ")[2] for _, why in rows] == [
                f"no float8: {reason}" if reason else "float8" for reason in reasons
            ], name

    def test_by_default_float8_needs_weights_1536_wide_and_1024_tokens(self):
        def fun(x, small, odd, large):
            return jnp.tanh(x[:, :768]) @ small, jnp.tanh(x) @ odd, jnp.tanh(x[:512]) @ large, jnp.tanh(x) @ large

        args = [shape(8192, 2048), shape(768, 3072), shape(2048, 50257), shape(2048, 2048)]
        reasons = [why for _, why in told(fun, *args, policy="mixed_float8")]
        assert [reason.partition("; ")[2] for reason in reasons] == [
            "no float8: 768 < 1536", "no float8: 50257 % 16", "no float8: 512 tokens < 1024", "float8",
        ]  # fmt: skip

    def test_the_summary_counts_float8_products_and_the_reasons_against_float8(self):
        def fun(x, small, large):
            with jaxmp.precision("float32"):
                x = layer(x, large)
            return jnp.tanh(x[:, :8]) @ small, layer(layer(x, large), large), jnp.tanh(x) @ jnp.tanh(x).T

        args = [shape(16, 16), shape(8, 16), shape(16, 16)]
        cast_plan = plan(fun, *args, policy=SMALL)
        assert cast_plan.summary.float8 == {"float8": 2, "no float8: 8 < 16": 1, "no float8: two activations": 1}
        told = "products in float8: 2 of 4, no float8: 8 < 16 (1), no float8: two activations (1)"
        assert told in str(cast_plan).splitlines() and '"float8": 2' in cast_plan.to_json()
        assert "in float8" not in str(plan(fun, *args)) and plan(fun, *args).summary.float8 == {}

    def test_a_call_outside_of_jit_computes_by_the_current_setting(self, monkeypatch):
        monkeypatch.setattr(float8, "_warned", ["cpu"])
        jitted, args = jax.jit(lambda x, w: x @ w), (normal(0, 16, 16), normal(1, 16, 16))
        fun = jaxmp.autocast(lambda x, w: jitted(x, w), SMALL)
        in_float8 = jaxmp.autocast(lambda x, w: x @ w, SMALL)(*args)
        in_half = jaxmp.autocast(lambda x, w: x @ w, "mixed_bfloat16")(*args)
        assert np.any(in_float8 != in_half)
        for setting, expected in (("emulate", in_float8), ("", in_half), ("emulate", in_float8)):
            monkeypatch.setenv("JAXMP_FLOAT8", setting)
            np.testing.assert_array_equal(fun(*args), expected)

    def test_a_device_without_float8_computes_in_bfloat16_and_warns_once(self, monkeypatch):
        monkeypatch.delenv("JAXMP_FLOAT8")
        monkeypatch.setattr(float8, "_warned", [])
        args = [shape(16, 16)] * 2
        with pytest.warns(UserWarning, match="are bfloat16 here"):
            assert told(layer, *args) == [(HALF, "product; no float8: not on this device")]
        assert told(layer, *args) == [(HALF, "product; no float8: not on this device")]
        with jaxmp.hardware.assumed("h200"):
            assert told(layer, *args) == [(FORWARD, "product; float8")]
        with jaxmp.hardware.assumed("a100"):
            assert told(layer, *args) == [(HALF, "product; no float8: not on this device")]
        assert told(layer, *args, policy="mixed_bfloat16") == [(HALF, "product")]

    def test_two_calls_of_a_jitted_product_can_differ_in_float8(self):
        dot = jax.jit(jnp.matmul)

        def fun(x, w):
            return dot(jnp.tanh(x), w), dot(jnp.tanh(x), jnp.tanh(w))

        args = normal(0, 16, 16), normal(1, 16, 16)
        assert multiplied(jaxmp.autocast(fun, SMALL), *args) == [FORWARD, HALF]
        eager = jaxmp.autocast(fun, SMALL)(*args)
        np.testing.assert_array_equal(eager, compiled(jaxmp.autocast(fun, SMALL))(*args))


class Linen(nn.Module):
    """Two layers that have a dtype field, and a head that has none."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = jnp.tanh(nn.Dense(32)(x))
        return Head(name="head")(x)


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 16))


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(n, 32, rngs=rngs) for n in (16, 32)])
        self.head = NNXHead(rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(x)


class NNXHead(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (32, 16)))

    def __call__(self, x):
        return x @ self.w[...]


@functools.cache
def initialised(model, rows):
    return numbers(jax.eval_shape(functools.partial(nn.Module.init, model), jax.random.key(0), jnp.ones((rows, 16))))


def linen_loss(model):
    variables = initialised(Linen(), 16)
    return lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2), variables["params"]


def nnx_loss(make):
    model = make(module_with_numbers(lambda: NNX(nnx.Rngs(0))))
    graphdef, params = nnx.split(model)
    return lambda params, x: jnp.mean(nnx.merge(graphdef, params)(x) ** 2), params


ROUTES = {
    "linen.apply_policy": lambda overrides=None: linen_loss(jaxmp.linen.apply_policy(Linen(), SMALL, overrides)),
    "linen.autocast": lambda overrides=None: linen_loss(jaxmp.linen.autocast(Linen(), SMALL, overrides)),
    "nnx.apply_policy": lambda overrides=None: nnx_loss(lambda net: jaxmp.nnx.apply_policy(net, SMALL, overrides)),
    "nnx.autocast": lambda overrides=None: nnx_loss(lambda net: jaxmp.nnx.autocast(net, SMALL, overrides)),
    "autocast": lambda overrides=None: _under_autocast(overrides),
}


def _under_autocast(overrides):
    loss, params = linen_loss(Linen())
    return jaxmp.autocast(loss, SMALL, overrides), params


@pytest.mark.parametrize("route", ROUTES)
def test_products_of_weights_are_float8_except_under_an_override(route):
    loss, params = ROUTES[route]()
    assert in_float8(jax.grad(loss), params, normal(0, 16, 16)) == ([3, 0], [5, 0])
    loss, params = ROUTES[route]({"**/head": "mixed_bfloat16" if "autocast" in route else "float32"})
    assert in_float8(jax.grad(loss), params, normal(0, 16, 16)) == ([2, 1], [3, 2])


def test_an_override_turns_float8_on_in_a_float32_model():
    for route in ("linen.apply_policy", "nnx.autocast"):
        loss, params = ROUTES[route]({"**/head": SMALL, "**": "float32"})
        assert multiplied(loss, params, normal(0, 16, 16)) == [("float32", "float32")] * 2 + [FORWARD]


@pytest.mark.once
def test_each_part_of_a_model_uses_its_own_recipe():
    overrides = {"**/head": SMALL.replace("min_dim", "gradient=float8_e4m3fn,min_dim")}
    for route in ("linen.autocast", "nnx.apply_policy"):
        loss, params = ROUTES[route](overrides)
        products = jaxmp.inspect.audit(jax.grad(loss), compile=False)(params, normal(0, 16, 16)).products
        backward = [product for product in products if product.phase == "backward"]
        formats = {product.path.endswith("head"): {*product.operands} for product in backward}
        assert formats == {True: {E4M3}, False: {E4M3, E5M2}}


def by_hand(x, w):
    """Compute the float8 product as the engine emits it."""
    half = [operand.astype(jnp.bfloat16) for operand in (x, w)]
    recipe = jaxmp.Float8(min_dim=16, min_tokens=16)
    return float8_product.dot_general(*half, (((x.ndim - 1,), (0,)), ((), ())), recipe, weight="rhs")


def mlp(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def hand_mlp(params, x):
    return by_hand(jnp.tanh(by_hand(x, params["up"])), params["down"]).astype(jnp.float32)


MLP = {"up": normal(1, 16, 64, scale=0.25), "down": normal(2, 64, 32, scale=0.125)}


def loss_of(fun):
    return lambda params, x: jnp.mean(fun(params, x) ** 2)


class TestNumbers:
    def test_results_equal_products_by_hand_bit_for_bit(self):
        x = normal(0, 4, 16, 16)
        ours, hand = (
            compiled(lambda *args, fun=fun: (fun(*args), jax.grad(loss_of(fun))(*args)))(MLP, x)
            for fun in (jaxmp.autocast(mlp, SMALL), hand_mlp)
        )
        jax.tree.map(np.testing.assert_array_equal, ours, hand)
        assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(ours))


class TestTransformations:
    def test_vmap_uses_one_scale_for_all_examples(self):
        x = normal(0, 4, 16, 16)
        mapped = jax.vmap(jaxmp.autocast(mlp, SMALL), (None, 0))
        outer = jaxmp.autocast(jax.vmap(mlp, (None, 0)), SMALL)
        expected, *results = compiled(lambda *args: [fun(*args) for fun in (hand_mlp, mapped, outer)])(MLP, x)
        for result in results:
            np.testing.assert_array_equal(result, expected)
        assert in_float8(jax.grad(loss_of(mapped)), MLP, x) == ([2, 0], [3, 0])

    @pytest.mark.once
    def test_a_scan_over_layers_equals_its_unrolled_loop(self):
        weights, x = normal(1, 3, 16, 16, scale=0.25), normal(0, 32, 16)

        @functools.partial(jaxmp.autocast, policy=SMALL)
        def scanned(weights, x):
            return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]

        def unrolled(weights, x):
            for w in weights:
                x = jnp.tanh(by_hand(x, w))
            return x.astype(jnp.float32)

        assert in_float8(jax.grad(loss_of(scanned)), weights, x) == ([1, 0], [2, 0])
        both = compiled(lambda *args: [jax.grad(loss_of(fun))(*args) for fun in (scanned, unrolled)])(weights, x)
        assert 1 - cosine(*both) < 1e-4

    def test_a_function_with_a_custom_rule_may_stand_between_products(self):
        @jax.custom_vjp
        def double(x):
            return 2 * x

        double.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))
        fun = jaxmp.autocast(lambda p, x: double(x @ p["up"]) @ p["down"], SMALL)
        assert in_float8(jax.grad(loss_of(fun)), MLP, normal(0, 16, 16)) == ([2, 0], [3, 0])

    @pytest.mark.parametrize("inside", [False, True], ids=["autocast of shard_map", "shard_map of autocast"])
    def test_shards_do_not_wait_for_a_shard_that_skips_the_product(self, inside):
        mesh = Mesh(np.array(jax.devices()[:4]), ("stage",))
        split, jitted = PartitionSpec("stage"), jax.jit(layer)  # called in a branch and outside of it
        run = jaxmp.autocast(lambda x, w: jitted(x, w), SMALL) if inside else jitted

        def local(x, w):
            x = run(x, w[0])
            return jax.lax.cond(jax.lax.axis_index("stage") == 0, lambda x: run(x, w[0]), lambda x: x, x)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=False)
        fun = mapped if inside else jaxmp.autocast(mapped, SMALL)
        x, w = normal(0, 64, 16), normal(1, 4, 16, 16)
        # One pmax for each operand of the product that all shards compute.
        assert str(jax.make_jaxpr(fun)(x, w)).count("pmax") == 2
        assert multiplied(fun, x, w) == [FORWARD] * 2
        half = jaxmp.autocast(mapped, "mixed_bfloat16")
        result, half = compiled(lambda x, w: (fun(x, w), half(x, w)))(x, w)
        assert np.isfinite(result).all() and 1 - cosine(result, half) < 1e-2


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(32)(layer()(nn.Dense(64)(x), None)[0])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(64)(x)), None


WEIGHTS = {(16, 64), (64, 32), (64, 64)}


def casts_to_e4m3(jaxpr, inside=False):
    """Count the casts of weights inside and outside of the loop over microbatches."""
    casts = Counter()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        is_cast = eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == E4M3
        casts[inside] += is_cast and eqn.invars[0].aval.shape in WEIGHTS
        is_loop = eqn.primitive.name == "scan" and eqn.params["length"] == 2
        for inner in jaxprs_in(eqn):
            casts.update(casts_to_e4m3(inner, inside or is_loop))
    return casts


@pytest.mark.skipif(getattr(jax.config, "jax_remat3", False), reason="JAX cannot split its new checkpoint")
def test_a_weight_is_cast_to_float8_once_per_step(monkeypatch):
    model, params = jaxmp.linen.apply_policy(Layers(), SMALL), initialised(Layers(), 48)["params"]

    def loss(params, model_state, batch, rng):
        return jnp.mean(model.apply({"params": params}, batch) ** 2), model_state

    state = jaxmp.TrainState.create(params=params, tx=jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.NoOpLossScale()))

    def casts():
        step = jaxmp.make_train_step(loss, accumulate_steps=2, donate=False)
        return casts_to_e4m3(jax.make_jaxpr(step.jitted)(state, normal(0, 2 * 48, 16)))

    assert casts() == {False: 3, True: 0}
    monkeypatch.setattr(devices, "hoist", lambda fun, *_: fun)
    assert casts()[True] >= 3


def test_the_policy_of_an_inner_autocast_decides_on_float8():
    inner = jaxmp.autocast(layer, "mixed_bfloat16")
    outer = jaxmp.autocast(lambda x, w: inner(layer(x, w), w), SMALL)
    assert multiplied(outer, *[normal(0, 16, 16)] * 2) == [FORWARD, HALF]
    outer = jaxmp.autocast(lambda x, w: jaxmp.autocast(layer, SMALL)(layer(x, w), w), "mixed_bfloat16")
    assert multiplied(outer, *[normal(0, 16, 16)] * 2) == [HALF, FORWARD]


def test_the_audit_finds_no_fault_with_float8_products():
    report = jaxmp.inspect.audit(jax.grad(loss_of(jaxmp.autocast(mlp, SMALL))), expect="mixed_bfloat16")(
        MLP, normal(0, 32, 16)
    )
    assert report.findings == () and report.half_flops == 1 and report.flops[E5M2] + report.flops[E4M3] == 1


@pytest.mark.absent_tpu
def test_the_audit_shows_products_that_run_in_float8_on_a_tpu7x(monkeypatch):
    monkeypatch.delenv("JAXMP_FLOAT8")
    gradient = jax.grad(loss_of(jaxmp.autocast(layer, SMALL)), argnums=(0, 1))
    args = shape(512, 256), shape(256, 384)
    report = jaxmp.inspect.audit(gradient, device="tpu7x")(*args)
    assert [product.operands for product in report.products] == [FORWARD, (E5M2, E4M3), (E5M2, E4M3)]
    assert [product.ran for product in report.products] == [E4M3, E5M2, E5M2]
    assert report.findings == ()
    with pytest.warns(UserWarning, match="or a TPU7x, got TPU v6 lite: they are bfloat16 here"):
        report = jaxmp.inspect.audit(gradient, device="v6e")(*args)
    assert {(product.operands, product.ran) for product in report.products} == {(HALF, "bfloat16")}
