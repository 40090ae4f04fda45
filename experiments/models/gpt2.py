"""GPT-2, a transformer.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.models import transformer
from experiments.models.activations import gelu
from experiments.models.transformer import NORMAL, Remat

SIZES: dict[str, dict[str, int]] = {
    "124M": {"layers": 12, "heads": 12, "width": 768, "context": 1024},
    "355M": {"layers": 24, "heads": 16, "width": 1024, "context": 1024},
    "774M": {"layers": 36, "heads": 20, "width": 1280, "context": 1024},
    "1558M": {"layers": 48, "heads": 25, "width": 1600, "context": 1024},
    "1.3B": {"layers": 24, "heads": 16, "width": 2048, "context": 2048},
    "1.8B": {"layers": 8, "heads": 32, "width": 4096, "context": 2048},
    "7B": {"layers": 32, "heads": 32, "width": 4096, "context": 2048},
}
"""Sizes by the number of params with GPT-2's tokens. The first four are the published sizes (table 2)."""


class GPT2(nn.Module):
    """A transformer from tokens (batch, sequence) to the logits of the next tokens.

    The logits are (batch, sequence, vocabulary). Modules and params have the names of the published weights, which
    :mod:`experiments.models.weights` loads. There is no dropout. Inside, activations are (batch · sequence, width) and
    the vocabulary is padded to a multiple of 64.

    Attributes:
      vocabulary: the number of tokens. The embeddings of the tokens are also the output layer.
      sequence: the length of the longest sequence.
      layers: the number of blocks.
      heads: the attention heads per block.
      width: the width of the residual stream.
      remat: the part of each block that its backward pass recomputes. See
        :class:`experiments.models.transformer.Block`.
      loop: whether the blocks are a loop over stacked params. The loop compiles as fast as a single block, but its
        params do not have the names of the published weights.
      chunks: the number of chunks in which the loss computes the logits, or ``"auto"``.

    >>> model = GPT2(vocabulary=50, sequence=8, layers=1, heads=2, width=16)
    >>> tokens = jnp.zeros((2, 8), jnp.int32)
    >>> variables = model.init(jax.random.key(0), tokens)
    >>> model.apply(variables, tokens).shape, model.apply(variables, tokens, tokens, method="loss").shape
    ((2, 8, 50), ())
    """

    vocabulary: int = 50257
    sequence: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    remat: Remat = "none"
    loop: bool = False
    chunks: int | Literal["auto"] = 8

    def setup(self) -> None:
        self.wte = transformer.embed(transformer.aligned(self.vocabulary), self.width)
        self.wpe = transformer.embed(self.sequence, self.width)
        kind, count = (Loop, 1) if self.loop else (Block, self.layers)
        self.h = [kind(self.heads, self.width, self.remat, self.layers) for _ in range(count)]
        self.ln_f = transformer.LayerNorm(1e-5)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.wte.attend(self.hidden(tokens))[..., : self.vocabulary]

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """Return the input of the output layer, (batch, sequence, width)."""
        return self._hidden(tokens).reshape(*tokens.shape, self.width)

    def loss(self, tokens: jax.Array, targets: jax.Array, *, ignore_index: int | None = None) -> jax.Array:
        """Return the mean cross-entropy of ``targets``, a float32 scalar.

        The logits are computed in chunks. See :func:`jaxmp.losses.projected_cross_entropy`.

        Args:
          tokens: (batch, sequence).
          targets: (batch, sequence), the token that follows each token.
          ignore_index: the target of tokens that do not count; None if all count.
        """
        x = self._hidden(tokens)
        return self.wte.cross_entropy(
            x, targets.reshape(-1), classes=self.vocabulary, chunks=self.chunks, ignore_index=ignore_index
        )

    def _hidden(self, tokens: jax.Array) -> jax.Array:
        batch, sequence = tokens.shape
        if sequence > self.sequence:
            raise ValueError(f"sequences have at most {self.sequence} tokens, got {sequence}; make the model longer")
        x = (self.wte(tokens) + self.wpe(jnp.arange(sequence))).reshape(-1, self.width)
        for block in self.h:
            x = block(x, batch)
        return self.ln_f(x)


class Block(transformer.Block):
    """Attention and a two-layer perceptron.

    Each of the two reads normalised activations, and adds its result to the residual stream.

    Attributes:
      depth: the number of blocks in the model. The kernels that write to the residual stream start 1/√(2·depth) as
        large as the others.
    """

    depth: int = 1
    causal = True

    def setup(self) -> None:
        residual = nn.initializers.normal(0.02 / (2 * self.depth) ** 0.5)
        self.ln_1, self.ln_2 = transformer.LayerNorm(1e-5), transformer.LayerNorm(1e-5)
        self.attn, self.mlp = Attention(self.width, residual), MLP(self.width, residual)

    def before(self, x: jax.Array) -> tuple[jax.Array, ...]:
        return self.attn.c_attn(self.ln_1(x))

    def after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = x + self.attn.c_proj(attended)
        return x + self.mlp(self.ln_2(x))


class Loop(nn.Module):
    """A scan over ``depth`` blocks.

    The params of the blocks are stacked along the first dimension.
    """

    heads: int
    width: int
    remat: Remat
    depth: int

    @nn.compact
    def __call__(self, x: jax.Array, batch: int) -> jax.Array:
        def turn(block: Block, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return block(x, batch), None

        turns = nn.scan(turn, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth)
        return turns(Block(self.heads, self.width, self.remat, self.depth, name="block"), x, None)[0]


class Attention(nn.Module):
    """The products before and after attention.

    ``c_attn`` makes queries, keys and values, and ``c_proj`` projects the result.
    """

    width: int
    residual: nn.initializers.Initializer

    def setup(self) -> None:
        self.c_attn = transformer.Projections(3 * self.width, kernel_init=NORMAL)
        self.c_proj = nn.Dense(self.width, kernel_init=self.residual)


class MLP(nn.Module):
    """A two-layer perceptron from (tokens, width) to the same shape.

    Its hidden layer is four times as wide.
    """

    width: int
    residual: nn.initializers.Initializer

    def setup(self) -> None:
        self.c_fc = nn.Dense(4 * self.width, kernel_init=NORMAL)
        self.c_proj = nn.Dense(self.width, kernel_init=self.residual)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(gelu(self.c_fc(x)))


def sized(size: str | None) -> GPT2:
    """Return GPT-2 in one of ``SIZES``; None for a small model for smoke tests."""
    if size is None:
        return GPT2(vocabulary=96, sequence=32, layers=2, heads=2, width=64)
    shape = SIZES[size]
    return GPT2(sequence=shape["context"], layers=shape["layers"], heads=shape["heads"], width=shape["width"])
