"""A small next-token model.

The model follows Bengio et al. 2003, "A Neural Probabilistic Language Model".
"""

from __future__ import annotations

import flax.linen as nn
import jax


class NextToken(nn.Module):
    """A model from tokens (batch, context) to the logits of the next token.

    The logits are (batch, vocabulary). The embeddings of the context are concatenated. They go through a hidden layer
    and a layer with the width of an embedding.

    Attributes:
      vocabulary: number of tokens.
      embedding: width of an embedding.
      hidden: width of the hidden layer.
    """

    vocabulary: int = 2048
    embedding: int = 64
    hidden: int = 256

    @nn.compact
    def __call__(self, context: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.embedding)(context).reshape(len(context), -1)
        x = nn.tanh(nn.Dense(self.hidden)(x))
        return nn.Dense(self.vocabulary)(nn.Dense(self.embedding)(x))
