"""Small Linen and NNX models as functions of their params."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from linen_zoo import data, float32, numbers, products, rngs, standard_promotion

import jaxmp

X = data(2, 8)
SEQUENCE = data(2, 8, 8)


class Pure(NamedTuple):
    """A Linen or NNX model as a function of its params."""

    apply: Callable[..., Any]
    params: Any

    def loss(self, *args: Any) -> Callable[[Any], jax.Array]:
        """Return a loss of the params: the float32 sum of squares of the outputs."""

        def loss(params: Any) -> jax.Array:
            return sum((jnp.sum(out**2) for out in jax.tree.leaves(float32(self.apply(params, *args)))), jnp.zeros(()))

        return loss


def pure(model: Any, *args: Any, abstract: bool = False) -> Pure:
    """Return ``model`` as a function, and its params.

    If ``abstract`` is set, the params of a Linen model are only shapes and dtypes.
    """
    if isinstance(model, nn.Module):
        shapes = jax.eval_shape(model.init, rngs(), *args)
        variables = shapes if abstract else numbers(shapes)
        other_variables = {name: value for name, value in variables.items() if name != "params"}
        return Pure(
            lambda params, *args: model.apply({"params": params, **other_variables}, *args), variables.get("params", {})
        )
    graph, params, other_variables = nnx.split(model, nnx.Param, ...)
    return Pure(lambda params, *args: nnx.merge(graph, params, other_variables)(*args), params)


def mixed(model: Any, policy: Any, overrides: Any = None) -> Any:
    adapter = jaxmp.linen if isinstance(model, nn.Module) else jaxmp.nnx
    return adapter.apply_policy(model, policy, overrides)


def dtypes_of_products(model: Any, *args: Any) -> list[str]:
    """Return the operand dtypes of the products in a call of ``model``, in order."""
    with standard_promotion():  # norms add half and float32 arrays
        apply, params = pure(model, *args)
        return products(apply, params, *args)


# --- models in Linen, and the same models in NNX ---------------------------------------------------------------------


class LinenWithParam(nn.Module):
    """A layer without a ``dtype`` that calls ``fun`` with its param and its inputs."""

    fun: Callable[..., Any]

    @nn.compact
    def __call__(self, *args: Any) -> Any:
        return self.fun(self.param("w", nn.initializers.lecun_normal(), (8, 8)), *args)


class NNXWithParam(nnx.Module):
    """:class:`LinenWithParam` in NNX."""

    def __init__(self, fun: Callable[..., Any]):
        self.w, self.fun = nnx.Param(nnx.initializers.lecun_normal()(jax.random.key(0), (8, 8))), fun

    def __call__(self, *args: Any) -> Any:
        return self.fun(self.w[...], *args)


class LinenNamed(nn.Module):
    """A module that creates its submodules in ``setup``, and calls ``fun`` with itself and its inputs."""

    fun: Callable[..., Any]
    makers: Any

    def setup(self) -> None:
        for name, make in self.makers.items():
            setattr(self, name, make())

    def __call__(self, *args: Any) -> Any:
        return self.fun(self, *args)


class NNXNamed(nnx.Module):
    """:class:`LinenNamed` in NNX."""

    def __init__(self, fun: Callable[..., Any], makers: Any):
        self.fun = fun
        for name, make in makers.items():
            setattr(self, name, make())

    def __call__(self, *args: Any) -> Any:
        return self.fun(self, *args)


def in_order(makers: Any) -> Callable[..., Any]:
    """Return a function that calls the submodules of a model one after the other."""

    def run(model: Any, x: Any) -> Any:
        for name in makers:
            x = getattr(model, name)(x)
        return x

    return run


class Linen:
    """The Linen models of this file, and Linen's layers."""

    WithParam = LinenWithParam
    Dense, Conv, LayerNorm = nn.Dense, nn.Conv, nn.LayerNorm
    adapters = (jaxmp.linen.apply_policy, jaxmp.linen.autocast)
    autocast = staticmethod(jaxmp.linen.autocast)

    @staticmethod
    def named(fun: Any = None, **makers: Callable[[], Any]) -> Any:
        """Return a model with submodules of these names, which ``fun`` or their order calls."""
        return LinenNamed(fun or in_order(makers), makers)

    @staticmethod
    def dense(**dtypes: Any) -> Any:
        return nn.Dense(8, **dtypes)

    @staticmethod
    def conv(**dtypes: Any) -> Any:
        return nn.Conv(8, (1,), **dtypes)

    @staticmethod
    def norm(kind: Any = nn.LayerNorm, **dtypes: Any) -> Any:
        return kind(**dtypes)


class NNX:
    """The NNX models of this file, and NNX's layers."""

    WithParam = NNXWithParam
    Dense, Conv, LayerNorm = nnx.Linear, nnx.Conv, nnx.LayerNorm
    adapters = (jaxmp.nnx.apply_policy, jaxmp.nnx.autocast)
    autocast = staticmethod(jaxmp.nnx.autocast)

    @staticmethod
    def named(fun: Any = None, **makers: Callable[[], Any]) -> Any:
        """Return a model with submodules of these names, which ``fun`` or their order calls."""
        return NNXNamed(fun or in_order(makers), makers)

    @staticmethod
    def dense(**dtypes: Any) -> Any:
        return nnx.Linear(8, 8, rngs=nnx.Rngs(0), **dtypes)

    @staticmethod
    def conv(**dtypes: Any) -> Any:
        return nnx.Conv(8, 8, (1,), rngs=nnx.Rngs(0), **dtypes)

    @staticmethod
    def norm(kind: Any = nnx.LayerNorm, **dtypes: Any) -> Any:
        return kind(8, rngs=nnx.Rngs(0), **dtypes)


each_api = pytest.mark.parametrize("api", [Linen, NNX], ids=lambda api: api.__name__)
