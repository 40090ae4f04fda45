"""Policies of NNX modules: overrides, explicit dtypes, nesting and errors."""

from __future__ import annotations

import gc
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_tools import refused
from flax import nnx
from linen_zoo import data, same_bits
from nnx_zoo import Net, Scale, compiled, model_products, module_with_numbers, outcome, products_of, rngs, values

import jaxmp
from jaxmp.nnx import apply_policy, autocast

IMAGE, VECTORS = data(2, 5, 5, 3), data(8, 8)


@pytest.mark.once
def test_an_override_covers_the_modules_below_its_path_and_the_first_match_wins():
    model = apply_policy(
        Net(rngs()), "mixed_float16", {"layers/1": "mixed_bfloat16", "layers": "float32", "**/norm": "float32"}
    )
    assert products_of(model, IMAGE) == [  # layers/0 and again are one module
        ("conv", "float16"),
        ("again", "float32"),
        ("layers/1", "bfloat16"),
        ("scale", "float16"),
        ("again", "float32"),
    ]


class ProductLayerNorm(nnx.LayerNorm):
    """A norm with a product."""

    def __call__(self, x: Any) -> Any:
        return super().__call__(x @ jnp.diag(self.scale[...]))


def test_an_override_by_class_covers_its_instances_and_o2_the_norms():
    overrides = [{pattern: "float32"} for pattern in (nnx.LayerNorm, "type:*Norm", "type:ProductLayer*")]
    for policy, override in (*(("mixed_float16", override) for override in overrides), ("O2", None)):
        model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()), ProductLayerNorm(8, rngs=rngs()))
        model = apply_policy(model, policy, override)
        assert products_of(model, VECTORS) == [("layers/0", "float16"), ("layers/1", "float32")]


@pytest.mark.once
def test_a_shared_module_is_covered_by_a_pattern_on_either_path():
    for pattern in ("again", "layers/0"):
        model = apply_policy(Net(rngs()), "mixed_float16", {pattern: "float32"})
        assert model.again is model.layers[0]
        assert model_products(model, IMAGE) == ["float16", "float32", "float16", "float16", "float32"]


def test_an_override_reaches_a_module_without_a_dtype_attribute():
    model = apply_policy(Net(rngs()), "mixed_float16", {"scale": "mixed_bfloat16"})
    assert model_products(model, IMAGE) == ["float16"] * 3 + ["bfloat16", "float16"]


def test_an_override_reaches_a_module_without_params():
    class Scores(nnx.Module):
        def __call__(self, x: Any) -> Any:
            return x @ x.T

    class Attention(nnx.Module):
        def __init__(self) -> None:
            self.layer, self.scores = nnx.Linear(8, 8, rngs=rngs()), Scores()

        def __call__(self, x: Any) -> Any:
            return self.scores(self.layer(x))

    for overrides, scores in (({}, "bfloat16"), ({"scores": "float32"}, "float32")):
        assert model_products(apply_policy(Attention(), "mixed_bfloat16", overrides), VECTORS) == ["bfloat16", scores]


@pytest.mark.once
def test_new_values_reach_the_copy_and_new_modules_and_variables_need_the_policy_again():
    put = apply_policy
    model = nnx.Sequential(nnx.Linear(8, 3, rngs=rngs()))
    policied = put(model, "mixed_bfloat16")
    model.layers[0].bias[...] = jnp.ones(3)
    same_bits(policied.layers[0].bias[...], jnp.ones(3))
    before = policied(VECTORS)
    model.layers[0].kernel = nnx.Param(jnp.zeros((8, 3)))
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


def test_a_dtype_that_differs_from_the_default_stays_unless_an_override_matches():
    for dtype in ("float32", "bfloat16"):
        model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()), nnx.Linear(8, 8, dtype=jnp.dtype(dtype), rngs=rngs()))
        for under in (apply_policy, autocast):
            assert model_products(under(model, "mixed_float16"), VECTORS) == ["float16", dtype]
            overridden = under(model, "mixed_float16", {"**": "mixed_float16"})
            assert model_products(overridden, VECTORS) == ["float16", "float16"]


def test_a_layer_whose_author_set_a_half_dtype_gives_the_bits_of_flax():
    layers = [nnx.Linear(8, 8, dtype=jnp.bfloat16, rngs=rngs()), nnx.LayerNorm(8, dtype=jnp.bfloat16, rngs=rngs())]
    for layer in layers:
        with jax.numpy_dtype_promotion("standard"):  # LayerNorm adds half and float32 arrays
            got, want = compiled(
                lambda models: [model(VECTORS) for model in models], (apply_policy(layer, "mixed_float16"), layer)
            )
        same_bits(got, want.astype("float32"))


def test_a_param_dtype_that_differs_from_the_default_stays_unless_an_override_matches():
    model = nnx.Linear(8, 8, param_dtype=jnp.bfloat16, rngs=rngs())
    assert apply_policy(model, "mixed_float16").kernel.dtype == jnp.bfloat16
    overridden = apply_policy(model, "mixed_float16", {"**": "mixed_float16"})
    assert overridden.kernel.dtype == jnp.float32


class HandedDown(nnx.Module):
    """A module that passes its default dtype, float32, to its submodules."""

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


def test_a_default_dtype_that_a_parent_passes_on_is_replaced_and_another_dtype_is_not():
    assert model_products(apply_policy(HandedDown(rngs()), "mixed_float16"), VECTORS) == ["float16"] * 2
    by_hand = apply_policy(HandedDown(rngs(), jnp.bfloat16), "mixed_float16")
    assert model_products(by_hand, VECTORS) == ["bfloat16"] * 2


class HalfByDefault(nnx.Module):
    """A module that passes its default dtype, bfloat16, to its submodule."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.bfloat16) -> None:
        self.inner = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


def test_a_default_dtype_in_half_precision_is_replaced():
    for policy, product in (("mixed_float16", "float16"), ("float32", "float32")):
        bare = HalfByDefault(rngs())
        assert model_products(apply_policy(bare, policy), VECTORS) == [product]
        assert model_products(bare, VECTORS) == ["bfloat16"]


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


@pytest.mark.once
@pytest.mark.parametrize("under", [apply_policy, autocast])
def test_a_second_policy_is_refused_because_it_would_drop_the_overrides_of_the_first(under):
    bare = Net(rngs())
    model = apply_policy(bare, "mixed_float16", {"norm": "float32"})
    call = f"jaxmp.nnx.{under.__name__}"
    for with_policy in (model, nnx.clone(model), nnx.merge(*nnx.split(model))):
        refused(
            lambda with_policy=with_policy: under(with_policy, "mixed_bfloat16"),
            ValueError,
            f"{call} takes a model without a policy, got a Net that has one (clones and merged models keep it)",
            f"use it as it is, or apply one policy, with all overrides, to the original model:\n{call}(model, policy,",
        )
    refused(
        lambda: under(model.layers[0], "mixed_bfloat16"),
        ValueError,
        "with the policy of a larger model;\nuse it as it is, or name it in the overrides of the larger model:\n",
    )
    assert model_products(under(bare, "mixed_bfloat16"), IMAGE) == ["bfloat16"] * 5


def test_a_submodule_with_a_policy_keeps_it_inside_another_model_and_alone():
    part = apply_policy(nnx.Linear(8, 8, rngs=rngs()), "mixed_bfloat16")
    model = apply_policy(nnx.Sequential(part, nnx.Linear(8, 8, rngs=rngs())), "mixed_float16")
    assert model_products(model, VECTORS) == ["bfloat16", "float16"]

    model = apply_policy(Net(rngs()), "mixed_float16")
    assert model_products(model.layers[0], VECTORS) == ["float16"]
    assert model.layers[0](VECTORS).dtype == jnp.float32
    assert model_products(apply_policy(nnx.Sequential(model.layers[0]), "mixed_bfloat16"), VECTORS) == ["bfloat16"]


@pytest.mark.once
def test_a_pattern_without_a_match_and_an_argument_that_is_not_a_module_raise_at_once():
    with pytest.raises(ValueError, match=r"'layers/7' matched none; nearest paths: .*layers/1"):
        apply_policy(Net(rngs()), "mixed_float16", {"layers/7": "float32"})
    with pytest.raises(ValueError, match="'conv/kernel' matched none; nearest paths: 'conv'"):
        apply_policy(Net(rngs()), "mixed_float16", {"conv/kernel": "float32"})
    with pytest.raises(ValueError, match=r"'BatchNorm' matched none; nearest paths: .*; write 'type:BatchNorm'$"):
        apply_policy(Net(rngs()), "mixed_float16", {"BatchNorm": "float32"})
    with pytest.raises(ValueError, match=r"is a class of flax.linen, but the model is of flax.nnx: write a class of"):
        apply_policy(Net(rngs()), "mixed_float16", {nn.LayerNorm: "float32"})
    with pytest.raises(ValueError, match=r"'type:LayerNorm' matched none; nearest classes: .*BatchNorm"):
        apply_policy(Net(rngs()), "mixed_float16", {nnx.LayerNorm: "float32"})

    for model, text in (
        (nn.Dense(2), "got flax.linen.linear.Dense; jaxmp.linen.apply_policy takes modules of flax.linen"),
        (nnx.Linear, "got the class Linear; create an instance"),
    ):
        with pytest.raises(TypeError, match=rf"jaxmp.nnx.apply_policy takes a flax.nnx.Module, {text}"):
            apply_policy(model, "mixed_float16")


@pytest.mark.once
def test_the_error_for_a_half_policy_without_half_products_names_the_modules_and_the_override():
    model = nnx.Sequential(nnx.Linear(8, 8, dtype=jnp.float32, rngs=rngs()), nnx.PReLU())
    under = apply_policy(model, "mixed_float16")
    calls = [lambda: under(VECTORS), lambda: nnx.jit(lambda model: model(VECTORS))(under)]
    calls += [lambda: nnx.grad(lambda model: model(VECTORS).sum())(under), lambda: jax.vmap(under)(VECTORS[None])]
    for call in (*calls, *calls[:2]):  # a program that raises the error is not cached, so it raises again
        with (
            jax.numpy_dtype_promotion("standard"),
            pytest.raises(
                ValueError,
                match=r"computes in float16, but every product stays as it was: layers/0 \(its own dtype=float32\)\.\n"
                r"To overrule .*: overrides=\{'\*\*': 'half'\}",
            ),
        ):
            call()
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ValueError, match=r"layers/0 \(override 'layers/0'\)"):
        apply_policy(model, "mixed_bfloat16", {"layers/0": "float32"})(VECTORS)
    norm = apply_policy(nnx.LayerNorm(8, rngs=rngs()), "mixed_float16", {"**": "float32"})
    nnx.eval_shape(norm, VECTORS)  # a model without products is not an error
    layers = [nnx.Linear(8, 8, dtype=dtype, rngs=rngs()) for dtype in (None, jnp.float32, jnp.float32)]
    under = apply_policy(nnx.Sequential(*layers), "mixed_float16")
    with pytest.warns(UserWarning, match=r"2 of 3 products stay as they were: layers/1 \(its own dtype=float32\), l"):
        under(VECTORS)


class Attends(nnx.Module):
    """A module with products of its own, and a submodule with a product."""

    def __init__(self, rngs, dtype=None):
        self.l, self.head = nnx.Linear(8, 8, dtype=dtype, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, x):
        x = self.head(self.l(x))
        return jax.nn.softmax(x @ x.T) @ x


class ByKernel(nnx.Module):
    def __init__(self, rngs):
        self.l = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        x = self.l(x).astype(jnp.bfloat16)
        return jax.pure_callback(np.matmul, x, x, x)


class Layers(nnx.Module):
    """A scan over layers; a layer has a norm, and ``body`` computes the rest of it."""

    def __init__(self, rngs, body, linear=None):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return nnx.Dict(norm=nnx.LayerNorm(8, rngs=rngs), linear=linear and linear(8, 8, rngs=rngs))

        self.layers, self.body = make(rngs), body

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layers, x):
            return x + self.body(layers, layers["norm"](x))

        return run(self.layers, x)


class Scaled(nnx.Module):
    """A module whose Param has two axes, but is not in a product."""

    def __init__(self, rngs):
        self.scale, self.l = Table(rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.l(self.scale(x))


class Table(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x):
        return x * self.table[...]


@pytest.mark.once
def test_half_products_are_searched_in_the_traced_program():
    for under in (apply_policy, autocast):
        half, wide = ["bfloat16"] * 2, ["float32"]
        for model in (Attends(rngs()), *([Attends(rngs(), jnp.float32)] if under is apply_policy else ())):
            overrides = {"l": "float32"} if model.l.dtype is None else None
            assert model_products(under(model, "mixed_bfloat16", overrides), VECTORS) == wide + half

        with jax.numpy_dtype_promotion("standard"):
            jax.eval_shape(
                under(ByKernel(rngs()), "mixed_bfloat16", {"l": "float32"}), VECTORS
            )  # the callback may multiply in half precision

        def attend(_, x):
            return jax.nn.softmax(x @ x.T) @ x

        model = under(module_with_numbers(lambda: Layers(rngs(), attend)), "mixed_bfloat16", {nnx.LayerNorm: "float32"})
        assert model_products(model, VECTORS) == half  # norms are not products, also with stacked Params

        def project(layers, x):
            return layers["linear"](x)

        model = module_with_numbers(lambda: Layers(rngs(), project, nnx.Linear))
        model = under(model, "mixed_bfloat16", {nnx.Linear: "float32"})
        text = r"stays as it was: layers/linear \(override 'type:Linear'\)\.\nDrop the override, or narrow"
        with jax.numpy_dtype_promotion("standard"), pytest.raises(ValueError, match=text):
            model(VECTORS)
        with pytest.raises(ValueError, match=r"every product stays as it was: l \(override 'l'\)\.\nDrop the override"):
            under(Scaled(rngs()), "mixed_bfloat16", {"l": "float32"})(VECTORS)


class BodyAndHead(nnx.Module):
    def __init__(self, rngs):
        self.body, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.body(x))

    def logits(self, x):
        return self.head(x)


@pytest.mark.once
def test_a_call_of_only_the_float32_part_and_a_nested_model_without_half_products_are_allowed():
    under = autocast

    def logits(model, x):
        return model.logits(x)

    assert model_products(under(BodyAndHead(rngs()), "mixed_float16", {"head": "float32"}), VECTORS, call=logits) == [
        "float32"
    ]
    part = under(BodyAndHead(rngs()), "mixed_float16", {"**": "float32"})
    assert model_products(part, VECTORS, call=logits) == ["float32"]
    around = apply_policy(nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()), part), "mixed_float16")
    assert model_products(around, VECTORS) == ["float16", "float32", "float32"]
    with jax.numpy_dtype_promotion("standard"):
        around(VECTORS)
    with pytest.raises(ValueError, match=r"stays as it was: body \(override '\*\*'\), head \(override '\*\*'\)"):
        nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()), part)(VECTORS)


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
    """A module with a Param and a submodule of the same class.

    Autocast's rules decide its dtypes.
    """

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
    assert model_products(same, VECTORS) == model_products(several, VECTORS) == ["float16"] * 4
    same_bits(same(VECTORS), several(VECTORS))


class Spectrum(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(14, 14, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.abs(jnp.fft.rfft(self.dense(x)))


class WithSpectrum(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.spectrum, self.head = Spectrum(rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.spectrum(x))


def test_a_fourier_transform_runs_in_float32():
    bare, x = WithSpectrum(nnx.Rngs(0)), jnp.ones((2, 14))
    models = [bare, apply_policy(bare, "mixed_float16"), autocast(bare, "mixed_float16")]
    want, *results = compiled(lambda models: [model(x) for model in models], models)
    for model, got in zip(models[1:], results, strict=True):
        assert model_products(model, x) == ["float16", "float16"]
        np.testing.assert_allclose(got, want, atol=1e-2)
        np.testing.assert_allclose(model(x), want, atol=1e-2)


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


@pytest.mark.parametrize(
    ("policy", "overrides", "caches"),
    [
        ("mixed_bfloat16", None, ["bfloat16", "bfloat16"]),
        ("bfloat16", {"layers/0": "float32"}, ["float32", "bfloat16"]),
    ],
)
def test_a_cache_that_is_created_under_a_policy_has_the_compute_dtype_of_its_layer(policy, overrides, caches):
    bare, x = Decoder(rngs()), jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 8)), jnp.float32)
    model = apply_policy(bare, policy, overrides)
    with jax.numpy_dtype_promotion("standard"):
        at_once = nnx.jit(lambda model, x: model(x))(model, x)
    model.init_cache(2, 4)  # without a policy, layer.init_cache creates a float32 cache
    assert [layer.cached_key.dtype.name for layer in model.layers] == caches
    np.testing.assert_allclose(decoded(model, x), at_once, atol=0.05)
    assert [int(layer.cache_index[...]) for layer in model.layers] == [4, 4]
    layer = model.layers[1]
    layer.init_cache((2, 4, 8))  # also if the layer is called directly
    assert layer.cached_key.dtype == "bfloat16"
    with pytest.raises(TypeError, match="init_cache"):
        layer.init_cache()


@pytest.mark.once
def test_a_cache_is_float32_under_a_float32_policy_and_under_autocast():
    x = jnp.ones((2, 4, 8))
    for model in (apply_policy(Decoder(rngs()), "float32"), jaxmp.nnx.autocast(Decoder(rngs()), "mixed_bfloat16")):
        model.init_cache(2, 4)
        assert [layer.cached_value.dtype.name for layer in model.layers] == ["float32"] * 2
        with jax.numpy_dtype_promotion("standard"):
            out = nnx.eval_shape(lambda model, x: model(x, decode=True), model, x[:, :1])
        assert out.dtype == jnp.float32


def test_eager_calls_keep_no_model_alive():
    def live_bytes() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    x, before = jnp.ones((2, 64)), live_bytes()
    model = apply_policy(nnx.Linear(64, 512, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    for _ in range(3):
        model(x)
    assert live_bytes() > before + 100_000
    del model
    assert live_bytes() < before + 10_000
