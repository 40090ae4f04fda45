"""The models for benchmarks: ResNet-50, BERT-Base and GPT-2.

A workload is a model with its batches and its loss. The models are those of :mod:`experiments.models`, in float32 and
without a dtype in their code. A benchmark sets the precision. :mod:`experiments.benchmarks.models.by_hand` has models
of the same sizes without jaxmp.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from experiments.models.bert import BERT
from experiments.models.gpt2 import GPT2
from experiments.models.images import ResNet
from experiments.models.transformer import Remat

Name = Literal["resnet50", "bert", "gpt2"]
NAMES: tuple[Name, ...] = get_args(Name)
LossFn = Callable[[Any, Any, Any, Any], tuple[jax.Array, Any]]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a model and its batch.

    Attributes:
      batch_size: the examples per step.
      length: the tokens of a sequence, or the height and width of an image.
      layers: the blocks of a transformer, or of each stage of a ResNet; 0 for the stages of ResNet-50.
      width: the width of a transformer's residual stream, or of a ResNet's first stage. The heads of a transformer are
        64 wide.
      vocabulary: the tokens of a transformer, or the classes of a ResNet.
    """

    batch_size: int
    length: int
    layers: int = 12
    width: int = 768
    vocabulary: int = 0

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the number of blocks in each stage of a ResNet."""
        return (self.layers,) * 4 if self.layers else (3, 4, 6, 3)


FULL = {
    "resnet50": Sizes(256, 224, layers=0, width=64, vocabulary=1000),
    "bert": Sizes(64, 512, vocabulary=30522),
    "gpt2": Sizes(16, 1024, vocabulary=50257),
}
"""The full sizes, which are usual in benchmarks."""
SMOKE = {
    "resnet50": Sizes(8, 32, layers=1, width=8, vocabulary=1000),
    "bert": Sizes(2, 32, layers=2, width=64, vocabulary=1000),
    "gpt2": Sizes(2, 32, layers=2, width=64, vocabulary=1000),
}
"""Small sizes for smoke tests on a CPU.

The padding of the vocabularies hardly changes the loss. The models by hand and in torch count it as tokens.
"""
LAST_SCALE = 0.25
"""The scale with which the last normalisation of a ResNet's block starts. It is usually zero. Then the gradients of the
block's convolutions would be zeros, and a GPU computes faster on zeros, because it needs less power."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model to train.

    Attributes:
      name: a name in ``NAMES``.
      sizes: the sizes of the model and its batch.
      remat: the part of each transformer block that its backward pass recomputes.
      chunks: the number of chunks of a transformer's cross-entropy, or ``"auto"``; 0 for the model's default.
    """

    name: str
    sizes: Sizes
    remat: Remat = "none"
    chunks: int | Literal["auto"] = 0

    @property
    def images(self) -> bool:
        """Return whether the model takes images rather than tokens."""
        return self.name == "resnet50"

    @property
    def unit(self) -> str:
        """Return the unit of :attr:`items`: "images" or "tokens"."""
        return "images" if self.images else "tokens"

    @property
    def items(self) -> int:
        """Return the number of images or tokens per step."""
        return self.sizes.batch_size * (1 if self.images else self.sizes.length)

    @property
    def text(self) -> str:
        """Return a description of the model and its sizes."""
        sizes = self.sizes
        shape = f"{sizes.batch_size}×{sizes.length}"
        if self.images:
            model = f"ResNet of {_count(sizes.layers, 'block')} a stage" if sizes.layers else "ResNet-50"
            return f"{model}, {shape}×{sizes.length}×3"
        model = {"gpt2": "GPT-2", "bert": "BERT"}[self.name]
        return f"{model}, {_count(sizes.layers, 'layer')} of {sizes.width}, {shape}"

    @property
    def facts(self) -> dict[str, Any]:
        """Return the description of the workload for results."""
        return {"model": self.name, "text": self.text, "items": self.items, "unit": self.unit}

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the ShapeDtypeStructs of ``inputs`` and ``labels``."""
        batch, length = self.sizes.batch_size, self.sizes.length
        if self.images:
            inputs = jax.ShapeDtypeStruct((batch, length, length, 3), jnp.float32)
            return {"inputs": inputs, "labels": jax.ShapeDtypeStruct((batch,), jnp.int32)}
        return {field: jax.ShapeDtypeStruct((batch, length), jnp.int32) for field in ("inputs", "labels")}

    @functools.cached_property
    def model(self) -> nn.Module:
        """Return the model in float32, without a policy."""
        sizes = self.sizes
        if self.images:
            return ResNet(sizes.stages, "bottleneck", sizes.vocabulary, sizes.width, last_scale=LAST_SCALE)
        kind = {"gpt2": GPT2, "bert": BERT}[self.name]
        options = {"chunks": self.chunks} if self.chunks else {}
        return kind(sizes.vocabulary, sizes.length, sizes.layers, sizes.width // 64, sizes.width, self.remat, **options)

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Return fresh float32 params, and the other variables (running statistics)."""
        example = [jnp.zeros((1, *spec.shape[1:]), spec.dtype) for spec in self.batch.values()]
        init = self.model.init
        variables = dict(init(key, example[0]) if self.images else init(key, *example, method="loss"))
        return variables.pop("params"), variables

    def loss_fn(self, model: nn.Module | None = None) -> LossFn:
        """Return the loss function of a train step.

        The loss function returns the float32 mean of the loss over examples or tokens, and the new model state.

        Args:
          model: the model under a policy with float32 output; None for the model without a policy.
        """
        used = self.model if model is None else model

        def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any = None) -> tuple[jax.Array, Any]:
            variables = {"params": params, **model_state}
            if not self.images:
                loss = used.apply(variables, batch["inputs"], batch["labels"], method="loss")
                return loss, model_state
            logits, model_state = used.apply(variables, batch["inputs"], train=True, mutable=[*model_state])
            return jaxmp.losses.cross_entropy(logits, batch["labels"]).mean(), model_state

        return loss_fn

    def random_batch(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Return random inputs and labels, on the host."""
        rng = np.random.default_rng(seed)

        def draw(spec: jax.ShapeDtypeStruct) -> np.ndarray:
            if spec.dtype == jnp.float32:
                return rng.standard_normal(spec.shape, np.float32)
            return rng.integers(0, self.sizes.vocabulary, spec.shape, np.int32)

        return {name: draw(spec) for name, spec in self.batch.items()}


def workload(
    name: str, sizes: Sizes | None = None, remat: Any = "none", chunks: int | Literal["auto"] = 0, **changes: int
) -> Workload:
    """Return a workload in the full sizes, or in other sizes.

    Args:
      name: a name in ``NAMES``.
      sizes: the sizes; None for ``FULL``.
      remat: the part of each transformer block that its backward pass recomputes.
      chunks: the number of chunks of a transformer's cross-entropy, or ``"auto"``; 0 for the model's default.
      **changes: changed fields of ``sizes``. A value of 0 does not change the field.

    Raises:
      ValueError: the name or ``remat`` is unknown, or a model that is not a transformer has a ``remat``. Except for
        ResNets, the width must also be a multiple of 64, the width of a head.
    """
    if name not in NAMES:
        raise ValueError(f"a workload must be one of {', '.join(NAMES)}, got {name!r}")
    if remat not in (get_args(Remat) if name in ("bert", "gpt2") else ("none",)):
        raise ValueError(f"remat is one of {', '.join(get_args(Remat))}, for transformers only, got {remat!r}")
    nonzero = {field: value for field, value in changes.items() if value}
    sizes = dataclasses.replace(sizes or FULL[name], **nonzero)
    if sizes.width % 64 and name != "resnet50":
        raise ValueError(f"a width must be a multiple of 64, the width of a head, got {sizes.width}")
    return Workload(name, sizes, remat, chunks)
