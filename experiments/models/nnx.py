"""The models of :mod:`experiments.models.images` in NNX."""

from __future__ import annotations

import jax
from flax import nnx

from experiments.models.images import KERNEL_INIT, MOMENTUM


class CNN(nnx.Module):
    """:class:`experiments.models.images.CNN` in NNX.

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
    """The basic block of a ResNet, like :class:`experiments.models.images.Block`."""

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
    """:class:`experiments.models.images.ResNet` with basic blocks in NNX.

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
