"""A transformer of GPT-2's shape (Radford et al. 2019), for benchmarks."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


class GPT2(nn.Module):
    """Tokens (batch, sequence) to the logits of the tokens that follow (batch, sequence, vocabulary).

    Attributes:
      vocabulary: number of tokens; the embeddings are also the output layer.
      sequence: longest sequence.
      layers: number of blocks.
      heads: attention heads in each.
      width: width of the residual stream.
    """

    vocabulary: int = 50304
    sequence: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=nn.initializers.normal(0.02))
        positions = nn.Embed(self.sequence, self.width, embedding_init=nn.initializers.normal(0.02))
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        for _ in range(self.layers):
            x = Block(self.heads, self.width)(x)
        return embed.attend(nn.LayerNorm()(x))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on normalised activations and added to the residual stream."""

    heads: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, sequence, width = x.shape
        qkv = nn.Dense(3 * self.width)(nn.LayerNorm()(x))
        q, k, v = jnp.moveaxis(qkv.reshape(batch, sequence, 3, self.heads, width // self.heads), 2, 0)
        x = x + nn.Dense(self.width)(causal_attention(q, k, v).reshape(batch, sequence, width))
        return x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention over (batch, sequence, heads, width): on a GPU cuDNN's kernel for half inputs, or autocast's."""
    if jax.default_backend() == "gpu":
        implementation = "cudnn" if q.dtype.itemsize == 2 else None  # None: autocast chooses, if it is autocast
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)
