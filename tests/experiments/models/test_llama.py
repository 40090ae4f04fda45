"""The experiments' Llama: its size, its attention, and the dtypes of its products."""

from __future__ import annotations

import math

import jax
import numpy as np

from experiments.models.llama import Llama

TOKENS = np.arange(16, dtype=np.int32).reshape(2, 8)


def shapes_of(model, tokens=TOKENS):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, tokens, method="loss"))["params"]


def test_the_default_sizes_have_the_published_number_of_params():
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes_of(Llama()))) == 8_030_261_248
