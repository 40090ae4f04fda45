"""The number of params of the ResNets, and GPT-2 in NNX."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from experiments.benchmarks.models.nnx_gpt2 import GPT2 as NNXGPT2
from experiments.models import nnx as nnx_models
from experiments.models.images import resnet18, resnet50


def count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def test_residual_networks_have_the_published_number_of_params():
    images = jnp.zeros((1, 224, 224, 3))
    for model, params in [(resnet18(1000), 11_689_512), (resnet50(1000), 25_557_032)]:
        assert count(jax.eval_shape(model.init, jax.random.key(0), images)["params"]) == params
    model = nnx.eval_shape(lambda: nnx_models.resnet18(3, 1000, rngs=nnx.Rngs(0)))
    assert count(nnx.state(model, nnx.Param)) == 11_689_512


@pytest.mark.slow("compiles two GPT-2s")
def test_gpt2_in_nnx_as_a_loop_is_its_layers_one_after_the_other():
    sizes = (32, 8, 2, 16, 2)
    layers, loop = (NNXGPT2(*sizes, loop, rngs=nnx.Rngs(0)) for loop in (False, True))
    params = nnx.as_pure(nnx.state(layers, nnx.Param))
    blocks = [params["blocks"][n] for n in range(2)]
    nnx.update(loop, {**params, "blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)})
    tokens = np.random.default_rng(0).integers(0, 32, (2, 9))

    @nnx.jit
    def loss_and_gradients(model: NNXGPT2) -> Any:
        loss, gradients = nnx.value_and_grad(lambda model: model.loss(tokens[:, :-1], tokens[:, 1:]))(model)
        return loss, nnx.as_pure(gradients)

    (loss, gradients), (loop_loss, loop_gradients) = loss_and_gradients(layers), loss_and_gradients(loop)
    np.testing.assert_allclose(loop_loss, loss, rtol=1e-6)
    logits = nnx.jit(NNXGPT2.__call__)(layers, tokens[:, :-1])
    np.testing.assert_allclose(jaxmp.losses.cross_entropy(logits, tokens[:, 1:]).mean(), loss, rtol=1e-6)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(gradients["blocks"][n] for n in range(2)))
    stacked_gradients = {**gradients, "blocks": stacked}
    for leaf, expected in zip(jax.tree.leaves(loop_gradients), jax.tree.leaves(stacked_gradients), strict=True):
        np.testing.assert_allclose(leaf, expected, atol=1e-6 * np.abs(expected).max() + 1e-9)
