"""A multilayer perceptron for benchmarks, which consists almost only of products."""

from __future__ import annotations

import flax.linen as nn
import jax


class MLP(nn.Module):
    """A model from vectors (batch, features) to logits (batch, classes).

    Attributes:
      layers: the number of hidden layers.
      width: the width of a hidden layer.
      classes: the number of classes.
    """

    layers: int = 3
    width: int = 1024
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.classes)(x)
