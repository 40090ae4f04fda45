"""Functions between two matrix products, and their allowed errors.

Each function is computed between two products that only permute numbers, which is exact in every dtype. So its inputs
are known exactly, and the whole error comes from the function. Both bfloat16 and float16 represent all inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax.losses as losses
from autocast_cases import (
    CAUSAL,
    LABELS,
    ONE_HOT,
    ONE_STEP,
    ROUNDED,
    SIGNS,
    WIDE,
    ZEROS_AND_ONES,
    A,
    B,
    Case,
    exact,
    normal,
    of_largest,
    simplex,
)
from autocast_tools import compiled
from autocast_zoo_jax import activations, float32_functions, half_functions, moves, softmaxes, sums
from autocast_zoo_math import linear_algebra, log_densities, special_functions
from flax import nnx


def optax_losses() -> Iterator[Case]:
    """Yield optax's losses, whose float32 results a product rounds once."""
    logits, other = WIDE, normal(5, seed=1)
    ending = of_largest(
        1.1, "a loss per example, whose last difference, square or sum may be half where a product reads it"
    )
    for name, fun, x, *plain in (
        ("squared_error", losses.squared_error, A, B),
        ("l2_loss", losses.l2_loss, A, B),
        ("huber_loss", losses.huber_loss, A, B),
        ("log_cosh", losses.log_cosh, A, B),
        ("softmax_cross_entropy", losses.softmax_cross_entropy, logits, ONE_HOT),
        ("safe_softmax_cross_entropy", losses.safe_softmax_cross_entropy, logits, ONE_HOT),
        ("softmax_cross_entropy_with_integer_labels", losses.softmax_cross_entropy_with_integer_labels, logits, LABELS),
        ("poly_loss_cross_entropy", losses.poly_loss_cross_entropy, logits, ONE_HOT),
        ("sigmoid_binary_cross_entropy", losses.sigmoid_binary_cross_entropy, logits, ZEROS_AND_ONES),
        ("sigmoid_focal_loss", losses.sigmoid_focal_loss, logits, ZEROS_AND_ONES),
        ("kl_divergence", lambda x, p: losses.kl_divergence(jax.nn.log_softmax(x), p), logits, simplex()),
        (
            "kl_divergence_with_log_targets",
            lambda x, y: losses.kl_divergence_with_log_targets(jax.nn.log_softmax(x), jax.nn.log_softmax(y)),
            logits,
            other,
        ),
        (
            "generalized_kl_divergence",
            lambda x, p: losses.generalized_kl_divergence(jax.nn.log_softmax(x), p),
            logits,
            simplex(),
        ),
        ("hinge_loss", losses.hinge_loss, A, SIGNS),
        ("perceptron_loss", losses.perceptron_loss, A, SIGNS),
        ("multiclass_hinge_loss", losses.multiclass_hinge_loss, A, LABELS),
        ("multiclass_perceptron_loss", losses.multiclass_perceptron_loss, A, LABELS),
        ("multiclass_sparsemax_loss", losses.multiclass_sparsemax_loss, A, LABELS),
        ("sparsemax_loss", losses.sparsemax_loss, A, ZEROS_AND_ONES),
        ("ranking_softmax_loss", losses.ranking_softmax_loss, logits, ZEROS_AND_ONES),
        ("binary_dice_loss", losses.binary_dice_loss, logits[..., None], ZEROS_AND_ONES[..., None]),
        ("cosine_similarity", losses.cosine_similarity, A, B),
        ("cosine_distance", losses.cosine_distance, A, B),
        ("ntxent", losses.ntxent, A, np.array([0, 0, 1, 1], np.int32)),
        (
            "ctc_loss",
            losses.ctc_loss,
            normal(5, shape=(1, 8, 4)),
            np.zeros((1, 8), np.float32),
            np.array([[1, 2, 3]], np.int32),
            np.zeros((1, 3), np.float32),
        ),
    ):
        yield Case(f"optax.{name}", fun, (x,), ending, tuple(plain))
    yield Case("optax.triplet_margin_loss", losses.triplet_margin_loss, (A, B, ZEROS_AND_ONES), ROUNDED)
    yield Case("optax.smooth_labels", lambda x: losses.smooth_labels(x, 0.1), (ONE_HOT,), ONE_STEP)


def drawn(tree: Any) -> Any:
    """Return random params.

    Scales, biases and variances are near 1, and kernels keep the variance.
    """
    rng = np.random.default_rng(0)

    def draw(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jax.random.key(0) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.zeros(x.shape, x.dtype)
        if len(x.shape) > 1:
            return exact(rng.normal(size=x.shape) * (x.shape[-1] / x.size) ** 0.5)
        return exact(rng.uniform(0.5, 1.5, size=x.shape))

    return jax.tree.map(draw, tree)


def linen(module: nn.Module, *inputs: np.ndarray, method: Any = None, **kwargs: Any) -> Callable[..., Any]:
    """Return a Linen module as a function of its inputs."""
    make = functools.partial(module.init, method=method, **kwargs)
    variables = drawn(jax.eval_shape(make, jax.random.key(0), *inputs))
    return lambda *args: module.apply(in_dtype_of(variables, args), *args, method=method, **kwargs)


def nnx_layer(make: Callable[[nnx.Rngs], Any]) -> Callable[..., Any]:
    """Return an NNX layer as a function of its inputs."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    state = drawn(state)
    return lambda *args: nnx.merge(graph, in_dtype_of(state, args))(*args)


def in_dtype_of(tree: Any, args: tuple[Any, ...]) -> Any:
    """Return ``tree`` with its floats in the dtype of the first argument.

    This dtype is float64 for the reference.
    """
    dtype = args[0].dtype
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if isinstance(x, np.ndarray) and x.dtype == np.float32 else x, tree
    )


def layers() -> Iterator[Case]:
    """Yield Flax's layers."""
    far, image = normal(1, 10), normal(shape=(1, 4, 4, 8))
    for name, module, x in (
        ("LayerNorm", nn.LayerNorm(), far),
        ("RMSNorm", nn.RMSNorm(), far),
        ("GroupNorm", nn.GroupNorm(2), far),
        ("InstanceNorm", nn.InstanceNorm(), image),
    ):
        yield Case(f"nn.{name}", linen(module, x), (x,), ROUNDED)
    yield Case("nn.LayerNorm, slow variance", linen(nn.LayerNorm(use_fast_variance=False), far), (far,), ROUNDED)
    evaluated = linen(nn.BatchNorm(use_running_average=True), far)
    yield Case("nn.BatchNorm in evaluation", evaluated, (far,), ROUNDED)
    batch_norm = nn.BatchNorm(use_running_average=False)
    variables = drawn(jax.eval_shape(batch_norm.init, jax.random.key(0), far))
    yield Case(
        "nn.BatchNorm in training",
        lambda x: batch_norm.apply(in_dtype_of(variables, (x,)), x, mutable=["batch_stats"])[0],
        (far,),
        ROUNDED,
    )
    bias = of_largest(1.01, "a product rounded, and a bias")
    for name, module, x in (
        ("Dense", nn.Dense(4), A),
        ("DenseGeneral", nn.DenseGeneral((2, 2)), A),
        ("Conv", nn.Conv(4, (3, 3)), image),
        ("ConvTranspose", nn.ConvTranspose(4, (2, 2), (2, 2)), image),
        ("Einsum", nn.Einsum((8, 4), "ij,jk->ik"), A),
    ):
        yield Case(f"nn.{name}", linen(module, x), (x,), bias)
    yield Case("nn.PReLU", linen(nn.PReLU(), A), (A,), ONE_STEP)
    yield Case("nn.Embed.attend", linen(nn.Embed(6, 8), A, method="attend"), (A,), bias)
    attention = of_largest(1.5, "four products, each rounded after the one before")
    heads, sequence = nn.MultiHeadDotProductAttention(2), normal(shape=(1, 4, 8))
    yield Case(
        "nn.MultiHeadDotProductAttention, causal",
        linen(heads, sequence, mask=jnp.asarray(CAUSAL)[None, None]),
        (sequence,),
        attention,
    )
    heads_of = normal(shape=(1, 4, 2, 8))
    yield Case(
        "nn.dot_product_attention",
        lambda x: nn.dot_product_attention(x, x, x),
        (heads_of,),
        of_largest(0.76, "logits rounded, then two products"),
    )
    yield Case(
        "jax.nn.dot_product_attention",
        lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True),
        (heads_of,),
        of_largest(0.76, "logits rounded, then two products"),
    )
    gates = of_largest(3, "gates rounded, and a sum of products in half")
    yield Case("nn.LSTMCell", linen_cell(nn.LSTMCell(4)), (A,), gates)
    yield Case("nn.GRUCell", linen_cell(nn.GRUCell(4)), (A,), gates)
    for name, make, x, tolerance in (
        ("LayerNorm", lambda rngs: nnx.LayerNorm(8, rngs=rngs), far, ROUNDED),
        ("RMSNorm", lambda rngs: nnx.RMSNorm(8, rngs=rngs), far, ROUNDED),
        ("GroupNorm", lambda rngs: nnx.GroupNorm(8, 2, rngs=rngs), far, ROUNDED),
        ("BatchNorm in evaluation", lambda rngs: nnx.BatchNorm(8, use_running_average=True, rngs=rngs), far, ROUNDED),
        ("Linear", lambda rngs: nnx.Linear(8, 4, rngs=rngs), A, bias),
        ("LinearGeneral", lambda rngs: nnx.LinearGeneral(8, (2, 2), rngs=rngs), A, bias),
        ("Conv", lambda rngs: nnx.Conv(8, 4, (3, 3), rngs=rngs), image, bias),
        ("ConvTranspose", lambda rngs: nnx.ConvTranspose(8, 4, (2, 2), rngs=rngs), image, bias),
        ("LoRA", lambda rngs: nnx.LoRA(8, 2, 4, rngs=rngs), A, of_largest(0.76, "two products")),
        ("MultiHeadAttention", lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs), sequence, attention),
    ):
        yield Case(f"nnx.{name}", nnx_layer(make), (x,), tolerance)


def linen_cell(cell: Any) -> Callable[..., Any]:
    """Return one step of a recurrent cell, which starts with a carry of zeros."""
    carry = jax.eval_shape(lambda: cell.initialize_carry(jax.random.key(0), A.shape))
    variables = drawn(jax.eval_shape(cell.init, jax.random.key(0), carry, A))

    def step(x: jax.Array) -> jax.Array:
        zeros = jax.tree.map(lambda c: jnp.zeros(c.shape, x.dtype), carry)
        return cell.apply(in_dtype_of(variables, (x,)), zeros, x)[1]

    return step


PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    part.__name__: part
    for part in (
        float32_functions,
        half_functions,
        activations,
        softmaxes,
        sums,
        moves,
        special_functions,
        log_densities,
        linear_algebra,
        optax_losses,
        layers,
    )
}


@functools.cache
def table(part: str) -> dict[str, Case]:
    """Return the cases of a part by name, with JAX's standard dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        cases = list(PARTS[part]())
    by_name = {case.name: case for case in cases}
    assert len(by_name) == len(cases), "two cases have the same name"
    return by_name


def enter(x: Any) -> Any:
    """Return ``x`` as the result of an exact product, which reverses reversed rows."""
    return (in_rows(x)[:, ::-1] @ reversal(x)).reshape(x.shape)


def leave(y: Any) -> Any:
    """Return ``y`` after an exact product has read it.

    Integers and bools are returned as they are.
    """
    if not jnp.issubdtype(y.dtype, jnp.floating):
        return y
    return (in_rows(y) @ reversal(y))[:, ::-1].reshape(y.shape)


def in_rows(x: Any) -> Any:
    """Return ``x`` as a matrix, with rows of 64 if possible.

    Then ``reversal(x)`` is small.
    """
    return x.reshape(-1, 64) if x.size > 64 and x.size % 64 == 0 else x.reshape(1, -1)


def reversal(x: Any) -> Any:
    return jnp.asarray(np.eye(in_rows(x).shape[-1])[::-1], x.dtype)


def after_a_product(case: Case) -> Callable[..., Any]:
    """Return the case's function with inputs that come from a product."""
    count = len(case.inputs)
    return lambda *args: case.fun(*map(enter, args[:count]), *args[count:])


def between_products(case: Case) -> Callable[..., Any]:
    """Return the case's function between two products."""
    return lambda *args: jax.tree.map(leave, after_a_product(case)(*args))


def gradient(case: Case) -> Callable[..., Any]:
    """Return the gradient of ``between_products(case)`` for its inputs.

    The loss is a sum of the results with random weights.
    """

    def loss(inputs: tuple[Any, ...], *plain: Any) -> Any:
        leaves = jax.tree.leaves(between_products(case)(*inputs, *plain))
        return sum((leaf * jnp.asarray(normal(shape=leaf.shape, seed=5), leaf.dtype)).sum() for leaf in leaves)

    count = len(case.inputs)
    return lambda *args: jax.grad(loss)(args[:count], *args[count:])


def float64(function: Callable[[Case], Callable[..., Any]], cases: Iterable[Case]) -> dict[str, list[np.ndarray]]:
    """Return the float64 results of ``function(case)`` for each case, by name."""
    cases = list(cases)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = {case.name: tuple(jnp.asarray(float64_of(x)) for x in arguments(case)) for case in cases}
        results = compiled(lambda wide: {case.name: function(case)(*wide[case.name]) for case in cases})(wide)
        return {name: [np.asarray(leaf) for leaf in jax.tree.leaves(result)] for name, result in results.items()}


def float64_of(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if x.dtype == np.float32 else x


def arguments(case: Case) -> tuple[np.ndarray, ...]:
    return (*case.inputs, *case.plain)


def ulps(got: Any, want: np.ndarray, half: Any, of: str = "each") -> float:
    """Return the largest error of ``got``, in units in the last place.

    The units are those of ``want`` in the dtype ``half``.
    """
    info = jnp.finfo(half)
    size = np.abs(want) if of == "each" else np.abs(want).max(keepdims=True)
    exponent = np.floor(np.log2(np.maximum(size, float(info.smallest_normal))))
    return float(np.max(np.abs(np.asarray(got, np.float64) - want) / 2.0 ** (exponent - info.nmant)))
