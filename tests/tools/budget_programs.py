"""Small programs of different kinds: a loss function and its arguments each."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np


def _weights(**shapes):
    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in shapes.items():
        fan_in = np.prod(shape[:-1]) if len(shape) > 1 else 1
        weights[name] = (rng.normal(size=shape) / np.sqrt(fan_in)).astype(np.float32)
    return weights


def _batch(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def _normalised(x, scale):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale[: x.shape[-1]]


def attention(x, qkv, out):
    """Return causal attention with two heads."""
    width = x.shape[-1]
    q, k, v = jnp.split((x @ qkv).reshape(*x.shape[:-1], 2, 3 * width // 2), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // 2).astype(np.float32)
    scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(x.shape) @ out


def block(x, w):
    """Return a block of a transformer."""
    x = x + attention(_normalised(x, w["scale"]), w["qkv"], w["out"])
    return x + jax.nn.gelu(_normalised(x, w["scale"]) @ w["up"]) @ w["down"]


def language_model(params, tokens, *, is_scan=True, is_remat=False):
    """Return the loss of a transformer with two layers, in a scan or not, with or without checkpoint."""
    x = params["embedding"][tokens[:, :-1]]
    layer = jax.checkpoint(block) if is_remat else block
    layers = {name: params[name] for name in ("qkv", "out", "up", "down", "scale")}
    if is_scan:
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, layers)
    else:
        for number in range(2):
            x = layer(x, jax.tree.map(lambda leaf, number=number: leaf[number], layers))
    logits = jax.nn.log_softmax(x @ params["embedding"].T)
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()


def language_model_args(examples=4):
    width = 16
    params = _weights(embedding=(32, width), qkv=(2, width, 3 * width), out=(2, width, width))
    params |= _weights(up=(2, width, 2 * width), down=(2, 2 * width, width))
    params["scale"] = np.ones((2, width), np.float32)
    params["embedding"] = params["embedding"] * 3
    return params, np.random.default_rng(2).integers(0, 32, (examples, 9))


def convolutions(params, x):
    """Return the loss of two convolutions with batch norms."""
    for name in ("first", "second"):
        x = jax.lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        x = jax.nn.relu((x - mean) * jax.lax.rsqrt(variance + 1e-5))
    return jnp.mean(jax.nn.logsumexp(x.mean((1, 2)) @ params["head"], -1) ** 2)


def recurrent(params, x):
    """Return the loss of a gated recurrent network."""

    def cell(h, x):
        gate, new = jnp.split(x @ params["in"] + h @ params["state"], 2, -1)
        gate = jax.nn.sigmoid(gate)
        return gate * h + (1 - gate) * jnp.tanh(new), None

    h, _ = jax.lax.scan(cell, jnp.zeros((x.shape[1], 8)), x)
    return jnp.mean((h @ params["head"]) ** 2)


def distances(params, x):
    """Return the loss of a Gaussian kernel of squared distances."""
    z = x @ params["w"]
    squares = (z**2).sum(-1)
    squared = squares[:, None] + squares[None] - 2 * (z @ z.T)
    return jnp.mean(jnp.exp(-0.5 * squared) @ params["values"])


def experts(params, x):
    """Return the loss of a mixture of four experts, of which each token uses two."""
    routes = jax.nn.softmax(x @ params["router"])
    chosen, indices = jax.lax.top_k(routes, 2)
    weights = (jax.nn.one_hot(indices, 4) * chosen[..., None]).sum(-2)
    hidden = jax.nn.silu(jnp.einsum("bd,edh->beh", x, params["up"]))
    outputs = jnp.einsum("beh,ehd->bed", hidden, params["down"])
    return jnp.mean((jnp.einsum("be,bed->bd", weights, outputs) - x) ** 2)


def autoencoder(params, x):
    """Return the loss of a variational autoencoder."""
    mean, log_variance = jnp.split(jax.nn.relu(x @ params["encoder"]) @ params["latent"], 2, -1)
    noise = jax.random.normal(jax.random.key(0), mean.shape)
    z = mean + jnp.exp(0.5 * log_variance) * noise
    decoded = jax.nn.relu(z @ params["decoder"]) @ params["output"]
    divergence = -0.5 * (1 + log_variance - mean**2 - jnp.exp(log_variance)).sum(-1)
    return jnp.mean(((decoded - x) ** 2).sum(-1) + divergence)


def messages(params, nodes):
    """Return the loss of two rounds of messages on a ring with chords."""
    senders = np.arange(3 * len(nodes)) % len(nodes)
    receivers = (7 * np.arange(3 * len(nodes)) + 1) % len(nodes)
    nodes = nodes @ params["encoder"]
    for name in ("first", "second"):
        sent = jax.nn.silu(jnp.concatenate([nodes[senders], nodes[receivers]], -1) @ params[name])
        nodes = nodes + jax.ops.segment_sum(sent, receivers, len(nodes)) @ params["update"]
    return jnp.mean(nodes**2)


def flow(params, x):
    """Return the loss of a neural ODE with small steps."""
    h = x @ params["encoder"]
    for _ in range(8):
        h = h + 0.01 * jnp.tanh(h @ params["field"])
    return jnp.mean((h @ params["head"]) ** 2)


PROGRAMS = {
    "convolutions": (
        convolutions,
        lambda: (_weights(first=(3, 3, 3, 8), second=(3, 3, 8, 8), head=(8, 5)), _batch(8, 6, 6, 3)),
    ),
    "recurrent": (recurrent, lambda: (_weights(**{"in": (6, 16), "state": (8, 16), "head": (8, 2)}), _batch(5, 8, 6))),
    "distances": (distances, lambda: (_weights(w=(6, 8), values=(16, 3)), 0.3 * _batch(16, 6))),
    "experts": (experts, lambda: (_weights(router=(8, 4), up=(4, 8, 16), down=(4, 16, 8)), _batch(12, 8))),
    "autoencoder": (
        autoencoder,
        lambda: (_weights(encoder=(12, 16), latent=(16, 8), decoder=(4, 16), output=(16, 12)), _batch(8, 12)),
    ),
    "messages": (
        messages,
        lambda: (_weights(encoder=(8, 8), first=(16, 8), second=(16, 8), update=(8, 8)), _batch(12, 8)),
    ),
    "flow": (flow, lambda: (_weights(encoder=(8, 16), field=(16, 16), head=(16, 4)), _batch(16, 8))),
    "language model": (language_model, language_model_args),
    "language model, unrolled": (functools.partial(language_model, is_scan=False), language_model_args),
}
