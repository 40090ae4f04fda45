"""A small model for MNIST: a convolution, pooling and two dense layers."""

from __future__ import annotations

import flax.linen as nn
import jax


class CNN(nn.Module):
    """A model from images to logits (batch, classes).

    Images are (batch, height, width, channels).

    Attributes:
      classes: number of labels.
      features: channels of the convolution.
      hidden: width of the first dense layer.
    """

    classes: int = 10
    features: int = 32
    hidden: int = 128

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:  # all models have `train`
        x = nn.relu(nn.Conv(self.features, (3, 3))(images))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(self.hidden)(x))
        return nn.Dense(self.classes)(x)
