"""The common parts of GPT-2 and BERT: embeddings, and blocks with recomputation."""

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
    """Embeddings that are also the output layer (Press & Wolf, arXiv 1608.05859).

    The rows are looked up before they are cast, so that the gradients of equal tokens are summed in float32.
    """

    def __call__(self, tokens: jax.Array) -> jax.Array:
        (rows,) = self.promote_dtype(jnp.take(self.embedding, tokens, axis=0), dtype=self.dtype, inexact=False)
        return rows

    def cross_entropy(self, x: jax.Array, labels: jax.Array, **options: Any) -> jax.Array:
        """Return the mean loss of ``x`` (tokens, features).

        See :func:`jaxmp.losses.projected_cross_entropy`.
        """
        (x,) = self.promote_dtype(x, dtype=self.dtype)  # as `attend` does, because a norm may return float32
        return projected_cross_entropy(x, self.embedding, labels, **options)


# With remat, the norm saves only its input, in half precision. Otherwise a loop over blocks would save three float32
# arrays of each norm for the backward pass. Without a loop, XLA merges the recomputation with the forward pass.
LayerNorm = nn.remat(nn.LayerNorm, prevent_cse=False)


def embed(rows: int, width: int) -> Embed:
    """Return embeddings with the initialisation of GPT-2 and BERT."""
    return Embed(rows, width, embedding_init=NORMAL)


def aligned(vocabulary: int) -> int:
    """Return the number of rows of the embeddings.

    The number is ``vocabulary`` padded to a multiple of 64 for tensor cores.
    """
    return align_dim(vocabulary, 64)


class Block(nn.Module):
    """A block of a transformer: ``before``, attention and ``after``.

    ``before`` and ``after`` work on (tokens, width), so that XLA need not change layouts. Only attention sees (batch,
    tokens, heads, head width).

    Attributes:
      heads: the number of attention heads.
      width: the width of the residual stream.
      remat: the part that the backward pass recomputes. ``"none"``: nothing. ``"attention"``: everything except
        attention. ``"dots"``: everything except products. ``"float8"``: everything except the operands of float8
        products. ``"full"``: everything.
    """

    heads: int
    width: int
    remat: Remat = "none"
    causal = False

    def before(self, x: jax.Array) -> jax.Array:
        """Return queries, keys and values side by side, (tokens, 3 × width)."""
        raise NotImplementedError

    def after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Return the output of the block, from its input and attention's result."""
        raise NotImplementedError

    def __call__(self, x: jax.Array, batch: int, mask: jax.Array | None = None) -> jax.Array:
        """Return the output of the block.

        ``x`` is (batch · sequence, width), ``mask`` is (batch, sequence).
        """
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
