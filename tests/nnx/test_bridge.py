"""A module that ``nnx.bridge`` wraps needs a policy of its own."""

from __future__ import annotations

import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import bridge
from linen_zoo import data, numbers, products, quick_jit, same_bits
from nnx_zoo import compiled, model_products, module_with_numbers, values

import jaxmp

X = data(6, 8)


class Linen(nn.Module):
    """A model with float32 and dtype-less layers, statistics and dropout."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Dense(8, name="a")(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = Scale(name="scale")(x)
        return nn.Dense(8, name="b")(nn.Dense(8, dtype="float32", param_dtype="float32", name="exact")(x))

    def head(self, x):
        return self.__call__(x)[..., :2]


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.lecun_normal(), (8, 8))


class Nnx(nnx.Module):
    def __init__(self, rngs, width=8):
        self.a, self.norm = nnx.Linear(width, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))
        self.exact = nnx.Linear(8, 8, dtype=jnp.float32, rngs=rngs)
        self.b = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x, train=False):
        x = self.norm(self.a(x), use_running_average=not train)
        return self.b(self.exact(self.drop(x, deterministic=not train) @ self.w))

    def head(self, x):
        return self(x)[..., :2]


pytestmark = pytest.mark.usefixtures("standard_promotion")  # NNX's norms add half and float32 arrays


def wrapped_linen(module=None):
    return bridge.ToNNX(Linen() if module is None else module, rngs=nnx.Rngs(0, dropout=1)).lazy_init(X)


def to_nnx(module=None):
    return module_with_numbers(lambda: wrapped_linen(module))


class AroundLinen(nnx.Module):
    def __init__(self, linen=None):
        self.first, self.wrapped = nnx.Linear(8, 8, rngs=nnx.Rngs(2)), wrapped_linen(linen)

    def __call__(self, x, **options):
        return self.wrapped(self.first(x), **options)


class AroundNnx(nn.Module):
    make: Any = Nnx

    @nn.compact
    def __call__(self, x, **options):
        return bridge.ToLinen(self.make, name="wrapped")(nn.Dense(8, name="first")(x), **options)


def around_linen(linen=None):
    return module_with_numbers(lambda: AroundLinen(linen))


def variables_with_numbers(model):
    """Return a Linen model's variables: params from NumPy, statistics of one."""
    shapes = jax.eval_shape(model.init, rngs(), X)
    stats = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes["batch_stats"])
    return {"params": numbers(shapes["params"]), "batch_stats": stats}


def linen_variables(model):
    """Return the variables of the Linen module that an NNX module wraps."""
    params, stats = (nnx.to_pure_dict(values(model, kind)) for kind in (nnx.Param, nnx.BatchStat))
    return {"params": params, "batch_stats": stats}


def dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype, tree)


def of_linen(model, variables):
    """Return the result of a Linen model on X, and the gradients of its params."""

    def loss(params):
        out = model.apply({**variables, "params": params}, X)
        return jnp.sum(out.astype("float32") ** 2), out

    (_, out), grads = quick_jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])
    return out, grads


def of_nnx(model):
    """Return the result of an NNX model on X, and the gradients of its Params."""

    def loss(model):
        out = model(X)
        return jnp.sum(out.astype("float32") ** 2), out

    (_, out), grads = compiled(nnx.value_and_grad(loss, has_aux=True), model)
    return out, nnx.to_pure_dict(nnx.as_pure(grads))


def rngs():
    return {"params": jax.random.key(0), "dropout": jax.random.key(1)}


HALF, WIDE = "bfloat16", "float32"


# --- a policy does not reach into the wrapped module ------------------------------------------------------------------


@pytest.mark.once
def test_a_policy_on_an_nnx_model_around_a_linen_module_raises_with_the_remedy():
    for make, policy, at in ((to_nnx, "mixed_bfloat16", ""), (around_linen, "float32", "'wrapped', ")):
        with pytest.raises(ValueError, match=r"a policy does not reach into nnx\.bridge\.ToNNX") as error:
            jaxmp.nnx.apply_policy(make(), policy, {"wrapped": "float32"})
        assert f"got {at}ToNNX(Linen(...))" in str(error.value)
        assert "nnx.bridge.ToNNX(jaxmp.linen.apply_policy(Linen(...), policy), rngs=rngs)" in str(error.value)

    part = nn.Sequential([jaxmp.linen.apply_policy(nn.Dense(4), "mixed_bfloat16"), nn.Dense(4)])
    with pytest.raises(ValueError, match=r"does not reach into nnx\.bridge\.ToNNX, got ToNNX\(Sequential"):
        jaxmp.nnx.apply_policy(to_nnx(part), "mixed_bfloat16")


@pytest.mark.once
def test_a_policy_on_a_linen_model_around_an_nnx_module_raises_with_the_remedy():
    for wrap, at in ((bridge.ToLinen, ""), (AroundNnx, "'wrapped', ")):
        model, variables = jaxmp.linen.apply_policy(wrap(Nnx), "mixed_bfloat16"), variables_with_numbers(wrap(Nnx))
        for call, first in (
            (model.init, rngs()),
            (model.apply, variables),
            (lambda variables, x, model=model: model.bind(variables)(x), variables),
        ):
            with pytest.raises(ValueError) as error:
                call(first, X)
            assert f"a policy does not reach into nnx.bridge.ToLinen, got {at}ToLinen of Nnx." in str(error.value)
            remedy = "ToLinen(lambda *args, **kw: jaxmp.nnx.apply_policy(Nnx(*args, **kw), policy), ...)"
            assert remedy in str(error.value)
    model = jaxmp.linen.apply_policy(AroundNnx(lambda rngs: Nnx(rngs)), "mixed_bfloat16")
    assert products(model.apply, variables_with_numbers(AroundNnx()), X) == [HALF, *[WIDE] * 4]


# --- a module under a policy, then wrapped ----------------------------------------------------------------------------


def test_a_linen_module_under_a_policy_computes_the_same_inside_a_bridge():
    linen = jaxmp.linen.apply_policy(Linen(), "float16", {"b": "float32"})
    model = to_nnx(linen)
    variables = linen_variables(model)
    assert dtypes(variables) == dtypes(jax.eval_shape(linen.init, jax.random.key(0), X))
    (out, grads), (want, want_grads) = of_nnx(model), of_linen(linen, variables)
    same_bits(out, want)
    same_bits(grads, want_grads)
    assert model_products(model, X) == products(linen.apply, variables, X)


def test_an_nnx_module_under_a_policy_computes_the_same_inside_a_bridge():
    def make(rngs):  # `exact` is the layer with dtype="float32"
        return jaxmp.nnx.apply_policy(Nnx(rngs), "mixed_bfloat16", {"exact": "half"})

    linen, model = bridge.ToLinen(make), module_with_numbers(lambda: make(nnx.Rngs(0)))
    variables = variables_with_numbers(linen)
    assert dtypes(variables) == dtypes(linen_variables(model))
    for collection in variables.values():
        nnx.update(model, collection)
    (got, grads), (want, want_grads) = of_linen(linen, variables), of_nnx(model)
    same_bits(got, want)
    same_bits(grads, want_grads)
    assert products(linen.apply, variables, X) == model_products(model, X)


@pytest.mark.parametrize("adapter", ["apply_policy", "autocast"])
def test_a_wrapped_module_keeps_its_policy_inside_a_model_under_another_policy(adapter):
    linen = jaxmp.linen.apply_policy(Linen(), "float16", {"b": "float32"})
    model = getattr(jaxmp.nnx, adapter)(around_linen(linen), "mixed_bfloat16", {"first": "float32"})
    assert model_products(model, X) == [WIDE, "float16", "float16", WIDE, WIDE]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(values(model.wrapped, nnx.Param))} == {"float16", WIDE}

    def make(rngs):
        return jaxmp.nnx.apply_policy(Nnx(rngs), "float16", {"b": "float32"})

    model = getattr(jaxmp.linen, adapter)(AroundNnx(make), "mixed_bfloat16", {"first": "float32"})
    variables = variables_with_numbers(model)
    assert variables["params"]["wrapped"]["a"]["kernel"].dtype == jnp.float16
    assert products(model.apply, variables, X) == [WIDE, "float16", "float16", WIDE, WIDE]
    copy = pickle.loads(pickle.dumps(jaxmp.nnx.apply_policy(around_linen(linen), "mixed_bfloat16")))
    assert model_products(copy, X) == [HALF, "float16", "float16", WIDE, WIDE]


def test_statistics_of_a_wrapped_linen_module_stay_float32_and_dropout_keeps_its_mask():
    model, bare, before = jaxmp.nnx.autocast(around_linen(), "mixed_bfloat16"), around_linen(), around_linen()
    options = {"train": True, "mutable": ["batch_stats", "intermediates"]}
    results = nnx.jit(lambda bare, model, x: [m(x, **options) for m in (bare, model)])(bare, model, X)
    np.testing.assert_allclose(results[1], results[0], rtol=0.1, atol=0.1)
    stats, want = (values(m, nnx.BatchStat) for m in (model, bare))
    for got, wanted, old in zip(*map(jax.tree.leaves, (stats, want, values(before, nnx.BatchStat))), strict=True):
        assert got.dtype == jnp.float32
        assert np.any(got != old)
        np.testing.assert_allclose(np.asarray(got - old), np.asarray(wanted - old), rtol=0.05, atol=2e-4)


# --- autocast of a model with a bridge --------------------------------------------------------------------------------


def test_an_override_of_autocast_matches_a_wrapped_module_but_no_module_inside_it():
    nnx_model, linen_model = around_linen(), AroundNnx()
    variables = variables_with_numbers(linen_model)
    for pattern, bridged in (("wrapped", True), ("type:To*", True), ("first", False)):
        want = [HALF, *[WIDE] * 4] if bridged else [WIDE, *[HALF] * 4]
        assert model_products(jaxmp.nnx.autocast(nnx_model, "mixed_bfloat16", {pattern: "float32"}), X) == want
        model = jaxmp.linen.autocast(linen_model, "mixed_bfloat16", {pattern: "float32"})
        assert products(model.apply, variables, X) == want
    for pattern in ("wrapped/b", "wrapped/*/kernel", "type:Bat*"):
        with pytest.raises(ValueError, match="every override must match a module"):
            jaxmp.nnx.autocast(nnx_model, "mixed_bfloat16", {pattern: "float32"})
        with pytest.raises(ValueError, match="every override must match a module"):
            model = jaxmp.linen.autocast(linen_model, "mixed_bfloat16", {pattern: "float32"})
            jax.eval_shape(model.apply, variables, X)
