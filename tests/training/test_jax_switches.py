"""Train steps of a transformer under JAX's switches: strict dtype promotion, and no sums in half precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import mesh_of

import jaxmp
from jaxmp.program.walk import equations

WIDTH, HEADS, VOCABULARY = 32, 2, 64
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (8, 17))


@pytest.fixture(autouse=True)
def no_half_sums() -> Iterator[None]:
    """Let JAX raise an error at each sum in half. Promotion is strict in all tests."""
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    jax.config.update("jax_allow_f16_reductions", False)
    yield
    jax.config.update("jax_allow_f16_reductions", True)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return causal attention for projections of shape (batch, length, width)."""
    heads = (*q.shape[:2], HEADS, -1)
    q, k, v = (projected.reshape(heads) for projected in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*heads[:2], WIDTH)


class Linen(nn.Module):
    """A transformer with one block."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + self.param("positions", nn.initializers.normal(), (16, WIDTH))
        y = nn.LayerNorm()(x)
        x = x + nn.Dense(WIDTH)(attend(*(nn.Dense(WIDTH)(y) for _ in range(3))))
        x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(64)(nn.RMSNorm()(x))))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def loss_of(model: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next tokens."""
    return jnp.mean(jaxmp.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]))


SLOW = pytest.mark.slow("the same with other options of a step")


def optimizer() -> Any:
    # Adam in optax raises a float to an integer power, which strict promotion forbids.
    return jaxmp.loss_scaling(optax.sgd(0.1, momentum=0.9), jaxmp.DynamicLossScale())


@pytest.mark.parametrize(
    ("how", "policy"),
    [
        ("policy", "mixed_bfloat16"),
        ("mesh", "mixed_float16"),
        pytest.param("autocast", "mixed_float16", marks=SLOW),
        pytest.param("accumulated", "mixed_bfloat16", marks=SLOW),
    ],
)
def test_a_linen_step_sums_nothing_in_half(how: str, policy: str) -> None:
    model = Linen() if how == "autocast" else jaxmp.linen.apply_policy(Linen(), policy)
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS[:, :-1])["params"]
    state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params=params, tx=optimizer()), shapes)
    options: dict[str, Any] = {
        "policy": {},
        "autocast": {"policy": policy},
        "accumulated": {"accumulate_steps": 2},
        "mesh": {"sharding": jaxmp.sharding.Sharding(mesh_of(data=4))},
    }[how]

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        return loss_of(lambda inputs: model.apply({"params": params}, inputs), tokens)

    step = jaxmp.make_train_step(loss_fn, **options)
    with jax.set_mesh(mesh_of(data=4)):
        jax.make_jaxpr(step.update)(state, TOKENS)


def softmax(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return the loss of a softmax right after a product. The derivative of its maximum counts the largest values."""
    return jnp.sum(jax.nn.softmax(x @ w) ** 2)


def largest(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return a product of maxima."""
    return jnp.sum((jnp.max(x @ w, axis=0) @ w) ** 2)


def repeated(w: jax.Array, x: jax.Array) -> jax.Array:
    """Return a loss that adds a computed value to eight rows, so that eight cotangents are summed."""
    return jnp.sum(((x @ w + jnp.ones(16) @ w) @ w) ** 2)


@pytest.mark.parametrize("loss", [softmax, largest, repeated])
def test_sums_that_are_half_without_the_switch_are_float32(loss: Any) -> None:
    def operands_of_sums() -> set[Any]:
        gradient = jax.grad(jaxmp.autocast(loss, "mixed_bfloat16"))
        program = jax.make_jaxpr(gradient)(jnp.ones((16, 16)), jnp.ones((8, 16)))
        sums = [eqn for eqn in equations(program) if eqn.primitive.name == "reduce_sum"]
        added = [eqn for eqn in sums if eqn.invars[0].aval.size > eqn.outvars[0].aval.size]
        return {eqn.invars[0].aval.dtype for eqn in added}

    assert operands_of_sums() == {np.dtype(np.float32)}
    jax.config.update("jax_allow_f16_reductions", True)
    assert np.dtype(jnp.bfloat16) in operands_of_sums()
