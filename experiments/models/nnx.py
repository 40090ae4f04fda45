"""Models in Flax NNX, which compute the same as the models in Linen."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models import by_hand
from experiments.models.resnet import KERNEL_INIT, MOMENTUM
from jaxmp.losses import projected_cross_entropy


class CNN(nnx.Module):
    """:class:`experiments.models.CNN` in NNX.

    The constructor needs the shape of the images, (height, width, channels).
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int = 10, features: int = 32, hidden: int = 128, *, rngs: nnx.Rngs
    ) -> None:
        height, width, channels = shape
        self.conv = nnx.Conv(channels, features, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear((height // 2) * (width // 2) * features, hidden, rngs=rngs)
        self.head = nnx.Linear(hidden, classes, rngs=rngs)

    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x = nnx.relu(self.conv(images))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.head(x)


class Block(nnx.Module):
    """The basic block of a ResNet, like :class:`experiments.models.resnet.Block`."""

    def __init__(self, channels: int, width: int, stride: int = 1, *, rngs: nnx.Rngs) -> None:
        self.conv1, self.norm1 = _conv(channels, width, 3, stride, rngs), _norm(width, rngs)
        self.conv2, self.norm2 = _conv(width, width, 3, 1, rngs), _norm(width, rngs, nnx.initializers.zeros)
        self.shortcut = channels != width or stride != 1
        if self.shortcut:
            self.conv3, self.norm3 = _conv(channels, width, 1, stride, rngs), _norm(width, rngs)

    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x), use_running_average=not train))
        y = self.norm2(self.conv2(y), use_running_average=not train)
        if self.shortcut:
            x = self.norm3(self.conv3(x), use_running_average=not train)
        return nnx.relu(x + y)


class ResNet(nnx.Module):
    """:class:`experiments.models.resnet.ResNet` with basic blocks in NNX.

    ``channels`` is the number of channels of the images.
    """

    def __init__(
        self,
        stages: tuple[int, ...],
        channels: int = 3,
        classes: int = 10,
        width: int = 64,
        small_images: bool = False,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.small_images = small_images
        self.conv = _conv(channels, width, 3, 1, rngs) if small_images else _conv(channels, width, 7, 2, rngs)
        self.norm = _norm(width, rngs)
        blocks = []
        channels = width
        for stage, count in enumerate(stages):
            for i in range(count):
                blocks.append(Block(channels, width * 2**stage, 2 if stage and i == 0 else 1, rngs=rngs))
                channels = width * 2**stage
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(channels, classes, rngs=rngs)

    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(images), use_running_average=not train))
        if not self.small_images:
            x = nnx.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x, train)
        return self.head(x.mean(axis=(1, 2)))


def resnet18(channels: int = 3, classes: int = 10, small_images: bool = False, *, rngs: nnx.Rngs) -> ResNet:
    """Return a ResNet-18."""
    return ResNet((2, 2, 2, 2), channels, classes, small_images=small_images, rngs=rngs)


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
    """:class:`experiments.models.by_hand.GPT2` in NNX.

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


def _conv(channels: int, features: int, kernel: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(
        channels,
        features,
        (kernel, kernel),
        stride,
        padding=kernel // 2,
        use_bias=False,
        kernel_init=KERNEL_INIT,
        rngs=rngs,
    )


def _norm(features: int, rngs: nnx.Rngs, scale_init: nnx.Initializer = nnx.initializers.ones) -> nnx.BatchNorm:
    return nnx.BatchNorm(features, momentum=MOMENTUM, scale_init=scale_init, rngs=rngs)
