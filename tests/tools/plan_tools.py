"""Tools for tests of the plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import jaxmp
from jaxmp.engine.plan import CastPlan, PlanRow


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def plan(fun, *args, policy="mixed_bfloat16", overrides=None) -> CastPlan:
    return jaxmp.cast_plan(fun, policy, overrides)(*args)


def rows(fun, *args, **options) -> list[PlanRow]:
    return list(plan(fun, *args, **options).rows)


def flops(fun, *args):
    """Return the primitive and the FLOPs of each row that has FLOPs."""
    return [(row.primitive, row.flops) for row in rows(fun, *args) if row.flops]


def mlp(w1, b1, w2, x):
    with jax.named_scope("hidden"):
        hidden = lax.tanh(x @ w1 + lax.broadcast_in_dim(b1, (4, 16), (1,)))
    with jax.named_scope("head"):
        logits = hidden @ w2
    top = lax.broadcast_in_dim(lax.reduce_max(logits, (1,)), (4, 2), (0,))
    powers = lax.exp(logits - top)
    return powers / lax.broadcast_in_dim(lax.reduce_sum(powers, (1,)), (4, 2), (0,))


MLP = (shape(8, 16), shape(16), shape(16, 2), shape(4, 8))


@jax.custom_vjp
def doubled(x, w):
    return x @ w * 2


doubled.defvjp(lambda x, w: (doubled(x, w), (x, w)), lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct))


def looped(x, w):
    def step(carry, scale):
        x, total = carry
        x = jax.nn.relu(x @ w) * scale
        return (x, total + jnp.sum(x)), x[0]

    return lax.scan(step, (x, jnp.float32(0)), x[0])


def custom(x, w):
    return jnp.sum(jax.nn.silu(x @ w) @ w) + jnp.sum(doubled(x, w))
