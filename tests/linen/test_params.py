"""Params, inputs and variables of modules without a dtype field."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import concrete
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_tools import in_turn
from flax import errors, serialization
from jax import lax
from linen_zoo import (
    HALVES,
    Linear,
    Tied,
    data,
    dtypes_of,
    float32,
    model_products,
    numbers,
    products,
    quick_jit,
    rngs,
    same_bits,
    same_computation,
    shapes,
    standard_promotion,
)

import jaxmp
from jaxmp.linen import apply_policy

X, IMAGE = data(2, 8), data(2, 4, 8, 3)
normal = nn.initializers.normal(1.0)


def half(hand: Any, *values: Any) -> Any:
    """Return ``values`` in the dtype ``hand``, or unchanged if it is None."""
    cast = [value if hand is None else value.astype(hand) for value in values]
    return cast if len(cast) > 1 else cast[0]


class Convolution(nn.Module):
    hand: Any = None

    @nn.compact
    def __call__(self, x):
        x, w = half(self.hand, x, self.param("w", normal, (3, 3, x.shape[-1], 2)))
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


class SetUp(nn.Module):
    hand: Any = None

    def setup(self):
        self.w = self.param("w", normal, (8, 8))

    def __call__(self, x):
        return jnp.dot(*half(self.hand, x, self.w))


class PytreeParams(nn.Module):
    """A module with a param that is a dict, beside a param that is an array.

    Only the array shows that the dict is not the params of a submodule.
    """

    hand: Any = None

    @nn.compact
    def __call__(self, x):
        def init(key, shape):
            return {"w": normal(key, shape), "steps": jnp.zeros((), jnp.int32), "rest": [jnp.ones(8), None]}

        tree = self.param("tree", init, (8, 8))
        x, w, offset, b = half(self.hand, x, tree["w"], tree["rest"][0], self.param("b", normal, (8,)))
        return x @ w + offset + b + tree["steps"].astype(b.dtype)


class Partitioned(nn.Module):
    hand: Any = None

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.with_partitioning(normal, (None, "model")), (8, 8))
        return jnp.dot(*half(self.hand, x, w))


class Norm(nn.Module):
    """A norm that the user wrote."""

    hand: Any = None

    @nn.compact
    def __call__(self, x):
        x, scale = half(self.hand, x, self.param("scale", nn.initializers.ones, (x.shape[-1],)))
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


LEAVES = {
    "jnp.dot": (lambda hand=None: Linear(8, hand), X),
    "lax.conv_general_dilated": (Convolution, IMAGE),
    "params in setup": (SetUp, X),
    "params that are pytrees beside an array": (PytreeParams, X),
    "partitioned params": (Partitioned, X),
    "a norm": (Norm, X),
}


def test_a_module_without_a_dtype_field_computes_as_under_autocast():
    for leaf, policy in in_turn(LEAVES):
        make, x = LEAVES[leaf]
        model = apply_policy(make(), policy)
        same_computation(model.init, make().init, rngs(), x)
        same_computation(model.apply, jaxmp.autocast(make().apply, policy), shapes(model, x), x)
        assert set(model_products(model, x)) <= {HALVES[policy]}


def errs_by_rounding(bare: nn.Module, x: Any, policy: str) -> None:
    """Assert that a policy changes outputs and gradients only a little."""
    model, variables = apply_policy(bare, policy), numbers(shapes(bare, x))

    @quick_jit
    def run(variables):
        return [(m.apply(variables, x), gradients_of(m, variables, x)) for m in (model, bare)]

    for got, want in zip(*run(variables), strict=True):
        is_close(got, want, policy)


def is_close(got: Any, want: Any, policy: str) -> None:
    """Assert that arrays differ only by the rounding of the operands of products."""
    bound = {"mixed_bfloat16": 0.02, "mixed_float16": 0.003}[policy]
    got, want = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (got, want))
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


def gradients_of(model: nn.Module, variables: Any, x: Any) -> Any:
    return jax.grad(lambda params: jnp.sum(model.apply({**variables, "params": params}, x) ** 2))(variables["params"])


def test_operations_of_lax_take_inputs_of_any_dtype_beside_params():
    for policy, dtype in (
        ("mixed_float16", "int32"),
        ("mixed_bfloat16", "float16"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
    ):

        class Scale(nn.Module):
            @nn.compact
            def __call__(self, x):
                scale = self.param("scale", nn.initializers.ones, (8,))
                x = x.astype(scale.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else x
                return lax.mul(x, jnp.broadcast_to(scale, x.shape))

        model, x = apply_policy(nn.Sequential([Scale(), nn.Dense(8)]), policy), np.asarray(10 * X, dtype)
        out = jax.eval_shape(model.apply, shapes(model, x), x)
        assert out.dtype == ("bfloat16" if policy == "bfloat16" else "float32")


def test_a_pure_half_policy_rounds_the_params_of_the_bare_module():
    bare = nn.Sequential([Linear(8), PytreeParams()])
    model = apply_policy(bare, "bfloat16")
    got, want = quick_jit(lambda rngs: (model.init(rngs, X), bare.init(rngs, X)))(rngs())
    same_bits(got, jax.tree.map(lambda w: w if w.dtype == jnp.int32 else w.astype(jnp.bfloat16), want))


# --- modules with params of their own and submodules ------------------------------------------------------------------


class ViT(nn.Module):
    """A vision transformer; some params come from ``self.param``, others from layers."""

    hand: Any = None

    @nn.compact
    def __call__(self, image):
        x = nn.Conv(8, (2, 2), strides=(2, 2), name="patches", dtype=self.hand)(image).reshape(2, -1, 8)
        token, position = half(
            self.hand, self.param("token", normal, (1, 1, 8)), self.param("position", normal, (1, 9, 8))
        )
        x = jnp.concatenate([jnp.tile(token, (2, 1, 1)), x], axis=1) + position
        gamma = half(self.hand, self.param("gamma", normal, (8,)))
        attention = nn.MultiHeadDotProductAttention(num_heads=2, dtype=self.hand)
        x = x + gamma * attention(nn.LayerNorm(dtype=self.hand)(x))
        head = half(self.hand, self.param("head", normal, (8, 8)))
        return x[:, 0] @ head


@pytest.mark.once
@pytest.mark.slow("compiles a transformer and its gradients; its parts have tests of their own")
def test_a_vision_transformer_has_half_products_and_no_other_rounding_errors():
    policy = "mixed_float16"
    with standard_promotion():
        errs_by_rounding(ViT(), IMAGE, policy)
        assert set(model_products(apply_policy(ViT(), policy), IMAGE)) == {HALVES[policy]}


def product_beside_a_submodule_is_half(product: Any) -> None:
    """Assert that a product with a param is half, and that gradients are float32."""

    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", normal, (8, 8))
            if product == "dot":
                y = x @ w
            else:
                y = lax.conv_general_dilated(x[None], w[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))[0]
            return nn.Dense(8)(y)

    model = apply_policy(Mixed(), "mixed_float16")
    gradient = jax.grad(lambda variables: model.apply(variables, X).sum())
    assert products(gradient, shapes(model, X)) == ["float16"] * 5  # no product for the gradient of the input
    assert dtypes_of(jax.eval_shape(gradient, shapes(model, X))) == {"float32"}


def test_the_product_of_an_input_and_a_param_beside_a_submodule_is_half():
    for product in ("dot", "conv"):
        product_beside_a_submodule_is_half(product)


# --- inputs that must not be rounded ----------------------------------------------------------------------------------

TIMES = concrete.array([999.25, 0.015625 + 1])  # bfloat16 has neither number


def wave(t):
    angles = t[:, None] * jnp.array([1.0, 0.5, 0.25, 0.125])
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


class Embedding(nn.Module):
    """A module that has neither a dtype field nor params."""

    @nn.compact
    def __call__(self, t):
        return wave(t)


class Diffusion(nn.Module):
    """A network with a timestep as input.

    The timestep goes through plain arithmetic or through a module without params, and then into a layer.
    """

    mixed: bool
    inline: bool

    @nn.compact
    def __call__(self, x, t):
        x = x + self.param("position", nn.initializers.zeros, (8,)).astype(x.dtype) if self.mixed else x
        time = wave(t) if self.inline else Embedding()(t)
        return nn.Dense(8)(x), nn.Dense(8, name="time", use_bias=False, kernel_init=nn.initializers.ones)(time)


def test_a_timestep_is_not_rounded_before_plain_arithmetic_or_a_float32_module():
    for mixed, inline in ((False, False), (True, True)):
        model = apply_policy(Diffusion(mixed, inline), "mixed_bfloat16", {"time": "float32"})

        @quick_jit
        def both(rngs, model=model):
            with jax.default_matmul_precision("highest"):
                want = wave(TIMES) @ jnp.ones((8, 8))
            return model.init_with_output(rngs, X, TIMES)[0][1], want

        same_bits(*both(rngs()))
        assert sorted(model_products(model, X, TIMES)) == ["bfloat16", "float32"]

    model = apply_policy(Diffusion(True, True), "mixed_bfloat16")

    @quick_jit
    def both(rngs):
        want = wave(TIMES).astype(jnp.bfloat16) @ jnp.ones((8, 8), jnp.bfloat16)
        return model.apply(model.init(rngs, X, TIMES), X, TIMES)[1], float32(want)

    same_bits(*both(rngs()))


def test_a_residual_of_a_float32_input_is_added_in_float32():
    class Residual(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.param("unused", normal, ())
            return x + nn.Dense(8)(x)

    with standard_promotion():
        model = apply_policy(Residual(), "mixed_float16")
        dense = apply_policy(nn.Dense(8), "mixed_float16")

        def both(variables):
            layer = dense.apply({"params": variables["params"]["Dense_0"]}, X)
            return model.apply(variables, X), X + layer

        same_bits(*quick_jit(both)(numbers(shapes(model, X))))


def test_a_value_that_a_module_passes_to_its_own_method_keeps_its_dtype():
    class Rounds(nn.Module):
        @nn.compact
        def __call__(self, x):
            return self.param("scale", normal, (8,)) * self.doubled(x.astype("float16")).astype("float32")

        def doubled(self, x):
            dtypes.append(x.dtype.name)
            return x + x

    dtypes: list[str] = []
    shapes(apply_policy(Rounds(), "mixed_bfloat16"), X)
    assert set(dtypes) == {"float16"}


def test_integers_bools_keys_and_other_objects_reach_modules_unchanged():
    arguments = {}

    class Look(nn.Module):
        owns: bool

        @nn.compact
        def __call__(self, x, ids, mask, key, nothing, number, *, name, flag=True):
            if self.owns:
                x = x * self.param("scale", nn.initializers.ones, ())
            noise = jax.random.bernoulli(key, 0.5, x.shape)
            arguments[self.owns] = (ids.dtype.name, mask.dtype.name, nothing, number, name, flag)
            return jnp.where(noise & mask, x, 0) + nn.Embed(3, 8)(ids)

    args = (X, concrete.array([0, 2]), concrete.ones((2, 8), bool), jax.random.key(3), None, 0.1)
    for owns in (False, True):
        model = apply_policy(nn.Sequential([Look(owns), nn.Dense(8)]), "mixed_float16")
        with standard_promotion():
            variables = shapes(model, *args, name="x")
            jax.eval_shape(lambda v, model=model: model.apply(v, *args, name="x"), variables)
    assert arguments == dict.fromkeys((False, True), ("int32", "bool", None, 0.1, "x", True))


def test_inputs_may_be_numpy_arrays_of_any_width():
    for module, dtype in ((lambda: Linear(8), "float32"), (lambda: nn.Dense(8), "float16"), (ViT, "float64")):
        x = np.asarray(IMAGE if module is ViT else X, dtype)
        model = apply_policy(module(), "mixed_bfloat16")
        with standard_promotion():
            assert set(model_products(model, x)) == {"bfloat16"}


# --- variables --------------------------------------------------------------------------------------------------------


def test_init_creates_the_variables_of_the_bare_module():
    for make, args, policy in (
        (lambda: nn.Sequential([Linear(), nn.BatchNorm(use_running_average=False)]), (X,), "O2"),
        (lambda: Tied(), (concrete.array([1, 2]),), "float32"),
        (lambda: ViT(), (IMAGE,), "mixed_bfloat16"),
        (lambda: nn.WeightNorm(nn.Dense(8)), (X,), "mixed_float16"),
        (lambda: nn.RNN(nn.OptimizedLSTMCell(8)), (data(2, 3, 8),), "float32"),
    ):
        with standard_promotion():
            same_computation(apply_policy(make(), policy).init, make().init, rngs(), *args)


def test_checkpoints_are_interchangeable_both_ways():
    network = nn.Sequential([nn.BatchNorm(True), Linear(8)])
    mine, bare = apply_policy(network, "O2").init(rngs(), X), network.init(rngs(1), X)
    same_bits(serialization.from_bytes(bare, serialization.to_bytes(mine)), mine)
    same_bits(serialization.from_bytes(mine, serialization.to_bytes(bare)), bare)


def test_training_leaves_params_statistics_and_moments_float32():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Linear(8)(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x)))

    model, optimizer = apply_policy(Net(), "mixed_bfloat16"), optax.adam(1e-2)

    def step(variables, state):
        def loss(params):
            out, updated = model.apply({**variables, "params": params}, X, mutable=["batch_stats"])
            return jnp.mean(out**2), updated

        gradients, updated = jax.grad(loss, has_aux=True)(variables["params"])
        updates, state = optimizer.update(gradients, state)
        return {"params": optax.apply_updates(variables["params"], updates), **updated}, state

    with standard_promotion():
        variables = shapes(model, X)
        state = jax.eval_shape(optimizer.init, variables["params"])
        assert jax.eval_shape(step, variables, state) == (variables, state)


class Counts(nn.Module):
    """A module with a variable whose value is a dict of arrays of two dtypes."""

    @nn.compact
    def __call__(self, x):
        means = self.variable(
            "means", "of", lambda: {"wide": jnp.zeros((), "float32"), "half": jnp.zeros((), "float16")}
        )
        y = nn.Dense(8)(x)
        if not self.is_initializing():
            means.value = {"wide": y.mean(), "half": y.astype("float32").mean()}
        return y


@pytest.mark.parametrize("mutable", [["means"], True])
def test_the_arrays_in_a_variable_keep_their_dtypes(mutable):
    model = apply_policy(Counts(), "mixed_float16")
    variables = shapes(model, X)
    apply = functools.partial(model.apply, mutable=mutable)
    assert jax.eval_shape(apply, variables, X)[1]["means"] == variables["means"] == shapes(Counts(), X)["means"]


def test_params_from_a_half_checkpoint_are_used_without_a_cast():
    model = apply_policy(Linear(), "mixed_float16")
    variables = model.init(rngs(), X)
    rounded = jax.tree.map(lambda w: w.astype(jnp.float16), variables)
    want = X.astype(jnp.float16) @ rounded["params"]["kernel"] + rounded["params"]["bias"]
    np.testing.assert_allclose(model.apply(rounded, X), want, rtol=2e-3)  # the last sum of `want` is rounded


def product_of_a_strong_type_is_half(module: Any) -> None:
    """Assert that a product is half if its input comes from a norm or a sort."""

    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            if module == "norm":  # jnp.linalg.norm returns a strongly typed array
                w = self.param("w", normal, (8, 8))
                return nn.Dense(8)((x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ w)
            experts = nn.Dense(2)(x).argmax(-1)
            w = self.param("w", normal, (2, 8, 8))
            return lax.ragged_dot(x[jnp.argsort(experts)], w, jnp.bincount(experts, length=2))

    model = apply_policy(Mixed(), "mixed_float16")
    with standard_promotion():
        assert set(model_products(model, X)) == {"float16"}
        if module == "norm":
            gradient = jax.grad(lambda variables: model.apply(variables, X).sum())
            assert dtypes_of(jax.eval_shape(gradient, shapes(model, X))) == {"float32"}


def test_a_product_beside_a_submodule_is_half_also_for_a_strongly_typed_input():
    for module in ("norm", "ragged"):
        product_of_a_strong_type_is_half(module)


class Halves(nn.Module):
    """Layers with a common initializer, and a param shaped like an array."""

    kernel_init: Any

    @nn.compact
    def __call__(self, x):
        first, second = (nn.Dense(8, kernel_init=self.kernel_init, name=name) for name in ("first", "second"))
        shift = self.param("shift", lambda key, like: jnp.zeros(like.shape), np.ones(8))
        return second(first(x)) + shift.astype(x.dtype)


def test_a_param_of_another_shape_raises_flaxs_error():
    x = concrete.ones((2, 8))
    model = apply_policy(Halves(nn.initializers.lecun_normal()), "mixed_bfloat16")
    for name in ("first", "second"):
        params = model.init(jax.random.key(0), x)["params"]
        params[name]["kernel"] = concrete.ones((8, 9))
        with pytest.raises(errors.ScopeParamShapeError, match=f'"kernel" in "/{name}", .* generate shape'):
            model.apply({"params": params}, x)


def test_an_initializer_that_reads_the_module_or_the_input_leaks_no_tracer():
    class Reads(nn.Module):
        @nn.compact
        def __call__(self, x):
            gain = self.param("gain", lambda key: jnp.ones(x.shape[-1:]) + 0 * self.features)
            return nn.Dense(self.features)(x * gain.astype(x.dtype))

        features: int = 8

    model, x = apply_policy(Reads(), "mixed_float16"), concrete.ones((2, 8))
    variables = model.init(jax.random.key(0), x)
    with jax.checking_leaks():
        assert jax.jit(model.apply)(variables, x).shape == (2, 8)


def test_classes_of_modules_below_the_root_are_freed_after_the_call():
    def local_class():
        class Local(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(8)(x)

        model = apply_policy(nn.Sequential([Local()]), "mixed_bfloat16")
        variables = jax.eval_shape(lambda key: model.init(key, X), jax.random.key(0))
        jax.eval_shape(lambda variables: model.apply(variables, X), variables)
        return weakref.ref(Local)

    classes = [local_class() for _ in range(2)]
    gc.collect()
    assert [reference() for reference in classes] == [None] * 2


def test_mutable_may_be_an_array_of_names():
    model = apply_policy(nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=False)]), "mixed_bfloat16")
    names = ["batch_stats", "cache"]
    with standard_promotion():
        of_list, of_array = (
            jax.eval_shape(functools.partial(model.apply, mutable=mutable), shapes(model, X), X)[1]
            for mutable in (names, np.array(names))
        )
    assert of_list == of_array and dtypes_of(of_array) == {"float32"}
