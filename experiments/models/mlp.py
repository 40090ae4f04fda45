"""A multilayer perceptron, for benchmarks: products and little else."""

from __future__ import annotations

import flax.linen as nn
import jax


class MLP(nn.Module):
    """Vectors (batch, features) to logits (batch, classes).

    Attributes:
      layers: number of hidden layers.
      width: width of each.
      classes: number of labels.
    """

    layers: int = 3
    width: int = 1024
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.classes)(x)
