"""A transformer block whose expected plan is in plan_block.txt.

If you change plans on purpose, write the file again, in this folder:

    jaxmp plan plan_block:loss --args plan_block:example --override '**/head=float32' --operations > plan_block.txt
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

# The block uses only jax.lax, because the operations of jax.numpy functions change between versions of JAX.


def norm(x, scale):
    mean = lax.broadcast_in_dim(lax.reduce_sum(x, (2,)) / 16.0, x.shape, (0, 1))
    centred = x - mean
    variance = lax.reduce_sum(lax.square(centred), (2,)) / 16.0
    root = lax.rsqrt(variance + 1e-6)
    return centred * lax.broadcast_in_dim(root, x.shape, (0, 1)) * lax.broadcast_in_dim(scale, x.shape, (2,))


def dense(x, w):
    return lax.dot_general(x, w, (((2,), (0,)), ((), ())))


def softmax(x):
    shifted = x - lax.broadcast_in_dim(lax.reduce_max(x, (2,)), x.shape, (0, 1))
    powers = lax.exp(shifted)
    return powers / lax.broadcast_in_dim(lax.reduce_sum(powers, (2,)), x.shape, (0, 1))


def attention(params, x):
    with jax.named_scope("attention"):
        h = norm(x, params["norm"])
        q, k, v = (dense(h, params[name]) for name in ("query", "key", "value"))
        scores = lax.dot_general(q, k, (((2,), (2,)), ((0,), (0,)))) / 4.0
        context = lax.dot_general(softmax(scores), v, (((2,), (1,)), ((0,), (0,))))
        return x + dense(context, params["out"])


def mlp(params, x):
    with jax.named_scope("mlp"):
        h = dense(norm(x, params["norm"]), params["up"])
        return x + dense(h * lax.logistic(h), params["down"])


def block(x, params):
    return mlp(params, attention(params, x)), None


def loss(layers, head, x, labels):
    x, _ = lax.scan(block, x, layers)
    with jax.named_scope("head"):
        logits = dense(x, head)
    with jax.named_scope("loss"):
        shifted = logits - lax.broadcast_in_dim(lax.reduce_max(logits, (2,)), logits.shape, (0, 1))
        normalizer = lax.log(lax.reduce_sum(lax.exp(shifted), (2,)))
        logs = shifted - lax.broadcast_in_dim(normalizer, logits.shape, (0, 1))
        return -lax.reduce_sum(logs * labels, (0, 1, 2)) / 16.0


def example():
    """Return the params of three layers of width 16, and two sequences of tokens."""
    shapes = {"norm": (16,), "up": (16, 64), "down": (64, 16)}
    shapes |= dict.fromkeys(("query", "key", "value", "out"), (16, 16))
    layers = {name: jnp.zeros((3, *shape)) for name, shape in shapes.items()}
    return layers, jnp.zeros((16, 32)), jnp.zeros((2, 8, 16)), jnp.zeros((2, 8, 32))
