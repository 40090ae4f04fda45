"""A jitted train step that is either applied completely or skipped.

If the gradients are not finite, the params, the optimizer's state, the batch statistics and the moving average do not
change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._internals.jax.invariants import hoisted
from jaxmp.base import trees as _tree
from jaxmp.base.arguments import printed, require_flag, require_whole_number
from jaxmp.base.donation import require_not_deleted
from jaxmp.base.user_warnings import warn_user
from jaxmp.optim.checks import as_float, require_no_line_search
from jaxmp.optim.loss_scaling import packed_grads
from jaxmp.optim.scaled_grad import global_norm, scaled_value_and_grad
from jaxmp.optim.scaling_state import get_loss_scale
from jaxmp.sharding.gathered_loss import Gathered, GatheredParams
from jaxmp.sharding.mesh_plan import Sharding, on_auto_axes
from jaxmp.sharding.mesh_types import typed
from jaxmp.sharding.placement import at_home, each_once, home_of, is_traced, placed_by_specs
from jaxmp.training.accumulation import Gradients, accumulated
from jaxmp.training.batches import microbatches, require_examples
from jaxmp.training.error_notes import error_notes
from jaxmp.training.loss_function import (
    OWN_METRICS,
    REMAT,
    LossFn,
    compute_dtype_of,
    require_same_structure,
    under_policy,
    with_remat,
)
from jaxmp.training.product_check import mismatch_of_products
from jaxmp.training.state import TrainState
from jaxmp.training.stuck_runs import NonFiniteTrainingError, StuckRuns, explanation

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
    compiler_options: Mapping[str, Any] | None = None,
) -> TrainStep:
    """Return a jitted train step, ``step(state, batch) -> (state, metrics)``.

    The step differentiates the scaled loss. If the norm of the gradients is not finite, the step is skipped: only the
    loss scale, the counters and the rng change. The step is compiled once for each set of shapes. The host waits for
    the device only after a skipped step.

    The new state has the same sharding as the old state. ``metrics`` has these entries:

    - ``loss``: the loss without the loss scale, in float32.
    - ``grad_norm``: the global norm of the gradients without the loss scale.
    - ``loss_scale``: the loss scale of this step.
    - ``skipped``: a bool, true if the step was skipped.
    - The metrics that the loss function returns.

    Args:
      loss_fn: ``loss_fn(params, batch)``, which returns ``loss`` or ``(loss, metrics)``. For batch statistics or random
        numbers, ``loss_fn(params, model_state, batch, rng)``, which returns ``(loss, new_model_state)`` or ``(loss,
        new_model_state, metrics)``. The loss is a float32 scalar, and ``metrics`` is a dict.
      policy: a policy with which :func:`jaxmp.autocast` runs the loss function. Use it for a model that has no policy.
        Only the compute dtype is used: params, loss, model state and metrics keep their dtypes.
      overrides: the overrides of ``policy``, as for :func:`jaxmp.autocast`.
      accumulate_steps: the number n of microbatches per step. Gradients are averaged over the microbatches in float32,
        and so are the loss and the metrics. If the gradients of one microbatch are not finite, the whole step is
        skipped. Example i goes into microbatch i % n, so that no example of a split batch moves to another device.
      ema_decay: the decay of the moving average ``state.ema_params``. It needs ``TrainState.create(ema=True)``.
      remat: the values that the backward pass recomputes: None or ``"none"`` (none); ``"full"`` (all); ``"dots"`` (all
        except results of products); ``"dots_no_batch"`` (all except results of products without batch dimensions);
        ``"float8"`` (all except operands of float8 products); or a policy of ``jax.checkpoint_policies`` or its name.
      donate: whether the new state reuses the memory of the old state. The state that you pass is then deleted.
      max_consecutive_skips: the number of skipped steps in a row after which an error ends the run. A step counts only
        if the loss scale could not fall in it.
      sharding: a :class:`jaxmp.sharding.Sharding`. The state and the batch are placed on its mesh. Each weight is
        gathered when the loss function uses it. The gathered weight has the dtype in which the loss function uses it:
        half precision under a half-precision policy.
      compiler_options: options of XLA for this step, such as ``{"xla_gpu_enable_latency_hiding_scheduler": True}``, as
        ``jax.jit`` takes them.

    Raises:
      ValueError: an argument is out of range, or contradicts another; the batch has no examples, or is not divisible by
        ``accumulate_steps`` or the number of devices; an override matches nothing; ``ema_decay`` is set and the state
        has no moving average, or the reverse; a metric has a reserved name, such as ``loss``; the structure of the
        model state changes; ``sharding`` does not fit the state; the gradient of a param cannot be summed in the
        ``reduce_dtype`` of ``sharding``.
      TypeError: the loss function has other parameters or results; the loss is half precision or not a scalar; the
        optimizer has a line search; the state is
        not a :class:`TrainState`; ``compiler_options`` is not a dict.
      RuntimeError: the state was donated to an earlier step.
      NonFiniteTrainingError: ``max_consecutive_skips`` is reached. The error is raised some steps later and names the
        arrays that are not finite. To find the operation, use :func:`jaxmp.inspect.first_nonfinite`. If you call the
        step inside your own ``jax.jit``, it cannot raise this error: call :func:`jaxmp.raise_if_stuck` in your loop.

    The first call warns if the loss function has float16 products and the optimizer has no loss scale. It also warns if
    a step with a loss scale has no policy and only float32 products, or if a step with a half-precision policy has a
    model whose own policy makes all products float32.

    >>> def loss_fn(params, batch):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.DynamicLossScale())
    >>> state = jaxmp.TrainState.create(params={"w": jnp.zeros((2, 1))}, tx=tx)
    >>> step = make_train_step(loss_fn, policy="mixed_float16")
    >>> state, metrics = step(state, {"x": jnp.ones((4, 2)), "y": jnp.ones((4, 1))})
    >>> float(metrics["loss"]), float(metrics["loss_scale"]), int(state.step)
    (1.0, 32768.0, 1)
    """
    require_whole_number("accumulate_steps", accumulate_steps)
    require_whole_number("max_consecutive_skips", max_consecutive_skips)
    require_flag("donate", donate, "pass donate=False to keep the states of earlier steps")
    if compiler_options is not None and not isinstance(compiler_options, Mapping):
        raise TypeError(
            f"compiler_options must be a dict from names of XLA's options to values, got {printed(compiler_options)}; "
            'write e.g. {"xla_gpu_enable_latency_hiding_scheduler": True}'
        )
    decay = _checked_decay(ema_decay)
    loss_fn = under_policy(loss_fn, policy, overrides)
    gathered: Gathered | None = None
    reduces_once = False
    if sharding is not None:
        _check_sharding(sharding, accumulate_steps)
        plan = sharding.plan()
        keeps_nothing = sharding.regather and remat in (None, "none")
        loss_fn = gathered = Gathered(plan, typed(loss_fn, sharding.mesh, plan.axes), keeps_nothing)
        reduces_once = sharding.reduce == "once" and gathered.is_split
    loss_fn = with_remat(loss_fn, remat)
    options = StepOptions(
        loss_fn,
        accumulate_steps,
        decay,
        donate,
        max_consecutive_skips,
        gathered,
        reduces_once,
        None if compiler_options is None else dict(compiler_options),
        compute_dtype_of(policy),
    )
    return TrainStep(options)


def _checked_decay(ema_decay: Any) -> float | None:
    """Return the decay of the moving average as a float, or None."""
    decay = None if ema_decay is None else as_float(ema_decay)
    if decay is not None and not 0 <= decay < 1:
        raise ValueError(f"ema_decay must lie in [0, 1), got {ema_decay!r}; 0.999 averages over about 1,000 steps")
    return decay


def _check_sharding(sharding: Any, accumulate_steps: int) -> None:
    """Raise an error if ``sharding`` is not a Sharding or needs more microbatches."""
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"sharding must be a jaxmp.sharding.Sharding(mesh, specs), got {type(sharding).__name__}; see "
            "docs/sharding.md"
        )
    if sharding.reduce == "once" and accumulate_steps == 1:
        raise ValueError("reduce='once' needs several microbatches, got accumulate_steps=1")


class _Layout(NamedTuple):
    """The structure of a state, and the sharding of each leaf (None if it has none)."""

    structure: Any
    shardings: tuple[Any, ...]


def _layout_of(state: Any) -> _Layout:
    leaves, structure = jax.tree.flatten(state)
    return _Layout(structure, tuple(getattr(leaf, "sharding", None) for leaf in leaves))


@dataclasses.dataclass(frozen=True, eq=False)
class StepOptions:
    """The options of a :class:`TrainStep`.

    Attributes:
      loss_fn: the loss function with its policy, mesh and rematerialisation.
      gathered: the loss function that gathers its weights, before rematerialisation is applied; None without a mesh.
      reduces_once: whether the gradients are reduced once per step, and not once per microbatch.
      compiler_options: the options of XLA; None for its defaults.
      policy_dtype: the compute dtype of the step's policy; None without a policy.
    """

    loss_fn: LossFn
    accumulate_steps: int
    ema_decay: float | None
    donate: bool
    max_consecutive_skips: int
    gathered: Gathered | None
    reduces_once: bool
    compiler_options: dict[str, Any] | None = None
    policy_dtype: np.dtype | None = None


class TrainStep:
    """A jitted train step, the result of :func:`make_train_step`.

    A call places the state and the batch, and runs the jitted program. The program computes the gradients of the
    batch and updates the state. A subclass may add metrics by overriding ``differentiate``.

    Attributes:
      options: the options of the step. To make the same step with a subclass, pass them to the subclass.
      jitted: the program of the last call, a jitted function of ``(state, batch)`` for ``jax.make_jaxpr`` and AOT
        compilation. If the state is on a mesh, the new state gets the same shardings.
    """

    def __init__(self, options: StepOptions) -> None:
        self.options = options
        self._plan = None if options.gathered is None else options.gathered.plan
        self._has_checked_products = False
        self._stuck_runs = StuckRuns(options.max_consecutive_skips)
        self._planned_layout: _Layout | None = None
        self._program_with = functools.lru_cache(maxsize=8)(self._jit)
        self.jitted = self._program_with(None)

    # --- a call ---

    def __call__(self, state: S, batch: Any) -> tuple[S, Metrics]:
        """Take one step; see :func:`make_train_step`."""
        self.require_state(state)
        bad_batches = self._stuck_runs.bad_batches_of(state)
        if bad_batches:
            raise self._error(state, bad_batches[-1])
        try:
            placed, placed_batch = self.placed(state, batch)
            program = self.jitted = self.program_for(placed)
            with self._on_mesh():
                if not self._has_checked_products:
                    self._check_products(program.trace(placed, placed_batch), state)  # the call reuses this trace
                new_state, metrics = program(placed, placed_batch)
        except (RuntimeError, ValueError) as error:
            require_not_deleted(state, error)
            raise
        self._stuck_runs.add(metrics["skipped"], batch)
        return new_state, metrics

    @staticmethod
    def require_state(state: Any) -> None:
        """Raise a TypeError if ``state`` is not a :class:`TrainState`."""
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
        """Place the state and the batch on the devices of the call.

        With a mesh, these are the devices of the mesh. Without a mesh, they are the devices of the committed arrays.
        """
        if self.options.donate:
            state = each_once(state)
        if not is_traced(state):
            state = self._placed_state(state, batch)
        if self._plan is None:
            return state, batch
        with self._on_mesh():
            return state, self._plan.batch(batch, self.options.accumulate_steps)

    def _placed_state(self, state: S, batch: Any) -> S:
        """Place the uncommitted arrays of ``state`` on the devices of :meth:`placed`."""
        if self._plan is None:
            home = home_of((state, batch))
            return state if home is None else jax.tree.map(lambda leaf: at_home(leaf, home), state)
        if _layout_of(state) != self._planned_layout:  # states that the step returned have this layout
            state = jax.tree.map_with_path(placed_by_specs, state, self._plan.shardings(state))
            self._planned_layout = _layout_of(state)
        return state

    def program_for(self, state: Any) -> Any:
        """Return the jitted function for a state of arrays or shapes.

        If the state is on a mesh, the function returns the new state in the same shardings.
        """
        layout = _layout_of(state)
        is_on_mesh = layout.shardings and all(isinstance(sharding, NamedSharding) for sharding in layout.shardings)
        return self._program_with(layout if is_on_mesh else None)

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lower the program of a call for arrays or shapes.

        Use it to inspect the memory, the cost and the text of the program. If a call has compiled the program, it is
        not compiled again.
        """
        self.require_state(state)
        return self.program_for(state).lower(state, batch)

    def _jit(self, layout: _Layout | None) -> Any:
        """Return the jitted step, with the shardings of ``layout`` for the new state.

        Without fixed shardings XLA would shard a new state like the batch.
        """
        shardings = None if layout is None else jax.tree.unflatten(layout.structure, layout.shardings)
        return jax.jit(
            self._step,
            donate_argnums=0 if self.options.donate else (),
            out_shardings=(shardings, None),
            compiler_options=self.options.compiler_options,
        )

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._plan is None else self._plan.set()

    # --- the program ---

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Compute the gradients of a batch, and update the state with them.

        Return the new state and the metrics.
        """
        self.require_state(state)
        require_no_line_search(state.opt_state)
        if self.options.ema_decay is None and state.ema_params is not None:
            raise ValueError(
                "the state keeps a moving average that this step would never update; pass "
                "make_train_step(ema_decay=0.999), say, or leave ema=True out"
            )
        with error_notes(state), self._on_mesh():  # a caller of ``jitted`` may not have set a mesh
            rng, step_rng = (None, None) if state.rng is None else jax.random.split(state.rng)
            loss, scaled_grads, model_state, metrics = self.placed_gradients(state, batch, step_rng)
            loss_scale = get_loss_scale(state.opt_state)
            scaled_grads = packed_grads(state.tx, state.opt_state, _tree.widen(scaled_grads))
            grads = loss_scale.unscale(scaled_grads)
            norm = global_norm(grads)
            new_state = self._updated(state, grads, model_state, loss, rng)
            skipped = new_state.skipped_steps > state.skipped_steps
        own_metrics = dict(zip(OWN_METRICS, (loss, norm, state.loss_scale, skipped), strict=True))
        return new_state, {**own_metrics, **metrics}

    def _updated(self, state: TrainState, grads: Any, model_state: Any, loss: Any, rng: Any) -> TrainState:
        """Return the state after one step of the optimizer with true gradients."""

        def updated(state: TrainState, grads: Any, model_state: Any, loss: Any, rng: Any) -> TrainState:
            extra_args = {"value": loss}  # for optax's plateaus
            return state.apply_gradients(
                grads=grads, model_state=model_state, ema_decay=self.options.ema_decay, extra_args=extra_args, rng=rng
            )

        if self._plan is not None:
            updated = on_auto_axes(updated, self._plan.specs_of(state))
        return updated(state, grads, model_state, loss, rng)

    def placed_gradients(self, state: TrainState, batch: Any, rng: Any) -> tuple[jax.Array, Any, Any, dict[str, Any]]:
        """Compute :meth:`gradients` on the mesh of the step."""
        if self._plan is None:
            return self.gradients(state, batch, rng)
        replicated = PartitionSpec()
        with self._on_mesh():
            specs, batch = self._plan.specs_of(state).params, self._plan.batch(batch, self.options.accumulate_steps)
            return on_auto_axes(self.gradients, (replicated, specs, replicated, replicated))(state, batch, rng)

    def gradients(self, state: TrainState, batch: Any, rng: Any) -> tuple[jax.Array, Any, Any, dict[str, Any]]:
        """Return the loss, gradients, model state and metrics of a whole batch.

        The loss is not scaled, but the gradients are those of the scaled loss.
        """
        require_examples(batch)
        if self.options.accumulate_steps > 1:
            result = self._accumulated_gradients(state, batch, rng)
        else:
            result = self._differentiate(self.options.loss_fn, state, state.model_state, batch, rng)
        return result.loss, result.grads, result.model_state, {**result.metrics, **result.records}

    def _accumulated_gradients(self, state: TrainState, batch: Any, rng: Any) -> Gradients:
        """Compute the gradients of a batch in a scan over microbatches."""
        count = self.options.accumulate_steps
        inputs = microbatches(batch, count), None if rng is None else jax.random.split(rng, count)
        first_inputs = jax.tree.map(lambda leaf: leaf[0], inputs)
        loss_fn, learned = self._loss_of_microbatch(state, first_inputs)
        gathered = self.options.gathered

        def differentiate(model_state: Any, batch: Any, rng: Any) -> Gradients:
            return self._differentiate(loss_fn, state.replace(params=learned), model_state, batch, rng)

        result = accumulated(differentiate, learned, state.model_state, inputs, count)
        total = result.grads
        if gathered is not None and self.options.reduces_once:
            total = gathered.reduced(*total)
        return result._replace(grads=jax.tree.map(lambda leaf: leaf / count, total))

    def _loss_of_microbatch(self, state: TrainState, first_inputs: tuple[Any, Any]) -> tuple[LossFn, Any]:
        """Return the loss function of a microbatch, and the tree to differentiate.

        The tree is usually the params. If gradients are reduced once per step, the tree also has the taps of
        :class:`GatheredParams`. Taps are zeros whose cotangents are the gradients of the gathered weights. Operations
        that depend only on the params are moved out of the loop over microbatches, unless each microbatch gathers the
        weights itself.
        """
        other_args = (state.model_state, *first_inputs)
        loss_fn, gathered = self.options.loss_fn, self.options.gathered
        if gathered is not None and self.options.reduces_once:
            gathered_params = gathered.gather(state.params, *other_args)
            loss_of_gathered = hoisted(loss_fn, gathered_params, other_args, REMAT["float8"])

            def loss_of_learned(learned: Any, *other_args: Any) -> Any:
                params, taps = learned
                return loss_of_gathered(GatheredParams(params, gathered_params.weights, taps), *other_args)

            return loss_of_learned, (gathered_params.params, gathered_params.taps)
        if gathered is not None and gathered.is_split:
            return loss_fn, state.params
        return hoisted(loss_fn, state.params, other_args, REMAT["float8"]), state.params

    def _differentiate(self, loss_fn: LossFn, state: TrainState, model_state: Any, batch: Any, rng: Any) -> Gradients:
        """Return the gradients of a microbatch, and the other results."""

        def loss_of_params(params: Any) -> Any:
            return loss_fn(params, model_state, batch, rng)

        (loss, (new_model_state, metrics)), grads, records = self.differentiate(loss_of_params, state)
        return Gradients(loss, grads, require_same_structure(new_model_state, model_state), metrics, records)

    def differentiate(self, loss_fn: Callable[[Any], Any], state: TrainState) -> tuple[Any, Any, dict[str, Any]]:
        """Return the results of ``loss_fn``, its scaled gradients, and records.

        The gradients are those of the scaled loss. Records are additional metrics, which are stacked over microbatches,
        not averaged. This class returns no records, but a subclass may.
        """
        gradients = scaled_value_and_grad(loss_fn, get_loss_scale(state.opt_state), has_aux=True)
        return *gradients(state.params), {}

    # --- warnings and errors ---

    def _check_products(self, traced: jax.stages.Traced, state: TrainState) -> None:
        """Warn if the products of the loss do not fit the loss scale or the policy."""
        self._has_checked_products = True
        message = mismatch_of_products(traced, get_loss_scale(state.opt_state), self.options.policy_dtype)
        if message is not None:
            warn_user(message)

    def _error(self, state: TrainState, batch: Any) -> NonFiniteTrainingError:
        """Return the error for a stuck run.

        The method computes the gradients of a skipped batch again, to name the arrays that are not finite.
        """
        placed_batch = batch if self._plan is None else self._plan.batch(batch, self.options.accumulate_steps)
        rng = None if state.rng is None else jax.random.split(state.rng)[1]
        loss, grads, _, _ = jax.jit(self.placed_gradients)(state, placed_batch, rng)
        text = explanation(loss, grads, state.loss_scale, state.params, placed_batch, self._stuck_runs.limit)
        return NonFiniteTrainingError(text, batch)
