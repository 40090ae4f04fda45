"""Linen and NNX models that use a param for hundreds of rows or iterations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import linen_zoo
import nnx_zoo
import numpy as np
from flax import nnx
from jax import lax

import jaxmp
from experiments.models.bert import BERT
from experiments.models.gpt2 import GPT2
from experiments.models.images import CNN, ResNet
from experiments.models.next_token import NextToken


class Case(NamedTuple):
    """A function that makes a module, and the module's input.

    ``make`` takes dtypes as keyword arguments. ``method`` is called with the module and the input, in place of the
    module's ``__call__``.
    """

    make: Callable[..., Any]
    x: np.ndarray
    method: Callable[[Any, Any], Any] | None = None


def normal(scale: float = 1, shape: tuple[int, ...] = ()) -> np.ndarray:
    return (scale * np.random.default_rng(0).normal(size=shape)).astype(np.float32)


def tokens(*shape: int, vocabulary: int = 40, seed: int = 0) -> np.ndarray:
    """Return random tokens by Zipf's law: a quarter of them are the same token."""
    shares = 1 / np.arange(1, vocabulary + 1)
    return np.random.default_rng(seed).choice(vocabulary, size=shape, p=shares / shares.sum()).astype(np.int32)


TOKENS, ROWS, IMAGES = tokens(20, 30), normal(shape=(20, 30, 4)), normal(shape=(4, 12, 12, 3))
SEQUENCES, LONG = normal(shape=(300, 3, 4)), normal(0.5, shape=(1, 600, 4))


def of_nnx(layer: Callable[..., Any], x: np.ndarray, *sizes: Any, **options: Any) -> Case:
    return Case(lambda **dtypes: layer(*sizes, rngs=nnx.Rngs(0), **options, **dtypes), x)


def rnn_of_nnx(cell: Callable[..., Any], x: np.ndarray) -> Case:
    return Case(lambda **dtypes: nnx.RNN(cell(4, 4, rngs=nnx.Rngs(0), **dtypes), rngs=nnx.Rngs(0)), x)


# Layers that both libraries have are in one of the two tables.
LINEN = {
    "Dense": Case(lambda **dtypes: nn.Dense(3, **dtypes), ROWS),
    "DenseGeneral": Case(
        lambda **dtypes: nn.DenseGeneral((2, 3), axis=(-2, -1), **dtypes), normal(shape=(20, 30, 2, 4))
    ),
    "Einsum": Case(lambda **dtypes: nn.Einsum((4, 3), "abc,cd->abd", **dtypes), ROWS),
    "Conv": Case(lambda **dtypes: nn.Conv(3, (3, 3), **dtypes), IMAGES),
    "ConvLocal": Case(lambda **dtypes: nn.ConvLocal(2, (3,), **dtypes), SEQUENCES),
    "Embed.attend": Case(lambda **dtypes: nn.Embed(40, 4, **dtypes), ROWS, lambda table, x: table.attend(x)),
    "RMSNorm": Case(lambda **dtypes: nn.RMSNorm(**dtypes), ROWS),
    "BatchNorm": Case(lambda **dtypes: nn.BatchNorm(use_running_average=False, **dtypes), ROWS),
    "WeightNorm": Case(lambda **dtypes: nn.WeightNorm(nn.Dense(3, **dtypes), **dtypes), ROWS),
    "MultiHeadDotProductAttention": Case(lambda **dtypes: nn.MultiHeadDotProductAttention(num_heads=2, **dtypes), ROWS),
    "PReLU": Case(lambda **dtypes: nn.Sequential([nn.Dense(4, **dtypes), nn.PReLU()]), ROWS),
    "RNN of MGUCell": Case(lambda **dtypes: nn.RNN(nn.MGUCell(4, **dtypes)), SEQUENCES),
    "RNN of ConvLSTMCell": Case(
        lambda **dtypes: nn.RNN(nn.ConvLSTMCell(2, (2, 2), **dtypes)), normal(shape=(20, 2, 4, 4, 1))
    ),
    "Bidirectional of LSTMCell and GRUCell": Case(
        lambda **dtypes: nn.Bidirectional(nn.RNN(nn.LSTMCell(3, **dtypes)), nn.RNN(nn.GRUCell(3, **dtypes))), SEQUENCES
    ),
}

NNX = {
    "Linear": of_nnx(nnx.Linear, ROWS, 4, 3),
    "LinearGeneral": of_nnx(nnx.LinearGeneral, normal(shape=(20, 30, 2, 4)), (2, 4), (2, 3), axis=(-2, -1)),
    "ConvTranspose": of_nnx(nnx.ConvTranspose, IMAGES, 3, 3, (3, 3)),
    "Embed": of_nnx(nnx.Embed, TOKENS, 40, 4),
    "LayerNorm": of_nnx(nnx.LayerNorm, ROWS, 4),
    "GroupNorm": of_nnx(nnx.GroupNorm, ROWS, 4, 2),
    "InstanceNorm": of_nnx(nnx.InstanceNorm, ROWS, 4),
    "SpectralNorm": Case(
        lambda **dtypes: nnx.SpectralNorm(nnx.Linear(4, 3, rngs=nnx.Rngs(0), **dtypes), rngs=nnx.Rngs(0), **dtypes),
        ROWS,
    ),
    "MultiHeadAttention": of_nnx(nnx.MultiHeadAttention, ROWS, 2, 4, decode=False),
    "LoRA": Case(
        lambda **dtypes: nnx.LoRA(
            4, 2, 3, base_module=nnx.Linear(4, 3, rngs=nnx.Rngs(0), **dtypes), rngs=nnx.Rngs(0), **dtypes
        ),
        ROWS,
    ),
    "LoRALinear": of_nnx(nnx.LoRALinear, ROWS, 4, 3, lora_rank=2),
    "RNN of OptimizedLSTMCell": rnn_of_nnx(nnx.OptimizedLSTMCell, SEQUENCES),
    "RNN of SimpleCell, many turns": rnn_of_nnx(nnx.SimpleCell, LONG),
}


# --- code of users without layers: functions of an input and of named params ------------------------------------------


def norm_by_hand(x: Any, scale: Any, bias: Any, kernel: Any) -> Any:
    y = x @ kernel
    centred = y - y.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6) * scale + bias


def lookup(ids: Any, table: Any, kernel: Any) -> Any:
    return table[ids] @ kernel


def relative_positions(x: Any, table: Any, kernel: Any) -> Any:
    """Look up a bias by the distance of two positions, and add it for each example."""
    q, places = x @ kernel, np.arange(x.shape[1])
    distances = np.abs(places[:, None] - places)
    return (q @ q.mT + table[distances]) @ q


def weights_in_a_loop(x: Any, kernel: Any, recurrent: Any, bias: Any) -> Any:
    """Compute a recurrence of 600 iterations that add the same bias."""
    turns = jnp.swapaxes(x @ kernel, 0, 1)

    def turn(state: Any, x: Any) -> Any:
        state = jnp.tanh(state @ recurrent / 4 + x + bias)
        return state, state

    return lax.scan(turn, jnp.zeros_like(turns[0]), turns)[1]


def rows_in_a_loop(x: Any, table: Any, kernel: Any) -> Any:
    """Add a row of a table in each iteration, alternating between two rows."""
    turns = jnp.swapaxes(x @ kernel, 0, 1)

    def turn(state: Any, x: Any) -> Any:
        n, state = state
        state = jnp.tanh(state / 4 + x + lax.dynamic_index_in_dim(table, n % 2, keepdims=False))
        return (n + 1, state), state

    return lax.scan(turn, (0, jnp.zeros_like(turns[0])), turns)[1]


def layers_in_a_loop(x: Any, kernels: Any, biases: Any) -> Any:
    """Scan a residual stream over layers with stacked weights."""
    return lax.scan(lambda x, layer: (x + jnp.tanh(x @ layer[0] + layer[1]), None), x, (kernels, biases))[0]


SQUARE = (4, 4)
WRITTEN: dict[str, tuple[Callable[..., Any], np.ndarray, dict[str, tuple[int, ...]]]] = {
    "norm by hand": (norm_by_hand, ROWS, {"scale": (4,), "bias": (4,), "kernel": SQUARE}),
    "lookup": (lookup, TOKENS, {"table": (40, 4), "kernel": SQUARE}),
    "relative positions": (relative_positions, SEQUENCES, {"table": (3,), "kernel": SQUARE}),
    "weights in a loop": (weights_in_a_loop, LONG, {"kernel": SQUARE, "recurrent": SQUARE, "bias": (4,)}),
    "rows in a loop": (rows_in_a_loop, LONG, {"table": (2, 4), "kernel": SQUARE}),
    "layers in a loop": (layers_in_a_loop, ROWS, {"kernels": (3, 4, 4), "biases": (3, 4)}),
}


class WithParams(nn.Module):
    """A function of an input and named params, as a Linen module without ``dtype``."""

    fun: Callable[..., Any]
    shapes: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fun(x, **{name: self.param(name, nn.initializers.zeros, shape) for name, shape in self.shapes})


def written(fun: Callable[..., Any], x: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> Case:
    return Case(lambda **_: WithParams(fun, tuple(shapes.items())), x)


# --- models -----------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Layers in ``nn.scan``, with params per layer or shared params."""

    shared: bool
    turns: int
    dtypes: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        variables = {"variable_broadcast": "params"} if self.shared else {"variable_axes": {"params": 0}}
        rngs = {"params": not self.shared}
        body = nn.scan(Turn, **variables, split_rngs=rngs, length=self.turns)
        return body(self.dtypes)(nn.Dense(4, **self.dtypes)(x), None)[0]


class Turn(nn.Module):
    """A layer of :class:`Stack`, with a residual connection."""

    dtypes: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x / 2 + nn.tanh(nn.Dense(4, **self.dtypes)(x)), None


class Vmapped(nn.Module):
    """One layer that ``nn.vmap`` maps over the examples of a batch."""

    dtypes: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.vmap(nn.Dense, variable_axes={"params": None}, split_rngs={"params": False})(4, **self.dtypes)(x)


class NNXLifted(nnx.Module):
    """One layer inside one of NNX's transforms."""

    def __init__(self, lift: Callable[[Any, Any], Any], dtypes: Any) -> None:
        self.lift, self.linear = lift, nnx.Linear(4, 4, rngs=nnx.Rngs(0), **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.lift(self.linear, x)


def scanned(linear: Any, x: Any) -> Any:
    turn = nnx.scan(
        lambda linear, x: jnp.tanh(linear(x)) + x / 2, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=4
    )
    return turn(linear, x)


LINEN_MODELS = {
    "Linear of the zoo": Case(lambda **_: linen_zoo.Linear(), ROWS),
    "Tied of the zoo": Case(lambda dtype=None, **_: linen_zoo.Tied(dtype), tokens(20, 30, vocabulary=5)),
    "CNN": Case(lambda **_: CNN(4, 4, 8), normal(shape=(4, 12, 12, 3))),
    "NextToken": Case(lambda **_: NextToken(60, 8, 16), tokens(300, 3, vocabulary=60)),
    "ResNet": Case(
        lambda **_: ResNet((1, 1), "basic", 4, 4, small_images=True),
        normal(shape=(4, 12, 12, 3)),
        lambda model, x: model(x, train=True),
    ),
    "GPT2": Case(lambda **_: GPT2(60, 4, 1, 2, 16), tokens(300, 4, vocabulary=60)),
    "BERT": Case(lambda **_: BERT(60, 4, 1, 2, 16), tokens(300, 4, vocabulary=60)),
    "nn.scan over layers": Case(lambda **dtypes: Stack(False, 2, dtypes), ROWS),
    "nn.scan of one layer": Case(lambda **dtypes: Stack(True, 300, dtypes), normal(shape=(1, 1, 4))),
    "nn.vmap": Case(lambda **dtypes: Vmapped(dtypes), SEQUENCES),
    "nn.remat": Case(lambda **dtypes: nn.remat(nn.Dense)(3, **dtypes), ROWS),
    "nn.jit": Case(lambda **dtypes: nn.jit(nn.Dense)(3, **dtypes), ROWS),
}
NNX_MODELS = {
    "Scale of the zoo": Case(lambda **_: nnx_zoo.Scale(4, nnx.Rngs(0)), ROWS),
    "nnx.scan": Case(lambda **dtypes: NNXLifted(scanned, dtypes), ROWS),
    "nnx.vmap": Case(
        lambda **dtypes: NNXLifted(nnx.vmap(lambda linear, x: linear(x), in_axes=(None, 0)), dtypes), SEQUENCES
    ),
    "nnx.remat": Case(lambda **dtypes: NNXLifted(nnx.remat(lambda linear, x: linear(x)), dtypes), ROWS),
    "nnx.jit": Case(lambda **dtypes: NNXLifted(nnx.jit(lambda linear, x: linear(x)), dtypes), ROWS),
}


# --- models as functions of their params ------------------------------------------------------------------------------


class Function(NamedTuple):
    """A model as a function ``apply(params, x)``, and its two arguments."""

    apply: Callable[[Any, Any], Any]
    params: Any
    x: Any


def linen_function(case: Case, policy: str | None = None, **dtypes: Any) -> Function:
    """Return a Linen model as a function, under a policy or with dtypes by hand."""
    module, x = case.make(**dtypes), in_dtype(case.x, **dtypes)
    init = functools.partial(module.init, jax.random.key(0), method=case.method)
    variables = drawn(jax.eval_shape(init, x), **dtypes)
    params = variables.pop("params")
    if policy is not None:
        module = jaxmp.linen.apply_policy(module, policy)

    def apply(params: Any, x: Any) -> Any:
        return module.apply({"params": params, **variables}, x, method=case.method, mutable=list(variables))[0]

    return Function(apply, params, x)


def nnx_function(case: Case, policy: str | None = None, **dtypes: Any) -> Function:
    """Return an NNX model as a function, under a policy or with dtypes by hand."""

    def parts() -> Any:
        model = case.make(**dtypes) if policy is None else jaxmp.nnx.apply_policy(case.make(**dtypes), policy)
        return nnx.split(model, nnx.Param, ...)

    graph, params, other_variables = jax.eval_shape(parts)
    other_variables, run = drawn(other_variables, **dtypes), case.method or (lambda model, x: model(x))

    def apply(params: Any, x: Any) -> Any:
        # The model may change them.
        copies = jax.tree.map(lambda leaf: leaf + 0 if is_float(leaf) else leaf, other_variables)
        return run(nnx.merge(graph, params, copies), x)

    return Function(apply, drawn(params, **dtypes), in_dtype(case.x, **dtypes))


def is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def in_dtype(tree: Any, dtype: Any = np.float32, **_: Any) -> Any:
    """Return ``tree`` with its floats in ``dtype``."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype if is_float(x) else x.dtype), tree)


def drawn(tree: Any, dtype: Any = np.float32, **_: Any) -> Any:
    """Return random params.

    Scales and biases are near 1, and kernels keep the variance.
    """
    rng = np.random.default_rng(0)

    def draw(x: Any) -> Any:
        if not is_float(x):
            return jax.random.key(0) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.zeros(x.shape, x.dtype)
        size = (x.shape[-1] / x.size) ** 0.5 if len(x.shape) > 1 else 0.0
        numbers = size * rng.normal(size=x.shape) if size else rng.uniform(0.5, 1.5, size=x.shape)
        return jnp.asarray(np.asarray(numbers, np.float32), dtype)

    return jax.tree.map(draw, tree)


def named(api: str, make: Callable[..., Function], cases: dict[str, Case]) -> dict[str, Callable[..., Function]]:
    return {f"{api}: {name}": functools.partial(make, case) for name, case in cases.items()}


LAYERS = {**named("Linen", linen_function, LINEN), **named("NNX", nnx_function, NNX)}
MODELS = {
    **named("Linen", linen_function, {name: written(*parts) for name, parts in WRITTEN.items()} | LINEN_MODELS),
    **named("NNX", nnx_function, NNX_MODELS),
}


def loss(fun: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a weighted sum of the results, after a product that reverses rows.

    Five sixths of the weights are positive. So the mean of the cotangents is not zero, as with many losses, and sums
    of cotangents grow.
    """

    def loss(params: Any, x: Any) -> Any:
        total = 0.0
        for y in jax.tree.leaves(fun(params, x)):
            turned = y.reshape(-1, y.shape[-1]) @ jnp.eye(y.shape[-1], dtype=y.dtype)[::-1]
            weights = 1 + np.random.default_rng(1).normal(size=turned.shape)
            total = total + jnp.sum(turned * weights.astype(y.dtype))
        return total

    return loss
