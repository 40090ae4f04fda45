"""NNX models as other people write them, and the oracle: the same model with ``dtype=`` written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from linen_zoo import products, quick_jit, same_bits

from jaxmp.base.trees import widen


def rngs(seed: int = 0) -> nnx.Rngs:
    return nnx.Rngs(params=seed, dropout=seed + 1, carry=seed + 2)


def values(node: Any, *filters: Any) -> Any:
    """The arrays of ``node``, random number generators left out."""
    return nnx.as_pure(nnx.state(node, nnx.All(nnx.Not(nnx.RngState), *filters)))


def call(model: Any, *args: Any) -> Any:
    return model(*args)


def outcome(model: Any, *args: Any, call: Callable[..., Any] = call) -> Any:
    """Return the widened outputs of ``model``, the gradients of the sum of their squares, and the model's arrays."""

    def loss_fn(model: Any) -> Any:
        out = widen(call(model, *args))
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(out)), out

    (_, out), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    return out, nnx.as_pure(grads), values(model)


def is_as_by_hand(
    model: Any, by_hand: Any, *args: Any, call: Callable[..., Any] = call, compiled: Any = quick_jit
) -> None:
    """Asserts that two models give the same outputs, bit for bit, and close gradients and statistics.

    They are one program, as each operation by itself would be one too.
    """
    models = model, by_hand
    graph, state = nnx.split(models)

    def run(state: Any) -> Any:
        inner = nnx.merge(graph, state)
        return [outcome(m, *args, call=call) for m in inner], nnx.state(inner)

    with jax.numpy_dtype_promotion("standard"):  # NNX's own norms and cells add half and float32
        (got, want), after = compiled(run)(state)
    nnx.update(models, after)
    same_bits(got[0], want[0])
    is_close(got, want)


def is_close(got: Any, want: Any) -> None:
    """Asserts that two outcomes are close, in the same dtypes."""
    for a_tree, b_tree in zip(got, want, strict=True):
        largest = max((np.abs(leaf).max() for leaf in jax.tree.leaves(b_tree)), default=0.0)
        for a, b in zip(jax.tree.leaves(a_tree), jax.tree.leaves(b_tree), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=0.02, atol=0.01 * largest)


def model_products(model: Any, *args: Any, call: Callable[..., Any] = call) -> list[str]:
    """The operand dtypes of every product that a call of ``model`` traces to; the model is left as it is."""
    graphdef, state = nnx.split(model)
    with jax.numpy_dtype_promotion("standard"):
        return products(lambda state: call(nnx.merge(graphdef, state), *args), state)


class Scale(nnx.Module):
    """Without a ``dtype``: uses its Params directly, in a list too, and writes a statistic."""

    def __init__(self, features: int, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (features, features)))
        self.biases = nnx.List([nnx.Param(jax.random.normal(rngs.params(), (features,))) for _ in range(2)])
        self.mean = nnx.BatchStat(jnp.zeros(features))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.product(x) + self.biases[0] + self.biases[1][...]
        self.mean[...] = self.mean + y.mean(tuple(range(y.ndim - 1))).astype(self.mean.dtype)
        return y

    def product(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel


class ScaleByHand(Scale):
    """:class:`Scale` as a person writes it who wants ``dtype`` for its products."""

    def __init__(self, features: int, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(features, rngs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = (bias[...].astype(self.dtype) for bias in self.biases)
        y = x.astype(self.dtype) @ self.kernel[...].astype(self.dtype) + first + second
        self.mean[...] = self.mean + y.mean(tuple(range(y.ndim - 1))).astype(jnp.float32)
        return y


class Net(nnx.Module):
    """Images to logits: convolution, norm, dropout, a list of layers, a module without ``dtype``, a shared one."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = None) -> None:
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs, dtype=dtype)
        self.norm = nnx.BatchNorm(8, rngs=rngs, dtype=dtype)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs, dtype=dtype) for _ in range(2)])
        self.scale = Scale(8, rngs) if dtype is None else ScaleByHand(8, dtype, rngs)
        self.again = self.layers[0]

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x))).mean((1, 2))
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.again(self.scale(self.drop(x)))
