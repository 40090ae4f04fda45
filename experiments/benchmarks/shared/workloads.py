"""The models that mixed precision is measured with, ResNet-50, BERT-Base and GPT-2, with their batches and losses.

Each is in float32 throughout, without a dtype in its code; whoever measures brings the precision. They are those of
:mod:`experiments.models`, whose attention, GELU, pooling and losses are written with jaxmp for half precision; code
that nobody prepared is in :mod:`experiments.benchmarks.shared.by_hand`, in the same sizes and an LSTM more.
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
from experiments.models import BERT, GPT2, ResNet
from experiments.models.transformer import Remat

Name = Literal["resnet50", "bert", "gpt2"]
NAMES: tuple[Name, ...] = get_args(Name)
LossFn = Callable[[Any, Any, Any, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large a model and its batch are.

    Attributes:
      batch_size: examples a step.
      length: tokens of a sequence, or height and width of an image.
      layers: blocks of a transformer, or of each stage of a ResNet; 0 for the stages of ResNet-50.
      width: of a transformer's residual stream, whose heads are 64 wide, or of a ResNet's first stage.
      vocabulary: a transformer's tokens, or a ResNet's classes.
    """

    batch_size: int
    length: int
    layers: int = 12
    width: int = 768
    vocabulary: int = 0

    @property
    def stages(self) -> tuple[int, ...]:
        """Blocks in each stage of a ResNet."""
        return (self.layers,) * 4 if self.layers else (3, 4, 6, 3)


FULL = {
    "resnet50": Sizes(256, 224, layers=0, width=64, vocabulary=1000),
    "bert": Sizes(64, 512, vocabulary=30522),
    "gpt2": Sizes(16, 1024, vocabulary=50257),
}
"""What the field measures."""
SMOKE = {
    "resnet50": Sizes(2, 32, layers=1, width=8, vocabulary=10),
    "bert": Sizes(2, 32, layers=2, width=64, vocabulary=96),
    "gpt2": Sizes(2, 32, layers=2, width=64, vocabulary=96),
}
"""What a CPU runs in a moment: the same code, a network of four blocks in place of ResNet-50's sixteen."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model to train.

    Attributes:
      name: one of ``NAMES``, or ``"lstm"``, which is there by hand only.
      sizes: how large it is.
      text: both in words.
      batch: ShapeDtypeStructs of ``inputs`` and ``labels``.
      items: images or tokens a step.
      unit: ``"images"`` or ``"tokens"``.
      remat: what each block of a transformer computes again in its backward pass.
    """

    name: str
    sizes: Sizes
    text: str
    batch: dict[str, jax.ShapeDtypeStruct]
    items: int
    unit: str
    remat: Remat = "none"

    @functools.cached_property
    def model(self) -> nn.Module:
        """The model of the experiments, in float32, without a policy."""
        sizes = self.sizes
        if self.unit == "images":
            return ResNet(sizes.stages, "bottleneck", sizes.vocabulary, sizes.width)
        kind = {"gpt2": GPT2, "bert": BERT}[self.name]
        return kind(sizes.vocabulary, sizes.length, sizes.layers, sizes.width // 64, sizes.width, self.remat)

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Fresh float32 params, and the model's other variables (running statistics)."""
        one = {name: jnp.zeros((1, *spec.shape[1:]), spec.dtype) for name, spec in self.batch.items()}
        if self.unit == "images":
            variables = dict(self.model.init(key, one["inputs"]))
        else:
            variables = dict(self.model.init(key, one["inputs"], one["labels"], method="loss"))
        return variables.pop("params"), variables

    def loss_fn(self, model: nn.Module | None = None) -> LossFn:
        """The loss function that a train step wants: the float32 mean over examples or tokens, and the new state.

        Args:
          model: the model under a policy with a float32 output, which a transformer's loss is; None is the model as it
            is.
        """
        own = self.model if model is None else model

        def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any = None) -> tuple[jax.Array, Any]:
            variables = {"params": params, **model_state}
            if self.unit == "tokens":
                return own.apply(variables, batch["inputs"], batch["labels"], method="loss"), model_state
            logits, model_state = own.apply(variables, batch["inputs"], train=True, mutable=[*model_state])
            return jaxmp.losses.cross_entropy(logits, batch["labels"]).mean(), model_state

        return loss_fn

    def forward_fn(self, model: nn.Module | None = None) -> Callable[[Any, Any, Any], jax.Array]:
        """``forward(params, model_state, inputs) -> logits`` as in inference."""
        own = self.model if model is None else model
        return lambda params, model_state, inputs: own.apply({"params": params, **model_state}, inputs)

    def random_batch(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Inputs and labels drawn at random, on the host."""
        rng = np.random.default_rng(seed)
        images = self.unit == "images"
        return {
            name: rng.standard_normal(spec.shape, np.float32)
            if images and name == "inputs"
            else rng.integers(0, self.sizes.vocabulary, spec.shape, np.int32)
            for name, spec in self.batch.items()
        }


def workload(name: str, sizes: Sizes | None = None, remat: Any = "none") -> Workload:
    """A model in the sizes of the field, or in others.

    Args:
      name: one of ``NAMES``, ``"resnet50"``, ``"bert"``, ``"gpt2"``, or ``"lstm"``.
      sizes: None for ``FULL``, which has no LSTM.
      remat: what each block of a transformer computes again in its backward pass.

    Raises:
      ValueError: an unknown name or ``remat``, or one of what is no transformer; a width of tokens that is no multiple
        of 64, the width of a head.
    """
    if name not in (*NAMES, "lstm"):
        raise ValueError(f"a workload is one of {', '.join(NAMES)}, lstm, got {name!r}")
    if remat not in (get_args(Remat) if name in ("bert", "gpt2") else ("none",)):
        raise ValueError(f"remat is one of {', '.join(get_args(Remat))}, for transformers only, got {remat!r}")
    sizes = sizes or FULL[name]
    batch, length = sizes.batch_size, sizes.length
    if name == "resnet50":
        specs = {
            "inputs": jax.ShapeDtypeStruct((batch, length, length, 3), jnp.float32),
            "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
        }
        title = f"ResNet of {sizes.layers} blocks a stage" if sizes.layers else "ResNet-50"
        return Workload(name, sizes, f"{title}, {batch}×{length}×{length}×3", specs, batch, "images")
    if sizes.width % 64:
        raise ValueError(f"a width must be a multiple of 64, the width of a head, got {sizes.width}")
    specs = {field: jax.ShapeDtypeStruct((batch, length), jnp.int32) for field in ("inputs", "labels")}
    title = {"gpt2": "GPT-2", "bert": "BERT", "lstm": "LSTM"}[name]
    text = f"{title}, {sizes.layers} layers of {sizes.width}, {batch}×{length}"
    return Workload(name, sizes, text, specs, batch * length, "tokens", remat)
