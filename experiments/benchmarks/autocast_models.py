"""Models for the benchmark of autocast: each in float32, and once more with half precision placed by hand.

A case's loss function takes a dtype: None is the code that nobody prepared for half precision, float32 throughout; a
half dtype is what a careful person makes of it: params in float32, products in half, normalisations, softmax and loss
in float32 inside. Linen's modules do that by their ``dtype``, which :func:`jaxmp.linen.apply_policy` fills.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmp
from experiments.models import BERT, GPT2, ResNet, resnet50

LossFn = Callable[[Any, Any, Any], tuple[jax.Array, Any]]
"""From params, other state of the model and a batch to the loss and the new state."""
NAMES = ("gpt2", "bert", "resnet", "lstm")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the models are."""

    batch_size: int
    sequence: int
    layers: int
    width: int
    vocabulary: int
    image: int

    @classmethod
    def of_backend(cls, name: str, gpu: bool) -> Sizes:
        """Real sizes for a GPU, small ones for a CPU."""
        if not gpu:
            return cls(2, 64, 2, 64, 512, 32)
        rows = {"gpt2": 16, "bert": 64, "resnet": 64, "lstm": 64}
        return cls(rows[name], {"gpt2": 1024, "bert": 512}.get(name, 256), 12, 768, 50304, 224)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
      text: what it is, in words.
      init: from a key to the params and the other state of the model.
      batch: ShapeDtypeStructs of the inputs and the labels.
      labels: how many labels there are.
      loss: the loss function, from a half dtype to place by hand or None for float32 throughout.
    """

    text: str
    init: Callable[[jax.Array], tuple[Any, Any]]
    batch: dict[str, jax.ShapeDtypeStruct]
    labels: int
    loss: Callable[[Any], LossFn]


def build(name: str, sizes: Sizes) -> Case:
    """One of the models called ``NAMES``."""
    if sizes.width % 64:
        raise ValueError(f"--width must be a multiple of 64, the width of a head, got {sizes.width}")
    heads, tokens = sizes.width // 64, (sizes.batch_size, sizes.sequence)
    shape = f"{sizes.layers} layers of {sizes.width}, {sizes.vocabulary} tokens, batch {tokens[0]}×{tokens[1]}"
    if name == "lstm":
        return _lstm(f"LSTM, {shape}", sizes)
    if name == "gpt2":
        model: nn.Module = GPT2(sizes.vocabulary, sizes.sequence, sizes.layers, heads, sizes.width)
        return _linen(f"GPT-2, {shape}", model, _tokens(tokens), sizes.vocabulary)
    if name == "bert":
        model = BERT(sizes.vocabulary, sizes.sequence, sizes.layers, heads, sizes.width)
        return _linen(f"BERT, {shape}", model, _tokens(tokens), sizes.vocabulary)
    large = sizes.image >= 128
    images = jax.ShapeDtypeStruct((sizes.batch_size, sizes.image, sizes.image, 3), jnp.float32)
    batch = {"inputs": images, "labels": jax.ShapeDtypeStruct((sizes.batch_size,), jnp.int32)}
    resnet = resnet50(1000) if large else ResNet((1,) * sizes.layers, "basic", 10, width=16, small_images=True)
    kind = "ResNet-50" if large else f"ResNet, {sizes.layers} basic blocks"
    return _linen(f"{kind}, batch {sizes.batch_size}×{sizes.image}×{sizes.image}", resnet, batch, 1000 if large else 10)


def _tokens(shape: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "labels")}


def _policy(dtype: Any) -> jaxmp.Policy:
    return jaxmp.Policy(jnp.float32, dtype, dtype)  # a half result: the loss function casts it, as people write


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def _linen(text: str, model: nn.Module, batch: dict[str, jax.ShapeDtypeStruct], labels: int) -> Case:
    train = {"train": True} if isinstance(model, ResNet) else {}

    def init(key: jax.Array) -> tuple[Any, Any]:
        inputs = jnp.zeros(batch["inputs"].shape, batch["inputs"].dtype)
        variables = dict(model.init(key, inputs, **train))
        return variables.pop("params"), variables

    def loss(dtype: Any) -> LossFn:
        own = model if dtype is None else jaxmp.linen.apply_policy(model, _policy(dtype))

        def loss_fn(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
            logits, state = own.apply({"params": params, **state}, batch["inputs"], **train, mutable=[*state])
            return _cross_entropy(logits, batch["labels"]), state

        return loss_fn

    return Case(text, init, batch, labels, loss)


def _lstm(text: str, sizes: Sizes) -> Case:
    """Layers of LSTM (Hochreiter & Schmidhuber 1997) under ``lax.scan``; the sum of the losses is carried too."""
    width, vocabulary = sizes.width, sizes.vocabulary

    def init(key: jax.Array) -> tuple[Any, Any]:
        keys = iter(jax.random.split(key, 2 * sizes.layers + 2))

        def normal(*shape: int) -> jax.Array:
            return 0.05 * jax.random.normal(next(keys), shape)

        layers = [
            {"in": normal(width, 4 * width), "out": normal(width, 4 * width), "bias": jnp.zeros(4 * width)}
            for _ in range(sizes.layers)
        ]
        return {"embedding": normal(vocabulary, width), "layers": layers, "head": normal(width, vocabulary)}, {}

    def loss(dtype: Any) -> LossFn:
        dtype = dtype or jnp.float32

        def layer(weights: Any, xs: jax.Array) -> jax.Array:
            hidden = weights["out"].astype(dtype)
            projected = xs @ weights["in"].astype(dtype) + weights["bias"].astype(dtype)
            zeros = jnp.zeros(xs.shape[1:], dtype)

            def cell(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
                state, memory = carry
                i, f, g, o = jnp.split(x + state @ hidden, 4, axis=-1)
                memory = jax.nn.sigmoid(f + 1) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
                state = jax.nn.sigmoid(o) * jnp.tanh(memory)
                return (state, memory), state

            return jax.lax.scan(cell, (zeros, zeros), projected)[1]

        def loss_fn(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
            xs = params["embedding"].astype(dtype)[batch["inputs"].T]
            for weights in params["layers"]:
                xs = layer(weights, xs)
            return _cross_entropy(xs @ params["head"].astype(dtype), batch["labels"].T), state

        return loss_fn

    return Case(text, init, _tokens((sizes.batch_size, sizes.sequence)), vocabulary, loss)
