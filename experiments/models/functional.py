"""Turn Linen and NNX models into functions of arrays for a train step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx


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
