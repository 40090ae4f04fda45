"""A jitted train step that is taken whole or not at all.

Where gradients are not finite, params, optimizer, batch statistics and moving average stay as they were.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._internals.jax.invariants import hoisted
from jaxmp._internals.jax.walk import product_dtypes
from jaxmp.base import trees as _tree
from jaxmp.base.arguments import require_flag
from jaxmp.base.donation import is_deleted, require_not_deleted
from jaxmp.optim.checks import as_float
from jaxmp.optim.loss_scale import NoOpLossScale
from jaxmp.optim.loss_scaling import with_loss
from jaxmp.optim.scaled_grad import global_norm, scaled_value_and_grad
from jaxmp.optim.scaling_state import get_loss_scale
from jaxmp.sharding.gathered_loss import Gathered, GatheredParams
from jaxmp.sharding.mesh_types import typed
from jaxmp.sharding.placement import at, at_home, each_once, home_of, is_traced
from jaxmp.sharding.plan import Sharding, on_auto_axes
from jaxmp.training.batches import microbatches, require_examples
from jaxmp.training.loss_function import (
    OWN_METRICS,
    REMAT,
    LossFn,
    require_same_structure,
    under_policy,
    with_remat,
)
from jaxmp.training.state import TrainState
from jaxmp.training.stuck_runs import StuckRuns, explanation

S = TypeVar("S", bound="TrainState")
Metrics = dict[str, jax.Array]


def make_train_step(
    loss_fn: LossFn,
    *,
    policy: Any = None,
    overrides: Mapping[str, str] | None = None,
    accumulate_steps: int = 1,
    ema_decay: float | None = None,
    remat: str | Callable[..., Any] | None = None,
    donate: bool = True,
    max_consecutive_skips: int = 25,
    sharding: Sharding | None = None,
) -> TrainStep:
    """A jitted ``step(state, batch) -> (state, metrics)`` for a :class:`TrainState`.

    The step differentiates the scaled loss. If the norm of the gradients is not finite, the step is skipped: only the
    loss scale, the counters and the rng change (:func:`jaxmp.loss_scaling` can test the updates too). The step is
    compiled once for equal shapes. The host waits for the device after a skipped step only.

    The state comes back in the shardings that it came with. Uncommitted arrays move to the device of the others, or to
    all devices of a mesh. To move a param later, write ``state.replace(params=…)``: a param that is moved in place
    (``state.params["w"] = …``) comes back where it was.

    ``metrics`` holds ``loss`` (the true one, float32), ``grad_norm`` (of the true gradients), ``loss_scale`` (the
    one this step used), ``skipped`` (bool, whether this step was) and what the loss function returned, by its names.

    Args:
      loss_fn: ``loss_fn(params, model_state, batch, rng)`` returning ``(loss, new_model_state)`` or
        ``(loss, new_model_state, metrics)``, the loss a float32 scalar, ``metrics`` a dict.
      policy: puts the loss function, whose model has no policy then, under :func:`jaxmp.autocast`: whatever
        names one policy. Its compute dtype is what counts: params, loss, model state and metrics keep their own. With
        one that computes in float32 there is no autocast, unless there are ``overrides``.
      overrides: those of the autocast.
      accumulate_steps: microbatches per step. Every n-th example goes into the same one, so that a batch sharded over
        axis 0 stays where it is, and a scalar into each; gradients are summed in float32 and averaged, like loss and
        metrics; one bad microbatch skips the step.
      ema_decay: decay of ``state.ema_params``, which needs ``TrainState.create(ema=True)``.
      remat: what the backward pass recomputes: None or ``"none"`` for nothing, ``"full"``, ``"dots"`` (keep products),
        ``"dots_no_batch"``, ``"float8"`` (keep the operands of float8 products), the name of a policy in
        ``jax.checkpoint_policies``, or such a policy.
      donate: whether the state's memory is reused; the state passed in is then deleted.
      max_consecutive_skips: after so many skipped steps in a row, with a loss scale that cannot fall, the run ends.
      sharding: a :class:`jaxmp.sharding.Sharding` over the devices of a mesh. State and batch move there, unless they
        were put elsewhere. Each weight is gathered where the loss function uses it, in the dtype in which it is used
        there, and once in a pass; docs/sharding.md has the rules.

    Raises (here, or from the step):
      ValueError: an argument is out of range, or makes no sense with the others; the batch has no examples, or does not
        divide by ``accumulate_steps`` or the devices; an override matches nothing; the state keeps a moving average and
        the step none, or the reverse; a metric has a name of the step's own; the model state has another structure than
        it came with; ``sharding`` does not fit; the gradient
        of a param cannot be summed in its ``reduce_dtype``.
      TypeError: the loss function takes or returns something else; the loss is float16 or no scalar; the state is no
        :class:`TrainState`.
      RuntimeError: the state was donated to an earlier step.
      NonFiniteTrainingError: ``max_consecutive_skips`` is reached. This is noticed some steps late: only after
        a skipped step does the host wait for a counter.

    Warns once when the loss has float16 products and the optimizer no loss scale.

    >>> def loss_fn(params, model_state, batch, rng):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2), model_state
    >>> tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale())
    >>> state = jaxmp.TrainState.create(params={"w": jnp.zeros((2, 1))}, tx=tx)
    >>> step = make_train_step(loss_fn)
    >>> state, metrics = step(state, {"x": jnp.ones((4, 2)), "y": jnp.ones((4, 1))})
    >>> float(metrics["loss"]), float(metrics["loss_scale"]), int(state.step)
    (1.0, 32768.0, 1)
    """
    for name, steps in (("accumulate_steps", accumulate_steps), ("max_consecutive_skips", max_consecutive_skips)):
        if not isinstance(steps, (int, np.integer)) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {steps!r}; 1 is the least")
    decay = None if ema_decay is None else as_float(ema_decay)
    if decay is not None and not 0 <= decay < 1:
        raise ValueError(f"ema_decay must lie in [0, 1), got {ema_decay!r}; 0.999 averages over about 1,000 steps")
    require_flag("donate", donate, "pass donate=False to keep the states of earlier steps")
    if sharding is not None and not isinstance(sharding, Sharding):
        raise TypeError(
            f"sharding is a jaxmp.sharding.Sharding(mesh, specs), got {type(sharding).__name__}; see docs/sharding.md"
        )
    sums_once = sharding is not None and sharding.reduce == "once"
    if sums_once and accumulate_steps == 1:
        raise ValueError("reduce='once' sums the gradients of several microbatches, got accumulate_steps=1")
    loss_fn = under_policy(loss_fn, policy, overrides)
    gathered = None
    if sharding is not None:
        plan = sharding.plan()
        keeps_nothing = sharding.regather and remat in (None, "none")
        loss_fn = gathered = Gathered(plan, typed(loss_fn, sharding.mesh, plan.axes), keeps_nothing)
    loss_fn = with_remat(loss_fn, remat)
    return TrainStep(loss_fn, accumulate_steps, decay, donate, max_consecutive_skips, gathered, sums_once)


class _Layout(NamedTuple):
    """The structure of a state and the sharding of each leaf, None for a leaf without one."""

    structure: Any
    shardings: tuple[Any, ...]


def _layout_of(state: Any) -> _Layout:
    leaves, structure = jax.tree.flatten(state)
    return _Layout(structure, tuple(getattr(leaf, "sharding", None) for leaf in leaves))


class TrainStep:
    """A jitted train step; :func:`make_train_step` returns it.

    Attributes:
      jitted: the program of the last call, a jitted function of ``(state, batch)`` for ``jax.make_jaxpr`` and AOT
        compilation. For a state on a mesh it returns the state in its shardings.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        accumulate_steps: int,
        ema_decay: float | None,
        donate: bool,
        max_consecutive_skips: int,
        gathered: Gathered | None = None,
        reduces_once: bool = False,
    ) -> None:
        # jaxmp.inspect makes a step of a subclass with the same arguments.
        self.arguments = loss_fn, accumulate_steps, ema_decay, donate, max_consecutive_skips, gathered, reduces_once
        self._loss_fn = loss_fn
        self._gathered = gathered
        self._reduces_once = reduces_once and gathered is not None and gathered.is_split
        self._plan = None if gathered is None else gathered.plan
        self._accumulate_steps, self._ema_decay, self._donate = accumulate_steps, ema_decay, donate
        self._warned = False
        self._stuck_runs = StuckRuns(max_consecutive_skips)
        self._planned_layout: _Layout | None = None
        self._program_with = functools.lru_cache(maxsize=8)(self._jit)
        self.jitted = self._program_with(None)

    def __call__(self, state: S, batch: Any) -> tuple[S, Metrics]:
        """Take one step; see :func:`make_train_step`."""
        self.require_state(state)
        bad_batches = [bad for bad in self._stuck_runs.bad_batches_of(state) if not is_deleted(bad)]
        if bad_batches:
            raise self._error(state, bad_batches[-1])
        try:
            placed, placed_batch = self.placed(state, batch)
            program = self.jitted = self.program_for(placed)
            with self._on_mesh():
                new_state, metrics = program(placed, placed_batch)
        except (RuntimeError, ValueError) as error:
            require_not_deleted(state, error)
            raise
        self._stuck_runs.add(metrics["skipped"], batch)
        return new_state, metrics

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lower the program that calls run, of arrays or shapes, for its memory, its cost and its text.

        What calls have compiled is not compiled again.
        """
        self.require_state(state)
        return self.program_for(state).lower(state, batch)

    def program_for(self, state: Any) -> Any:
        """Return the jitted function for a state of arrays or shapes, which returns it in the same shardings."""
        layout = _layout_of(state)
        is_on_mesh = layout.shardings and all(isinstance(sharding, NamedSharding) for sharding in layout.shardings)
        return self._program_with(layout if is_on_mesh else None)

    @staticmethod
    def require_state(state: Any) -> None:
        """Raise a TypeError unless ``state`` is a :class:`TrainState`, as Flax's or the params alone are not."""
        if isinstance(state, tuple) and state and isinstance(state[0], TrainState):
            raise TypeError(
                "a step takes a jaxmp.TrainState, got the tuple that a step returned; unpack it: state, metrics = "
                "step(state, batch)"
            )
        if not isinstance(state, TrainState):
            kind = type(state)
            raise TypeError(
                f"a step takes a jaxmp.TrainState, got {kind.__module__}.{kind.__name__}; make one with "
                "jaxmp.TrainState.create(params=params, tx=tx)"
            )

    def placed(self, state: S, batch: Any) -> tuple[S, Any]:
        """Return state and batch where a call computes with them: on the mesh of the step, or on one device."""
        state = self._placed(state, batch)
        if self._plan is None:
            return state, batch
        with self._on_mesh():
            return state, self._plan.batch(batch, self._accumulate_steps)

    def _placed(self, state: S, batch: Any) -> S:
        """Return ``state`` with uncommitted arrays on the devices of the others, the batch or the plan."""
        if self._donate:
            state = each_once(state)
        if is_traced(state):
            return state
        if self._plan is not None:
            if _layout_of(state) != self._planned_layout:  # that of every state which the step returns
                state = jax.tree.map_with_path(at, state, self._plan.shardings(state))
                self._planned_layout = _layout_of(state)
            return state
        home = home_of((state, batch))
        return state if home is None else jax.tree.map(lambda leaf: at_home(leaf, home), state)

    def _jit(self, layout: _Layout | None) -> Any:
        """Return the jitted step; left to itself, XLA would shard a new state by the batch."""
        shardings = None if layout is None else jax.tree.unflatten(layout.structure, layout.shardings)
        return jax.jit(self._step, donate_argnums=0 if self._donate else (), out_shardings=(shardings, None))

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        self.require_state(state)
        with self._on_mesh():  # also for who calls ``jitted``
            return self._stepped(state, batch)

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._plan is None else self._plan.set()

    def _stepped(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        if self._ema_decay is None and state.ema_params is not None:
            raise ValueError(
                "the state keeps a moving average that this step would never update; pass "
                "make_train_step(ema_decay=0.999), say, or leave ema=True out"
            )
        rng, step_rng = (None, None) if state.rng is None else jax.random.split(state.rng)
        loss, scaled_grads, model_state, metrics = self.placed_gradients(state, batch, step_rng)
        loss_scale = get_loss_scale(state.opt_state)
        scale = jnp.asarray(loss_scale.loss_scale, jnp.float32)
        grads = loss_scale.unscale(_tree.widen(scaled_grads))
        norm = global_norm(grads)

        def updated(state: TrainState, grads: Any, model_state: Any, loss: Any, rng: Any) -> TrainState:
            apply = functools.partial(
                state.apply_gradients, grads=grads, model_state=model_state, ema_decay=self._ema_decay, rng=rng
            )
            return with_loss(lambda **value: apply(extra_args=value), loss)

        if self._plan is not None:
            updated = on_auto_axes(updated, self._plan.specs_of(state))
        new_state = updated(state, grads, model_state, loss, rng)
        skipped = new_state.skipped > state.skipped
        own = dict(zip(OWN_METRICS, (loss, norm, scale, skipped), strict=True))
        return new_state, {**own, **metrics}

    def placed_gradients(self, state: TrainState, batch: Any, rng: Any) -> tuple[jax.Array, Any, Any, dict[str, Any]]:
        """As ``gradients``, on the mesh of the step."""
        if self._plan is None:
            return self.gradients(state, batch, rng)
        whole = PartitionSpec()
        with self._on_mesh():
            specs, batch = self._plan.specs_of(state).params, self._plan.batch(batch, self._accumulate_steps)
            return on_auto_axes(self.gradients, (whole, specs, whole, whole))(state, batch, rng)

    def gradients(self, state: TrainState, batch: Any, rng: Any) -> tuple[jax.Array, Any, Any, dict[str, Any]]:
        """True loss, gradients of the scaled loss, new model state and metrics of a whole batch."""
        require_examples(batch)
        return state._given_to(lambda state: self._gradients(state, batch, rng))

    def _gradients(self, state: TrainState, batch: Any, rng: Any) -> tuple[jax.Array, Any, Any, Metrics]:
        gathered: GatheredParams | None = None
        loss_of: Callable[..., Any] = self._loss_fn

        def gradients(
            model_state: Any, batch: Any, rng: Any
        ) -> tuple[jax.Array, Any, Any, dict[str, Any], dict[str, Any]]:
            self._warn_if_unscaled(state, model_state, batch, rng)

            def loss_fn(params: Any) -> Any:
                params = params if gathered is None else GatheredParams(params[0], gathered.weights, params[1])
                return loss_of(params, model_state, batch, rng)

            learned = state if gathered is None else state.replace(params=(gathered.params, gathered.taps))
            (loss, (new_model_state, metrics)), grads, seen = self.differentiated(loss_fn, learned)
            return loss, grads, require_same_structure(new_model_state, model_state), metrics, seen

        n = self._accumulate_steps
        if n == 1:
            loss, grads, model_state, metrics, seen = gradients(state.model_state, batch, rng)
            return loss, grads, model_state, {**metrics, **seen}

        def accumulate(carry: Any, microbatch: Any) -> Any:
            total, model_state = carry
            loss, grads, new_state, metrics, seen = gradients(model_state, *microbatch)
            total = jax.tree.map(jnp.add, total, _tree.widen(grads))
            return (total, _tree.select_tree(True, new_state, model_state)), (loss, metrics, seen)

        rngs = None if rng is None else jax.random.split(rng, n)
        turns = microbatches(batch, n), rngs
        first = jax.tree.map(lambda leaf: leaf[0], turns)
        if self._gathered is not None and self._reduces_once:
            gathered = self._gathered.gather(state.params, state.model_state, *first)
        if (
            gathered is not None or self._gathered is None or not self._gathered.is_split
        ):  # else each turn gathers its own
            fixed = state.params if gathered is None else gathered
            loss_of = hoisted(self._loss_fn, fixed, (state.model_state, *first), REMAT["float8"])
        learned = state.params if gathered is None else (gathered.params, gathered.taps)
        zeros = jax.tree.map(jnp.zeros_like, _tree.widen(learned))
        start = zeros, state.model_state
        (total, model_state), (loss, metrics, seen) = jax.lax.scan(accumulate, start, turns, length=n)  # of no arrays
        if self._gathered is not None and gathered is not None:
            total = self._gathered.reduced(*total)
        mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0, dtype=jnp.float32), (loss, metrics))
        return mean[0], jax.tree.map(lambda leaf: leaf / n, total), model_state, {**mean[1], **seen}

    def differentiated(self, loss_fn: Callable[[Any], Any], state: TrainState) -> tuple[Any, Any, dict[str, Any]]:
        """Return the results of ``loss_fn``, the gradients, and what a subclass records: here nothing."""
        gradients = scaled_value_and_grad(loss_fn, get_loss_scale(state.opt_state), has_aux=True)
        return *gradients(state.params), {}

    def _warn_if_unscaled(self, state: TrainState, *args: Any) -> None:
        if self._warned or not isinstance(get_loss_scale(state.opt_state), NoOpLossScale):
            return
        if "float16" in product_dtypes(jax.make_jaxpr(self._loss_fn)(state.params, *args)):
            self._warned = True
            warnings.warn(
                "the loss has float16 products and no loss scale, so that small gradients become zero; write tx = "
                "jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale())",
                stacklevel=2,
            )

    def _error(self, state: TrainState, batch: Any) -> NonFiniteTrainingError:
        """Return the error that says what is not finite, from the gradients of the last bad batch."""
        from jaxmp.inspect.blame import first_nonfinite  # not needed before

        batch = batch if self._plan is None else self._plan.batch(batch, self._accumulate_steps)
        rng = None if state.rng is None else jax.random.split(state.rng)[1]
        loss, grads, _, _ = jax.jit(self.placed_gradients)(state, batch, rng)
        scale = get_loss_scale(state.opt_state)
        error = NonFiniteTrainingError(explanation(loss, grads, scale, state.params, batch, self._stuck_runs.limit))
        try:
            error.blame = first_nonfinite(self)(state, batch)
        except Exception as failure:  # an error of the search must not hide the error that it is to explain
            error.add_note(f"the operation was not found: {type(failure).__name__}: {failure}")
        if error.blame is not None:
            error.args = (f"{error}. First: {error.blame.summary()}",)
        return error


class NonFiniteTrainingError(FloatingPointError):
    """Too many steps in a row were not finite although the loss scale was as low as it can be.

    ``blame`` is the :class:`jaxmp.inspect.Blame` of the last bad step: which operation made the first infinity or NaN.
    None if there is none in loss and gradients.
    """

    blame: Any = None
