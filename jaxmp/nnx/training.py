"""The train step for NNX, on the arrays of the model and its optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmp._internals.flax.nnx import note_for_changes
from jaxmp.base.arguments import checks_arguments, require_step_arguments
from jaxmp.base.trees import path_name
from jaxmp.nnx.model_values import ModelForm, set_values, split_values
from jaxmp.nnx.optimizer import Optimizer, require_model, require_optimizer
from jaxmp.nnx.policy_check import require_policy
from jaxmp.nnx.run import TO_COPY
from jaxmp.optim.checks import require_loss
from jaxmp.program.invariants import passed_on
from jaxmp.sharding.mesh_plan import Sharding
from jaxmp.training import loss_function
from jaxmp.training import step as train_step
from jaxmp.training.state import TrainState
from jaxmp.training.update import Metrics

_FORM = "(model, optimizer, batch)"
_NOTE_FOR_STEPS = (
    "The loss function of a train step may change only the model that it gets, and read all other NNX objects.\n"
    "If it uses another model, call eval() on that model, or put both models into one module."
)


@train_step.remembers_options
def make_train_step(
    loss_fn: Callable[[Any, Any], Any],
    *,
    policy: Any = None,
    overrides: Mapping[str, str] | None = None,
    accumulate_steps: int = 1,
    mean_over: str | None = None,
    ema_decay: float | None = None,
    remat: str | Callable[..., Any] | None = None,
    loss_chunks: int | None = None,
    donate: bool = True,
    max_consecutive_skips: int = 25,
    sharding: Sharding | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> TrainStep:
    """Return a jitted train step, ``step(model, optimizer, batch) -> metrics``.

    The step reports the metrics of :func:`jaxmp.make_train_step`, and changes the model and the optimizer in place. If
    the norm of the gradients is not finite, the step is skipped: only the loss scale, the counters and the random
    number generators change. All other Variables of the model and the optimizer's state stay the same, bit for bit. The
    generators advance in every microbatch, so each microbatch has its own dropout mask.

    If the loss uses a second model, such as a teacher, pass that model in the batch (``{"x": x, "teacher":
    teacher}``). If the loss function closes over the teacher instead, the step always uses the values that the
    teacher had when the step was compiled. The loss function may read NNX objects in the batch, but not change
    them: a batch norm must be in ``eval()`` mode, and drawing from an Rngs is a change. The arguments
    ``accumulate_steps`` and ``sharding`` split the batch, so that it cannot contain a model. With these arguments,
    put both models into one module, and train one of them with ``Optimizer(both, tx, wrt=nnx.All(nnx.Param,
    nnx.PathContains("student")))``.

    Args:
      loss_fn: ``loss_fn(model, batch)``, which returns the loss (a float32 scalar) or ``(loss, metrics)`` with a dict
        ``metrics``. It may write to the model's Variables, except those that are trained.
      policy: a policy with which autocast runs the loss function, for a model without a policy.
        :func:`jaxmp.make_train_step` describes this argument and the following ones in full.
      overrides: the overrides of ``policy``.
      accumulate_steps: the number of microbatches per step.
      mean_over: the name of the metric that counts what the loss is a mean over.
      ema_decay: the decay of the moving average of an ``Optimizer(model, tx, ema=True)``.
      remat: the values that the backward pass recomputes.
      loss_chunks: the number of chunks in :func:`jaxmp.losses.projected_cross_entropy` with ``chunks="auto"``.
      donate: whether the new values reuse the memory of the old values. An ``nnx.clone`` or ``nnx.state`` that you took
        from the model earlier may share this memory, and is then deleted. To keep it, copy its arrays, pass it to
        the step in the batch (a target network), or write ``donate=False``.
      max_consecutive_skips: the number of skipped steps in a row that ends the run with an error.
      sharding: a :class:`jaxmp.sharding.Sharding`, whose specs are ``fsdp_specs(nnx.state(model, nnx.Param), mesh)``.
      compiler_options: options of XLA for this step, as in :func:`jaxmp.make_train_step`.

    Raises:
      TypeError: the model is not an NNX model; the optimizer is not a :class:`jaxmp.nnx.Optimizer`; or an error of
        :func:`jaxmp.make_train_step`.
      ValueError: the step has no ``policy``, and the model was passed to ``apply_policy`` earlier (use the copy that
        ``apply_policy`` returned); the loss function writes to trained Variables, adds or removes Variables, or changes
        an attribute that is not an array; or an error of :func:`jaxmp.make_train_step`.

    >>> model = jaxmp.nnx.apply_policy(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), "mixed_float16")
    >>> optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=jaxmp.DynamicLossScale())
    >>> step = jaxmp.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2), accumulate_steps=2)
    >>> losses = [float(step(model, optimizer, jnp.ones((4, 2)))["loss"]) for _ in range(3)]
    >>> losses[2] < losses[0], int(optimizer.step[...]), int(optimizer.skipped_steps)
    (True, 3, 0)
    """
    if isinstance(sharding, Sharding):
        sharding = dataclasses.replace(sharding, specs=nnx.as_pure(sharding.specs))
    step = train_step.make_train_step(
        _of_arrays(loss_fn),
        policy=policy,
        overrides=overrides,
        accumulate_steps=accumulate_steps,
        mean_over=mean_over,
        ema_decay=ema_decay,
        remat=remat,
        loss_chunks=loss_chunks,
        donate=donate,
        max_consecutive_skips=max_consecutive_skips,
        sharding=sharding,
        compiler_options=compiler_options,
    )
    return TrainStep(step, has_policy=policy is not None)


class TrainStep:
    """A train step for an NNX model.

    Attributes:
      of_trees: the same step as a function of a train state; :func:`state_of` returns such a state.
    """

    def __init__(self, step: train_step.TrainStep, has_policy: bool = False) -> None:
        """Make a train step.

        Args:
          step: the step as a function of a train state.
          has_policy: whether the step itself has a policy.
        """
        self.of_trees = step
        self.remake: Callable[..., TrainStep] | None = None
        self._has_policy = has_policy

    @staticmethod
    def require_arguments(*args: Any) -> None:
        """Raise a TypeError if ``args`` are not an NNX model, its optimizer and a batch."""
        require_step_arguments(args, _FORM, lambda model: require_model(model, "step", _FORM))

    @checks_arguments
    def __call__(self, model: Any, optimizer: Optimizer, batch: Any) -> Metrics:
        """Take one step; see :func:`make_train_step`."""
        state = jax.tree.map(_as_array, self._state_of(model, optimizer))
        with note_for_changes(_NOTE_FOR_STEPS):
            state, metrics = self.of_trees(state, batch)
        take_state(model, optimizer, state)
        return metrics

    def with_options(self, **options: Any) -> TrainStep:
        """Return the same step with other options of :func:`make_train_step`."""
        if self.remake is None:
            raise ValueError("this step was not made by make_train_step, so its options are unknown")
        return self.remake(**options)

    @checks_arguments
    def lower(self, model: Any, optimizer: Optimizer, batch: Any) -> jax.stages.Lowered:
        """Lower the program of a call, without running it.

        Use the result to inspect the memory, the cost and the text of the program. The arguments are not changed, and
        may have shapes in place of arrays.
        """
        return self.of_trees.lower(self._state_of(model, optimizer), batch)

    def _state_of(self, model: Any, optimizer: Optimizer) -> _State:
        state = state_of(model, optimizer)
        if not self._has_policy:
            require_policy(model, optimizer)
        return state


def _as_array(leaf: Any) -> jax.Array:
    """Return ``leaf`` as a strongly typed array.

    The results of a step are strongly typed too, so the step compiles only once.
    """
    is_strong = isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", False)  # a key has no weak_type
    return leaf if is_strong else jnp.asarray(leaf, jnp.asarray(leaf).dtype)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Form:
    """A model without its values, and the filter of its trained Variables."""

    model: ModelForm
    wrt: Any


class _ModelState(NamedTuple):
    """A model without its trained Variables.

    Attributes:
      form: the model without its values.
      generators: the state of the random number generators, which advance in skipped steps too.
      untrained: the other Variables that are not trained.
    """

    form: _Form
    generators: Any
    untrained: Any


class _State(TrainState):
    """The train state of an NNX model. Its ``model_state`` is a :class:`_ModelState`."""

    _to_copy = TO_COPY

    def apply_gradients(self, *, model_state: Any = None, **changes: Any) -> Self:
        new = super().apply_gradients(model_state=model_state, **changes)
        return new.replace(model_state=new.model_state._replace(generators=model_state.generators))


def _split(model: Any, wrt: Any) -> tuple[Any, _ModelState]:
    """Return the trained Variables of a model, and the rest."""
    form, (params, generators, untrained) = split_values(model, wrt, nnx.RngState, ...)
    return params, _ModelState(_Form(form, wrt), generators, untrained)


def state_of(model: Any, optimizer: Optimizer) -> _State:
    """Return a model and its optimizer as a train state for ``TrainStep.of_trees``."""
    require_model(model, "step", _FORM)
    require_optimizer(optimizer, "(model, optimizer)")
    params, model_state = _split(model, optimizer.wrt)
    optimizer._require_structure(params)
    return _State(
        step=optimizer.step.get_raw_value(),
        params=params,
        opt_state=nnx.as_pure(optimizer.opt_state),
        model_state=model_state,
        ema_params=optimizer.ema,
        rng=None,
        apply_fn=None,
        tx=optimizer.tx,
    )


def take_state(model: Any, optimizer: Optimizer, state: TrainState) -> None:
    """Set a model and its optimizer to a state like that of :func:`state_of`."""
    _, generators, untrained = state.model_state
    set_values(model, (optimizer.wrt, state.params), (nnx.RngState, generators), (..., untrained))
    optimizer._take(state)


def _of_arrays(loss_fn: Callable[[Any, Any], Any]) -> loss_function.LossFn:
    """Turn a loss function of a model into a function of the model's arrays."""
    loss_function.require_loss_function(loss_fn, "model, batch")

    def run(params: Any, model_state: _ModelState, batch: Any) -> tuple[Any, Any, _ModelState]:
        """Return the loss function's result, and both parts of the model after the call."""
        form, generators, untrained = model_state
        model = form.model.merge(params, generators, untrained)
        result = loss_fn(model, batch)
        params_after, state_after = _split(model, form.wrt)
        return result, params_after, state_after

    def of_arrays(params: Any, model_state: _ModelState, batch: Any, rng: Any) -> Any:
        result, params_after, state_after = run(params, model_state, batch)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        require_loss(loss, "return loss, or (loss, metrics), in this order")
        if state_after.form != model_state.form:
            raise ValueError(
                "a loss function may change only the values of a model's Variables, but it added, removed or changed\n"
                "other attributes. Call model.train() or model.eval() before the step, store changing values in\n"
                "Variables, and remove added Variables: nnx.pop(model, nnx.Intermediate)."
            )
        arrays = zip(jax.tree.leaves(params_after), jax.tree.leaves(params), strict=True)
        if any(new is not old for new, old in arrays):
            # nnx.remat and nnx.scan return all their inputs as new arrays. Only a traced program shows which new
            # arrays are equal to the old arrays.
            ends = passed_on(jax.make_jaxpr(lambda params: run(params, model_state, batch)[1])(params))
            _require_unchanged(params, ends)
        return loss, state_after, metrics

    return of_arrays


def _require_unchanged(params: Any, ends: list[int | None]) -> None:
    """Raise a ValueError if a loss function writes to a trained Variable.

    ``ends`` has an entry for each param after the call: the number of the equal param before the call, or None.
    """
    for n, (path, _) in enumerate(jax.tree.leaves_with_path(params)):
        if ends[n] != n:
            raise ValueError(
                "a train step's loss function must not write to trained Variables, got a write to "
                f"{path_name(path)!r}, as by nnx.WeightNorm;\n"
                "write your own step with jaxmp.nnx.value_and_grad and optimizer.update(model, grads)"
            )
