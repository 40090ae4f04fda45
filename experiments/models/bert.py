"""BERT with its head for masked tokens (Devlin et al. 2018, arXiv 1810.04805)."""

from __future__ import annotations

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.models import transformer
from experiments.models.activations import gelu
from experiments.models.transformer import NORMAL, Remat


class BERT(nn.Module):
    """A model from tokens (batch, sequence) to the logits at each position.

    The logits are (batch, sequence, vocabulary). :mod:`experiments.models.weights` loads the published weights. There
    is no dropout, no pooler and no head for next sentence prediction. Inside, activations are (batch · sequence, width)
    and the vocabulary is padded to a multiple of 64.

    Attributes:
      vocabulary: the number of tokens. The embeddings of the tokens are also the output layer.
      sequence: the length of the longest sequence.
      layers: the number of blocks.
      heads: the attention heads per block.
      width: the width of the activations.
      remat: the part of each block that its backward pass recomputes. See
        :class:`experiments.models.transformer.Block`.
      chunks: the number of chunks in which the loss computes the logits, or ``"auto"``.

    >>> model = BERT(vocabulary=50, sequence=8, layers=1, heads=2, width=16)
    >>> tokens = jnp.zeros((2, 8), jnp.int32)
    >>> variables = model.init(jax.random.key(0), tokens)
    >>> model.apply(variables, tokens).shape, model.apply(variables, tokens, tokens, method="loss").shape
    ((2, 8, 50), ())
    """

    vocabulary: int = 30522
    sequence: int = 512
    layers: int = 12
    heads: int = 12
    width: int = 768
    remat: Remat = "none"
    chunks: int | Literal["auto"] = 16

    def setup(self) -> None:
        rows = transformer.aligned(self.vocabulary)
        self.word_embeddings = transformer.embed(rows, self.width)
        self.position_embeddings = transformer.embed(self.sequence, self.width)
        self.token_type_embeddings = transformer.embed(2, self.width)
        self.embeddings_norm = nn.LayerNorm(1e-12)
        self.layer = [Layer(self.heads, self.width, self.remat) for _ in range(self.layers)]
        self.transform = nn.Dense(self.width, kernel_init=NORMAL)
        self.transform_norm = nn.LayerNorm(1e-12)
        self.decoder_bias = self.param("decoder_bias", nn.initializers.zeros, (rows,))

    def __call__(
        self, tokens: jax.Array, *, token_types: jax.Array | None = None, mask: jax.Array | None = None
    ) -> jax.Array:
        x = self._head(self._hidden(tokens, token_types, mask)).reshape(*tokens.shape, self.width)
        logits = self.word_embeddings.attend(x)
        return (logits + self.decoder_bias.astype(logits.dtype))[..., : self.vocabulary]

    def hidden(
        self, tokens: jax.Array, *, token_types: jax.Array | None = None, mask: jax.Array | None = None
    ) -> jax.Array:
        """Return the output of the encoder's last layer, (batch, sequence, width).

        Args:
          tokens: (batch, sequence).
          token_types: 0 for tokens of the first text and 1 for tokens of the second; None for 0 everywhere.
          mask: True or nonzero for tokens that are visible; None for all.
        """
        return self._hidden(tokens, token_types, mask).reshape(*tokens.shape, self.width)

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        *,
        token_types: jax.Array | None = None,
        mask: jax.Array | None = None,
        ignore_index: int | None = -100,
    ) -> jax.Array:
        """Return the mean cross-entropy of ``targets``, a float32 scalar.

        The logits are computed in chunks. See :func:`jaxmp.losses.projected_cross_entropy`.

        Args:
          tokens: (batch, sequence).
          targets: (batch, sequence), the correct token at each position, or ``ignore_index``.
          token_types: see :meth:`hidden`.
          mask: see :meth:`hidden`.
          ignore_index: the target of tokens that do not count; None if all count.
        """
        # The step has its peak memory here, so the head is recomputed.
        head = nn.remat(lambda model, x: model._head(x))
        return self.word_embeddings.cross_entropy(
            head(self, self._hidden(tokens, token_types, mask)),
            targets.reshape(-1),
            bias=self.decoder_bias,
            chunks=self.chunks,
            classes=self.vocabulary,
            ignore_index=ignore_index,
        )

    def _hidden(self, tokens: jax.Array, token_types: jax.Array | None, mask: jax.Array | None) -> jax.Array:
        batch, sequence = tokens.shape
        if sequence > self.sequence:
            raise ValueError(f"sequences have at most {self.sequence} tokens, got {sequence}; make the model longer")
        x = self.word_embeddings(tokens) + self.position_embeddings(jnp.arange(sequence))
        x = x + self.token_type_embeddings(jnp.zeros((), jnp.int32) if token_types is None else token_types)
        x = self.embeddings_norm(x.reshape(-1, self.width))
        for layer in self.layer:
            x = layer(x, batch, mask)
        return x

    def _head(self, x: jax.Array) -> jax.Array:
        return self.transform_norm(gelu(self.transform(x), approximate=False))


class Layer(transformer.Block):
    """Attention over the whole sequence and a two-layer perceptron.

    The result of each is added to its input, and the sum is normalised.
    """

    def setup(self) -> None:
        self.query_key_value = transformer.Projections(3 * self.width, kernel_init=NORMAL)
        self.attention_output = nn.Dense(self.width, kernel_init=NORMAL)
        self.attention_norm = nn.LayerNorm(1e-12)
        self.intermediate = nn.Dense(4 * self.width, kernel_init=NORMAL)
        self.output = nn.Dense(self.width, kernel_init=NORMAL)
        self.output_norm = nn.LayerNorm(1e-12)

    def before(self, x: jax.Array) -> tuple[jax.Array, ...]:
        return self.query_key_value(x)

    def after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = self.attention_norm(x + self.attention_output(attended))
        inner = gelu(self.intermediate(x), approximate=False)
        return self.output_norm(x + self.output(inner))
