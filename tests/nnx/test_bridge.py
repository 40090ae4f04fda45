"""Linen modules wrapped for NNX, and NNX modules wrapped for Linen, compute as they do under their own adapters."""

from __future__ import annotations

import functools
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import bridge
from linen_zoo import data, products, same_bits
from nnx_zoo import model_products, values

import jaxmp

X = data(6, 5)


class Linen(nn.Module):
    """With a layer that its author keeps in float32, a module without a dtype field, statistics and dropout."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Dense(8, name="a")(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = Scale(name="scale")(x)
        return nn.Dense(4, name="b")(nn.Dense(8, dtype="float32", param_dtype="float32", name="exact")(x))

    def head(self, x):
        return self.__call__(x)[..., :2]


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.lecun_normal(), (8, 8))


class Nnx(nnx.Module):
    def __init__(self, rngs, width=5):
        self.a, self.norm = nnx.Linear(width, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))
        self.exact = nnx.Linear(8, 8, dtype=jnp.float32, rngs=rngs)
        self.b = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, train=False):
        x = self.norm(self.a(x), use_running_average=not train)
        return self.b(self.exact(self.drop(x, deterministic=not train) @ self.w))

    def head(self, x):
        return self(x)[..., :2]


@pytest.fixture(autouse=True)
def usual_promotion():
    with jax.numpy_dtype_promotion("standard"):  # NNX's norms add half and float32
        yield


def to_nnx(module=None):
    return bridge.ToNNX(Linen() if module is None else module, rngs=nnx.Rngs(0, dropout=1)).lazy_init(X)


class AroundLinen(nnx.Module):
    def __init__(self):
        self.first, self.wrapped = nnx.Linear(5, 5, rngs=nnx.Rngs(2)), to_nnx()

    def __call__(self, x, **options):
        return self.wrapped(self.first(x), **options)


class AroundNnx(nn.Module):
    @nn.compact
    def __call__(self, x, **options):
        return bridge.ToLinen(Nnx, name="wrapped")(nn.Dense(5, name="first")(x), **options)


def linen_variables(model):
    """The variables of the Linen module that an NNX module wraps."""
    params, stats = (nnx.to_pure_dict(values(model, kind)) for kind in (nnx.Param, nnx.BatchStat))
    return {"params": params, "batch_stats": stats}


def dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype, tree)


ADAPTERS = ["apply_policy", "autocast"]


def of_each_adapter(cases):
    """The newest Python has the first case of each adapter, and the one in which a layer is half against its author."""
    first = [next(case for case in cases if case[0] == adapter) for adapter in ADAPTERS]
    kept = [case for case in cases if case in first or "half" in (case[2] or {}).values()]
    return [pytest.param(*case, marks=[pytest.mark.once] * (case not in kept)) for case in cases]


CASES = [
    ("apply_policy", "mixed_float16", {"**/b": "float32"}),
    ("apply_policy", "mixed_bfloat16", {nn.Dense: "float32"}),
    ("apply_policy", "mixed_bfloat16", {"type:Dense": "half"}),  # the layer that its author made float32, too
    ("apply_policy", "float16", {"scale": "float32"}),
    ("apply_policy", "float32", None),
    ("autocast", "mixed_float16", {"**/b": "float32"}),
    ("autocast", "mixed_bfloat16", {nn.Dense: "float32"}),
]


def of_linen(model, variables):
    """What a Linen model makes of X, and the gradients of its params."""

    def loss(params):
        out = model.apply({**variables, "params": params}, X)
        return jnp.sum(out.astype("float32") ** 2), out

    (_, out), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    return out, grads


def of_nnx(model):
    """The same of a model in NNX."""

    def loss(model):
        out = model(X)
        return jnp.sum(out.astype("float32") ** 2), out

    (_, out), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    return out, nnx.to_pure_dict(nnx.as_pure(grads))


@pytest.mark.parametrize(("adapter", "policy", "overrides"), of_each_adapter(CASES), ids=str)
def test_a_wrapped_linen_module_computes_as_under_linens_own_adapter(adapter, policy, overrides):
    model = getattr(jaxmp.nnx, adapter)(to_nnx(), policy, overrides)
    linen = getattr(jaxmp.linen, adapter)(Linen(), policy, overrides)
    variables = linen_variables(model)
    stored = jax.eval_shape(linen.init, jax.random.key(0), X)
    assert dtypes(variables) == dtypes(stored)

    want, want_grads = of_linen(linen, variables)
    out, grads = of_nnx(model)
    same_bits(out, want)
    same_bits(grads, want_grads)
    assert model_products(model, X) == products(linen.apply, variables, X)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("make", [to_nnx, AroundLinen])
def test_statistics_of_a_wrapped_linen_module_stay_float32_and_dropout_keeps_its_mask(make, adapter):
    bare = make()
    model = getattr(jaxmp.nnx, adapter)(make(), "mixed_bfloat16")
    seen = [m(X, train=True, mutable=["batch_stats", "intermediates"]) for m in (bare, model)]
    assert seen[1].dtype == jnp.float32
    np.testing.assert_allclose(seen[1], seen[0], rtol=0.1, atol=0.1)
    stats, want = (values(m, nnx.BatchStat) for m in (model, bare))
    for got, wanted, old in zip(*map(jax.tree.leaves, (stats, want, values(make(), nnx.BatchStat))), strict=True):
        assert got.dtype == jnp.float32
        assert np.any(got != old)
        np.testing.assert_allclose(got, wanted, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_wrapped_linen_module_inside_an_nnx_module_goes_by_its_path(adapter):
    under = getattr(jaxmp.nnx, adapter)
    half, wide = "bfloat16", "float32"
    model = AroundLinen()
    exact = half if adapter == "autocast" else wide
    assert model_products(under(model, "mixed_bfloat16"), X) == [half, half, half, exact, half]
    for pattern, want in {
        "wrapped/b": [half, half, half, exact, wide],
        "wrapped": [half, *[wide] * 4],
        bridge.ToNNX: [half, *[wide] * 4],
        nn.Dense: [half, wide, half, wide, wide],
        nnx.Linear: [wide, half, half, exact, half],
    }.items():
        assert model_products(under(model, "mixed_bfloat16", {pattern: "float32"}), X) == want


@pytest.mark.once
def test_patterns_on_a_wrapped_linen_module_that_match_nothing_raise():
    for make, pattern in ((to_nnx, "**/bb"), (AroundLinen, "wrapped/bb"), (AroundLinen, "b")):
        with pytest.raises(
            ValueError, match=f"every pattern of a policy must match a module, but '{re.escape(pattern)}'"
        ):
            jaxmp.nnx.apply_policy(make(), "mixed_float16", {pattern: "float32"})
    model = jaxmp.nnx.apply_policy(to_nnx(), "mixed_float16", {"type:Conv": "float32"})
    with pytest.raises(ValueError, match=r"but 'type:Conv' matched none; nearest classes: .*'Dense'"):
        model(X)  # for only then the classes in it are known


@pytest.mark.once
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_half_policy_that_changes_no_product_of_a_wrapped_linen_module_raises(adapter):
    model = getattr(jaxmp.nnx, adapter)(to_nnx(), "mixed_float16", {nn.Dense: "float32", "scale": "float32"})
    with pytest.raises(ValueError, match="computes in float16, but every product stays as it was: a") as raised:
        model(X)
    assert not [note for note in getattr(raised.value, "__notes__", ()) if note.startswith("jaxmp: ")]  # no FFT's


class BesideLinen(nnx.Module):
    """Has a Linen layer beside its own, each of a dtype."""

    def __init__(self, linen, own, *others, rngs=None):
        self.linen = nnx.List([to_nnx(nn.Dense(5, dtype=dtype)) for dtype in (linen, *others)])
        self.own = nnx.Linear(5, 2, dtype=own, rngs=nnx.Rngs(0))

    def __call__(self, x, depth=None):
        for layer in self.linen[:depth]:
            x = layer(x)
        return self.own(x)


@pytest.mark.once
def test_a_half_policy_that_changes_no_product_of_wrapped_linen_modules_and_those_beside_them_raises():
    model = jaxmp.nnx.apply_policy(BesideLinen("float32", "float32"), "mixed_bfloat16")
    text = r"product stays as it was: own \(its own dtype=float32\), linen/0 \(its own dtype=float32\); to overrule"
    with pytest.raises(ValueError, match=text):
        model(X)
    with pytest.raises(ValueError, match=text):
        nnx.jit(lambda model: model(X))(model)
    overrides = {nn.Dense: "float32", nnx.Linear: "float32"}
    for adapter in ADAPTERS:
        model = getattr(jaxmp.nnx, adapter)(BesideLinen(None, None), "mixed_bfloat16", overrides)
        with pytest.raises(ValueError, match=r"own \(override 'type:Linear'\), linen/0 \(override 'type:Dense'\)"):
            model(X)
    for dtypes_given in [("float32", None), (None, "float32"), ("float32", "float32", None)]:
        model = jaxmp.nnx.apply_policy(BesideLinen(*dtypes_given), "mixed_bfloat16")
        assert model_products(model, X).count("bfloat16") == 1
    model(X, depth=1)  # the one in half is not called, so that it is not known here
    linen = jaxmp.linen.apply_policy(bridge.ToLinen(BesideLinen, (None, "float32")), "mixed_bfloat16")
    assert "bfloat16" in products(linen.apply, linen.init(jax.random.key(0), X), X)


def test_a_class_of_wrapped_linen_modules_whose_params_are_made_cannot_store_them_in_another_dtype():
    with pytest.raises(ValueError) as error:
        jaxmp.nnx.apply_policy(AroundLinen(), "bfloat16", {nnx.Linear: "float32", nn.Dense: "float32"})
    assert str(error.value) == (
        "the classes in a Linen module that nnx.bridge.ToNNX wraps are known when it runs, and its params are made "
        "already, got 'type:Dense' in overrides, whose policy stores params in float32 and not in bfloat16; write "
        "patterns on paths, or call apply_policy first and lazy_init on what it returns"
    )


def test_params_of_a_wrapped_linen_module_that_are_made_under_a_policy_have_its_dtypes():
    bare = bridge.ToNNX(Linen(), rngs=nnx.Rngs(0, dropout=1))
    model = jaxmp.nnx.apply_policy(bare, "bfloat16", {nn.Dense: "float32", "scale": "float16"}).lazy_init(X)
    linen = jaxmp.linen.apply_policy(Linen(), "bfloat16", {nn.Dense: "float32", "scale": "float16"})
    want = jax.eval_shape(linen.init, jax.random.key(0), X)
    assert dtypes(linen_variables(model)) == dtypes(want)
    same_bits(model(X), linen.apply(linen_variables(model), X))


def test_a_policy_is_put_on_a_wrapped_linen_module_again_and_its_own_stays():
    model = jaxmp.nnx.apply_policy(to_nnx(), "mixed_float16", {"b": "float32"})
    again = jaxmp.nnx.apply_policy(model, "mixed_bfloat16")
    assert model_products(again, X) == ["bfloat16", "bfloat16", "float32", "bfloat16"]
    own = to_nnx(jaxmp.linen.apply_policy(Linen(), "float16", {"b": "float32"}))
    for adapter in ADAPTERS:
        under = getattr(jaxmp.nnx, adapter)(own, "bfloat16")
        assert dtypes(linen_variables(under)) == dtypes(linen_variables(own))
        assert model_products(under, X) == ["float16", "float16", "float32", "float32"]


def test_a_wrapped_linen_module_is_jitted_pickled_and_called_by_its_methods():
    model = jaxmp.nnx.apply_policy(AroundLinen(), "mixed_bfloat16", {"wrapped/b": "float32"})
    want = model(X)
    copy = pickle.loads(pickle.dumps(model))
    for got in (nnx.jit(lambda model, x: model(x))(model, X), copy(X)):
        np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)
    assert model_products(copy, X) == model_products(model, X)
    inner = jaxmp.nnx.apply_policy(to_nnx(), "mixed_bfloat16")
    same_bits(inner.head(X), inner(X)[..., :2])
    # Taken out of its wrapper it is a Linen module under these policies.
    same_bits(inner.to_nnx__module.apply(linen_variables(inner), X), inner(X))


# --- NNX modules in Linen ---


NNX_CASES = [
    ("apply_policy", "mixed_float16", {"**/b": "float32"}),
    ("apply_policy", "mixed_bfloat16", {nnx.Linear: "float32"}),
    ("apply_policy", "mixed_bfloat16", {"type:Linear": "half"}),
    ("apply_policy", "float16", {"exact": "float32"}),
    ("apply_policy", "bfloat16", {nnx.Linear: "float32"}),
    ("apply_policy", "float32", None),
    ("autocast", "mixed_float16", {"**/b": "float32"}),
    ("autocast", "mixed_bfloat16", {nnx.Linear: "float32"}),
]


@pytest.mark.parametrize(("adapter", "policy", "overrides"), of_each_adapter(NNX_CASES), ids=str)
def test_a_wrapped_nnx_module_computes_as_under_nnxs_own_adapter(adapter, policy, overrides):
    linen = getattr(jaxmp.linen, adapter)(bridge.ToLinen(Nnx), policy, overrides)
    variables = linen.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    model = getattr(jaxmp.nnx, adapter)(Nnx(nnx.Rngs(0)), policy, overrides)
    assert dtypes(variables) == dtypes(linen_variables(model))
    for collection in variables.values():
        nnx.update(model, collection)

    got, grads = of_linen(linen, variables)
    want, want_grads = of_nnx(model)
    same_bits(got, want)
    same_bits(grads, want_grads)
    assert products(linen.apply, variables, X) == model_products(model, X)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_wrapped_nnx_module_inside_a_linen_module_goes_by_its_path(adapter):
    half, wide = "bfloat16", "float32"
    exact = half if adapter == "autocast" else wide
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = AroundNnx().init(rngs, X)
    for pattern, want in {
        None: [half, half, half, exact, half],
        "wrapped/b": [half, half, half, exact, wide],
        "wrapped": [half, *[wide] * 4],
        bridge.ToLinen: [half, *[wide] * 4],
        Nnx: [half, *[wide] * 4],
        nnx.Linear: [half, wide, half, wide, wide],
        nn.Dense: [wide, half, half, exact, half],
    }.items():
        overrides = {pattern: "float32"} if pattern else None
        model = getattr(jaxmp.linen, adapter)(AroundNnx(), "mixed_bfloat16", overrides)
        assert products(model.apply, variables, X) == want, pattern
    for pattern, near in ((nnx.Conv, "classes"), ("wrapped/bb", "paths")):
        model = getattr(jaxmp.linen, adapter)(AroundNnx(), "mixed_bfloat16", {pattern: "float32"})
        with pytest.raises(ValueError, match=f"every pattern of a policy must match a module.* nearest {near}: "):
            model.apply(variables, X)


@pytest.mark.once
def test_a_half_policy_that_changes_no_product_of_a_wrapped_nnx_module_raises():
    model = jaxmp.linen.apply_policy(bridge.ToLinen(nnx.Linear, (5, 4), {"dtype": jnp.float32}), "mixed_float16")
    with pytest.raises(ValueError, match=r"every product stays as it was: ToLinen \(its own dtype=float32\)"):
        model.init(jax.random.key(0), X)


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.body, self.head = nnx.Linear(5, 5, rngs=rngs), nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.body(x))

    def logits(self, x):
        return self.head(x)


@pytest.mark.once
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_call_of_only_the_float32_part_of_a_wrapped_nnx_module_is_let_pass(adapter):
    variables = bridge.ToLinen(TwoLayers).init(jax.random.key(0), X)
    model = getattr(jaxmp.linen, adapter)(bridge.ToLinen(TwoLayers), "mixed_bfloat16", {"head": "float32"})
    assert products(functools.partial(model.apply, nnx_method="logits"), variables, X) == ["float32"]
    model = getattr(jaxmp.linen, adapter)(bridge.ToLinen(TwoLayers), "mixed_bfloat16", {bridge.ToLinen: "float32"})
    with pytest.raises(ValueError, match=r"every product stays as it was: body \(override 'type:ToLinen'\), head"):
        model.apply(variables, X)


@pytest.mark.once
def test_a_model_that_is_called_as_a_part_of_another_first_is_refused_when_it_is_called_by_itself():
    class Around(nn.Module):
        wrapped: nn.Module

        def __call__(self, x):
            return self.wrapped(x)

    part = jaxmp.nnx.apply_policy(TwoLayers(nnx.Rngs(0)), "mixed_bfloat16", {"**": "float32"})
    jaxmp.linen.apply_policy(Around(bridge.ToLinen(lambda rngs: part)), "mixed_bfloat16").init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"every product stays as it was: body \(override '\*\*'\), head"):
        part(X)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("make", [lambda: bridge.ToLinen(Nnx), AroundNnx])
def test_statistics_of_a_wrapped_nnx_module_stay_float32_and_dropout_keeps_its_mask(make, adapter):
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    bare, model = make(), getattr(jaxmp.linen, adapter)(make(), "mixed_bfloat16")
    variables = bare.init(rngs, X)
    same_bits(model.init(rngs, X), variables)
    seen = [m.apply(variables, X, train=True, rngs=rngs, mutable=["batch_stats"]) for m in (model, bare)]
    assert dtypes(seen[0]) == dtypes(seen[1])
    for got, want in zip(*map(jax.tree.leaves, seen), strict=True):
        np.testing.assert_allclose(got, want, rtol=0.1, atol=0.1)
    old, new = variables["batch_stats"], seen[0][1]["batch_stats"]
    assert all(np.any(a != b) for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))


def test_a_wrapped_nnx_module_keeps_its_own_policy_is_pickled_and_called_by_its_methods():
    def make(rngs):
        return jaxmp.nnx.apply_policy(Nnx(rngs), "float16", {"b": "float32"})

    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    own = jaxmp.linen.apply_policy(bridge.ToLinen(make), "bfloat16")
    variables = own.init(rngs, X)
    assert variables["params"]["a"]["kernel"].dtype == jnp.float16
    assert products(own.apply, variables, X) == ["float16", "float16", "float32", "float32"]

    model = jaxmp.linen.apply_policy(bridge.ToLinen(Nnx), "mixed_bfloat16")
    variables, copy = model.init(rngs, X), pickle.loads(pickle.dumps(model))
    want = model.apply(variables, X)
    same_bits(copy.apply(variables, X), want)
    assert model.nnx_class is Nnx
    same_bits(model.apply(variables, X, nnx_method="head"), want[..., :2])
    same_bits(model.apply(variables, X, nnx_method=Nnx.head), want[..., :2])
    same_bits(model.apply(variables, X, method=lambda wrapper, x: wrapper.head(x)), want[..., :2])
