"""Models of images in Linen, and the functions that a train step takes: a small CNN, ResNet-18 and ResNet-50.

The ResNets are those of He et al. 2015, arXiv 1512.03385. Images are NHWC. :mod:`experiments.models.nnx` has the same
models in NNX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

KERNEL_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
MOMENTUM = 0.9  # the momentum of the running statistics
WIDTHS = {"basic": 1, "bottleneck": 4}  # the output channels of a block, in multiples of its width


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


class Block(nn.Module):
    """Convolutions with batch normalisation, and a shortcut.

    Arrays are (batch, height, width, channels). ``basic`` has two 3×3 convolutions. ``bottleneck`` has convolutions of
    1×1, 3×3 and 1×1, and the result has four times ``width`` channels. The stride is in the 3×3 convolution (v1.5). The
    scale of the last normalisation starts at ``last_scale``. With zero, the block starts as its shortcut (Goyal et al.
    2017).
    """

    kind: Literal["basic", "bottleneck"]
    width: int
    stride: int = 1
    last_scale: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        def norm(y: jax.Array, **kwargs: object) -> jax.Array:
            return nn.BatchNorm(use_running_average=not train, momentum=MOMENTUM, **kwargs)(y)

        def conv(y: jax.Array, channels: int, kernel: int, stride: int = 1) -> jax.Array:
            return _conv(channels, kernel, stride)(y)

        channels = self.width * WIDTHS[self.kind]
        if self.kind == "basic":
            y = nn.relu(norm(conv(x, self.width, 3, self.stride)))
            y = conv(y, channels, 3)
        else:
            y = nn.relu(norm(conv(x, self.width, 1)))
            y = nn.relu(norm(conv(y, self.width, 3, self.stride)))
            y = conv(y, channels, 1)
        y = norm(y, scale_init=nn.initializers.constant(self.last_scale))
        if x.shape != y.shape:
            x = norm(conv(x, channels, 1, self.stride))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A residual network from images to logits (batch, classes).

    The images are (batch, height, width, channels). The running statistics are in the collection ``batch_stats``.

    Attributes:
      stages: the number of blocks in each stage. From the second on, a stage halves the image and doubles the width.
      kind: the kind of the blocks.
      classes: the number of classes.
      width: the channels of the stem and the width of the first stage.
      small_images: whether the stem is for images of about 32×32: a 3×3 convolution. If False, the stem is for images
        of about 224×224: a 7×7 convolution with stride 2 and max pooling with stride 2.
      last_scale: the scale with which the last normalisation of each block starts.
    """

    stages: tuple[int, ...]
    kind: Literal["basic", "bottleneck"]
    classes: int = 10
    width: int = 64
    small_images: bool = False
    last_scale: float = 0.0

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x = _conv(self.width, 3, 1)(images) if self.small_images else _conv(self.width, 7, 2)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=MOMENTUM)(x))
        if not self.small_images:
            x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage, blocks in enumerate(self.stages):
            for i in range(blocks):
                stride = 2 if stage and i == 0 else 1
                x = Block(self.kind, self.width * 2**stage, stride, self.last_scale)(x, train)
        return nn.Dense(self.classes)(x.mean(axis=(1, 2)))


def resnet18(classes: int = 10, small_images: bool = False) -> ResNet:
    """Return a ResNet-18.

    It has 11,689,512 params for 1,000 classes and large images.
    """
    return ResNet((2, 2, 2, 2), "basic", classes, small_images=small_images)


def resnet50(classes: int = 10, small_images: bool = False) -> ResNet:
    """Return a ResNet-50 v1.5.

    It has 25,557,032 params for 1,000 classes and large images.
    """
    return ResNet((3, 4, 6, 3), "bottleneck", classes, small_images=small_images)


def _conv(channels: int, kernel: int, stride: int) -> nn.Conv:
    # Published weights need the same padding on both sides. "SAME" pads strided convolutions asymmetrically.
    return nn.Conv(channels, (kernel, kernel), stride, padding=kernel // 2, use_bias=False, kernel_init=KERNEL_INIT)


class Functions(NamedTuple):
    """A model as functions.

    ``params`` are trained. ``model_state`` has the other variables, such as running statistics.

    Attributes:
      init: ``init(seed) -> (params, model_state)``.
      apply: ``apply(params, model_state, images, train) -> (logits, model_state)``. The state changes only if ``train``
        is true.
    """

    init: Callable[[int], tuple[Any, Any]]
    apply: Callable[[Any, Any, jax.Array, bool], tuple[jax.Array, Any]]


def linen_functions(model: nn.Module, shape: tuple[int, int, int]) -> Functions:
    """Return the functions of a Linen model.

    ``shape`` is that of the images, (height, width, channels).
    """

    @jax.jit
    def init(seed: int) -> tuple[Any, Any]:
        variables = dict(model.init(jax.random.key(seed), jnp.zeros((1, *shape))))
        return variables.pop("params"), variables

    def apply(params: Any, model_state: Any, images: jax.Array, train: bool) -> tuple[jax.Array, Any]:
        variables = {"params": params, **model_state}
        if not train:
            return model.apply(variables, images), model_state
        return model.apply(variables, images, train=True, mutable=list(model_state))

    return Functions(init, apply)


def nnx_functions(build: Callable[[nnx.Rngs], nnx.Module]) -> Functions:
    """Return the functions of the NNX model that ``build`` makes."""

    def split(model: nnx.Module) -> tuple[nnx.GraphDef[Any], Any, Any]:
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        return graphdef, params, rest

    @jax.jit
    def init(seed: int) -> tuple[Any, Any]:
        return split(build(nnx.Rngs(jax.random.key(seed))))[1:]

    graphdef = split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))[0]

    def apply(params: Any, model_state: Any, images: jax.Array, train: bool) -> tuple[jax.Array, Any]:
        # Merge in each call, because a Variable may change only in the trace that made it, and jax.grad has a new
        # trace.
        params, model_state = jax.tree.map(lambda leaf: leaf, (params, model_state))
        model = nnx.merge(graphdef, params, model_state)
        logits = model(images, train=train)
        return logits, split(model)[2]

    return Functions(init, apply)
