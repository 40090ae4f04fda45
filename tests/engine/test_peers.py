"""Models of Equinox and transformers under autocast, if these are installed.

The configurations are tiny and the params are random, so nothing is downloaded.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_tools import HALVES, compiled, cosine, flat
from gradient_zoo import drawn

import jaxmp
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.walk import equations

pytestmark = pytest.mark.once

Program = tuple[Callable[[Any], tuple[jax.Array, Any]], Any]


@pytest.fixture(autouse=True)
def default_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the libraries about each other's versions
        yield


def data(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).normal(size=shape), jnp.float32)


IDS = jnp.asarray(np.random.default_rng(3).integers(2, 40, (2, 8)), jnp.int32)
PADDED = jnp.array([[1] * 8, [1] * 5 + [0] * 3])


def equinox_attention(eqx: Any) -> tuple[Any, Any]:
    class Block(eqx.Module):
        norm: Any
        attention: Any
        mlp: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            y = jax.vmap(self.norm)(x)
            x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((8, 8), bool)))
            return x + jax.vmap(self.mlp)(x)

    first, second = jax.random.split(jax.random.key(0))
    attention = eqx.nn.MultiheadAttention(2, 16, key=first)
    return Block(eqx.nn.LayerNorm(16), attention, eqx.nn.MLP(16, 16, 32, 1, jax.nn.gelu, key=second)), data(2, 8, 16)


EQUINOX = {
    "attention": equinox_attention,
}


def equinox_program(name: str) -> Program:
    eqx = pytest.importorskip("equinox")
    model, x = EQUINOX[name](eqx)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any) -> tuple[jax.Array, Any]:
        out = jax.vmap(eqx.combine(params, static))(x)
        return jnp.square(out).mean(), out

    return loss, params


TEXT = {"vocab_size": 40, "attention_probs_dropout_prob": 0.0}
BERT = TEXT | {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertConfig", "FlaxBertForMaskedLM", BERT),
}


def transformers_program(name: str) -> Program:
    transformers = pytest.importorskip("transformers", "4.40", exc_type=ImportError)
    config, model_class, options = TRANSFORMERS[name]
    if not hasattr(transformers, model_class):
        pytest.skip("transformers 5 has no Flax models")
    model = getattr(transformers, model_class)(getattr(transformers, config)(**options), _do_init=False)

    def loss(params: Any) -> tuple[jax.Array, Any]:
        out = model(input_ids=IDS, attention_mask=PADDED, params=params).logits
        labels = jnp.arange(out[..., 0].size).reshape(out.shape[:-1]) % out.shape[-1]
        return optax.losses.softmax_cross_entropy_with_integer_labels(out, labels).mean(), out

    return loss, drawn(jax.eval_shape(lambda: model.init_weights(jax.random.key(0), model.input_shape)))


MODELS: dict[str, Callable[[], Program]] = {
    **{f"equinox {name}": functools.partial(equinox_program, name) for name in EQUINOX},
    **{f"transformers {name}": functools.partial(transformers_program, name) for name in TRANSFORMERS},
}


def value_and_grad(loss: Any) -> Any:
    return jax.value_and_grad(loss, has_aux=True)


@pytest.mark.slow("models of other libraries")
@pytest.mark.parametrize("name", MODELS)
def test_a_half_model_of_another_library_matches_float32(name: str) -> None:
    loss, params = MODELS[name]()
    policy, half = list(HALVES.items())[list(MODELS).index(name) % 2]
    (value, out), grads = compiled(value_and_grad(loss))(params)
    traced = compiled(value_and_grad(jaxmp.autocast(loss, policy))).trace(params)
    operands = [eqn.invars[:2] for eqn in equations(traced.jaxpr) if eqn.primitive.name in PRODUCTS]
    dtypes = [{var.aval.dtype.name for var in pair} for pair in operands]
    # BERT multiplies its attention by an integer mask with an einsum, which contracts nothing and keeps its dtypes.
    float_operands = [pair for pair in dtypes if "int32" not in pair]
    assert set().union(*float_operands) == {half}
    (got_value, got_out), got_grads = traced.lower().compile()(params)
    assert got_value.dtype == got_out.dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(got_grads)} == {"float32"}
    rounding = 10 * float(jnp.finfo(half).eps)  # allows for about ten roundings in sequence
    scale = float(jnp.abs(out).max())
    assert np.abs(flat(got_out) - flat(out)).max() <= rounding * scale
    assert abs(float(got_value - value)) <= rounding * max(float(value), scale)
    assert cosine(got_grads, grads) > (0.99 if half == "bfloat16" else 0.9999)


def test_equinox_differentiates_a_whole_model_under_autocast() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    def loss_of_params(params: Any, x: jax.Array) -> jax.Array:
        return loss_fn(eqx.combine(params, static), x)

    whole = eqx.filter_value_and_grad(jaxmp.autocast(loss_fn, "mixed_bfloat16"))
    loss, grads = eqx.filter_jit(whole)(model, data(8, 8))
    expected = jax.jit(jax.value_and_grad(jaxmp.autocast(loss_of_params, "mixed_bfloat16")))(params, data(8, 8))
    np.testing.assert_array_equal(flat((loss, eqx.filter(grads, eqx.is_array))), flat(expected))
    assert not np.array_equal(flat(jax.grad(loss_of_params)(params, data(8, 8))), flat(expected[1]))
