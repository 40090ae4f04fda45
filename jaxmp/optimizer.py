"""Loss scaling as an optax transform: skip non-finite steps whole, adapt the scale.

The transform wraps an optimizer and keeps the loss scale in the optimizer's state. :func:`value_and_grad` reads it from
there, differentiates the scaled loss and returns the true gradients, so that scaled gradients never leave it. Nothing
here talks to the host: a skipped step is a select on the device, and a branch in a train step on a CPU. After
Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, with the semantics of torch's GradScaler.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp import hardware
from jaxmp._functions import require_flag
from jaxmp._jaxpr import reading
from jaxmp._placement import require_not_deleted
from jaxmp.loss_scale import LossScale, as_loss_scale
from jaxmp.rounding import BEHIND_LOW_PRECISION, LowPrecision, LowPrecisionState, as_optimizer, decoded, rounds_params
from jaxmp.tree import all_finite, is_float_array, max_abs, path_name, select_tree, sum_of_squares, widen

T = TypeVar("T")


class LossScalingState(NamedTuple):
    """State of :func:`loss_scaling`.

    Attributes:
      inner_state: the state of the wrapped optimizer, as it was after the last step that was not skipped.
      loss_scale: the loss-scale object that the next loss is to be scaled with.
      skipped: int32 scalar, the steps skipped so far.
      consecutive_skipped: int32 scalar, the steps skipped since the last one that was not.
      grad_norm: float32 scalar, the global norm of the last gradients; None unless asked for.
    """

    inner_state: Any
    loss_scale: LossScale
    skipped: jax.Array
    consecutive_skipped: jax.Array
    grad_norm: jax.Array | None

    @property
    def last_finite(self) -> jax.Array:
        """Return whether the last step was applied, a bool scalar; True before the first."""
        return self.consecutive_skipped == 0  # each array of a state costs more than a microsecond a step


def loss_scaling(
    inner: optax.GradientTransformation,
    loss_scale: LossScale,
    *,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    grad_norm: bool = False,
    check_updates: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it skips steps that are not finite, and adapts the loss scale.

    An update takes the true gradients that :func:`value_and_grad` returns, casts half ones to float32, and tests one
    number, the float32 sum of their squares. If it is finite, ``inner``'s updates pass and the scale may grow. If not,
    the updates are -0.0 (adding that changes no bit of a param), ``inner``'s state is bit for bit what it was, and the
    scale backs off. ``inner`` sees float32 gradients and params, so that its state is float32 whatever the params are;
    :func:`jaxmp.low_precision` sees them as they are.

    Gradients of plain ``jax.value_and_grad`` train too, but without a loss scale small float16 gradients become zero.
    With ``NoOpLossScale`` only the skipping remains, for bfloat16 and float32 training.

    Clipping may stand inside, before ``loss_scaling`` in a chain, or in your own code. Momentum, weight decay and
    schedules belong inside: what stands after ``loss_scaling`` in a chain goes on when a step is skipped. Do not hide
    non-finite gradients from it (``optax.zero_nans`` or ``optax.apply_if_finite`` before or around it). Wrap
    ``optax.MultiSteps`` in ``loss_scaling``: a non-finite microbatch is then dropped on its own. Extra arguments of an
    update go to ``inner``.

    Args:
      inner: any optax transform; its ``init`` and ``update`` take the params that it takes by itself, such as the pair
        of ``optax.lookahead``.
      loss_scale: ``DynamicLossScale()``, ``StaticLossScale``, ``HeadroomLossScale``, ``NoOpLossScale`` or one of jmp's.
      axis_name: name or names of mapped axes (``pmap``, ``vmap``, ``shard_map``) whose members must all agree to apply
        or skip a step. Not needed under plain ``jit`` with sharded arrays.
      grad_norm: whether to keep the global norm of the gradients in the state; its square is what is tested.
      check_updates: whether the updates are tested as well, for infinities and NaN: for optimizers that divide by what
        may be zero, or overflow on gradients of a finite norm. It costs further passes over the optimizer's state,
        which is what an elementwise optimizer spends its time on.

    Raises (here, or from ``init`` and ``update``):
      RuntimeError: a donating step has had the state or the params.
      TypeError: ``inner`` is no optimizer; ``loss_scale`` is no loss scale; the state is none that ``init`` makes.
      ValueError: the scale is no positive scalar; ``inner`` has a loss scale already; another transform stands around
        ``low_precision``; an update does not have the shape of its param.
        for other params.

    >>> tx = loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale(loss_scale=2.0**10))
    >>> params = {"w": jnp.array([2.0])}
    >>> opt_state = tx.init(params)
    >>> loss, grads = value_and_grad(lambda p: jnp.sum(p["w"] ** 2), opt_state)(params)
    >>> grads["w"]  # 2 * w: the gradient of the true loss
    Array([4.], dtype=float32)
    >>> updates, opt_state = tx.update(grads, opt_state, params)
    >>> optax.apply_updates(params, updates)["w"]
    Array([1.6], dtype=float32)
    """
    inner = as_optimizer(inner)
    loss_scale = as_loss_scale(loss_scale)
    require_flag("grad_norm", grad_norm, "to clip, put optax.clip_by_global_norm(1.0) inside loss_scaling")
    require_flag("check_updates", check_updates, "pass True to test the updates beside the gradients")

    def as_taken(params: Any) -> Any:
        return params if isinstance(inner, LowPrecision) else widen(params)

    def init(params: optax.Params) -> LossScalingState:
        inner_state = jax.tree.map(_copied_key, inner.init(as_taken(params)))
        if not isinstance(inner, LowPrecision) and rounds_params(inner_state):
            raise ValueError(BEHIND_LOW_PRECISION)
        return wrap_opt_state(inner_state, loss_scale, grad_norm=grad_norm)

    def update(
        updates: optax.Updates, state: LossScalingState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, LossScalingState]:
        try:
            return stepped(updates, state, params, None, **extra_args)
        except (RuntimeError, ValueError) as error:
            require_not_deleted({"opt_state": state, "params": params}, error)
            raise

    def stepped(
        updates: optax.Updates,
        state: LossScalingState,
        params: optax.Params | None,
        made: Made | None,
        **extra_args: Any,
    ) -> tuple[Any, LossScalingState]:
        """Return what ``made`` computes from the updates in place of the updates."""
        _check_state(state)
        grads = widen(updates)
        squares = sum_of_squares(grads)

        def of_inner() -> tuple[Any, Any]:
            new_updates, inner_state = inner.update(grads, state.inner_state, as_taken(params), **extra_args)
            _check_same_shapes(new_updates, updates if params is None else params)
            return new_updates, inner_state

        finite = jnp.isfinite(squares)
        computed = of_inner() if check_updates else None
        if computed is not None:
            finite &= all_finite(computed[0])
        grad_max = max_abs(grads) if state.loss_scale.needs_grad_max else None
        if axis_name is not None:
            finite = jax.lax.pmin(finite.astype(jnp.int32), axis_name).astype(jnp.bool_)
            grad_max = None if grad_max is None else jax.lax.pmax(grad_max, axis_name)
        if made is None:
            new_updates, inner_state = computed or of_inner()
            result = jax.tree.map(lambda u: jnp.where(finite, u, -jnp.zeros((), u.dtype)), new_updates)
            inner_state = select_tree(finite, inner_state, state.inner_state)
        else:

            def both() -> tuple[Any, Any]:
                new_updates, inner_state = computed or of_inner()
                return made.of(new_updates), inner_state

            result, inner_state = _computed_where(finite, both, (made.before, state.inner_state))
        bad = 1 - finite.astype(jnp.int32)
        new_state = LossScalingState(
            inner_state=inner_state,
            loss_scale=state.loss_scale.adjust(finite, grad_max),
            skipped=state.skipped + bad,
            consecutive_skipped=(state.consecutive_skipped + bad) * bad,
            grad_norm=jnp.sqrt(squares).astype(jnp.float32) if grad_norm else None,
        )
        return result, new_state

    tx = LossScaling(init, update)
    tx.inner, tx.stepped = inner, stepped
    return tx


def require_outermost(tx: Any, opt_state: Any) -> None:
    """Raise an error if :func:`jaxmp.low_precision` is not directly inside :func:`loss_scaling`."""
    if rounds_params(opt_state) and not _is_outermost_low_precision(tx):
        raise ValueError(BEHIND_LOW_PRECISION)


def _is_outermost_low_precision(tx: Any) -> bool:
    return isinstance(tx, LossScaling) and isinstance(tx.inner, LowPrecision)


def in_precision_of(tx: Any, inner_state: Any, params: Any) -> Any:
    """Return the state of an optimizer as the optimizer in ``tx`` stores it."""
    before = inner_state if isinstance(inner_state, LowPrecisionState) else None
    inner_state = decoded(before.inner_state) if before else inner_state
    return tx.inner.wrap(inner_state, params, before) if _is_outermost_low_precision(tx) else inner_state


def _copied_key(leaf: Any) -> Any:
    """Return a copy of a key, which a donating step would delete for its owner."""
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


class LossScaling(optax.GradientTransformationExtraArgs):
    """The transform that :func:`loss_scaling` returns."""

    inner: optax.GradientTransformationExtraArgs
    stepped: Callable[..., tuple[Any, LossScalingState]]


class Made(NamedTuple):
    """What a step makes of the updates, such as new params, and what it is if the step is skipped."""

    of: Callable[[Any], Any]
    before: Any


def wrap_opt_state(opt_state: optax.OptState, loss_scale: LossScale, *, grad_norm: bool = False) -> LossScalingState:
    """Return the state of ``loss_scaling(tx, loss_scale)`` around a state of ``tx`` that has trained already.

    ``grad_norm`` is what :func:`loss_scaling` is given.

    >>> tx = optax.adam(1e-3)
    >>> opt_state = tx.init(jnp.ones(3))  # … and many steps later
    >>> opt_state = wrap_opt_state(opt_state, jaxmp.DynamicLossScale())  # goes with loss_scaling(tx, …)

    Raises:
      ValueError: the state has a loss scale already.
    """
    if scalings_in(opt_state):
        raise ValueError(
            "loss_scaling was put inside loss_scaling: the optimizer's state has a loss scale already; remove the "
            "inner one"
        )
    return LossScalingState(
        inner_state=opt_state,
        # Copies, so that a step that donates its state does not delete the arrays of the object the user holds.
        loss_scale=jax.tree.map_with_path(_own_array, as_loss_scale(loss_scale)),
        skipped=jnp.zeros((), jnp.int32),
        consecutive_skipped=jnp.zeros((), jnp.int32),
        grad_norm=jnp.zeros((), jnp.float32) if grad_norm else None,
    )


def _own_array(path: Any, leaf: Any) -> jax.Array:
    """Return a leaf of a loss scale as a new array; an integer scale becomes float32, as it may be halved."""
    dtype = jnp.result_type(leaf)
    is_whole = path_name(path) == "loss_scale" and jnp.issubdtype(dtype, jnp.integer)
    return jnp.array(leaf, jnp.float32 if is_whole else dtype)


def has_loss_scale(opt_state: optax.OptState) -> bool:
    """Return whether an optimizer's state has a loss scale, wherever it is nested."""
    return bool(scalings_in(opt_state))


def get_loss_scaling_state(opt_state: optax.OptState) -> LossScalingState:
    """Return the one :class:`LossScalingState` in an optimizer's state, wherever it is nested.

    Raises:
      ValueError: there is none, or there are several.
    """
    if isinstance(opt_state, optax.GradientTransformation):
        raise ValueError("an optimizer's state is needed, got the optimizer itself; pass opt_state = tx.init(params)")
    found = scalings_in(opt_state)
    if not found:
        raise ValueError(
            f"the optimizer's state has no loss scale, got {type(opt_state).__name__}; wrap the optimizer, "
            "tx = jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale()), and call tx.init again"
        )
    if len(found) > 1:
        raise ValueError(
            f"one loss has one scale, but the optimizer's state has {len(found)}; put one loss_scaling around the "
            "whole optimizer"
        )
    return found[0]


def get_loss_scale(opt_state: optax.OptState) -> LossScale:
    """Return the loss-scale object in an optimizer's state, wherever it is nested.

    >>> tx = optax.chain(loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(8.0)))
    >>> get_loss_scale(tx.init(jnp.ones(2))).loss_scale
    8.0

    Raises:
      ValueError: there is none, or there are several.
    """
    return get_loss_scaling_state(opt_state).loss_scale


def _at_hand(opt_state: optax.OptState) -> LossScale:
    """Return the loss scale in ``opt_state``, or raise an error if it was donated."""
    loss_scale = get_loss_scale(opt_state)
    require_not_deleted(loss_scale)
    return loss_scale


def keep_if_skipped(opt_state: optax.OptState, new: T, old: T) -> T:
    """Return ``new`` if the last step was taken, and ``old`` bit for bit if it was skipped.

    Use it in a step of your own for everything that a skipped step must leave as it was, such as batch statistics,
    moving averages of params or target networks.

    Args:
      opt_state: the optimizer's state that ``tx.update`` returned in this step, with :func:`loss_scaling` outermost or
        in a chain. Inside of ``optax.MultiSteps`` or ``optax.apply_if_finite`` it does not see every step.
      new: any pytree of arrays, computed in this step.
      old: the same pytree before this step; its dtypes are kept.

    Raises:
      ValueError: ``opt_state`` has no loss scale, several, or one inside of a transform that may hide a step from it;
        the trees differ in structure.
      TypeError: two leaves differ in shape.

    >>> tx = loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale())
    >>> params, mean = jnp.ones(2), jnp.zeros(())
    >>> _, opt_state = tx.update(jnp.array([jnp.inf, 0.0]), tx.init(params), params)
    >>> keep_if_skipped(opt_state, jnp.array(jnp.nan), mean)
    Array(0., dtype=float32)
    """
    if isinstance(opt_state, (optax.MultiStepsState, optax.ApplyIfFiniteState)):
        raise ValueError(
            f"keep_if_skipped needs a loss scale that sees every step, got one inside of {type(opt_state).__name__}; "
            "wrap the other way round: jaxmp.loss_scaling(optax.MultiSteps(tx, 4), loss_scale), say"
        )
    return select_tree(get_loss_scaling_state(opt_state).last_finite, new, old)


def scale_loss(loss: jax.Array, opt_state: optax.OptState) -> jax.Array:
    """Return the loss in float32 times the scale in ``opt_state``.

    Use it in a function that you differentiate yourself, and divide the gradients by the scale with :func:`unscale`
    before you do anything else with them. :func:`value_and_grad` does both.

    Raises:
      TypeError: the loss is not floating, or float16.
      ValueError: ``opt_state`` has no loss scale, or several.
      RuntimeError: ``opt_state`` was donated to an earlier step.

    >>> opt_state = loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(8.0)).init(jnp.ones(2))
    >>> jax.grad(lambda params: scale_loss(jnp.sum(params), opt_state))(jnp.ones(2))
    Array([8., 8.], dtype=float32)
    """
    return _at_hand(opt_state).scale(_float32_loss(loss))


def unscale(grads: T, opt_state: optax.OptState) -> T:
    """Return the true gradients, in float32, of a loss that was multiplied by :func:`scale_loss`.

    A gradient that overflowed comes back as NaN, never as an infinity, so that clipping by value cannot hide it from
    :func:`loss_scaling`.

    Raises:
      ValueError: ``opt_state`` has no loss scale, or several.
      RuntimeError: ``opt_state`` was donated to an earlier step.

    >>> opt_state = loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(8.0)).init(jnp.ones(2))
    >>> unscale({"w": jnp.array([8.0, 4.0], jnp.float16)}, opt_state)
    {'w': Array([1. , 0.5], dtype=float32)}
    """
    return true_gradients(grads, _at_hand(opt_state))


def true_gradients(grads: Any, loss_scale: LossScale) -> Any:
    """Return gradients of the scaled loss divided by the scale, in float32, NaN in place of infinities."""
    return nan_if_infinite(loss_scale.unscale(widen(grads)))


def nan_if_infinite(grads: Any) -> Any:
    """Return ``grads`` with NaN in place of infinities, which clipping by value would make finite."""

    def nan_in_place(grad: Any) -> Any:
        return jnp.where(jnp.isinf(grad), jnp.nan, grad) if is_float_array(grad) else grad

    return jax.tree.map(nan_in_place, grads)


def global_norm(grads: Any) -> jax.Array:
    """Return the global norm of true gradients, finite if and only if :func:`loss_scaling` takes the step."""
    return jnp.sqrt(sum_of_squares(widen(grads)))


def value_and_grad(
    fun: Callable[..., Any], opt_state: optax.OptState, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function of the true loss and gradients, under ``opt_state``'s loss scale.

    It takes the place of ``jax.value_and_grad`` in a step of your own. The loss is multiplied by the scale before the
    backward pass, and the gradients are divided by it after, in float32: small float16 gradients survive, and nothing
    outside of this function sees the scale. Gradients of several losses may be added, clipped and logged.

    Args:
      fun: returns the loss, a floating scalar, or ``(loss, aux)`` with ``has_aux``.
      opt_state: the state of an optimizer in :func:`loss_scaling`, wherever that is nested.
      argnums: the arguments to differentiate, as for ``jax.value_and_grad``.
      has_aux: whether ``fun`` returns ``(loss, aux)``.

    Returns:
      A function with ``fun``'s arguments that returns ``(loss, grads)``, or ``((loss, aux), grads)`` with ``has_aux``.
      The loss is float32. The gradients are float32 for half and float32 params, with NaN where one overflowed: pass
      them to ``tx.update``, which skips the step.

    Raises:
      ValueError: ``opt_state`` has no loss scale, or several.
      TypeError: the loss is no floating scalar, or float16 (the scale itself would overflow); an argument to
        differentiate has leaves that are not floating; ``argnums`` are no whole numbers.
      RuntimeError: ``opt_state`` was donated to an earlier step.

    >>> opt_state = loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(8.0)).init(jnp.ones(2))
    >>> value_and_grad(jnp.sum, opt_state)(jnp.ones(2))
    (Array(2., dtype=float32), Array([1., 1.], dtype=float32))
    """
    loss_scale = _at_hand(opt_state)
    scaled = scaled_value_and_grad(fun, loss_scale, argnums, has_aux)

    @functools.wraps(fun)
    def unscaled(*args: Any, **kwargs: Any) -> Any:
        loss, grads = scaled(*args, **kwargs)
        return loss, true_gradients(grads, loss_scale)

    return unscaled


def scaled_value_and_grad(
    fun: Callable[..., Any], loss_scale: LossScale, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return :func:`value_and_grad`'s function without its division by the scale.

    A train step sums the gradients of its microbatches first.
    """
    scaled_fun = scaled_loss(fun, loss_scale, has_aux)

    def scaled(*args: Any, **kwargs: Any) -> Any:
        (_, (loss, aux)), grads = jax.value_and_grad(scaled_fun, argnums, has_aux=True)(*args, **kwargs)
        return ((loss, aux) if has_aux else loss), grads

    return scaled


def is_list(argnums: Any) -> bool:
    """Return whether ``argnums`` is a list of places: a sequence, or an array with axes."""
    return isinstance(argnums, Sequence) or np.ndim(argnums) > 0


def places_of(argnums: Any, *others: type) -> list[Any]:
    """Return what ``argnums`` lists: arguments by their places, or ``others``."""
    places = list(argnums) if is_list(argnums) else [argnums]
    return [place if isinstance(place, others) else operator.index(place) for place in places]


def scaled_loss(fun: Callable[..., Any], loss_scale: LossScale, has_aux: bool) -> Callable[..., Any]:
    """Return ``fun`` with the results ``(scaled loss, (true loss, aux))``."""
    require_flag("has_aux", has_aux, "pass has_aux=True for a function that returns (loss, aux)")

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

    # NNX reads the signature, but not that of a partial.
    return scaled_fun if isinstance(fun, functools.partial) else functools.wraps(fun)(scaled_fun)


def take_step(
    tx: optax.GradientTransformationExtraArgs,
    grads: Any,
    opt_state: Any,
    params: Any,
    extra_args: Mapping[str, Any],
    made: Made | None = None,
) -> tuple[Any, Any, jax.Array]:
    """Take one step of an optimizer with ``loss_scaling`` in it; ``grads`` are the true gradients.

    Returns:
      The updates, or what is made of them; the new state, of which only the loss scale changed if the step was skipped;
      and whether it was, int32 0 or 1.
    """
    is_outermost = isinstance(tx, LossScaling)
    if is_outermost:
        result, new_state = tx.stepped(grads, opt_state, params, made, **extra_args)
    else:
        # Before loss_scaling a transform may clip by value: a NaN stays one.
        result, new_state = tx.update(nan_if_infinite(grads), opt_state, params, **extra_args)
    skipped = get_loss_scaling_state(new_state).skipped - get_loss_scaling_state(opt_state).skipped
    if not is_outermost:
        # A transform around loss_scaling may drop bad gradients before it (MultiSteps), or go on when it skips.
        finite = jnp.isfinite(global_norm(grads))
        skipped = jnp.maximum(skipped, 1 - finite.astype(jnp.int32))
        new_state = _keep_scale(skipped == 0, new_state, opt_state)
        result = result if made is None else select_tree(skipped == 0, made.of(result), made.before)
    return result, new_state, skipped


def _computed_where(pred: jax.Array, make: Callable[[], T], otherwise: T) -> T:
    """``make()`` where the bool scalar ``pred`` holds, else ``otherwise``, as :func:`jaxmp.tree.select_tree` of both.

    On a CPU it is a branch: XLA computes there what is selected in more kernels than what is not, and copies it before.
    On other devices a branch waits for the host, and XLA cannot divide one between devices as well as a selection. What
    has effects, such as a print, has them in any case.
    """
    is_alone = jax.sharding.get_abstract_mesh().empty
    if not (is_alone and reading.is_tracing() and hardware.detect().platform == "cpu"):
        return select_tree(pred, make(), otherwise)
    closed, shapes = jax.make_jaxpr(make, return_shape=True)()

    def made() -> T:
        found: T = jax.tree.unflatten(jax.tree.structure(shapes), reading.evaluate(*reading.opened(closed), []))
        return found

    if closed.effects:
        return select_tree(pred, made(), otherwise)
    return jax.lax.cond(pred, lambda: select_tree(True, made(), otherwise), lambda: otherwise)


def with_loss(step: Callable[..., T], loss: Any) -> T:
    """Call ``step(value=loss)``, for optimizers that look at the loss, or ``step()`` where a transform takes none."""
    try:
        return step(value=loss)
    except TypeError:  # optax.contrib.sam takes none
        return step()


def _keep_scale(finite: jax.Array, new: Any, old: Any) -> Any:
    """Return ``new`` where ``finite``, else ``old`` with the loss scale and the counters of ``new``."""

    def keep(new: Any, old: Any) -> Any:
        if isinstance(new, LossScalingState):
            return new._replace(inner_state=select_tree(finite, new.inner_state, old.inner_state))
        return select_tree(finite, new, old)

    return jax.tree.map(keep, new, old, is_leaf=lambda node: isinstance(node, LossScalingState))


def scalings_in(opt_state: optax.OptState) -> list[LossScalingState]:
    """Return the loss-scaling states in an optimizer's state, wherever they are nested."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, LossScalingState))
    return [node for node in nodes if isinstance(node, LossScalingState)]


def require_loss(loss: Any, otherwise: str) -> Any:
    """Return the ``loss`` of a function; ``otherwise`` is the remedy for what is no number.

    Raises:
      TypeError: it is no floating scalar.
    """
    if not is_number(loss) or np.ndim(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        remedy = otherwise
        if is_number(loss):
            remedy = "take its mean: jnp.mean(loss)" if np.ndim(loss) else "compute it from floating values"
        raise TypeError(f"a loss must be a floating scalar, got {described(loss)}; {remedy}")
    return loss


def is_number(value: Any) -> bool:
    """Return whether ``value`` is an array of JAX or NumPy, a Python number or a Variable of NNX."""
    number = isinstance(value, (jax.Array, np.ndarray, np.generic, int, float, complex))
    return number or hasattr(value, "__jax_array__")


def as_float(value: Any) -> float:
    """Return a concrete real number as a float, and NaN for all else."""
    is_real = is_number(value) and not isinstance(value, (bool, jax.core.Tracer)) and np.ndim(value) == 0
    dtype = jnp.result_type(value) if is_real else np.dtype(bool)
    is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return float(value) if is_real else np.nan


def described(value: Any) -> str:
    """Return the dtype and shape of a value, or its type, for an error."""
    if is_number(value):
        return f"{jnp.result_type(value).name} of shape {np.shape(value)}"
    return f"{type(value).__name__}{f' of {len(value)}' if isinstance(value, (tuple, list)) else ''}"


def _float32_loss(loss: Any) -> jax.Array:
    loss = jnp.asarray(loss)
    if loss.dtype == jnp.float16:
        raise TypeError(
            "a loss to be scaled must be float32, got float16, in which the scale overflows; compute it from float32 "
            "values, logits.astype(jnp.float32), say"
        )
    return widen(loss)


def _check_state(state: Any) -> None:
    if not isinstance(state, LossScalingState):
        raise TypeError(
            f"loss_scaling updates a state of its own, got {type(state).__name__}; call tx.init again, or wrap a "
            "running state with jaxmp.wrap_opt_state"
        )


def _check_same_shapes(updates: Any, params: Any) -> None:
    """Raise an error if an update does not have the shape of its param; broadcasting would hide it."""
    made: Any = jax.tree.structure(updates)
    if made != jax.tree.structure(params):
        return
    for (path, update), param in zip(jax.tree.leaves_with_path(updates), jax.tree.leaves(params), strict=True):
        if jnp.shape(update) != jnp.shape(param):
            raise ValueError(
                f"the update of {path_name(path)!r} has the shape {jnp.shape(update)}, its param {jnp.shape(param)}; "
                "pass the params that the gradients are of, or call tx.init again"
            )
