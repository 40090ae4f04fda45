"""Models of Flax, Haiku and Optax under autocast match float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import concrete
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_tools import HALVES, compiled, cosine, flat
from flax import nnx
from gradient_zoo import drawn

import jaxmp
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.walk import equations

Loss = Callable[..., Any]


# JAX's default promotion, because Flax's norms and Haiku add integers and floats of several dtypes.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def data(*shape: int, seed: int = 7) -> jax.Array:
    return concrete.array(np.random.default_rng(seed).normal(size=shape), np.float32)


class Block(nn.Module):
    """A pre-norm transformer block."""

    width: int = 16

    @nn.compact
    def __call__(self, x: jax.Array, mask: Any = None) -> jax.Array:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2)(y, y, mask=mask)
        y = nn.Dense(2 * self.width)(nn.LayerNorm()(x))
        return x + nn.Dense(self.width)(nn.gelu(y))


class ScannedLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return nn.remat(Block)()(x), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(ScannedLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(4)(layers()(x, None)[0])


IMAGES, SEQUENCE = data(4, 6, 6, 3), data(2, 8, 16)
CAUSAL = nn.make_causal_mask(jnp.ones((2, 8)))

LINEN: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "scanned remat blocks": (Scanned(), (SEQUENCE,)),
}


def linen_program(name: str) -> tuple[Loss, Any, Any]:
    model, args = LINEN[name]

    def loss(params: Any, _: Any) -> tuple[jax.Array, Any]:
        out = model.apply(params, *args)
        return optax.losses.huber_loss(out).mean(), (out, ())

    return loss, drawn(jax.eval_shape(model.init, jax.random.key(0), *args)), ()


class NNXBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.norm2 = nnx.LayerNorm(16, rngs=rngs), nnx.RMSNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), mask=CAUSAL)
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


NNX: dict[str, tuple[Callable[[nnx.Rngs], Any], Any]] = {
    "block": (NNXBlock, SEQUENCE),
    "convolutions and statistics": (nnx_network, IMAGES),
}


def nnx_program(name: str) -> tuple[Loss, Any, Any]:
    make, x = NNX[name]
    graph, params, state = jax.eval_shape(lambda: nnx.split(make(nnx.Rngs(0)), nnx.Param, ...))

    def loss(params: Any, state: Any) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, state, copy=True)  # an inner trace may only change its own Variables
        out = model(x)
        return jnp.square(out).mean(), (out, nnx.state(model, nnx.BatchStat))

    return loss, drawn(params), drawn(state)


HAIKU: dict[str, tuple[Callable[..., jax.Array], Any]] = {
    "BatchNorm": (lambda x: hk.Linear(3)(jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Conv2D(8, 3)(x), True))), IMAGES),
}


def haiku_program(name: str) -> tuple[Loss, Any, Any]:
    fun, x = HAIKU[name]
    model = hk.transform_with_state(fun)
    params, state = drawn(jax.eval_shape(model.init, jax.random.key(0), x))

    def loss(params: Any, state: Any) -> tuple[jax.Array, Any]:
        out, new = model.apply(params, state, None, x)
        return jnp.square(out - 1.0).mean(), (out, new)

    return loss, params, state


MODELS: dict[str, Callable[[], tuple[Loss, Any, Any]]] = {
    **{f"linen {name}": functools.partial(linen_program, name) for name in LINEN},
    **{f"nnx {name}": functools.partial(nnx_program, name) for name in NNX},
    **{f"haiku {name}": functools.partial(haiku_program, name) for name in HAIKU},
}


def value_and_grad(loss: Loss) -> Loss:
    return jax.value_and_grad(loss, has_aux=True)


def product_operands(jaxpr: Any) -> set[str]:
    """Return the dtypes of the operands of all products."""
    products = (eqn for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS)
    return {var.aval.dtype.name for eqn in products for var in eqn.invars[:2]}


def dtypes(tree: Any) -> list[Any]:
    return [jnp.result_type(leaf) for leaf in jax.tree.leaves(tree)]


SLOW = pytest.mark.slow("compiles a loop of layers that are computed again, in two precisions")
EACH = [pytest.param(name, marks=[SLOW] * (name == "linen scanned remat blocks")) for name in MODELS]


@pytest.mark.parametrize("name", EACH)
def test_a_half_model_matches_float32(name: str) -> None:
    loss, params, old_state = MODELS[name]()
    number, plain = list(MODELS).index(name), value_and_grad(loss)
    policy, half = list(HALVES.items())[number % 2]
    is_outside = number // 2 % 2  # autocast of the gradient, or the gradient of autocast
    program = jaxmp.autocast(plain, policy) if is_outside else value_and_grad(jaxmp.autocast(loss, policy))
    (value, (out, state)), grads = compiled(plain)(params, old_state)
    traced = compiled(program).trace(params, old_state)
    assert product_operands(traced.jaxpr) == {half}  # no product is left in float32
    half_value, half_grads = traced.lower().compile()(params, old_state)
    got_value, (got_out, got_state) = half_value
    assert dtypes(half_value) == dtypes((value, (out, state)))
    assert dtypes(half_grads) == dtypes(params)
    # The tolerance allows for about ten roundings in sequence.
    rounding = 10 * float(jnp.finfo(half).eps)
    scale = float(jnp.abs(out).max())
    assert np.abs(flat(got_out) - flat(out)).max() <= rounding * scale
    assert abs(float(got_value - value)) <= rounding * max(abs(float(value)), scale)
    assert cosine(half_grads, grads) > (0.99 if half == "bfloat16" else 0.9999)
    if jax.tree.leaves(state):
        np.testing.assert_allclose(flat(got_state), flat(state), atol=rounding * max(1.0, np.abs(flat(state)).max()))
