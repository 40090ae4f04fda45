"""A Variable may contain a dict or another pytree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from linen_zoo import data, same_bits

import jaxmp
from jaxmp.nnx import Optimizer, apply_policy, make_train_step

X = data(4, 8)
SGD = optax.sgd(0.1, momentum=0.9)


class Trees(nnx.Module):
    """A model whose params and statistics are dicts."""

    def __init__(self) -> None:
        self.layer = nnx.Param({"w": concrete.ones((8, 8)), "bias": [concrete.zeros(8), concrete.ones(8)]})
        self.seen = nnx.BatchStat({"sum": concrete.zeros(8), "calls": {"count": concrete.zeros(())}})

    def __call__(self, x: jax.Array) -> jax.Array:
        seen = self.seen.get_raw_value()
        seen["calls"]["count"] = seen["calls"]["count"] + 1  # changes the dict in place
        self.seen.set_raw_value({**seen, "sum": seen["sum"] + jnp.sum(x, 0)})
        layer = self.layer.get_raw_value()
        return x @ layer["w"] + layer["bias"][0] * layer["bias"][1]


class Flat(nnx.Module):
    """The same model with an array in each Variable."""

    def __init__(self) -> None:
        self.w, self.bias = nnx.Param(concrete.ones((8, 8))), nnx.Param(concrete.zeros(8))
        self.scale = nnx.Param(concrete.ones(8))
        self.sum, self.count = nnx.BatchStat(concrete.zeros(8)), nnx.BatchStat(concrete.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] += 1
        self.sum[...] += jnp.sum(x, 0)
        return x @ self.w[...] + self.bias[...] * self.scale[...]


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1) ** 2)


def setup(model: Any) -> tuple[Any, Optimizer]:
    model = apply_policy(model, "mixed_float16")
    return model, Optimizer(model, SGD, loss_scale=jaxmp.DynamicLossScale(), ema=True)


def arrays(model: Any) -> list[Any]:
    """Return the arrays of either model in one order."""
    if isinstance(model, Trees):
        layer, seen = model.layer.get_raw_value(), model.seen.get_raw_value()
        return [layer["w"], *layer["bias"], seen["sum"], seen["calls"]["count"]]
    return [variable[...] for variable in (model.w, model.bias, model.scale, model.sum, model.count)]


@pytest.fixture(scope="module")
def trained() -> list[Any]:
    """Return both models with their optimizers after three steps, of which the second was skipped."""
    pairs = [setup(Trees()), setup(Flat())]
    step = make_train_step(loss_fn, accumulate_steps=2, ema_decay=0.9)
    for batch in (X, np.full_like(X, np.inf), X):
        for model, optimizer in pairs:
            step(model, optimizer, batch)
    return pairs


def test_a_step_gives_the_same_bits_as_with_an_array_in_each_variable(trained: list[Any]):
    (trees, optimizer), (flat, _) = trained
    same_bits(arrays(trees), arrays(flat))
    assert type(trees.seen.get_raw_value()["calls"]) is dict
    assert float(arrays(trees)[-1]) == 4  # two microbatches in each of two steps
    assert int(optimizer.skipped_steps) == 1


def test_an_average_and_an_evaluation_give_the_same_bits(trained: list[Any]):
    averages = [optimizer.ema_model(model) for model, optimizer in trained]
    same_bits(*[nnx.jit(loss_fn)(average, X) for average in averages])
    same_bits(*map(arrays, averages))


def test_a_checkpoint_restores_the_dicts(trained: list[Any], tmp_path: Path):
    pair = trained[0]
    jaxmp.checkpoint.save(tmp_path, pair)
    restored = jaxmp.checkpoint.restore(tmp_path, setup(Trees()))
    same_bits(arrays(restored[0]), arrays(pair[0]))
    same_bits(restored[1].ema, pair[1].ema)
