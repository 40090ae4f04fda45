"""ResNet-50, GPT-2 and BERT with half precision by hand.

Flax users write such code without jaxmp. Every module has ``dtype=``, attention on a GPU is JAX's, and the loss is
optax's cross-entropy on float32 logits. With None as dtype, the model is plain code without half precision.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from experiments.benchmarks.models.workloads import LAST_SCALE, LossFn, Workload
from experiments.models import attention


def attend(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """Return attention over (batch, tokens, heads, head width).

    On a GPU, or if :func:`experiments.models.attention.implementation` asks for cuDNN, JAX's attention function
    computes the result. In half precision that function uses cuDNN.
    """
    if (attention.asked() or jax.default_backend()) in ("cudnn", "gpu"):
        implementation = "cudnn" if q.dtype.itemsize == 2 else None  # None is JAX's default
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores).astype(v.dtype), v)


class Attention(nn.Module):
    """A layer of attention, from (batch, tokens, width) to the same shape."""

    heads: int
    causal: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, tokens, width = x.shape
        qkv = nn.Dense(3 * width, dtype=self.dtype, name="qkv")(x)
        q, k, v = jnp.moveaxis(qkv.reshape(batch, tokens, 3, self.heads, width // self.heads), 2, 0)
        y = attend(q, k, v, self.causal).reshape(x.shape)
        return nn.Dense(width, dtype=self.dtype, name="out")(y)


class Transformer(nn.Module):
    """The fields of GPT-2 and BERT. Their embeddings are also the output layer."""

    vocabulary: int
    sequence: int
    layers: int
    heads: int
    width: int
    dtype: Any = None


class GPT2(Transformer):
    """A model from tokens (batch, tokens) to the logits of the next tokens."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = _embed(self, self.vocabulary, "embed")
        norm = functools.partial(nn.LayerNorm, epsilon=1e-5, dtype=self.dtype)
        x = embed(tokens) + _embed(self, self.sequence, "positions")(jnp.arange(tokens.shape[1]))
        for i in range(self.layers):
            y = norm(name=f"norm1_{i}")(x)
            x = x + Attention(self.heads, True, self.dtype, name=f"attention{i}")(y)
            y = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype, name=f"up{i}")(norm(name=f"norm2_{i}")(x)))
            x = x + nn.Dense(self.width, dtype=self.dtype, name=f"down{i}")(y)
        return embed.attend(norm(name="norm")(x))


class BERT(Transformer):
    """A model from tokens (batch, tokens) to the logits of each position's token."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = _embed(self, self.vocabulary, "embed")
        norm = functools.partial(nn.LayerNorm, epsilon=1e-12, dtype=self.dtype)
        gelu = functools.partial(nn.gelu, approximate=False)
        positions, types = _embed(self, self.sequence, "positions"), _embed(self, 2, "types")
        # One look-up for all tokens, which have the type 0. With a look-up for each token, all gradients would be added
        # to one row of the table, which takes longer than the rest of the step.
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1])) + types(jnp.zeros((), tokens.dtype))
        x = norm(name="norm")(x)
        for i in range(self.layers):
            y = Attention(self.heads, False, self.dtype, name=f"attention{i}")(x)
            x = norm(name=f"norm1_{i}")(x + y)
            y = gelu(nn.Dense(4 * self.width, dtype=self.dtype, name=f"up{i}")(x))
            x = norm(name=f"norm2_{i}")(x + nn.Dense(self.width, dtype=self.dtype, name=f"down{i}")(y))
        x = norm(name="head_norm")(gelu(nn.Dense(self.width, dtype=self.dtype, name="head")(x)))
        logits = embed.attend(x)
        return logits + self.param("bias", nn.initializers.zeros, (self.vocabulary,)).astype(logits.dtype)


class ResNet(nn.Module):
    """ResNet v1.5 as in Flax's ImageNet example.

    It maps images (batch, height, width, 3) to logits (batch, classes).
    """

    stages: tuple[int, ...]
    classes: int
    width: int = 64
    dtype: Any = None

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype, kernel_init=init)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        x = conv(self.width, (7, 7), (2, 2), padding=3, name="stem")(images)
        x = nn.max_pool(nn.relu(norm(name="norm")(x)), (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage, blocks in enumerate(self.stages):
            for i in range(blocks):
                name, width, stride = f"{stage}_{i}", self.width * 2**stage, 2 if stage and i == 0 else 1
                y = nn.relu(norm(name=f"norm1_{name}")(conv(width, (1, 1), name=f"conv1_{name}")(x)))
                y = conv(width, (3, 3), stride, padding=1, name=f"conv2_{name}")(y)
                y = conv(4 * width, (1, 1), name=f"conv3_{name}")(nn.relu(norm(name=f"norm2_{name}")(y)))
                y = norm(name=f"norm3_{name}", scale_init=nn.initializers.constant(LAST_SCALE))(y)
                if x.shape != y.shape:
                    x = conv(4 * width, (1, 1), stride, name=f"conv4_{name}")(x)
                    x = norm(name=f"norm4_{name}")(x)
                x = nn.relu(x + y)
        return nn.Dense(self.classes, dtype=self.dtype, name="dense")(x.mean((1, 2)))


def build(case: Workload, dtype: Any = None) -> nn.Module:
    """Return the model of a workload, with ``dtype`` on every module.

    The vocabulary is padded to a multiple of 64 for speed. The padding is treated like other tokens.
    """
    sizes = case.sizes
    if case.images:
        return ResNet(sizes.stages, sizes.vocabulary, sizes.width, dtype)
    vocabulary = -(-sizes.vocabulary // 64) * 64
    shape = (vocabulary, sizes.length, sizes.layers, sizes.width // 64, sizes.width)
    return (GPT2 if case.name == "gpt2" else BERT)(*shape, dtype)


def init(case: Workload, model: nn.Module, key: jax.Array) -> tuple[Any, Any]:
    """Return fresh float32 params, and the other variables (running statistics)."""
    spec = case.batch["inputs"]
    variables = dict(model.init(key, jnp.zeros((1, *spec.shape[1:]), spec.dtype)))
    return variables.pop("params"), variables


def loss_fn_of(model: nn.Module) -> LossFn:
    """Return ``loss_fn(params, model_state, batch, rng) -> (loss, model_state)``.

    The loss is the mean of optax's cross-entropy.
    """
    train: dict[str, Any] = {"train": True} if isinstance(model, ResNet) else {}

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any = None) -> tuple[jax.Array, Any]:
        variables = {"params": params, **model_state}
        logits, model_state = model.apply(variables, batch["inputs"], **train, mutable=[*model_state])
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean(), model_state

    return loss_fn


def _embed(model: Any, rows: int, name: str) -> nn.Embed:
    init = nn.initializers.normal(0.02)
    return nn.Embed(rows, model.width, dtype=model.dtype, embedding_init=init, name=name)
