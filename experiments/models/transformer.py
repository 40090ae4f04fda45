"""The common parts of GPT-2 and BERT: embeddings, and blocks that recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.models.attention import attention
from jaxmp.base.hardware import align_dim
from jaxmp.losses import projected_cross_entropy
from jaxmp.policy import float8_product

Remat = Literal["none", "attention", "dots", "float8", "full"]
NORMAL = nn.initializers.normal(0.02)


class Embed(nn.Embed):
    """Tokens to vectors, and back as the tied output layer (Press & Wolf 2016, arXiv 1608.05859).

    The rows are looked up before they are cast: the gradient of a token that a batch has a thousand times is then
    summed in float32.
    """

    def __call__(self, tokens: jax.Array) -> jax.Array:
        (rows,) = self.promote_dtype(jnp.take(self.embedding, tokens, axis=0), dtype=self.dtype, inexact=False)
        return rows

    def cross_entropy(self, x: jax.Array, labels: jax.Array, **options: Any) -> jax.Array:
        """The mean loss of ``x`` (tokens, features), see :func:`jaxmp.losses.projected_cross_entropy`."""
        (x,) = self.promote_dtype(x, dtype=self.dtype)  # as `attend` has it: half also after a norm in float32
        return projected_cross_entropy(x, self.embedding, labels, **options)


# It keeps its input alone, in half. A loop over blocks stores all that its backward pass reads, which would be
# three arrays in float32 of each norm; without a loop XLA computes it once.
LayerNorm = nn.remat(nn.LayerNorm, prevent_cse=False)


def embed(rows: int, width: int) -> Embed:
    """Embeddings with the initialisation of both models."""
    return Embed(rows, width, embedding_init=NORMAL)


def aligned(vocabulary: int) -> int:
    """Rows of the embeddings: what tensor cores want of a dimension."""
    return align_dim(vocabulary, 64)


class Block(nn.Module):
    """A repeated block: ``before`` attention and ``after`` it, over (tokens, width).

    Products over two dimensions leave XLA no layouts to change: only attention sees (batch, tokens, heads, width).

    Attributes:
      heads: attention heads.
      width: of the residual stream.
      remat: what the backward pass computes again: nothing; all but attention; all but products; all but the
        operands of float8 products; all.
    """

    heads: int
    width: int
    remat: Remat = "none"
    causal = False

    def before(self, x: jax.Array) -> jax.Array:
        """Queries, keys and values side by side, (tokens, 3 × width)."""
        raise NotImplementedError

    def after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Return the output of the block, from its input and attention's result."""
        raise NotImplementedError

    def __call__(self, x: jax.Array, batch: int, mask: jax.Array | None = None) -> jax.Array:
        """``x`` is (batch · sequence, width), ``mask`` (batch, sequence)."""
        if self.remat not in get_args(Remat):
            raise ValueError(f"remat must be one of {', '.join(get_args(Remat))}, got {self.remat!r}")

        def attend(qkv: jax.Array) -> jax.Array:
            shape = (batch, -1, self.heads, self.width // self.heads)
            q, k, v = (part.reshape(shape) for part in jnp.split(qkv, 3, axis=-1))
            return attention(q, k, v, causal=self.causal, mask=mask).reshape(x.shape)

        kind = type(self)
        if self.remat == "attention":
            before, after = nn.remat(kind.before), nn.remat(kind.after)
            return after(self, x, attend(before(self, x)))

        def whole(block: Block, x: jax.Array) -> jax.Array:
            return block.after(x, attend(block.before(x)))

        run: Callable[[Block, jax.Array], jax.Array] = whole
        if self.remat == "dots":
            run = nn.remat(whole, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        elif self.remat == "float8":
            run = nn.remat(whole, policy=jax.checkpoint_policies.save_only_these_names(float8_product.RESIDUALS))
        elif self.remat == "full":
            run = nn.remat(whole)
        return run(self, x)
