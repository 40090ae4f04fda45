"""Models of Flax, Haiku, Equinox and transformers under autocast match float32.

The configurations are tiny and the params are random, so nothing is downloaded. Equinox and transformers are optional.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_tools import compiled, cosine, flat, in_turn
from flax import nnx
from gradient_zoo import drawn

import jaxmp
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.walk import equations

# A function of params and state that returns its value, and its output with the new state; params; state.
Program = tuple[Callable[..., Any], Any, Any]


@pytest.fixture(autouse=True)
def default_promotion() -> Iterator[None]:
    """Allow norms, Haiku and transformers to add integers and floats of several dtypes."""
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the libraries about each other's versions
        yield


def data(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).normal(size=shape), jnp.float32)


class Block(nn.Module):
    """A pre-norm transformer block."""

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2)(y, y)
        return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(4)(layers()(x, None)[0])


def linen_blocks() -> Program:
    model, x = Scanned(), data(2, 8, 16)

    def loss(params: Any, _: Any) -> tuple[jax.Array, Any]:
        out = model.apply(params, x)
        return optax.losses.huber_loss(out).mean(), (out, ())

    return loss, drawn(jax.eval_shape(model.init, jax.random.key(0), x)), ()


class NNXBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.norm2 = nnx.LayerNorm(16, rngs=rngs), nnx.RMSNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), mask=nn.make_causal_mask(jnp.ones((2, 8))))
        return x + self.down(nnx.silu(self.up(self.norm2(x))))


def nnx_network(rngs: nnx.Rngs) -> Any:
    return nnx.Sequential(
        nnx.Conv(3, 8, (3, 3), rngs=rngs),
        nnx.BatchNorm(8, rngs=rngs),
        nnx.relu,
        nnx.Conv(8, 8, (3, 3), rngs=rngs),
        nnx.GroupNorm(8, 2, rngs=rngs),
        nnx.Linear(8, 8, rngs=rngs),
    )


def nnx_program(make: Callable[[nnx.Rngs], Any], x: jax.Array) -> Program:
    graph, params, state = jax.eval_shape(lambda: nnx.split(make(nnx.Rngs(0)), nnx.Param, ...))

    def loss(params: Any, state: Any) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, state, copy=True)  # an inner trace may only change its own Variables
        out = model(x)
        return jnp.square(out).mean(), (out, nnx.state(model, nnx.BatchStat))

    return loss, drawn(params), drawn(state)


def haiku_batch_norm() -> Program:
    def fun(x: jax.Array) -> jax.Array:
        return hk.Linear(3)(jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Conv2D(8, 3)(x), True)))

    model, x = hk.transform_with_state(fun), data(4, 6, 6, 3)

    def loss(params: Any, state: Any) -> tuple[jax.Array, Any]:
        out, new = model.apply(params, state, None, x)
        return jnp.square(out - 1.0).mean(), (out, new)

    return loss, *drawn(jax.eval_shape(model.init, jax.random.key(0), x))


def equinox_attention() -> Program:
    eqx = pytest.importorskip("equinox")
    attention, x = eqx.nn.MultiheadAttention(2, 16, key=jax.random.key(0)), data(2, 8, 16)
    params, static = eqx.partition(attention, eqx.is_inexact_array)

    def loss(params: Any, _: Any) -> tuple[jax.Array, Any]:
        mask = jnp.tril(jnp.ones((8, 8), bool))
        out = jax.vmap(lambda x: x + eqx.combine(params, static)(x, x, x, mask=mask))(x)
        return jnp.square(out).mean(), (out, ())

    return loss, params, ()


def transformers_bert() -> Program:
    transformers = pytest.importorskip("transformers", "4.40", exc_type=ImportError)
    if not hasattr(transformers, "FlaxBertForMaskedLM"):
        pytest.skip("transformers 5 has no Flax models")
    config = transformers.BertConfig(
        vocab_size=40,
        attention_probs_dropout_prob=0.0,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model = transformers.FlaxBertForMaskedLM(config, _do_init=False)
    ids = jnp.asarray(np.random.default_rng(3).integers(2, 40, (2, 8)), jnp.int32)
    padded = jnp.array([[1] * 8, [1] * 5 + [0] * 3])

    def loss(params: Any, _: Any) -> tuple[jax.Array, Any]:
        out = model(input_ids=ids, attention_mask=padded, params=params).logits
        labels = jnp.arange(out[..., 0].size).reshape(out.shape[:-1]) % out.shape[-1]
        return optax.losses.softmax_cross_entropy_with_integer_labels(out, labels).mean(), (out, ())

    return loss, drawn(jax.eval_shape(lambda: model.init_weights(jax.random.key(0), model.input_shape))), ()


MODELS: dict[str, Callable[[], Program]] = {
    "NNX block": lambda: nnx_program(NNXBlock, data(2, 8, 16)),
    "Haiku batch norm": haiku_batch_norm,
    "NNX convolutions and statistics": lambda: nnx_program(nnx_network, data(4, 6, 6, 3)),
    "Linen scanned remat blocks": linen_blocks,
    "Equinox attention": equinox_attention,
    "transformers BERT": transformers_bert,
}
SLOW = pytest.mark.slow("models of other libraries, and layers in a loop that are computed again")
QUICK = ("NNX block", "NNX convolutions and statistics", "Haiku batch norm")


@pytest.mark.parametrize(
    ("name", "policy"), [pytest.param(*pair, marks=[SLOW] * (pair[0] not in QUICK)) for pair in in_turn(MODELS)]
)
def test_a_half_model_matches_float32(name: str, policy: str) -> None:
    loss, params, old_state = MODELS[name]()
    half, plain = policy.removeprefix("mixed_"), jax.value_and_grad(loss, has_aux=True)
    is_outside = list(MODELS).index(name) // 2 % 2  # autocast of the gradient, or the gradient of autocast
    program = jaxmp.autocast(plain, policy)
    if not is_outside:
        program = jax.value_and_grad(jaxmp.autocast(loss, policy), has_aux=True)
    (value, (out, state)), grads = compiled(plain)(params, old_state)
    traced = compiled(program).trace(params, old_state)
    operands = [eqn.invars[:2] for eqn in equations(traced.jaxpr) if eqn.primitive.name in PRODUCTS]
    dtypes = [{var.aval.dtype.name for var in pair} for pair in operands]
    # BERT multiplies its attention by an integer mask with an einsum, which contracts nothing and keeps its dtypes.
    assert set().union(*(pair for pair in dtypes if "int32" not in pair)) == {half}
    (got_value, (got_out, got_state)), got_grads = traced.lower().compile()(params, old_state)
    results, expected = (got_value, got_out, got_state, got_grads), (value, out, state, params)
    assert [leaf.dtype for leaf in jax.tree.leaves(results)] == [leaf.dtype for leaf in jax.tree.leaves(expected)]
    # The tolerance allows for about ten roundings in sequence.
    rounding, scale = 10 * float(jnp.finfo(half).eps), float(jnp.abs(out).max())
    assert np.abs(flat(got_out) - flat(out)).max() <= rounding * scale
    assert abs(float(got_value - value)) <= rounding * max(abs(float(value)), scale)
    assert cosine(got_grads, grads) > (0.99 if half == "bfloat16" else 0.9999)
    if jax.tree.leaves(state):
        np.testing.assert_allclose(flat(got_state), flat(state), atol=rounding * max(1.0, np.abs(flat(state)).max()))


@pytest.mark.once
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
