"""Llama, a transformer with grouped queries.

Grattafiori et al. 2024, "The Llama 3 Herd of Models", arXiv 2407.21783.
"""

from __future__ import annotations

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.models import transformer
from experiments.models.transformer import NORMAL, Remat

_BASE = 500_000.0
"""The base of the rotary embedding's wavelengths, as in Llama 3."""


class Llama(nn.Module):
    """A transformer from tokens (batch, sequence) to the mean loss of the next tokens.

    The blocks are a loop over stacked params. The embeddings are not the output layer. The default sizes are those of
    Llama 3 with 8 billion params.

    Attributes:
      vocabulary: the number of tokens.
      sequence: the length of a sequence.
      layers: the number of blocks.
      heads: the attention heads per block. A group of them shares a head of keys and values.
      groups: the heads of keys and values.
      width: the width of the residual stream.
      hidden: the width of the perceptron's hidden layer.
      remat: the part of each block that its backward pass recomputes. See
        :class:`experiments.models.transformer.Block`.
      chunks: the number of chunks in which the loss computes the logits, or ``"auto"``.

    >>> model = Llama(vocabulary=64, sequence=8, layers=2, heads=4, groups=2, width=32, hidden=48)
    >>> tokens = jnp.zeros((2, 8), jnp.int32)
    >>> variables = model.init(jax.random.key(0), tokens, tokens, method="loss")
    >>> model.apply(variables, tokens, tokens, method="loss").shape
    ()
    """

    vocabulary: int = 128_256
    sequence: int = 2048
    layers: int = 32
    heads: int = 32
    groups: int = 8
    width: int = 4096
    hidden: int = 14_336
    remat: Remat = "full"
    chunks: int | Literal["auto"] = "auto"

    def setup(self) -> None:
        self.embeddings = transformer.embed(self.vocabulary, self.width)
        self.blocks = Loop(self.layers, self.heads, self.width, self.groups, self.hidden, self.remat)
        self.norm = nn.RMSNorm(1e-5)
        self.output = transformer.embed(self.vocabulary, self.width)

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Return the mean cross-entropy of ``targets``, a float32 scalar.

        Args:
          tokens: (batch, sequence).
          targets: (batch, sequence), the token that follows each token.
        """
        x = self.embeddings(tokens).reshape(-1, self.width)
        x = self.norm(self.blocks(x, len(tokens)))
        return self.output.cross_entropy(x, targets.reshape(-1), classes=self.vocabulary, chunks=self.chunks)


class Block(transformer.Block):
    """Attention with grouped queries, and a gated perceptron (Shazeer 2020, arXiv 2002.05202).

    Each of the two reads normalised activations, and adds its result to the residual stream.

    Attributes:
      groups: the heads of keys and values.
      hidden: the width of the perceptron's hidden layer.
    """

    groups: int = 1
    hidden: int = 1
    causal = True

    def setup(self) -> None:
        shared = self.groups * (self.width // self.heads)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(1e-5), nn.RMSNorm(1e-5)
        self.query, self.key, self.value = (_dense(features) for features in (self.width, shared, shared))
        self.attention_output = _dense(self.width)
        self.gate, self.up, self.down = _dense(self.hidden), _dense(self.hidden), _dense(self.width)

    def before(self, x: jax.Array) -> tuple[jax.Array, ...]:
        batch, tokens, _ = x.shape
        x = self.attention_norm(x)

        def in_heads(projected: jax.Array) -> jax.Array:
            return projected.reshape(batch, tokens, -1, self.width // self.heads)

        q, k, v = in_heads(self.query(x)), in_heads(self.key(x)), in_heads(self.value(x))
        repeats = self.heads // self.groups
        parts = rotated(q), jnp.repeat(rotated(k), repeats, axis=2), jnp.repeat(v, repeats, axis=2)
        return tuple(part.reshape(batch, tokens, self.width) for part in parts)

    def after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = x + self.attention_output(attended)
        y = self.mlp_norm(x)
        return x + self.down(nn.silu(self.gate(y)) * self.up(y))


class Loop(nn.Module):
    """A scan over ``depth`` blocks, whose params are stacked along the first dimension."""

    depth: int
    heads: int
    width: int
    groups: int
    hidden: int
    remat: Remat

    @nn.compact
    def __call__(self, x: jax.Array, batch: int) -> jax.Array:
        def turn(block: Block, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return block(x, batch), None

        turns = nn.scan(turn, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth)
        block = Block(self.heads, self.width, self.remat, groups=self.groups, hidden=self.hidden, name="block")
        return turns(block, x, None)[0]


def rotated(x: jax.Array) -> jax.Array:
    """Return queries or keys with the rotary embedding of their positions.

    The method is that of Su et al. 2021, arXiv 2104.09864. The angles and the rotation are in float32.

    Args:
      x: (batch, tokens, heads, head width). The head width is even.

    >>> x = jnp.ones((1, 2, 1, 4))
    >>> rotated(x)[0, 0, 0]
    Array([1., 1., 1., 1.], dtype=float32)
    """
    half = x.shape[-1] // 2
    frequencies = _BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    result = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return result.astype(x.dtype)


def _dense(features: int) -> nn.Dense:
    return nn.Dense(features, use_bias=False, kernel_init=NORMAL)
