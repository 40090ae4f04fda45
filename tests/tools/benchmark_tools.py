"""Small sizes for the models of the benchmarks, and variables for them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.models import by_hand
from experiments.benchmarks.models.workloads import Sizes

# The vocabularies are multiples of 64. Otherwise the padding would count as tokens, but only in the models by hand.
SMALL = {
    "resnet50": Sizes(2, 32, layers=1, width=8, vocabulary=10),
    "bert": Sizes(2, 8, layers=1, width=64, vocabulary=64),
    "gpt2": Sizes(2, 8, layers=1, width=64, vocabulary=64),
}
_UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def once(fun, *args):
    """Compile a function without optimisation, and return the result of one call."""
    return jax.jit(fun).lower(*args).compile(_UNOPTIMISED)(*args)


def drawn(case, model):
    """Return random variables.

    With scales of 1 and biases of 0, some errors would not show.
    """
    shapes = jax.eval_shape(functools.partial(by_hand.init, case, model), jax.random.key(0))
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        start = float(path[-1].key in ("scale", "var"))
        return jnp.asarray(start + 0.1 * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)
