"""``jax.export`` with a symbolic batch size, under a policy and under autocast."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import half, normal
from gradient_zoo import drawn
from jax import export

import jaxmp

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Flax's norms mix dtypes


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        shift = self.param("shift", nn.initializers.normal(1.0), (8,))
        x = nn.LayerNorm()(nn.Dense(8)(x) + shift.astype(x.dtype))
        return nn.MultiHeadDotProductAttention(2)(nn.gelu(x)[:, None])[:, 0]


def linen_net(policy):
    model = jaxmp.linen.apply_policy(Net(), policy)
    params = drawn(jax.eval_shape(Net().init, jax.random.key(0), jnp.ones((2, 8))))
    return lambda x: model.apply(params, x)


def by_autocast(policy):
    w, b = normal(1, 8, 8), normal(2, 8)
    return half(lambda x: jax.nn.softmax((x @ w + b) @ w + (b * b) @ w) @ w, policy)


def over_examples(policy):
    def fun(p, x):
        return jax.lax.scan(lambda h, x: (h + jnp.tanh(x @ p["w"] + p["b"] + h @ p["w"]), h), 0 * p["b"], x)[1] @ p["w"]

    params = {"w": normal(1, 8, 8, scale=0.3), "b": normal(2, 8)}
    return lambda x: (
        half(fun, policy)(params, x),
        jax.grad(lambda p: jnp.mean(half(fun, policy)(p, x) ** 2))(params),
    )


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (linen_net, "mixed_bfloat16"),
        (by_autocast, "mixed_bfloat16"),
        (over_examples, "mixed_float16"),
    ],
)
def test_an_export_with_a_symbolic_batch_computes_the_same_as_the_function(make, policy):
    fun = jax.jit(make(policy))
    exported = export.export(fun)(jax.ShapeDtypeStruct(export.symbolic_shape("b, 8"), jnp.float32))
    for rows in (3, 80) if make is by_autocast else (80,):
        x = normal(rows, rows, 8)
        result, expected = exported.call(x), fun(x)
        assert jax.tree.map(lambda leaf: leaf.dtype, result) == jax.tree.map(lambda leaf: leaf.dtype, expected)
        for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
            np.testing.assert_allclose(got, want, rtol=0.02, atol=0.01)


def test_a_plan_raises_for_symbolic_sizes():
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 8"), jnp.float32)
    with pytest.raises(ValueError, match="a plan needs all sizes"):
        jaxmp.cast_plan(lambda x: x @ normal(1, 8, 8), "mixed_bfloat16")(x)


def test_a_product_with_a_symbolic_size_is_not_float8():
    lhs = jax.ShapeDtypeStruct(export.symbolic_shape("b, 2048"), jnp.bfloat16)
    rhs = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    why = jaxmp.policy.float8.refusal(lhs, rhs, (((1,), (0,)), ((), ())), jaxmp.Float8())
    assert why == "a dimension that jax.export leaves open"
