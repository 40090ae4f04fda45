"""NNX models as users write them, and the same models with dtypes by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import concrete
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from linen_zoo import numbers, products, quick_jit

from jaxmp._internals.jax.sources import names_of
from jaxmp.base.trees import widen
from jaxmp.nnx import apply_policy
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.walk import equations


def written(model: Any, policy: str) -> Any:
    """Return a copy of a model whose code runs as it is written, in the compute dtype of a policy."""
    return apply_policy(model, policy, {"**": "written"})


def rngs(seed: int = 0) -> nnx.Rngs:
    return nnx.Rngs(params=seed, dropout=seed + 1, carry=seed + 2)


def values(node: Any, *filters: Any) -> Any:
    """Return the arrays of ``node`` without its random number generators."""
    return nnx.as_pure(nnx.state(node, nnx.All(nnx.Not(nnx.RngState), *filters)))


def module_with_numbers(make: Callable[[], Any]) -> Any:
    """Return the module that ``make`` creates, with Params that NumPy draws.

    Statistics are one, and each stream of random numbers has the key of seed zero.
    """
    model = nnx.eval_shape(make)  # JAX's initializers would compile for each shape
    params, stats, keys, counts = nnx.state(model, nnx.Param, nnx.BatchStat, nnx.RngKey, nnx.RngCount)
    nnx.update(
        model,
        numbers(params),
        jax.tree.map(lambda leaf: concrete.ones(leaf.shape, leaf.dtype), stats),
        jax.tree.map(lambda leaf: jax.random.key(0), keys),
        jax.tree.map(lambda leaf: concrete.zeros(leaf.shape, leaf.dtype), counts),
    )
    return model


def call(model: Any, *args: Any) -> Any:
    return model(*args)


def outcome(model: Any, *args: Any, call: Callable[..., Any] = call) -> Any:
    """Return the float32 outputs, the gradients and the arrays of ``model``.

    The gradients are those of the sum of squares of the outputs.
    """

    def loss_fn(model: Any) -> Any:
        out = widen(call(model, *args))
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(out)), out

    (_, out), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    return out, nnx.as_pure(grads), values(model)


def compiled(fun: Callable[[Any], Any], model: Any) -> Any:
    """Call ``fun`` with ``model`` under ``quick_jit``, and update the model."""
    graph, state = nnx.split(model)

    def run(state: Any) -> Any:
        inner = nnx.merge(graph, state)
        return fun(inner), nnx.state(inner)

    with jax.numpy_dtype_promotion("standard"):  # NNX's own norms and cells add half and float32
        result, after = quick_jit(run)(state)
    nnx.update(model, after)
    return result


def outcomes(models: Any, *args: Any, call: Callable[..., Any] = call) -> list[Any]:
    """Return the outcome of each model; all are compiled in one program."""
    return compiled(lambda models: [outcome(m, *args, call=call) for m in models], models)


def is_close(got: Any, want: Any) -> None:
    """Assert that two outcomes are close and have the same dtypes."""
    for a_tree, b_tree in zip(got, want, strict=True):
        largest = max((np.abs(leaf).max() for leaf in jax.tree.leaves(b_tree)), default=0.0)
        for a, b in zip(jax.tree.leaves(a_tree), jax.tree.leaves(b_tree), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=0.02, atol=0.01 * largest)


def model_products(model: Any, *args: Any, call: Callable[..., Any] = call) -> list[str]:
    """Return the operand dtypes of all products in a call of ``model``.

    The model does not change.
    """
    graphdef, state = nnx.split(model)
    with jax.numpy_dtype_promotion("standard"):
        return products(lambda state: call(nnx.merge(graphdef, state), *args), state)


def products_of(model: Any, *args: Any) -> list[tuple[str, str]]:
    """Return the scope and operand dtype of every product in a call of ``model``."""
    graphdef, state = nnx.split(model)
    with jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(lambda state: nnx.merge(graphdef, state)(*args))(state)
    products = (eqn for eqn in equations(jaxpr) if eqn.primitive.name in PRODUCTS)
    return [
        ("/".join(name for name in names_of(eqn) if not name.startswith("jaxmp.")), eqn.invars[0].aval.dtype.name)
        for eqn in products
    ]


class Scale(nnx.Module):
    """A module without a ``dtype`` that has a list of Params and a statistic."""

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
    """:class:`Scale` with a ``dtype`` whose casts are written by hand."""

    def __init__(self, features: int, dtype: Any, rngs: nnx.Rngs) -> None:
        super().__init__(features, rngs)
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = (bias[...].astype(self.dtype) for bias in self.biases)
        y = x.astype(self.dtype) @ self.kernel[...].astype(self.dtype) + first + second
        self.mean[...] = self.mean + y.mean(tuple(range(y.ndim - 1))).astype(jnp.float32)
        return y


class Net(nnx.Module):
    """An image classifier with dropout, :class:`Scale` and a shared layer."""

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
