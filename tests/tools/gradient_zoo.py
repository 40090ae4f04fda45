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
from experiments.benchmarks.models.mlp import MLP
from experiments.models import nnx as nnx_models
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

LINEN = {
    "Dense": Case(lambda **dtypes: nn.Dense(3, **dtypes), ROWS),
    "DenseGeneral": Case(
        lambda **dtypes: nn.DenseGeneral((2, 3), axis=(-2, -1), **dtypes), normal(shape=(20, 30, 2, 4))
    ),
    "Einsum": Case(lambda **dtypes: nn.Einsum((4, 3), "abc,cd->abd", **dtypes), ROWS),
    "Conv": Case(lambda **dtypes: nn.Conv(3, (3, 3), **dtypes), IMAGES),
    "ConvLocal": Case(lambda **dtypes: nn.ConvLocal(2, (3,), **dtypes), SEQUENCES),
    "ConvTranspose": Case(lambda **dtypes: nn.ConvTranspose(3, (3, 3), **dtypes), IMAGES),
    "Embed": Case(lambda **dtypes: nn.Embed(40, 4, **dtypes), TOKENS),
    "Embed.attend": Case(lambda **dtypes: nn.Embed(40, 4, **dtypes), ROWS, lambda table, x: table.attend(x)),
    "LayerNorm": Case(lambda **dtypes: nn.LayerNorm(**dtypes), ROWS),
    "RMSNorm": Case(lambda **dtypes: nn.RMSNorm(**dtypes), ROWS),
    "GroupNorm": Case(lambda **dtypes: nn.GroupNorm(2, **dtypes), ROWS),
    "BatchNorm": Case(lambda **dtypes: nn.BatchNorm(use_running_average=False, **dtypes), ROWS),
    "InstanceNorm": Case(lambda **dtypes: nn.InstanceNorm(**dtypes), ROWS),
    "WeightNorm": Case(lambda **dtypes: nn.WeightNorm(nn.Dense(3, **dtypes), **dtypes), ROWS),
    "SpectralNorm": Case(
        lambda **dtypes: nn.SpectralNorm(nn.Dense(3, **dtypes), **dtypes),
        ROWS,
        lambda layer, x: layer(x, update_stats=True),
    ),
    "MultiHeadDotProductAttention": Case(lambda **dtypes: nn.MultiHeadDotProductAttention(num_heads=2, **dtypes), ROWS),
    "PReLU": Case(lambda **dtypes: nn.Sequential([nn.Dense(4, **dtypes), nn.PReLU()]), ROWS),
    "RNN of OptimizedLSTMCell": Case(lambda **dtypes: nn.RNN(nn.OptimizedLSTMCell(4, **dtypes)), SEQUENCES),
    "RNN of MGUCell": Case(lambda **dtypes: nn.RNN(nn.MGUCell(4, **dtypes)), SEQUENCES),
    "RNN of ConvLSTMCell": Case(
        lambda **dtypes: nn.RNN(nn.ConvLSTMCell(2, (2, 2), **dtypes)), normal(shape=(20, 2, 4, 4, 1))
    ),
    "RNN of SimpleCell, many turns": Case(lambda **dtypes: nn.RNN(nn.SimpleCell(4, **dtypes)), LONG),
    "Bidirectional of LSTMCell and GRUCell": Case(
        lambda **dtypes: nn.Bidirectional(nn.RNN(nn.LSTMCell(3, **dtypes)), nn.RNN(nn.GRUCell(3, **dtypes))), SEQUENCES
    ),
}

NNX = {
    "Linear": Case(lambda **dtypes: nnx.Linear(4, 3, rngs=nnx.Rngs(0), **dtypes), ROWS),
    "LinearGeneral": Case(
        lambda **dtypes: nnx.LinearGeneral((2, 4), (2, 3), axis=(-2, -1), rngs=nnx.Rngs(0), **dtypes),
        normal(shape=(20, 30, 2, 4)),
    ),
    "Einsum": Case(lambda **dtypes: nnx.Einsum("abc,cd->abd", (4, 3), (3,), rngs=nnx.Rngs(0), **dtypes), ROWS),
    "Conv": Case(lambda **dtypes: nnx.Conv(3, 3, (3, 3), rngs=nnx.Rngs(0), **dtypes), IMAGES),
    "ConvTranspose": Case(lambda **dtypes: nnx.ConvTranspose(3, 3, (3, 3), rngs=nnx.Rngs(0), **dtypes), IMAGES),
    "Embed": Case(lambda **dtypes: nnx.Embed(40, 4, rngs=nnx.Rngs(0), **dtypes), TOKENS),
    "Embed.attend": Case(
        lambda **dtypes: nnx.Embed(40, 4, rngs=nnx.Rngs(0), **dtypes), ROWS, lambda table, x: table.attend(x)
    ),
    "LayerNorm": Case(lambda **dtypes: nnx.LayerNorm(4, rngs=nnx.Rngs(0), **dtypes), ROWS),
    "RMSNorm": Case(lambda **dtypes: nnx.RMSNorm(4, rngs=nnx.Rngs(0), **dtypes), ROWS),
    "GroupNorm": Case(lambda **dtypes: nnx.GroupNorm(4, 2, rngs=nnx.Rngs(0), **dtypes), ROWS),
    "BatchNorm": Case(lambda **dtypes: nnx.BatchNorm(4, rngs=nnx.Rngs(0), **dtypes), ROWS),
    "InstanceNorm": Case(lambda **dtypes: nnx.InstanceNorm(4, rngs=nnx.Rngs(0), **dtypes), ROWS),
    "WeightNorm": Case(
        lambda **dtypes: nnx.WeightNorm(nnx.Linear(4, 3, rngs=nnx.Rngs(0), **dtypes), rngs=nnx.Rngs(0), **dtypes), ROWS
    ),
    "SpectralNorm": Case(
        lambda **dtypes: nnx.SpectralNorm(nnx.Linear(4, 3, rngs=nnx.Rngs(0), **dtypes), rngs=nnx.Rngs(0), **dtypes),
        ROWS,
    ),
    "MultiHeadAttention": Case(
        lambda **dtypes: nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0), **dtypes), ROWS
    ),
    "PReLU": Case(
        lambda **dtypes: nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0), **dtypes), nnx.PReLU(**dtypes)), ROWS
    ),
    "LoRA": Case(
        lambda **dtypes: nnx.LoRA(
            4, 2, 3, base_module=nnx.Linear(4, 3, rngs=nnx.Rngs(0), **dtypes), rngs=nnx.Rngs(0), **dtypes
        ),
        ROWS,
    ),
    "LoRALinear": Case(lambda **dtypes: nnx.LoRALinear(4, 3, lora_rank=2, rngs=nnx.Rngs(0), **dtypes), ROWS),
    "RNN of OptimizedLSTMCell": Case(
        lambda **dtypes: nnx.RNN(nnx.OptimizedLSTMCell(4, 4, rngs=nnx.Rngs(0), **dtypes), rngs=nnx.Rngs(0)), SEQUENCES
    ),
    "RNN of SimpleCell, many turns": Case(
        lambda **dtypes: nnx.RNN(nnx.SimpleCell(4, 4, rngs=nnx.Rngs(0), **dtypes), rngs=nnx.Rngs(0)), LONG
    ),
    "Bidirectional of LSTMCell and GRUCell": Case(
        lambda **dtypes: nnx.Bidirectional(
            nnx.RNN(nnx.LSTMCell(4, 3, rngs=nnx.Rngs(0), **dtypes), rngs=nnx.Rngs(0)),
            nnx.RNN(nnx.GRUCell(4, 3, rngs=nnx.Rngs(0), **dtypes), rngs=nnx.Rngs(0)),
            rngs=nnx.Rngs(0),
        ),
        SEQUENCES,
    ),
}


# --- code of users without layers: functions of an input and of named params ------------------------------------------


def position_table(x: Any, positions: Any, kernel: Any) -> Any:
    """Add a table of positions to every example, by the broadcast of ``+``."""
    return x @ kernel + positions


def cast_by_its_author(x: Any, positions: Any, kernel: Any) -> Any:
    y = x @ kernel
    return y + positions.astype(y.dtype)


def class_token(x: Any, token: Any, kernel: Any) -> Any:
    """Repeat a token for each example, and put it before the example's rows."""
    return jnp.concatenate([jnp.broadcast_to(token, (x.shape[0] * 15, 2, 4)), (x @ kernel).reshape(-1, 2, 4)], axis=1)


def layer_scale(x: Any, scale: Any, kernel: Any) -> Any:
    return x @ kernel * scale


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


def cumulated(x: Any, steps: Any, kernel: Any) -> Any:
    """Add growing thresholds, which are sums of params."""
    return jnp.reshape(x @ kernel, (-1, 300, 4)) + jnp.cumsum(steps, axis=0)


def used_in_turn(x: Any, kernel: Any, bias: Any) -> Any:
    """Use the same weight three times in a row."""
    for _ in range(3):
        x = jnp.tanh(x @ kernel + bias)
    return x


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


def looked_up_in_a_branch(x: Any, bias: Any, kernel: Any) -> Any:
    return lax.cond(kernel[0, 0] > 0, lambda y: y + bias, lambda y: y - bias, x @ kernel)


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


def behind_a_custom_rule(x: Any, bias: Any, kernel: Any) -> Any:
    return doubled(jax.nn.silu(x @ kernel + bias))


SQUARE = (4, 4)
WRITTEN: dict[str, tuple[Callable[..., Any], np.ndarray, dict[str, tuple[int, ...]]]] = {
    "position table": (position_table, normal(shape=(300, 6, 4)), {"positions": (6, 4), "kernel": SQUARE}),
    "position table of one axis more": (position_table, ROWS, {"positions": (1, 1, 4), "kernel": SQUARE}),
    "position table cast by its author": (
        cast_by_its_author,
        normal(shape=(300, 6, 4)),
        {"positions": (1, 6, 4), "kernel": SQUARE},
    ),
    "class token": (class_token, ROWS, {"token": (1, 4), "kernel": SQUARE}),
    "layer scale": (layer_scale, ROWS, {"scale": (4,), "kernel": SQUARE}),
    "norm by hand": (norm_by_hand, ROWS, {"scale": (4,), "bias": (4,), "kernel": SQUARE}),
    "lookup": (lookup, TOKENS, {"table": (40, 4), "kernel": SQUARE}),
    "relative positions": (relative_positions, SEQUENCES, {"table": (3,), "kernel": SQUARE}),
    "cumulated": (cumulated, normal(shape=(300, 4)), {"steps": (300, 4), "kernel": SQUARE}),
    "used in turn": (used_in_turn, ROWS, {"kernel": SQUARE, "bias": (4,)}),
    "weights in a loop": (weights_in_a_loop, LONG, {"kernel": SQUARE, "recurrent": SQUARE, "bias": (4,)}),
    "rows in a loop": (rows_in_a_loop, LONG, {"table": (2, 4), "kernel": SQUARE}),
    "layers in a loop": (layers_in_a_loop, ROWS, {"kernels": (3, 4, 4), "biases": (3, 4)}),
    "in a branch": (looked_up_in_a_branch, ROWS, {"bias": (4,), "kernel": SQUARE}),
    "behind a custom rule": (behind_a_custom_rule, ROWS, {"bias": (4,), "kernel": SQUARE}),
}


class LinenWithParams(nn.Module):
    """A function of an input and named params, as a Linen module without ``dtype``."""

    fun: Callable[..., Any]
    shapes: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fun(x, **{name: self.param(name, nn.initializers.zeros, shape) for name, shape in self.shapes})


class NNXWithParams(nnx.Module):
    """:class:`LinenWithParams` in NNX."""

    def __init__(self, fun: Callable[..., Any], shapes: Any) -> None:
        self.fun = fun
        self.named_params = nnx.Dict({name: nnx.Param(jnp.zeros(shape)) for name, shape in shapes})

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fun(x, **{name: param[...] for name, param in self.named_params.items()})


def written(module: Any) -> dict[str, Case]:
    """Return the functions of WRITTEN as modules of the class ``module``."""

    def case(fun: Callable[..., Any], x: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> Case:
        return Case(lambda **_: module(fun, tuple(shapes.items())), x)

    return {name: case(*parts) for name, parts in WRITTEN.items()}


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


def without_dropout(net: nnx_zoo.Net) -> nnx_zoo.Net:
    """Return ``net`` without dropout, whose masks would differ in float64."""
    net.drop.deterministic = True
    return net


IDS = tokens(300, 4, vocabulary=60)
LINEN_MODELS = {
    "MLP of the zoo": Case(lambda **_: linen_zoo.MLP(), ROWS),
    "Linear of the zoo": Case(lambda **_: linen_zoo.Linear(), ROWS),
    "Tied of the zoo": Case(lambda dtype=None, **_: linen_zoo.Tied(dtype), tokens(20, 30, vocabulary=5)),
    "ResNet of the zoo": Case(
        lambda dtype=np.float32, **_: linen_zoo.ResNet(dtype=dtype), normal(shape=(2, 16, 16, 3))
    ),
    "CNN": Case(lambda **_: CNN(4, 4, 8), normal(shape=(4, 12, 12, 3))),
    "MLP": Case(lambda **_: MLP(2, 8, 4), ROWS),
    "NextToken": Case(lambda **_: NextToken(60, 8, 16), tokens(300, 3, vocabulary=60)),
    "ResNet": Case(
        lambda **_: ResNet((1, 1), "basic", 4, 4, small_images=True),
        normal(shape=(4, 12, 12, 3)),
        lambda model, x: model(x, train=True),
    ),
    "GPT2": Case(lambda **_: GPT2(60, 4, 1, 2, 16), IDS),
    "GPT2 with remat": Case(lambda **_: GPT2(60, 4, 1, 2, 16, "attention"), IDS),
    "BERT": Case(lambda **_: BERT(60, 4, 1, 2, 16), IDS),
    "nn.scan over layers": Case(lambda **dtypes: Stack(False, 2, dtypes), ROWS),
    "nn.scan of one layer": Case(lambda **dtypes: Stack(True, 300, dtypes), normal(shape=(1, 1, 4))),
    "nn.vmap": Case(lambda **dtypes: Vmapped(dtypes), SEQUENCES),
    "nn.remat": Case(lambda **dtypes: nn.remat(nn.Dense)(3, **dtypes), ROWS),
    "nn.jit": Case(lambda **dtypes: nn.jit(nn.Dense)(3, **dtypes), ROWS),
}
NNX_MODELS = {
    "Scale of the zoo": Case(lambda **_: nnx_zoo.Scale(4, nnx.Rngs(0)), ROWS),
    "Net of the zoo": Case(lambda **_: without_dropout(nnx_zoo.Net(nnx.Rngs(0))), normal(shape=(4, 12, 12, 3))),
    "CNN": Case(lambda **_: nnx_models.CNN((12, 12, 3), 4, 4, 8, rngs=nnx.Rngs(0)), normal(shape=(4, 12, 12, 3))),
    "ResNet": Case(
        lambda **_: nnx_models.ResNet((1, 1), 3, 4, 4, small_images=True, rngs=nnx.Rngs(0)),
        normal(shape=(4, 12, 12, 3)),
        lambda model, x: model(x, train=True),
    ),
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
    **named("Linen", linen_function, {**written(LinenWithParams), **LINEN_MODELS}),
    **named("NNX", nnx_function, {**written(NNXWithParams), **NNX_MODELS}),
}

TRANSFORMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "jit": lambda fun, params, x: jax.jit(fun)(params, x),
    "vmap over examples": lambda fun, params, x: jax.vmap(fun, (None, 0))(params, x[:, None]),
    "checkpoint": lambda fun, params, x: jax.checkpoint(fun)(params, x),
    "scan over microbatches": lambda fun, params, x: lax.map(lambda x: fun(params, x), x.reshape(2, -1, *x.shape[1:])),
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
