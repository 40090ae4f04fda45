"""Differentiate a scaled loss, and return true gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp._internals.flax.nnx_if_imported import imported_nnx
from jaxmp._internals.jax.traces import is_tracing_jit
from jaxmp.base.arguments import require_function
from jaxmp.base.donation import donation_note
from jaxmp.base.dtypes import is_half
from jaxmp.base.trees import is_float_array, is_traced, sum_of_squares, widen
from jaxmp.base.user_warnings import warn_user
from jaxmp.optim.checks import described, require_loss, require_no_functions
from jaxmp.optim.loss_scale import LossScale, NoOpLossScale, StaticLossScale
from jaxmp.optim.scaling_state import usable_loss_scale

P = ParamSpec("P")
Aux = TypeVar("Aux")


def true_gradients(grads: Any, loss_scale: LossScale) -> Any:
    """Divide the gradients of the scaled loss by the scale; infinities become NaN."""
    return nan_if_infinite(loss_scale.unscale(widen(grads)))


def nan_if_infinite(grads: Any) -> Any:
    """Return ``grads`` with NaN in place of infinities.

    Clipping by value would make infinities finite, but it keeps NaN.
    """

    def nan_in_place(grad: Any) -> Any:
        return jnp.where(jnp.isinf(grad), jnp.nan, grad) if is_float_array(grad) else grad

    return jax.tree.map(nan_in_place, grads)


def global_norm(grads: Any) -> jax.Array:
    """Return the global norm of true gradients.

    :func:`loss_scaling` skips the step if the norm is not finite.
    """
    return jnp.sqrt(sum_of_squares(widen(grads)))


@overload
def value_and_grad(
    fun: Callable[P, jax.Array],
    opt_state: optax.OptState,
    argnums: int | Sequence[int] = 0,
    has_aux: Literal[False] = False,
    allow_int: bool = False,
) -> Callable[P, tuple[jax.Array, Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, tuple[jax.Array, Aux]],
    opt_state: optax.OptState,
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    allow_int: bool = False,
) -> Callable[P, tuple[tuple[jax.Array, Aux], Any]]: ...
@overload
def value_and_grad(
    fun: Callable[..., Any],
    opt_state: optax.OptState,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]: ...


def value_and_grad(
    fun: Callable[..., Any],
    opt_state: optax.OptState,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes the unscaled loss and gradients of ``fun``.

    Use it in place of ``jax.value_and_grad`` in your own step. The loss is multiplied by the scale before the backward
    pass, and the gradients are divided by it afterwards, in float32. So small float16 gradients do not become 0, and
    the returned loss and gradients do not contain the scale. You can add, clip and log them as usual.

    Args:
      fun: a function that returns the loss, a floating scalar, or ``(loss, aux)`` with ``has_aux``.
      opt_state: the state of an optimizer that :func:`loss_scaling` wraps. It may be chained with other transforms, but
        not with a transform that has a state. If params differ in their optimizers, or some are frozen, write
        ``loss_scaling(optax.partition(...), loss_scale)``.
      argnums: the arguments to differentiate, as for ``jax.value_and_grad``.
      has_aux: whether ``fun`` returns ``(loss, aux)``.
      allow_int: whether the arguments to differentiate may have integer and bool leaves, such as indices. As in
        ``jax.value_and_grad``, their gradients have the dtype ``jax.dtypes.float0``.

    Returns:
      A function with ``fun``'s arguments that returns ``(loss, grads)``, or ``((loss, aux), grads)`` with ``has_aux``.
      The loss is float32. The gradients of half-precision and float32 params are float32. A gradient that overflowed is
      NaN. Pass the gradients to ``tx.update``, which skips the step if one of them is NaN.

    To differentiate by other means, such as ``jax.vjp``, multiply a float32 loss by the scale and divide the gradients:
    ``loss_scale = jaxmp.get_loss_scale(opt_state)`` has the methods ``scale`` and ``unscale``. Do not use them together
    with this function: in a jitted step, ``tx.update`` warns if its gradients still contain the loss scale.

    The returned function warns if it is traced by ``jax.jit`` with a loss scale that is not an argument of the jitted
    function. Such a scale never changes.

    Raises:
      ValueError: ``opt_state`` has no loss scale, or several; a transform with a state is chained with
        ``loss_scaling`` (a skipped step would change this state or the params); or ``loss_scaling`` is inside of
        ``optax.partition``, ``optax.masked``, ``optax.MultiSteps`` or ``optax.apply_if_finite``.
      TypeError: ``fun`` is not a function; the loss is not a floating scalar, or is half precision; an argument to
        differentiate has leaves that are not floating, such as functions (or integers without ``allow_int``), or is an
        NNX model with batch statistics or random state; ``argnums`` are not integers.
      RuntimeError: ``opt_state`` was donated to an earlier step.

    >>> opt_state = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(8.0)).init(jnp.ones(2))
    >>> value_and_grad(jnp.sum, opt_state)(jnp.ones(2))
    (Array(2., dtype=float32), Array([1., 1.], dtype=float32))
    """
    require_function(
        fun,
        rule="jaxmp.value_and_grad takes a loss function",
        remedy="write jaxmp.value_and_grad(loss_fn, opt_state)(params)",
        model_remedy="pass a function that calls the model and returns the loss",
        allows_nnx=False,
    )
    loss_scale = usable_loss_scale(opt_state)
    scaled = scaled_value_and_grad(fun, loss_scale, argnums, has_aux, allow_int)

    @functools.wraps(fun)
    def unscaled(*args: Any, **kwargs: Any) -> Any:
        warn_if_constant(loss_scale)
        for arg in _arguments_at(argnums, args):
            _require_no_nnx_model(arg)
            require_no_functions(arg, "jaxmp.value_and_grad")
        with donation_note():
            loss, grads = scaled(*args, **kwargs)
        return loss, true_gradients(grads, loss_scale)

    return unscaled


def _arguments_at(argnums: int | Sequence[int], args: Sequence[Any]) -> list[Any]:
    """Return the positional arguments that ``argnums`` names.

    Values of ``argnums`` that JAX refuses are left out.
    """
    numbers = np.atleast_1d(argnums)
    if not np.issubdtype(numbers.dtype, np.integer):
        return []
    return [args[number] for number in numbers if -len(args) <= number < len(args)]


def _require_no_nnx_model(arg: Any) -> None:
    """Raise a TypeError if a differentiated argument is an NNX model with Variables other than Params.

    JAX's gradient would drop what the loss function writes to them.
    """
    nnx = imported_nnx()
    if nnx is None or not isinstance(arg, nnx.Module):
        return
    if jax.tree.leaves(nnx.state(arg, nnx.Not(nnx.Param))):
        raise TypeError(
            f"jaxmp.value_and_grad takes params, got the NNX model {type(arg).__name__}, whose new batch "
            "statistics would be lost;\nwrite jaxmp.nnx.value_and_grad(loss_fn, optimizer)"
        )


def warn_if_constant(loss_scale: LossScale) -> None:
    """Warn if an adaptive loss scale is not an argument of the jitted function that JAX traces."""
    is_adaptive = not isinstance(loss_scale, (StaticLossScale, NoOpLossScale))
    if is_adaptive and not is_traced(loss_scale) and is_tracing_jit():
        warn_user(
            "the loss scale is a constant of this jitted function, so it never changes; pass the optimizer's state "
            "(for NNX, the optimizer) to the function as an argument, and call value_and_grad in it"
        )


def scaled_value_and_grad(
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes the loss and the gradients of the scaled loss.

    :func:`value_and_grad` divides these gradients by the scale. A train step sums the gradients of its microbatches
    before it divides the sum by the scale.
    """
    scaled_fun = scaled_loss(fun, loss_scale, has_aux)

    def scaled(*args: Any, **kwargs: Any) -> Any:
        (_, (loss, aux)), grads = jax.value_and_grad(scaled_fun, argnums, has_aux=True, allow_int=allow_int)(
            *args, **kwargs
        )
        return ((loss, aux) if has_aux else loss), grads

    return scaled


def scaled_loss(fun: Callable[..., Any], loss_scale: LossScale, has_aux: bool) -> Callable[..., Any]:
    """Return a version of ``fun`` that returns ``(scaled loss, (true loss, aux))``."""

    def scaled_fun(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        result = fun(*args, **kwargs)
        if has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                f"with has_aux=True the function returns (loss, aux), got {described(result)}; return such a pair, or "
                "leave has_aux out"
            )
        loss, aux = result if has_aux else (result, None)
        returned = "return (loss, aux), in this order" if has_aux else "pass has_aux=True to return (loss, aux)"
        loss = _float32_loss(require_loss(loss, returned))
        return loss_scale.scale(loss), (loss, aux)

    # NNX reads the signature of a function, but not the signature of a partial.
    return scaled_fun if isinstance(fun, functools.partial) else functools.wraps(fun)(scaled_fun)


def _float32_loss(loss: Any) -> jax.Array:
    loss = jnp.asarray(loss)
    if is_half(loss.dtype):
        is_float16 = loss.dtype == jnp.float16
        reason = "in which the scaled loss may overflow" if is_float16 else "which has two to three digits"
        raise TypeError(
            f"a loss must be float32, got {loss.dtype.name}, {reason}; compute it from float32 values, e.g. "
            "logits.astype(jnp.float32)"
        )
    return widen(loss)
