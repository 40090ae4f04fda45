"""Dtypes of Linen layers that have no counterpart in NNX, and dtypes in fields of modules."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from linen_zoo import (
    HALVES,
    data,
    model_products,
    numbers,
    quick_jit,
    same_bits,
    same_computation,
    shapes,
    standard_promotion,
    written,
)

from jaxmp.linen import apply_policy

SEQUENCE, VECTOR = (2, 8, 8), (2, 8)


def test_every_gate_of_an_optimized_cell_is_half():
    model = apply_policy(nn.RNN(nn.OptimizedLSTMCell(8)), "mixed_float16")
    with standard_promotion():
        assert set(model_products(model, data(*SEQUENCE))) == {"float16"}


def test_decoding_step_by_step_fills_a_half_cache_as_with_dtype_set_by_hand():
    policy = "mixed_bfloat16"

    def make(**hand: Any) -> nn.Module:
        return nn.MultiHeadDotProductAttention(num_heads=2, decode=True, **hand)

    x = data(*SEQUENCE)
    model, by_hand = apply_policy(make(), policy), make(dtype=HALVES[policy])
    variables = shapes(model, x)
    assert variables["cache"]["cached_key"].dtype == HALVES[policy]

    def step(model: nn.Module) -> Any:
        def apply(variables: Any, token: jax.Array) -> Any:
            out, cache = model.apply(variables, token, mutable=["cache"])
            return out.astype(jnp.float32), cache

        return apply

    assert jax.eval_shape(step(model), variables, x[:, :1])[1]["cache"] == variables["cache"]
    same_computation(step(written(make(), policy)), step(by_hand), variables, x[:, :1])
    initial = numbers(variables)
    both = quick_jit(lambda variables: [step(m)(variables, x[:, :1]) for m in (model, by_hand)])
    (got, cache), (want, cache_by_hand) = both(initial)
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.005)
    same_bits(cache, cache_by_hand)


# --- dtypes that the author set, and overrides ------------------------------------------------------------------------


def test_modules_below_a_container_without_a_dtype_follow_their_own_paths():
    class Block(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            x = x if self.dtype is None else x.astype(self.dtype)
            return nn.Dense(8, dtype=self.dtype, name="fine")(x), nn.Dense(8, dtype=self.dtype, name="rough")(x)

    x = data(*VECTOR)
    model = apply_policy(Block(), "mixed_bfloat16", {"fine": "float32"})
    assert model_products(model, x) == ["float32", "bfloat16"]

    def fine(variables: Any) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return nn.Dense(8).apply({"params": variables["params"]["fine"]}, x)

    same_computation(lambda variables: model.apply(variables, x)[0], fine, shapes(model, x))


def test_a_default_dtype_is_replaced_in_every_spelling_and_a_dtype_that_is_not_floating_is_not():
    class Model(nn.Module):
        dtype: Any = jnp.float32

        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, dtype=self.dtype)(x)

    class Tokens(nn.Module):
        dtype: Any = jnp.int32

        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(nn.one_hot(jnp.asarray(x, self.dtype), 8))

    class Chosen(nn.Module):
        dtype: Any = "auto"  # a word that names no dtype

        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, dtype=None if self.dtype == "auto" else jnp.float32)(x)

    x = data(*VECTOR)
    for model in (Model(jnp.float32), Model("float32"), Model(jnp.dtype("float32")), Chosen()):
        assert model_products(apply_policy(model, "mixed_float16"), x) == ["float16"]
    assert model_products(apply_policy(Tokens(), "mixed_float16"), jnp.array([0, 3])) == ["float16"]


def test_a_parent_reads_float32_as_the_dtype_of_its_submodule():
    class Holder(nn.Module):
        dense: nn.Module

        def __call__(self, x):
            return self.dense(jnp.ones((), self.dense.dtype) * x) + jnp.ones((), self.dense.dtype)

    x = data(*VECTOR)
    model = apply_policy(Holder(nn.Dense(8)), "mixed_float16")
    for call in (lambda variables: model.apply(variables, x), lambda variables: model.bind(variables)(x)):
        assert jax.eval_shape(call, shapes(model, x)).dtype == jnp.float32
