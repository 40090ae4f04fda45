"""GPT-2 in Flax NNX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.benchmarks.models import by_hand
from jaxmp.losses import projected_cross_entropy


class Layer(nnx.Module):
    """A layer of :class:`GPT2`."""

    def __init__(self, width: int, heads: int, dtype: Any, rngs: nnx.Rngs) -> None:
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        self.heads = heads
        self.norm1, self.norm2 = _layer_norm(width, dtype, rngs), _layer_norm(width, dtype, rngs)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.reshape(shape) for part in jnp.split(self.qkv(self.norm1(x)), 3, axis=-1))
        x = x + self.out(by_hand.attend(q, k, v, causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT2(nnx.Module):
    """:class:`experiments.benchmarks.models.by_hand.GPT2` in NNX.

    Args:
      vocabulary: the number of tokens. The embeddings of the tokens are also the output layer.
      sequence: the length of the longest sequence.
      layers: the number of layers.
      width: the width of the residual stream.
      heads: the attention heads per layer.
      loop: whether the layers are a loop over stacked params, in which the backward pass recomputes each layer.
      dtype: the dtype of every module, for half precision by hand.
      rngs: the random numbers of the params.
    """

    def __init__(
        self,
        vocabulary: int,
        sequence: int,
        layers: int,
        width: int,
        heads: int = 1,
        loop: bool = False,
        dtype: Any = None,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(sequence, width, dtype=dtype, rngs=rngs)
        make = functools.partial(Layer, width, heads, dtype)
        stacked = nnx.split_rngs(splits=layers)(nnx.vmap(make))
        self.blocks = stacked(rngs) if loop else nnx.List([make(rngs) for _ in range(layers)])
        self.norm = _layer_norm(width, dtype, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.hidden(tokens))

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """Return the input of the output layer, (batch, tokens, width)."""
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        if isinstance(self.blocks, nnx.List):
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def turn(x: jax.Array, layer: Layer) -> jax.Array:
            return layer(x)

        return self.norm(turn(x, self.blocks))

    def loss(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Return the mean cross-entropy of ``targets``, (batch, tokens).

        The logits are computed in chunks.
        """
        x = self.hidden(tokens)
        return projected_cross_entropy(x.reshape(-1, x.shape[-1]), self.embed.embedding[...], targets.reshape(-1))


def _layer_norm(width: int, dtype: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=1e-5, dtype=dtype, rngs=rngs)
