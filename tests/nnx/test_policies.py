"""Policies of NNX modules: sharing, default dtypes, nesting, caches and errors."""

from __future__ import annotations

import gc
from typing import Any

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from linen_zoo import data, products, same_bits
from nnx_zoo import Net, Scale, model_products, outcome, products_of, rngs, values

import jaxmp
from jaxmp.nnx import apply_policy, autocast

IMAGE, VECTORS = data(2, 5, 5, 3), data(8, 8)


@pytest.mark.once
def test_a_shared_module_is_covered_by_a_pattern_on_either_path():
    for pattern in ("again", "layers/0"):
        model = apply_policy(Net(rngs()), "mixed_float16", {pattern: "float32"})
        assert model.again is model.layers[0]
        assert model_products(model, IMAGE) == ["float16", "float32", "float16", "float16", "float32"]


@pytest.mark.once
def test_new_values_reach_the_copy_and_new_modules_and_variables_need_the_policy_again():
    put = apply_policy
    model = nnx.Sequential(nnx.Linear(8, 3, rngs=rngs()))
    policied = put(model, "mixed_bfloat16")
    model.layers[0].bias[...] = concrete.ones(3)
    same_bits(policied.layers[0].bias[...], concrete.ones(3))
    before = policied(VECTORS)
    model.layers[0].kernel = nnx.Param(concrete.zeros((8, 3)))
    same_bits(policied(VECTORS), before)
    model.layers[0] = nnx.Linear(8, 5, rngs=rngs())
    same_bits(policied(VECTORS), before)
    assert put(model, "mixed_bfloat16")(VECTORS).shape == (8, 5)


def test_the_copy_shares_its_variables_with_the_original_model_which_does_not_change():
    bare = Net(rngs())
    before, attributes = values(bare), dtypes_given(bare)
    model = apply_policy(bare, "mixed_float16")
    assert dtypes_given(bare) == attributes and type(bare) is Net
    same_bits(values(bare), before)
    model.conv.kernel[...] += 1
    same_bits(bare.conv.kernel[...], model.conv.kernel[...])
    assert model.layers[0].kernel is bare.layers[0].kernel and model.again is model.layers[0]


def dtypes_given(model: Any) -> list[Any]:
    return [vars(module).get("dtype", "none") for _, module in nnx.iter_modules(model)]


def test_params_tied_across_modules_stay_tied():
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(5, 8, rngs=rngs)
            self.out = Scale(8, rngs)
            self.table = self.embed.embedding

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.embed.attend(self.out(self.embed(tokens)))

    for policy in ("mixed_float16", "float16"):
        model = apply_policy(Tied(rngs()), policy)
        assert model.table is model.embed.embedding
        grads = nnx.eval_shape(lambda model: outcome(model, jnp.arange(4))[1], model)
        assert len(jax.tree.leaves(grads)) == 4  # the shared table counts once


class HandedDown(nnx.Module):
    """A module that passes its default dtype to its submodules."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> None:
        self.first = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)
        self.block = Block(dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.block(self.first(x))


class Block(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.dtype, self.inner = dtype, nnx.Linear(8, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


class HalfByDefault(HandedDown):
    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.bfloat16) -> None:
        super().__init__(rngs, dtype)


def test_a_default_dtype_that_a_parent_passes_on_is_replaced_and_another_dtype_is_not():
    for bare, policy, product in (
        (HandedDown(rngs()), "mixed_float16", "float16"),
        (HandedDown(rngs(), jnp.bfloat16), "mixed_float16", "bfloat16"),
        (HalfByDefault(rngs()), "mixed_float16", "float16"),
        (HalfByDefault(rngs()), "float32", "float32"),
    ):
        assert model_products(apply_policy(bare, policy), VECTORS) == [product] * 2
    assert model_products(bare, VECTORS) == ["bfloat16"] * 2


class WithoutSelf(nnx.Module):
    """A module whose method reads all kinds of class attributes."""

    class Factor:
        value = 2

    def __init__(self) -> None:
        self.inner = nnx.Linear(8, 8, rngs=rngs())

    @property
    def factor(self) -> int:
        return self.Factor.value

    @staticmethod
    def scaled(x: jax.Array, factor: int) -> jax.Array:
        return x * factor

    @classmethod
    def doubled(cls, x: jax.Array) -> jax.Array:
        return cls.scaled(x, 2)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.scaled(self.doubled(self.inner(x)), self.factor)


@pytest.mark.parametrize("under", [apply_policy, autocast])
def test_properties_and_static_and_class_methods_work_as_before(under):
    model = under(WithoutSelf(), "mixed_float16")
    assert (model.factor, type(model).scaled(3, 2), type(model).doubled(3)) == (2, 6, 6)
    assert model_products(model, VECTORS) == ["float16"]


def test_a_submodule_of_a_model_keeps_its_policy_alone_and_in_another_model():
    model = apply_policy(Net(rngs()), "mixed_float16")
    assert model_products(model.layers[0], VECTORS) == ["float16"]
    assert model.layers[0](VECTORS).dtype == jnp.float32
    assert model_products(apply_policy(nnx.Sequential(model.layers[0]), "mixed_bfloat16"), VECTORS) == ["bfloat16"]


@pytest.mark.once
def test_the_error_for_a_half_policy_without_half_products_is_raised_in_every_transform_and_again():
    model = apply_policy(nnx.Linear(8, 8, dtype=jnp.float32, rngs=rngs()), "mixed_float16")
    calls = [lambda: model(VECTORS), lambda: nnx.jit(lambda model: model(VECTORS))(model)]
    calls += [lambda: nnx.grad(lambda model: model(VECTORS).sum())(model), lambda: jax.vmap(model)(VECTORS[None])]
    for call in (*calls, *calls[:2]):  # a program that raises the error is not cached, so it raises again
        with pytest.raises(ValueError, match=r"every product stays as it was: .* \(as it is written\)"):
            call()


@pytest.mark.once
@pytest.mark.parametrize("under", [apply_policy, autocast])
def test_half_products_may_be_in_a_callback(under):
    class ByKernel(nnx.Module):
        def __init__(self):
            self.l = nnx.Linear(8, 8, rngs=rngs())

        def __call__(self, x):
            x = self.l(x).astype(jnp.bfloat16)
            return jax.pure_callback(np.matmul, x, x, x)

    with jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(under(ByKernel(), "mixed_bfloat16", {"l": "float32"}), VECTORS)


class Outer(nnx.Module):
    def __init__(self, inner: Any) -> None:
        self.first, self.inner = nnx.Linear(8, 8, rngs=rngs()), inner

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(self.first(x))


@pytest.mark.once
def test_scopes_are_paths_and_a_model_nested_in_a_function_under_autocast_keeps_its_policy():
    nested = autocast(Outer(Outer(nnx.Linear(8, 8, rngs=rngs()))), "mixed_bfloat16")
    assert [scope for scope, _ in products_of(nested, VECTORS)] == ["first", "inner/first", "inner/inner"]
    inner = autocast(Outer(nnx.Linear(8, 8, rngs=rngs())), "mixed_float16", {"inner": "float32"})
    graphdef, state = nnx.split(Outer(inner))
    run = jaxmp.autocast(lambda model: model(VECTORS), "mixed_bfloat16")
    assert products(lambda state: run(nnx.merge(graphdef, state)), state) == ["bfloat16", "float16", "float32"]


class Student(nnx.Module):
    """A module that may have a submodule of its own class."""

    def __init__(self, rngs: nnx.Rngs, teacher: Any = None) -> None:
        self.linear, self.teacher = nnx.Linear(8, 8, rngs=rngs), teacher

    def __call__(self, x: jax.Array) -> Any:
        return self.linear(x) if self.teacher is None else (self.linear(x), self.teacher(x))


def test_a_root_inside_a_root_of_the_same_class_and_policy_stays_a_root():
    teacher = apply_policy(Student(rngs(1)), "mixed_float16")
    model = apply_policy(Student(rngs(), teacher), "mixed_float16")
    assert [out.dtype.name for out in model(VECTORS)] == ["float32", "float32"]
    model = apply_policy(Student(rngs(), teacher), "params=float32,compute=float16,output=float16")
    assert [out.dtype.name for out in model(VECTORS)] == [
        "float16",
        "float16",
    ]  # the outer root casts its results, also those of the teacher
    _, inner = jax.eval_shape(lambda: Student.__call__(model, VECTORS))
    assert inner.dtype == jnp.float32


class Tree(nnx.Module):
    """A module with a Param and a submodule of the same class."""

    def __init__(self, depth: int, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))
        self.child = Tree(depth - 1, rngs) if depth else nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.child(jnp.tanh(x @ self.kernel).astype("float32"))  # the child multiplies it by its Param


def test_nested_modules_of_one_class_compute_the_same_as_modules_of_several_classes():
    class Inner(Tree):
        pass

    same, several = Tree(2, rngs()), Tree(2, rngs())
    several.child.__class__ = Inner
    same, several = apply_policy(same, "mixed_float16"), apply_policy(several, "mixed_float16")
    assert model_products(same, VECTORS) == ["float16"] * 4
    same_bits(same(VECTORS), several(VECTORS))


class Decoder(nnx.Module):
    """Two attention layers, for which ``init_cache`` creates caches."""

    def __init__(self, rngs: nnx.Rngs, **options: Any) -> None:
        self.layers = nnx.List([nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs, **options) for _ in range(2)])

    def init_cache(self, batch: int, length: int) -> None:
        for layer in self.layers:
            layer.init_cache((batch, length, 8))

    def __call__(self, x: jax.Array, decode: bool = False) -> jax.Array:
        for layer in self.layers:
            mask = None if decode else nnx.make_causal_mask(x[..., 0])
            x = layer(x, mask=mask, decode=decode)
        return x


def decoded(model: Any, x: jax.Array) -> jax.Array:
    step = nnx.jit(lambda model, x: model(x, decode=True))
    with jax.numpy_dtype_promotion("standard"):  # JAX's half-precision attention with a mask promotes dtypes
        return jnp.concatenate([step(model, x[:, n : n + 1]) for n in range(x.shape[1])], axis=1)


def test_a_cache_that_is_created_under_a_policy_has_the_compute_dtype_of_its_layer():
    x = data(2, 4, 8)
    model = apply_policy(Decoder(rngs()), "bfloat16", {"layers/0": "float32"})
    with jax.numpy_dtype_promotion("standard"):
        at_once = nnx.jit(lambda model, x: model(x))(model, x)
    model.init_cache(2, 4)  # without a policy, layer.init_cache creates a float32 cache
    assert [layer.cached_key.dtype.name for layer in model.layers] == ["float32", "bfloat16"]
    np.testing.assert_allclose(decoded(model, x), at_once, atol=0.05)
    assert [int(layer.cache_index[...]) for layer in model.layers] == [4, 4]
    layer = model.layers[1]
    layer.init_cache((2, 4, 8))  # also if the layer is called directly
    assert layer.cached_key.dtype == "bfloat16"
    with pytest.raises(TypeError, match="init_cache"):
        layer.init_cache()
    for model in (apply_policy(Decoder(rngs()), "float32"), autocast(Decoder(rngs()), "mixed_bfloat16")):
        model.init_cache(2, 4)
        assert [layer.cached_value.dtype.name for layer in model.layers] == ["float32"] * 2


def test_calls_outside_of_jit_keep_no_model_alive():
    def live_bytes() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    x, before = concrete.ones((2, 64)), live_bytes()
    model = apply_policy(nnx.Linear(64, 512, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    for _ in range(3):
        model(x)
    assert live_bytes() > before + 100_000
    del model
    assert live_bytes() < before + 10_000
