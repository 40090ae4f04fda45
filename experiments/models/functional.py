"""Models of either API as two functions of arrays, which is how a train step wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx


class Functions(NamedTuple):
    """A model as functions.

    ``params`` are trained; ``model_state`` is the rest, such as running statistics.

    Attributes:
      init: ``init(seed) -> (params, model_state)``.
      apply: ``apply(params, model_state, images, train) -> (logits, model_state)``; the state comes back as it went in
        unless ``train``.
    """

    init: Callable[[int], tuple[Any, Any]]
    apply: Callable[[Any, Any, jax.Array, bool], tuple[jax.Array, Any]]


def linen_functions(model: nn.Module, shape: tuple[int, int, int]) -> Functions:
    """A Linen model for images of that shape, (height, width, channels)."""

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
    """An NNX model that ``build`` makes from random numbers."""

    def split(model: nnx.Module) -> tuple[nnx.GraphDef[Any], Any, Any]:
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        return graphdef, params, rest

    @jax.jit
    def init(seed: int) -> tuple[Any, Any]:
        return split(build(nnx.Rngs(jax.random.key(seed))))[1:]

    graphdef = split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))[0]

    def apply(params: Any, model_state: Any, images: jax.Array, train: bool) -> tuple[jax.Array, Any]:
        # Built anew: a Variable may change only in the trace that made it, and jax.grad has one of its own.
        params, model_state = jax.tree.map(lambda leaf: leaf, (params, model_state))
        model = nnx.merge(graphdef, params, model_state)
        logits = model(images, train=train)
        return logits, split(model)[2]

    return Functions(init, apply)
