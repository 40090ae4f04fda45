"""The common parts of GPT-2 and BERT: embeddings, and blocks with recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import PrecisionLike

import jaxmp
from experiments.models.attention import attention
from jaxmp.base.dtypes import at_least_float32
from jaxmp.base.hardware import align_dim
from jaxmp.losses import projected_cross_entropy
from jaxmp.policy import quantisation
from jaxmp.sharding.mesh_plan import plan_being_traced

Remat = Literal["none", "attention", "dots", "float8", "full"]
NORMAL = nn.initializers.normal(0.02)
_WIDE = 1536
"""The width from which a layer's projections are a single product."""


class Embed(nn.Embed):
    """Embeddings that are also the output layer (Press & Wolf, arXiv 1608.05859).

    The rows are looked up before they are cast, so that the gradients of equal tokens are summed in float32.
    """

    def __call__(self, tokens: jax.Array) -> jax.Array:
        (rows,) = self.promote_dtype(jnp.take(self.embedding, tokens, axis=0), dtype=self.dtype, inexact=False)
        return rows

    def cross_entropy(self, x: jax.Array, labels: jax.Array, **options: Any) -> jax.Array:
        """Return the mean loss of ``x`` (tokens, features).

        See :func:`jaxmp.losses.projected_cross_entropy`.
        """
        (x,) = self.promote_dtype(x, dtype=self.dtype)  # as `attend` does, because a norm may return float32
        return projected_cross_entropy(x, self.embedding, labels, **options)


class Projections(nn.Dense):
    """A dense layer that returns its features as ``parts`` arrays of equal width.

    In a narrow layer, the forward pass has a product for each array, because attention reads whole arrays and a slice
    would copy. The backward pass has the products of a single dense layer. In a wide layer, the copy costs little
    beside the product, and the product may be float8. On a mesh, the layer also has a single product.
    """

    parts: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        # A train step on a mesh sums the gradients of weights in single products over devices.
        if x.shape[-1] >= _WIDE or plan_being_traced() is not None:
            return tuple(jnp.split(super().__call__(x), self.parts, axis=-1))
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        (x,) = self.promote_dtype(x, dtype=self.dtype)
        # Under autocast, x is float32 here. A half operand makes the cotangents of the custom derivative half, too.
        half = jaxmp.autocast_dtype() if x.dtype == jnp.float32 else None
        # The backward pass is traced outside of the context that sets the default precision.
        precision = self.precision or jax.config.jax_default_matmul_precision
        projected = _projected(x if half is None else x.astype(half), kernel, bias, self.parts, precision)
        return tuple(part.astype(x.dtype) for part in projected)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _projected(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, parts: int, precision: PrecisionLike
) -> tuple[jax.Array, ...]:
    return _products(x, kernel, bias, parts, precision)


def _products(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, parts: int, precision: PrecisionLike
) -> tuple[jax.Array, ...]:
    kernels, biases = jnp.split(kernel.astype(x.dtype), parts, axis=1), jnp.split(bias.astype(x.dtype), parts)
    results = []
    for kernel, bias in zip(kernels, biases, strict=True):
        # Without the barrier, XLA would merge the products into one and slice its result.
        x, result = jax.lax.optimization_barrier((x, jnp.dot(x, kernel, precision=precision) + bias))
        results.append(result)
    return tuple(results)


def _projected_forward(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, parts: int, precision: PrecisionLike
) -> tuple[Any, Any]:
    # A call of _projected would hide the products from policies of jax.checkpoint.
    return _products(x, kernel, bias, parts, precision), (x, kernel, bias)


def _projected_backward(
    parts: int, precision: PrecisionLike, residuals: Any, cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    x, kernel, bias = residuals
    cotangent = jnp.concatenate(cotangents, axis=-1)
    rows = tuple(range(x.ndim - 1))
    by_x = jnp.dot(cotangent, kernel.astype(x.dtype).T, precision=precision)
    by_kernel = jnp.tensordot(x, cotangent, axes=(rows, rows), precision=precision).astype(kernel.dtype)
    by_bias = jnp.sum(cotangent, axis=rows, dtype=at_least_float32(cotangent.dtype)).astype(bias.dtype)
    return by_x, by_kernel, by_bias


_projected.defvjp(_projected_forward, _projected_backward)


# With remat, the norm saves only its input, in half precision. Otherwise a loop over blocks would save three float32
# arrays of each norm for the backward pass. Without a loop, XLA merges the recomputation with the forward pass.
LayerNorm = nn.remat(nn.LayerNorm, prevent_cse=False)


def embed(rows: int, width: int) -> Embed:
    """Return embeddings with the initialisation of GPT-2 and BERT."""
    return Embed(rows, width, embedding_init=NORMAL)


def aligned(vocabulary: int) -> int:
    """Return the number of rows of the embeddings.

    The number is ``vocabulary`` padded to a multiple of 64 for tensor cores.
    """
    return align_dim(vocabulary, 64)


class Block(nn.Module):
    """A block of a transformer: ``before``, attention and ``after``.

    ``after`` works on (tokens, width), so that XLA need not change layouts. ``before`` works on (batch, tokens, width):
    the compiler for TPUs computes the softmax in the kernel of the scores only if the batch is the outermost axis of
    queries and keys. Only attention sees (batch, tokens, heads, head width).

    Attributes:
      heads: the number of attention heads.
      width: the width of the residual stream.
      remat: the part that the backward pass recomputes. ``"none"``: nothing. ``"attention"``: everything except
        attention. ``"dots"``: everything except products. ``"float8"``: everything except the operands of float8
        products. ``"full"``: everything.
    """

    heads: int
    width: int
    remat: Remat = "none"
    causal = False

    def before(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Return queries, keys and values from the input of the block, (batch, tokens, width) each."""
        raise NotImplementedError

    def after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Return the output of the block, from its input and attention's result."""
        raise NotImplementedError

    def __call__(self, x: jax.Array, batch: int, mask: jax.Array | None = None) -> jax.Array:
        """Return the output of the block.

        ``x`` is (batch · sequence, width), ``mask`` is (batch, sequence).
        """
        if self.remat not in get_args(Remat):
            raise ValueError(f"remat must be one of {', '.join(get_args(Remat))}, got {self.remat!r}")

        def in_examples(x: jax.Array) -> jax.Array:
            return x.reshape(batch, -1, self.width)

        def attend(projected: tuple[jax.Array, ...]) -> jax.Array:
            shape = (batch, -1, self.heads, self.width // self.heads)
            q, k, v = (part.reshape(shape) for part in projected)
            return attention(q, k, v, causal=self.causal, mask=mask).reshape(x.shape)

        kind = type(self)
        if self.remat == "attention":
            before, after = nn.remat(kind.before), nn.remat(kind.after)
            return after(self, x, attend(before(self, in_examples(x))))

        def whole(block: Block, x: jax.Array) -> jax.Array:
            return block.after(x, attend(block.before(in_examples(x))))

        run: Callable[[Block, jax.Array], jax.Array] = whole
        if self.remat == "dots":
            run = nn.remat(whole, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        elif self.remat == "float8":
            run = nn.remat(whole, policy=jax.checkpoint_policies.save_only_these_names(quantisation.RESIDUALS))
        elif self.remat == "full":
            run = nn.remat(whole)
        return run(self, x)
