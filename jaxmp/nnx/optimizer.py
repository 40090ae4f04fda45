"""An NNX optimizer with loss scaling, and a function that computes gradients."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.errors import TraceContextError

from jaxmp._internals.flax.nnx_calls import value_of
from jaxmp._internals.flax.nnx_variables import is_module, is_node, is_object
from jaxmp.base import trees as _tree
from jaxmp.base.arguments import require_function
from jaxmp.base.donation import donation_note
from jaxmp.engine.model_policy import full_class_name
from jaxmp.nnx.model_values import set_values, split_values
from jaxmp.nnx.policy_check import needs_policy, require_policy
from jaxmp.optim.checked_params import params_are_checked
from jaxmp.optim.checks import as_optimizer
from jaxmp.optim.half_params import warn_about_params
from jaxmp.optim.loss_scale import LossScale, NoOpLossScale
from jaxmp.optim.loss_scaling import loss_scaling, require_outermost, take_step, without_loss_scaling
from jaxmp.optim.scaled_grad import global_norm, scaled_loss, true_gradients, warn_if_constant
from jaxmp.optim.scaling_state import get_loss_scale, get_loss_scaling_state, has_loss_scale
from jaxmp.sharding.placement import copied_if_seen
from jaxmp.training.state import TrainState

M = TypeVar("M", bound=nnx.Module)
P = ParamSpec("P")
Aux = TypeVar("Aux")
Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]

_Object: Any = nnx.Optimizer  # hides its type parameters


class Optimizer(_Object):
    """An ``nnx.Optimizer`` with a loss scale, which skips non-finite steps.

    Pass the gradients of :func:`value_and_grad` to ``update``. If their norm is not finite, the step is skipped: every
    Variable of the model, including batch statistics, gets back its value from before the step. Other modules that you
    pass to the loss function are restored in the same way. Random number generators are not restored. The attribute
    ``step`` counts all steps, and ``skipped_steps`` counts the skipped steps.

    The optimizer warns if it trains half-precision Variables and ``tx`` is not :func:`jaxmp.low_precision`.

    Args:
      model: the model, under a policy or not.
      tx: an optax optimizer, with or without ``jaxmp.loss_scaling``.
      wrt: the filter of the Variables to train.
      loss_scale: the loss scale for a ``tx`` without ``jaxmp.loss_scaling``. None means ``NoOpLossScale``, which only
        skips non-finite steps.
      ema: whether to keep a float32 moving average of the trained Variables. ``jaxmp.nnx.make_train_step(ema_decay=…)``
        updates it, and :meth:`ema_model` returns a model with it.

    Raises:
      TypeError: ``model`` is not an NNX model, ``tx`` is not an optimizer, or ``loss_scale`` is not a loss scale.
      ValueError: ``wrt`` matches no Variable of the model; ``loss_scale`` is set although ``tx`` already has a loss
        scale; ``tx`` has several loss scales; or a transform other than ``loss_scaling`` wraps ``low_precision``.

    >>> model = jaxmp.nnx.apply_policy(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), "mixed_float16")
    >>> optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=jaxmp.DynamicLossScale())
    >>> @nnx.jit
    ... def step(model, optimizer, x):
    ...     loss, grads = jaxmp.nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2), optimizer)(model)
    ...     optimizer.update(model, grads)
    ...     return loss
    >>> loss = step(model, optimizer, jnp.full((4, 2), jnp.inf))
    >>> int(optimizer.skipped_steps), float(optimizer.loss_scale)
    (1, 16384.0)
    """

    def __init__(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        *,
        wrt: Any = nnx.Param,
        loss_scale: LossScale | None = None,
        ema: bool = False,
        **kwargs: Any,
    ) -> None:
        """See the class."""
        require_model(model, "jaxmp.nnx.Optimizer", "(model, tx)")
        tx, params = as_optimizer(tx), nnx.state(model, wrt)
        _require_some(params, model, wrt)
        warn_about_params(without_loss_scaling(tx), nnx.as_pure(params))
        with params_are_checked():
            shapes = jax.eval_shape(tx.init, nnx.as_pure(params))
        is_scaled = has_loss_scale(shapes)
        if is_scaled and loss_scale is not None:
            raise ValueError("tx has a loss scale already, got another one as loss_scale=...; drop one of them")
        if not is_scaled:
            tx = loss_scaling(tx, NoOpLossScale() if loss_scale is None else loss_scale)
        with params_are_checked():
            init = functools.partial(_init_with_variables, tx)
            super().__init__(model, optax.GradientTransformation(init, tx.update), wrt=wrt, **kwargs)
        self.tx = tx
        get_loss_scale(self.opt_state)  # raises if there are several
        require_outermost(tx, self.opt_state)
        self._needs_policy = needs_policy(model)
        self._structure: Any = jax.tree.structure(nnx.as_pure(params))
        self._before: Any = nnx.data(None)
        # If an array of the model is also in the optimizer's state or in the average, the state or the average gets a
        # copy. Otherwise two results of jax.device_put could share a buffer, and a step would donate this buffer
        # twice.
        arrays_of_model = {*map(id, jax.tree.leaves(nnx.as_pure(params)))}
        own_arrays = nnx.as_pure(self.opt_state), _tree.widen(nnx.as_pure(params)) if ema else None
        opt_state, average = jax.tree.map(lambda leaf: copied_if_seen(leaf, arrays_of_model), own_arrays)
        _set(self.opt_state, opt_state)
        self.ema: Any = nnx.data(average)

    @property
    def loss_scale(self) -> jax.Array:
        """The loss scale that the next step will use, a float32 scalar.

        It is 1 if the optimizer has no loss scale. ``jaxmp.get_loss_scale(optimizer.opt_state)`` returns the object
        with its settings.
        """
        return jnp.asarray(self._loss_scale_object().loss_scale, jnp.float32)

    def _loss_scale_object(self) -> LossScale:
        return get_loss_scale(nnx.as_pure(self.opt_state))

    @property
    def skipped_steps(self) -> jax.Array:
        """The number of skipped steps so far, an int32 scalar."""
        return get_loss_scaling_state(nnx.as_pure(self.opt_state)).skipped_steps

    def ema_model(self, model: M) -> M:
        """Return a copy of ``model`` with the moving averages as params, for evaluation.

        Raises:
          ValueError: the optimizer keeps no moving average.
        """
        if self.ema is None:
            raise ValueError("ema_model needs a moving average: jaxmp.nnx.Optimizer(model, tx, ema=True)")
        form, (params, untrained) = split_values(model, self.wrt, ...)
        # The copies remain when a later step donates the arrays of the model and the optimizer.
        averages = jax.tree.map(lambda ema, param: jnp.array(ema, param.dtype), self.ema, params)
        average_model: M = form.merge(averages, jax.tree.map(jnp.copy, untrained))
        return average_model

    def _remember(self, values: dict[str, Any]) -> None:
        """Store old values of Variables, for :meth:`update` to restore in a skipped step.

        :func:`value_and_grad` passes the Variables that the loss function has changed.
        """
        self._before = nnx.data({**values, **(self._before or {})})

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Update the model, or skip the step if the gradient norm is not finite.

        Args:
          model: the model, which is changed in place.
          grads: the true gradients, from :func:`value_and_grad`.
          **kwargs: extra arguments of the optax optimizer.

        Returns:
          The updates that were added to the params. In a skipped step, all updates are -0.0.

        Raises:
          TypeError: ``model`` is not an NNX model, for example because you swapped it with the gradients.
          ValueError: ``model`` is not under a policy, but has a copy under a policy; ``model`` is not under a policy,
            but the optimizer was created with a model under a policy; the params of ``model`` have another structure
            than the params that the optimizer was created with; or the optimizer keeps a moving average, which only
            ``make_train_step`` updates.
        """
        require_model(model, "optimizer.update", "(model, grads)")
        require_policy(model, self)
        if self.ema is not None:
            raise ValueError(
                "optimizer.update does not update a moving average, got an optimizer with ema=True; train with "
                "jaxmp.nnx.make_train_step(loss_fn, ema_decay=0.999), or leave ema=True out"
            )
        params = nnx.as_pure(nnx.state(model, self.wrt))
        self._require_structure(params)
        grads, opt_state, kwargs = map(nnx.as_pure, (nnx.state(grads, self.wrt), self.opt_state, kwargs))
        updates, opt_state, finite = take_step(self.tx, grads, opt_state, params, kwargs)
        new_params = optax.apply_updates(_tree.widen(params), updates)
        set_values(model, (self.wrt, _tree.select_tree(finite, new_params, params)))
        _set(self.opt_state, opt_state)
        self.step[...] += 1
        if self._before is not None:
            _put_back(finite, model, self._before)
            self._before = nnx.data(None)
        return updates

    def _require_structure(self, params: Any) -> None:
        """Raise a ValueError if the optimizer is for a model with other params."""
        structure: Any = jax.tree.structure(params)
        if structure != self._structure:
            raise ValueError(
                f"the optimizer was created with a model of {self._structure.num_leaves} params, got a model of "
                f"{structure.num_leaves} params in another structure;\n"
                "write optimizer = jaxmp.nnx.Optimizer(model, tx) with this model"
            )

    def _take(self, state: TrainState) -> None:
        """Set this optimizer to the state that a train step returned."""
        _set((self.opt_state, self.step), (state.opt_state, state.step))
        if self.ema is not None:
            self.ema = nnx.data(state.ema_params)


def _init_with_variables(tx: optax.GradientTransformation, params: Any) -> Any:
    """Return the state of an optimizer, with a Variable in place of each array that belongs to a param.

    Such an array has the shape of the param, and its path contains the path of the param.

    Flax would pass ``params``, a State of Variables, to ``tx.init``, but a State of arrays to ``tx.update``. Their
    paths differ, so masks and labels by path would differ, too. The Variables carry the metadata of the params, for
    example their sharding.
    """
    variables = dict(jax.tree.leaves_with_path(params, is_leaf=lambda node: isinstance(node, nnx.Variable)))

    def as_variable(path: Any, leaf: Any) -> Any:
        for end in range(len(path), 0, -1):  # the path of the param is last, but an array in float8 blocks has a name
            for start in range(end):
                variable = variables.get(path[start:end])
                if variable is not None and np.shape(variable.get_raw_value()) == np.shape(leaf):
                    return variable.replace(leaf)
        return leaf

    return jax.tree.map_with_path(as_variable, tx.init(nnx.as_pure(params)))


def _set(variables: Any, values: Any) -> None:
    """Set each Variable to its value, which may be a tree.

    ``nnx.update`` cannot be used, because it would turn a tree into a State.
    """
    jax.tree.map(nnx.Variable.set_raw_value, variables, values, is_leaf=lambda node: isinstance(node, nnx.Variable))


def require_optimizer(optimizer: Any, who: str) -> None:
    """Raise a TypeError if ``optimizer`` is not an :class:`Optimizer` of this module."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{who} takes a jaxmp.nnx.Optimizer, got {full_class_name(optimizer)}; "
            "write jaxmp.nnx.Optimizer(model, tx, loss_scale=jaxmp.DynamicLossScale())"
        )


def require_model(model: Any, call: str, arguments: str) -> None:
    """Raise a TypeError unless ``model`` is an NNX model or a tree with NNX models.

    Args:
      model: the value that the user passed as the model.
      call: the name of the called function.
      arguments: the arguments of that function, as the message shows them.
    """
    if is_module(model):
        return
    is_of_nnx = isinstance(model, (nnx.Optimizer, nnx.State, nnx.Rngs, nnx.Variable))
    if is_of_nnx or not any(map(is_node, jax.tree.leaves(model, is_leaf=is_object))):
        came = f"the class {model.__name__}" if isinstance(model, type) else full_class_name(model)
        raise TypeError(
            f"{call} takes {arguments} with an NNX model, got {came}; for Linen write jaxmp.TrainState and "
            "jaxmp.make_train_step"
        )


def _require_some(params: Any, model: Any, wrt: Any) -> None:
    """Raise a ValueError if ``wrt`` matches no Variable of ``model``."""
    if jax.tree.leaves(params):
        return
    variables = [node for _, node in nnx.iter_graph(model, graph=True) if isinstance(node, nnx.Variable)]
    kinds = ", ".join(sorted({type(variable).__name__ for variable in variables})) or "none"
    got = getattr(wrt, "__name__", repr(wrt))
    raise ValueError(f"wrt={got} matches no Variable of the model; its kinds of Variables: {kinds}")


def _values(model: Any) -> dict[str, Any]:
    """Return the arrays of ``model`` by path, without random number generators."""
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState)))
    return {_path_text(path): value_of(leaf) for path, leaf in leaves}


def _path_text(path: Any) -> str:
    return json.dumps(path, default=str)


def _changed(model: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of ``before`` whose values have changed."""
    now = _values(model)
    return {name: value for name, value in before.items() if name in now and now[name] is not value}


def _put_back(finite: jax.Array, model: Any, before: dict[str, Any]) -> None:
    """Set Variables back to the values ``before``, unless ``finite`` is true."""
    arrays = []
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState))):
        old, new = before.get(_path_text(path)), value_of(leaf)
        if _path_text(path) not in before or not _is_alike(new, old):
            continue  # the step has created the array or changed its shape, for example that of an intermediate
        value = _tree.select_tree(finite, new, old)
        if isinstance(leaf, nnx.Variable):
            leaf.set_raw_value(value)
        else:
            arrays.append((path, value))
    nnx.update(model, nnx.from_flat_state(arrays))


def _is_alike(new: Any, old: Any) -> bool:
    """Return whether two trees have the same paths and shapes."""
    shapes, old_shapes = (
        [(path, jnp.shape(leaf)) for path, leaf in jax.tree.leaves_with_path(tree)] for tree in (new, old)
    )
    return shapes == old_shapes


@overload
def value_and_grad(
    loss_fn: Callable[P, jax.Array],
    optimizer: Optimizer,
    argnums: Argnums = 0,
    has_aux: Literal[False] = False,
) -> Callable[P, tuple[jax.Array, Any]]: ...
@overload
def value_and_grad(
    loss_fn: Callable[P, tuple[jax.Array, Aux]],
    optimizer: Optimizer,
    argnums: Argnums = 0,
    *,
    has_aux: Literal[True],
) -> Callable[P, tuple[tuple[jax.Array, Aux], Any]]: ...
@overload
def value_and_grad(
    loss_fn: Callable[..., Any], optimizer: Optimizer, argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]: ...


def value_and_grad(
    loss_fn: Callable[..., Any], optimizer: Optimizer, argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes the true loss and gradients.

    Use it in place of ``nnx.value_and_grad`` in your own step. The returned function scales the loss and unscales the
    gradients, as :func:`jaxmp.value_and_grad` does. If the step is skipped, ``optimizer.update`` undoes the writes of
    the loss function to the model, such as new batch statistics.

    Args:
      loss_fn: a function that returns the loss, or ``(loss, aux)`` with ``has_aux``.
      optimizer: the :class:`Optimizer` that will use the gradients.
      argnums: the arguments to differentiate. Gradients are taken with respect to the Variables that ``optimizer``
        trains, unless an ``nnx.DiffState`` selects others.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.

    Returns:
      A function with ``loss_fn``'s arguments that returns ``(loss, grads)``, or ``((loss, aux), grads)`` with
      ``has_aux``. The loss and the gradients are unscaled, and the gradients are float32. A gradient that overflowed is
      NaN. Pass the gradients to ``optimizer.update``.

    Raises:
      TypeError: ``loss_fn`` is not a function; ``optimizer`` is not a :class:`jaxmp.nnx.Optimizer`; the loss is not a
        floating scalar, or is half precision; ``argnums`` are neither integers nor ``nnx.DiffState``.

    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=jaxmp.StaticLossScale(8.0))
    >>> loss, grads = value_and_grad(lambda model: jnp.sum(model(jnp.ones((1, 2)))), optimizer)(model)
    >>> grads["bias"][...]
    Array([1.], dtype=float32)
    """
    require_function(
        loss_fn,
        rule="jaxmp.nnx.value_and_grad takes a loss function",
        remedy="write jaxmp.nnx.value_and_grad(loss_fn, optimizer)(model)",
        model_remedy="pass a function that calls the model and returns the loss",
        allows_nnx=False,
    )
    require_optimizer(optimizer, "value_and_grad")
    numbers: Any = argnums
    is_list = isinstance(argnums, Sequence) or np.ndim(numbers) > 0
    wanted = [
        number if isinstance(number, nnx.DiffState) else nnx.DiffState(operator.index(number), optimizer.wrt)
        for number in (numbers if is_list else [numbers])
    ]

    @functools.wraps(loss_fn)
    def unscaled(*args: Any, **kwargs: Any) -> Any:
        loss_scale = optimizer._loss_scale_object()
        warn_if_constant(loss_scale)
        gradient = nnx.value_and_grad(
            scaled_loss(loss_fn, loss_scale, has_aux),
            argnums=tuple(wanted) if is_list else wanted[0],
            has_aux=True,
        )
        trained = args[wanted[0].argnum] if wanted[0].argnum < len(args) else None  # a module, or a tree of modules
        require_policy(trained, optimizer)
        other_args = [arg for arg in (*args, *kwargs.values()) if arg is not trained]
        models = [trained, *(leaf for leaf in jax.tree.leaves(other_args, is_leaf=_is_module) if _is_module(leaf))]
        before = [_values(model) for model in models]
        with donation_note():
            (_, (loss, aux)), scaled_grads = gradient(*args, **kwargs)
        grads = true_gradients(scaled_grads, loss_scale)
        for model, values in zip(models, before, strict=True):
            if changed := _changed(model, values):
                _keep(model, changed, grads, optimizer, is_trained=model is trained)
        return ((loss, aux) if has_aux else loss), grads

    return unscaled


def _is_module(node: Any) -> bool:
    return isinstance(node, nnx.Module)


def _keep(model: Any, changed: dict[str, Any], grads: Any, optimizer: Optimizer, *, is_trained: bool) -> None:
    """Restore the values ``changed`` of ``model`` if the step is skipped.

    ``optimizer.update`` restores the values of the trained model. This function restores the values of other models.
    """
    if is_trained:
        # NNX raises this error inside of a loop or a transformed function that does not take the optimizer.
        with contextlib.suppress(TraceContextError):
            return optimizer._remember(changed)
    _put_back(jnp.isfinite(global_norm(nnx.as_pure(grads))), model, changed)
