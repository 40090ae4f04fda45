"""Cross-entropies that compute in float32 and store half-precision logits.

The logits are the largest array of a language model's step. For 16 sequences of 1,024 tokens and 50,304 classes, they
need 1.5 GiB in half precision (float16 or bfloat16), and JAX's derivative of a float32 softmax stores them in float32.
:func:`cross_entropy` stores the logits in their dtype, and two float32 numbers for each label: the largest logit, and
the logarithm of the softmax's denominator after the largest logit is subtracted from all logits. The backward pass
computes the gradient from these arrays in float32, and casts it to the dtype of the logits.

:func:`projected_cross_entropy` also computes the logits, for one chunk of the tokens at a time. So only the logits of
one chunk are in memory. The forward pass computes the gradients too, so no product is computed twice.

Both functions support a label to ignore, smoothed labels (Szegedy et al. 2015, arXiv 1512.00567), a z-loss and a
softcap. The z-loss keeps the softmax's denominator near 1 (Chowdhery et al. 2022, PaLM, arXiv 2204.02311). The softcap
keeps the logits in a fixed range (Gemma 2, arXiv 2408.00118). It is applied to float32 logits, and differentiated in
float32. For float64 logits, the functions compute in float64.

Limits:

- JAX cannot raise an error that depends on values. So a label that is neither a class nor ignored makes the loss NaN.
- The losses have reverse-mode derivatives only: ``jax.jvp`` and ``jax.linearize`` of a loss raise JAX's TypeError. You
  can apply ``jax.jvp`` and ``jax.grad`` to the gradient of a loss.
- Do not call the projected loss inside of ``jax.checkpoint``. The checkpoint would compute the logits twice, or store
  them if its policy stores products. Put only the blocks before the loss inside of the checkpoint.
- In a step of your own that shards the tokens over devices, each chunk has tokens of every device. The devices then
  sum the weights' gradient once for each chunk, so use few chunks. Under ``make_train_step(sharding=…)``, they sum the
  gradient once, if the number of devices divides the number of tokens.
- In a ``jax.shard_map`` with ``check_vma=True``, apply ``jax.lax.pcast(…, to="varying")`` to weights that do not vary
  over the mesh axes. All custom derivatives need this.
- Explicit mesh axes work only with :func:`cross_entropy`.
"""

from __future__ import annotations

import functools
import math
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxmp.base import hardware
from jaxmp.base.cache_keys import auto_chunks
from jaxmp.base.dtypes import at_least_float32, is_half
from jaxmp.engine.marks import mark_of
from jaxmp.engine.trace import autocast_dtype
from jaxmp.sharding.mesh_plan import Plan, on_auto_axes, plan_being_traced

__all__ = ["cross_entropy", "projected_cross_entropy"]

_IGNORED = -1
_CHUNKS = 8
"""The number of chunks with ``chunks="auto"`` on a device whose memory is unknown."""
_SHARE_OF_MEMORY, _SHARE_ON_TPU = 1 / 32, 1 / 8
"""The largest share of the device's memory for one chunk with ``chunks="auto"``.

It is larger on a TPU, where each chunk costs more: the sum of the weights' gradients is read and written in float32.
"""


class _Options(NamedTuple):
    classes: int  # the number of classes; later columns of the logits are padding
    label_smoothing: float
    z_loss: float
    softcap: float | None
    has_ignored: bool = False  # whether tokens with an ignored label do not count in the mean


_Denominators = tuple[jax.Array, jax.Array]
"""The log-sum-exp of each token's logits x, as the sum of two arrays: ``max(x)`` and ``log(sum(exp(x - max(x))))``."""


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> jax.Array:
    """Return the cross-entropy of each label, in nats; it is 0 for ignored labels.

    All computations are in float32. The stored logits and the gradient have the dtype of the logits.

    Args:
      logits: an array of shape (..., classes) and any floating dtype.
      labels: an array of shape (...) and any integer dtype. A label is at least 0 and less than the number of classes.
      ignore_index: the label to ignore, often one that is not a class (-100).
      label_smoothing: the share of the target that is spread evenly over all classes, as in torch and optax.
      z_loss: a factor. This factor times the squared log-sum-exp of the logits is added to the loss. PaLM uses 1e-4.
      softcap: a number c, to replace the logits by ``c * tanh(logits / c)``; Gemma 2 uses 30.0. For the cap
        ``2 * c * sigmoid(2 * logits / c)``, which is ``c`` more, also pass c: without a z-loss, the losses are equal.

    Returns:
      The losses, with the shape of the labels, in float32 (float64 for float64 logits).

    Raises:
      TypeError: the logits are not floating, or the labels are not integers.
      ValueError: the shapes do not match; ``label_smoothing`` is outside of [0, 1); ``z_loss`` is negative, or not a
        Python or NumPy number; or ``softcap`` is not a positive number.
      OverflowError: ``ignore_index`` is outside of int32 (int64 for 64-bit labels).

    >>> logits = jnp.array([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]], jnp.bfloat16)
    >>> cross_entropy(logits, jnp.array([0, -100]), ignore_index=-100).round(4)
    Array([0.2395, 0.    ], dtype=float32)
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    _check_floating(logits=logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"cross_entropy takes logits (..., classes), got the shape {logits.shape}")
    options = _Options(logits.shape[-1], label_smoothing, z_loss, softcap)
    _check_options(labels, logits.shape[:-1], options)
    return _cross_entropy(logits, _targets(labels, options.classes, ignore_index), options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits: jax.Array, labels: jax.Array, options: _Options) -> jax.Array:
    return _losses(logits, labels, options)[0]


def _cross_entropy_forward(logits: jax.Array, labels: jax.Array, options: _Options) -> tuple[jax.Array, Any]:
    losses, denominators = _losses(logits, labels, options)
    return losses, (logits, labels, denominators)


def _cross_entropy_backward(options: _Options, residuals: Any, cotangents: jax.Array) -> tuple[jax.Array, None]:
    logits, labels, denominators = residuals
    gradient = _gradient(logits, labels, denominators, options) * cotangents[..., None]
    gradient = jnp.where((labels == _IGNORED)[..., None], 0, gradient)  # also for logits that are not finite
    return gradient.astype(logits.dtype), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def projected_cross_entropy(
    x: jax.Array,
    weights: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    classes: int | None = None,
    chunks: int | Literal["auto"] = 8,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> jax.Array:
    """Return the mean cross-entropy of ``x @ weights.T + bias``, computed in chunks.

    Only the logits of one chunk of tokens are in memory at a time. The logits are computed in the dtype of ``x``. The
    gradients of a chunk are computed together with its logits. The gradients of ``weights`` and ``bias`` are summed
    over the chunks in float32. If you do not differentiate the loss, no gradient is computed.

    Args:
      x: an array of shape (tokens, dim) in the compute dtype. With n chunks, a chunk takes every n-th token, and not
        consecutive tokens. So no token moves to another device if the tokens are sharded.
      weights: an array of shape (vocabulary, dim), often the embeddings. It may have any floating dtype and is cast to
        the dtype of ``x``.
      labels: an array of shape (tokens,) and any integer dtype. A label is at least 0 and less than ``classes``.
      bias: an array of shape (vocabulary,) and any floating dtype.
      classes: the number of classes. Rows of ``weights`` after the first ``classes`` rows are padding. By default there
        is no padding.
      chunks: the number of chunks of tokens; the last chunk may have fewer tokens. More chunks need less memory, and
        take more time. With ``"auto"``, it is the number in ``make_train_step(loss_chunks=…)``. Without that number, a
        chunk is as large as possible such that its logits and their gradient take at most 1/32 of the device's memory,
        and on a TPU 1/8. (If the memory is unknown, as on a CPU, there are 8 chunks.) Pass a number if your own
        ``jax.jit`` splits the tokens over devices.
      ignore_index: the label to ignore. Tokens with this label do not count in the mean. If all labels are ignored, the
        loss is 0. In a train step with ``accumulate_steps``, also set ``mean_over``.
      label_smoothing: as in :func:`cross_entropy`.
      z_loss: as in :func:`cross_entropy`.
      softcap: as in :func:`cross_entropy`.

    Returns:
      A float32 scalar (float64 for float64 ``x``).

    Raises:
      TypeError: ``x``, ``weights`` or ``bias`` is not floating, or the labels are not integers.
      ValueError: the shapes do not match; ``classes`` or ``chunks`` is out of range; or another option has a value
        that :func:`cross_entropy` does not take.

    >>> x, weights = jnp.eye(3, dtype=jnp.bfloat16), 2 * jnp.eye(4, 3)
    >>> projected_cross_entropy(x, weights, jnp.array([0, 1, 1]), classes=3, chunks=2).round(4)
    Array(0.9062, dtype=float32)
    """
    x, weights, labels = jnp.asarray(x), jnp.asarray(weights), jnp.asarray(labels)
    bias = None if bias is None else jnp.asarray(bias)
    _check_floating(x=x, weights=weights, **({} if bias is None else {"bias": bias}))
    if x.ndim != 2 or weights.ndim != 2 or not 0 < x.shape[1] == weights.shape[1]:
        raise ValueError(
            "projected_cross_entropy takes x (tokens, dim) and weights (vocabulary, dim), got the shapes "
            f"{x.shape} and {weights.shape}; reshape x to (-1, dim), and transpose weights of (dim, vocabulary)"
        )
    if bias is not None and bias.shape != weights.shape[:1]:
        raise ValueError(
            f"bias must have the shape {weights.shape[:1]}, one number per row of weights, got {bias.shape}"
        )
    classes = weights.shape[0] if classes is None else classes
    if not (_is(Integral, classes) and 1 <= classes <= weights.shape[0]):
        raise ValueError(f"classes must be an integer from 1 to {weights.shape[0]}, the rows of weights, got {classes}")
    if not (chunks == "auto" or (_is(Integral, chunks) and chunks >= 1)):
        raise ValueError(f"chunks must be an integer of at least 1 or 'auto', got {chunks!r}; write chunks='auto'")
    options = _Options(classes, label_smoothing, z_loss, softcap, ignore_index is not None)
    _check_options(labels, x.shape[:1], options)
    # Under autocast, `x` is float32 here, and autocast does not see the casts to float32 below. So `x` is cast to half
    # precision here, and code below that must be float32 is marked with `mark_of("float32")`.
    half = autocast_dtype() if x.dtype == jnp.float32 else None
    x = x if half is None else x.astype(half)
    dtypes = tuple(None if array is None else np.dtype(array.dtype) for array in (x, weights, bias))
    labels = _targets(labels, classes, ignore_index)
    if (plan := plan_being_traced()) is not None and len(x) % plan.devices == 0:
        spread_loss = functools.partial(_mean_over_devices, plan, options, chunks, dtypes)
        return on_auto_axes(spread_loss, PartitionSpec())(x, weights, bias, labels)
    return _projected(x, weights, bias, labels, options, _chunks_of(x, weights, chunks), dtypes)


def _chunks_of(x: jax.Array, weights: jax.Array, chunks: int | Literal["auto"]) -> int:
    """Return the number of chunks of the tokens ``x``."""
    tokens = max(len(x), 1)
    number = auto_chunks.value if chunks == "auto" else chunks
    if number is not None:
        return min(number, tokens)
    device = hardware.detect()
    if device.memory_bytes is None:
        return min(_CHUNKS, tokens)
    needed = 2 * tokens * len(weights) * x.dtype.itemsize  # the logits and their gradient
    share = _SHARE_ON_TPU if device.platform == "tpu" else _SHARE_OF_MEMORY
    return min(math.ceil(needed / (device.memory_bytes * share)), tokens)


def _mean_over_devices(
    plan: Plan, options: _Options, chunks: Any, dtypes: Any, x: Any, weights: Any, bias: Any, labels: Any
) -> jax.Array:
    """Return the mean over tokens that a train step has split over devices.

    Each device sums the gradient of the weights over its own tokens.
    """
    x, labels = plan.parts(x), plan.parts(labels)
    weights, bias = plan.copies(weights), None if bias is None else plan.copies(bias)

    def mean(x: Any, weights: Any, bias: Any, labels: Any) -> jax.Array:
        return _projected(x, weights, bias, labels, options, _chunks_of(x, weights, chunks), dtypes)

    means = jax.vmap(mean, in_axes=(0, 0, None if bias is None else 0, 0))(x, weights, bias, labels)
    with mark_of("float32"):
        counts = jax.vmap(functools.partial(_count, options=options, dtype=means.dtype))(labels)
        return (means * counts).sum() / _count(labels, options, means.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _projected(x: Any, weights: Any, bias: Any, labels: Any, options: _Options, chunks: int, dtypes: Any) -> jax.Array:
    def add(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, labels = chunk
        return total + _losses(_logits(x, *layer), labels, options)[0].sum(), None

    layer = _layer(weights, bias, x.dtype, options)
    total, _ = jax.lax.scan(add, jnp.zeros_like(x, at_least_float32(x.dtype), ()), _in_chunks(x, labels, chunks))
    return total / _count(labels, options, total.dtype)


def _projected_forward(
    x: Any, weights: Any, bias: Any, labels: Any, options: _Options, chunks: int, dtypes: Any
) -> tuple[jax.Array, Any]:
    wide, layer = at_least_float32(x.dtype), _layer(weights, bias, x.dtype, options)
    # A TPU would compute the gradient of the logits once more to sum it over the tokens. With a column of ones beside
    # `x`, the sum is a column of a product that reads the gradient anyway. Its terms are then rounded to half, as those
    # of the weights' gradient.
    has_ones = bias is not None and is_half(x.dtype) and hardware.detect().platform == "tpu"

    def add(carry: tuple[Any, ...], chunk: tuple[jax.Array, jax.Array]) -> tuple[tuple[Any, ...], jax.Array]:
        total, by_weights, by_bias = carry
        x, labels = chunk
        logits = _logits(x, *layer)
        losses, denominators = _losses(logits, labels, options)
        # The gradient is divided by the number of labels only at the end, and `_gradient_shift` makes it as large as
        # float16 allows. Otherwise the gradient of an unlikely class would underflow.
        gradient = _gradient(logits, labels, denominators, options)
        by_bias = None if by_bias is None else by_bias + gradient.sum(0)
        with mark_of("float32"):
            gradient = (gradient * _gradient_shift(x.dtype, options)).astype(x.dtype)
        columns = jnp.pad(x, ((0, 0), (0, 1)), constant_values=1) if has_ones else x
        by_weights += jnp.dot(gradient.T, columns, preferred_element_type=wide)
        return (total + losses.sum(), by_weights, by_bias), jnp.dot(gradient, layer[0], preferred_element_type=wide)

    zeros = functools.partial(jnp.zeros_like, x, wide)  # in a shard_map, these vary over the axes of x
    rows, dim = weights.shape
    start = (zeros(()), zeros((rows, dim + has_ones)), None if bias is None or has_ones else zeros(bias.shape))
    (total, by_weights, by_bias), by_x = jax.lax.scan(add, start, _in_chunks(x, labels, chunks))
    if has_ones:
        by_weights, by_bias = by_weights[:, :dim], by_weights[:, dim] / _gradient_shift(x.dtype, options)
    count = _count(labels, options, wide)
    return total / count, (by_x.swapaxes(0, 1).reshape(-1, x.shape[1])[: len(x)], by_weights, by_bias, count)


def _projected_backward(
    options: _Options, chunks: int, dtypes: Any, residuals: Any, cotangent: jax.Array
) -> tuple[Any, ...]:
    *gradients, count = residuals
    with mark_of("float32"):  # the cotangent may be a loss scale above the largest float16 number
        factor = cotangent / count
        shifted = factor / _gradient_shift(dtypes[0], options)
        scaled = [
            None if dtype is None else (gradient * factor).astype(dtype)
            for gradient, factor, dtype in zip(gradients, (shifted, shifted, factor), dtypes, strict=True)
        ]
    return (*scaled, None)


_projected.defvjp(_projected_forward, _projected_backward)


def _logits(x: jax.Array, matrix: jax.Array, bias: jax.Array | None) -> jax.Array:
    logits = x @ matrix.T
    return logits if bias is None else logits + bias


def _layer(
    weights: jax.Array, bias: jax.Array | None, dtype: Any, options: _Options
) -> tuple[jax.Array, jax.Array | None]:
    """Return the matrix and the bias of the logits in the compute dtype.

    The logits of padding are 0 - inf, so that no other operation has to leave them out. (The product adds the bias in
    its own kernel.) The weights of padding are zeroed, because a logit that overflows would be inf - inf. A softcap
    makes the logits of padding finite; they become -inf again after it.
    """
    rows = weights.shape[0]
    if options.classes < rows:
        is_class = jnp.arange(rows) < options.classes
        weights = jnp.where(is_class[:, None], weights, 0)
        bias = jnp.zeros(rows, dtype) if bias is None else bias.astype(dtype)
        bias = jnp.where(is_class, bias, -jnp.inf)
    # Without the barrier, the compiler for TPUs casts the weights again in the kernel of each product, tile by tile.
    weights = jax.lax.optimization_barrier(weights.astype(dtype))
    return weights, None if bias is None else bias.astype(dtype)


def _in_chunks(x: jax.Array, labels: jax.Array, chunks: int) -> tuple[jax.Array, jax.Array]:
    """Return ``x`` and ``labels`` with a leading axis of chunks.

    With n chunks, a chunk has every n-th token. Tokens with an ignored label fill up the last chunks. Every ignored
    token is set to 0, so that its logits are finite if the weights are.
    """
    # Without the barrier, the compiler for TPUs would select again in the kernel of each product, tile by tile.
    x = jax.lax.optimization_barrier(jnp.where((labels == _IGNORED)[:, None], 0, x))
    missing = -len(x) % chunks
    x = jnp.pad(x, ((0, missing), (0, 0))).reshape(-1, chunks, x.shape[1])
    labels = jnp.pad(labels, (0, missing), constant_values=_IGNORED).reshape(-1, chunks)
    return x.swapaxes(0, 1), labels.swapaxes(0, 1)


def _count(labels: jax.Array, options: _Options, dtype: Any) -> jax.Array:
    """Return the number of tokens that count in the mean, at least 1."""
    count = (labels != _IGNORED).sum() if options.has_ignored else labels.size
    return jnp.maximum(count, 1).astype(dtype)


# The functions below must not create constants that are as large as the logits. If a checkpoint differentiates the
# loop over chunks, JAX moves loop-invariant values out of the loop and would store them.


def _capped(wide: jax.Array, softcap: float | None) -> jax.Array:
    if softcap is None:
        return wide
    cap = float(softcap)
    return cap * jnp.tanh(wide / cap)


def _all_capped(wide: jax.Array, options: _Options) -> jax.Array:
    """Apply the softcap to float32 logits with padding."""
    capped = _capped(wide, options.softcap)
    if options.softcap is not None and options.classes < wide.shape[-1]:
        capped += jnp.where(jnp.arange(wide.shape[-1]) < options.classes, 0, -jnp.inf).astype(wide.dtype)
    return capped


def _losses(logits: jax.Array, labels: jax.Array, options: _Options) -> tuple[jax.Array, _Denominators]:
    """Return the loss of each label and the denominator of its softmax, in float32.

    The largest logit is not added to the logarithm of the sum, because the addition would round the logarithm. The
    softcap is applied to the largest logit, which is the largest capped logit. (XLA would store capped logits in
    float32, if two sums over the classes read them.)
    """
    classes, smoothing, z_loss, softcap, _ = options
    with mark_of("float32"):  # autocast traces this in float32, and does not see the cast below
        uncapped = logits.astype(at_least_float32(logits.dtype))
        table = uncapped
        if is_half(logits.dtype) and hardware.detect().platform == "tpu":
            # The compiler for TPUs would store all float32 logits for the lookup, so it reads the half logits. The
            # compiler may also drop a cast to half and back. The sum must read the same rounded logits as the lookup.
            info = jnp.finfo(logits.dtype)
            table, uncapped = logits, jax.lax.reduce_precision(uncapped, info.nexp, info.nmant)
        logits_of_labels = jnp.take_along_axis(table, labels[..., None], axis=-1, mode="clip")[..., 0]
        largest = _capped(jax.lax.stop_gradient(uncapped.max(-1)), softcap)
        wide = _all_capped(uncapped, options)
        logarithm = jnp.log(jnp.exp(wide - largest[..., None]).sum(-1))
        picked = _capped(logits_of_labels.astype(wide.dtype), softcap)
        losses = logarithm - (1 - smoothing) * (picked - largest)
        if smoothing:
            losses -= smoothing / classes * (wide[..., :classes] - largest[..., None]).sum(-1)
        if z_loss:
            losses += z_loss * (largest + logarithm) ** 2
        losses = jnp.where(labels < classes, losses, jnp.nan)
        return jnp.where(labels == _IGNORED, 0, losses), (largest, logarithm)


def _gradient(logits: jax.Array, labels: jax.Array, denominators: _Denominators, options: _Options) -> jax.Array:
    """Return the gradient of each loss with respect to its logits, in float32.

    The logits of ignored labels must be finite: their gradient is then 0.
    """
    classes, smoothing, z_loss, softcap, _ = options
    with mark_of("float32"):
        # Without the barrier, XLA would compute `wide - largest` once for the loss and the gradient, and store it in
        # float32. The softcap is computed before that, so with it the logits need a barrier too.
        if softcap is None:
            denominators = jax.lax.optimization_barrier(denominators)
        else:
            logits, denominators = jax.lax.optimization_barrier((logits, denominators))
        largest, logarithm, labels = (array[..., None] for array in (*denominators, labels))
        wide, by_logits = jax.vjp(lambda wide: _all_capped(wide, options), logits.astype(largest.dtype))
        columns = jnp.arange(wide.shape[-1], dtype=labels.dtype)
        # The gradient of an ignored token is 0, and that of an invalid label is NaN. One shift for each token gives
        # both. With a select for each logit, the compiler for a TPU v6e would store the gradient before the products
        # that read it.
        is_ignored = labels == _IGNORED
        shift = jnp.where(is_ignored, jnp.inf, jnp.where(labels < classes, logarithm, jnp.nan))
        # Half logits are rounded more coarsely than this sum. With two subtractions, a TPU v5p stores the gradient.
        exponents = wide - (largest + shift) if is_half(logits.dtype) else wide - largest - shift
        gradient = jnp.exp(exponents)
        if z_loss:
            gradient *= 1 + 2 * z_loss * (largest + logarithm)
        gradient -= (1 - smoothing) * (columns == labels).astype(wide.dtype)  # no column is an ignored label
        if smoothing:
            share = jnp.where(is_ignored, 0, smoothing / classes).astype(wide.dtype)
            gradient -= share * (columns < classes).astype(wide.dtype)  # a select would create a constant
        (gradient,) = by_logits(gradient)
        return gradient


def _gradient_shift(dtype: Any, options: _Options) -> float:
    """Return a power of two by which to multiply float16 gradients of logits.

    The multiplication keeps small gradients from underflow. The power is so small that no gradient overflows: the
    largest gradient is 1, plus the gradient of the z-loss for the largest float16 logit. For other dtypes, return 1.
    """
    if dtype != jnp.float16:
        return 1.0
    largest = float(jnp.finfo(dtype).max)
    return max(1.0, 2.0 ** math.floor(math.log2(largest / (1 + 2 * options.z_loss * largest))))


def _targets(labels: jax.Array, classes: int, ignore_index: int | None) -> jax.Array:
    """Return labels as int32: -1 if ignored, ``classes`` if invalid.

    An invalid label later makes the loss NaN.
    """
    wide = labels.astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)
    targets = jnp.where((wide >= 0) & (wide < classes), wide, classes)
    return jnp.where(wide == ignore_index, _IGNORED, targets).astype(jnp.int32)


def _check_options(labels: jax.Array, shape: tuple[int, ...], options: _Options) -> None:
    _, label_smoothing, z_loss, softcap, _ = options
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"labels must have an integer dtype, got {labels.dtype.name}; cast them, or take the argmax of one-hot "
            "labels"
        )
    if labels.shape != shape:
        raise ValueError(f"labels must have the shape {shape}, one per row of logits, got the shape {labels.shape}")
    if not (_is(Real, z_loss) and 0 <= z_loss < math.inf):
        raise ValueError(f"z_loss must be a Python number of at least 0, got {z_loss}")
    if not (_is(Real, label_smoothing) and 0 <= label_smoothing < 1):
        raise ValueError(f"label_smoothing must be at least 0 and less than 1, got {label_smoothing}")
    if softcap is not None and not (_is(Real, softcap) and 0 < softcap < math.inf):
        raise ValueError(f"softcap must be a Python number above 0, got {softcap}; write softcap=30.0 or leave it out")


def _is(kind: type, value: Any) -> bool:
    """Return whether a value is a Python or NumPy number of this kind, not an array."""
    return isinstance(value, kind)


def _check_floating(**arrays: jax.Array) -> None:
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} must have a floating dtype, got {array.dtype.name}; cast it")
