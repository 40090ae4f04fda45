"""A jitted train step.

A call places its arguments, and runs the computation of ``update.py``. It raises an error if the run is stuck.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import jax
import numpy as np

from jaxmp.base.arguments import checks_arguments, require_step_arguments, require_whole_number
from jaxmp.base.donation import require_not_deleted
from jaxmp.base.trees import is_traced, non_finite, require_no_raw_bytes
from jaxmp.base.user_warnings import warn_user
from jaxmp.optim.checks import as_float
from jaxmp.optim.half_params import warn_if_updates_vanish
from jaxmp.optim.loss_scaling import without_loss_scaling
from jaxmp.optim.scaling_state import get_loss_scale, get_loss_scaling_state
from jaxmp.program.walk import product_dtypes
from jaxmp.sharding.devices import DevicesOfArrays, DevicesOfMesh, FlatState, Layout
from jaxmp.sharding.mesh_plan import Sharding
from jaxmp.sharding.placement import each_once
from jaxmp.training.loss_function import LossFn, compute_dtype_of, under_policy, with_loss_chunks
from jaxmp.training.mean_check import divides_by_own_count
from jaxmp.training.product_check import ignores_params, mismatch_of_products
from jaxmp.training.remat import recompute_layers, with_remat
from jaxmp.training.state import TrainState
from jaxmp.training.stuck_runs import FLOAT16_RANGE, NonFiniteTrainingError, StuckRuns, message, non_finite_parts
from jaxmp.training.update import Metrics, S, Update

P = ParamSpec("P")
T = TypeVar("T")


def remembers_options(make: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that makes train steps, so that a step can be made again with other options."""

    @functools.wraps(make)
    def make_and_remember(*args: P.args, **options: P.kwargs) -> T:
        step: Any = make(*args, **options)
        copies: Any = {name: dict(value) if isinstance(value, dict) else value for name, value in options.items()}
        step.remake = functools.partial(make_and_remember, *args, **copies)
        return cast(T, step)

    return make_and_remember


@remembers_options
def make_train_step(
    loss_fn: LossFn,
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
    """Return a jitted train step, ``step(state, batch) -> (state, metrics)``.

    The step differentiates the scaled loss. If the norm of the gradients is not finite, the step is skipped: only the
    loss scale, the counters and the rng change. The step is compiled once for each set of shapes. The host waits for
    the device about once in ``max_consecutive_skips`` steps, to read the counters of skipped steps from the state.

    The new state has the same sharding as the old state. ``metrics`` has these entries:

    - ``loss``: the loss without the loss scale, in float32.
    - ``grad_norm``: the global norm of the gradients without the loss scale. Gradients that the optimizer discards,
      such as those of frozen params, do not count.
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
      mean_over: the name of a metric that the loss function returns: the number of tokens or examples that the loss is
        a mean over, such as ``mask.sum()``. If microbatches have different numbers, the loss, the gradients and the
        metrics are then those of the whole batch, and this metric is summed. None if the loss is a mean over all
        examples.
      ema_decay: the decay of the moving average ``state.ema_params``. It needs ``TrainState.create(ema=True)``.
      remat: the values that the backward pass recomputes: None or ``"none"`` (none); ``"dots"`` (all except results of
        products); ``"dots_no_batch"`` (all except results of products without batch dimensions); ``"layers"`` (one
        layer at a time); ``"float8"`` (all except operands of float8 products); or a policy of
        ``jax.checkpoint_policies`` or its name. The layers are the modules of a stack, whose names differ only in
        numbers (``Block_0``, ``Block_1``), and the iterations of a scan.
      loss_chunks: the number of chunks in :func:`jaxmp.losses.projected_cross_entropy` with ``chunks="auto"``. Other
        losses do not use it. By default, the number follows the memory of the device.
      donate: whether the new state reuses the memory of the old state. The state that you pass is then deleted, except
        arrays that are themselves in the batch, such as those of a target network.
      max_consecutive_skips: the number of skipped steps in a row after which an error ends the run, if the loss scale
        cannot fall any further.
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
        state is not a :class:`TrainState`.
      RuntimeError: the state was donated to an earlier step.
      NonFiniteTrainingError: ``max_consecutive_skips`` is reached, and this batch would be skipped too. The error is
        raised at most ``max_consecutive_skips`` steps later, before the state is donated. It names the arrays that are
        not finite. To find the operation, use :func:`jaxmp.inspect.first_nonfinite`. If you call the step inside your
        own ``jax.jit``, it cannot raise this error: call :func:`jaxmp.raise_if_stuck` in your loop.

    The first call warns if:

    - the loss function has float16 products, and the optimizer has no loss scale, or one that is always 1;
    - a step with a loss scale has no policy and only float32 products;
    - a step with a half-precision policy has a model whose own policy makes all products float32;
    - the policy is float32, and the model has a half-precision policy of its own;
    - the loss does not depend on the params;
    - with ``accumulate_steps``, the loss divides by a number that it computes from the microbatch, such as
      ``mask.sum()``, and ``mean_over`` is not set;
    - the params are half precision, and the optimizer is not :func:`jaxmp.low_precision`.

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
    if loss_chunks is not None:
        require_whole_number("loss_chunks", loss_chunks)
    decay = _checked_decay(ema_decay)
    loss_fn = under_policy(loss_fn, policy, overrides)
    if loss_chunks is not None:
        loss_fn = with_loss_chunks(loss_fn, loss_chunks)
    if remat == "layers":  # before weights are gathered, as for layers that the author recomputes
        loss_fn, remat = recompute_layers(loss_fn), None
    devices = DevicesOfArrays()
    if sharding is not None:
        _check_sharding(sharding, accumulate_steps)
        devices = DevicesOfMesh(sharding, loss_fn, is_remat=remat not in (None, "none"))
        loss_fn = devices.gathered
    update = Update(with_remat(loss_fn, remat), devices, accumulate_steps, decay, mean_over)
    return TrainStep(
        update,
        donate=donate,
        max_consecutive_skips=max_consecutive_skips,
        compiler_options=compiler_options,
        policy_dtype=compute_dtype_of(policy),
    )


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


_SHARED_MEMORY = (
    "An array of the batch has the memory of an array of the state, for example after jax.device_put.\n"
    "Copy it with jax.tree.map(jnp.copy, ...), or write make_train_step(..., donate=False)"
)


class TrainStep:
    """A jitted train step, the result of :func:`make_train_step`.

    A call places the state and the batch, and runs the jitted :class:`Update`.

    Attributes:
      remake: a function that makes the same step; keyword arguments replace its options. None if
        :func:`make_train_step` did not make the step.
      update: the computation of the step, a function of ``(state, batch)`` that is not jitted.
      jitted: the program of the last call, a jitted function of ``(state, batch)`` for ``jax.make_jaxpr`` and AOT
        compilation. If the state is on a mesh, the new state gets the same shardings.
    """

    def __init__(
        self,
        update: Update,
        *,
        donate: bool,
        max_consecutive_skips: int,
        compiler_options: Mapping[str, Any] | None,
        policy_dtype: np.dtype | None,
    ) -> None:
        """Make a train step.

        Args:
          update: the computation of the step.
          donate, max_consecutive_skips, compiler_options: as for :func:`make_train_step`.
          policy_dtype: the compute dtype of the step's policy; None without a policy.
        """
        self.update = update
        self.remake: functools.partial[TrainStep] | None = None
        self._donate = donate
        self._compiler_options = None if compiler_options is None else dict(compiler_options)
        self._policy_dtype = policy_dtype
        self._has_warned = False
        self._stuck_runs = StuckRuns(max_consecutive_skips)
        self._program_with = functools.lru_cache(maxsize=8)(self._jit)
        self.jitted = self._program_with(None)

    def with_options(self, **options: Any) -> TrainStep:
        """Return the same step with other options of :func:`make_train_step`.

        >>> step = jaxmp.make_train_step(lambda params, batch: jnp.mean(batch * params))
        >>> step.with_options(accumulate_steps=2).update.accumulate_steps
        2
        """
        return self._require_remake()(**options)

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that were passed to :func:`make_train_step`."""
        return dict(self._require_remake().keywords)

    def _require_remake(self) -> functools.partial[TrainStep]:
        if self.remake is None:
            raise ValueError("this step was not made by make_train_step, so its options are unknown")
        return self.remake

    def with_update(self, update: Update) -> TrainStep:
        """Return the same step with another computation, for which there is no :meth:`with_options`."""
        return TrainStep(
            update,
            donate=self._donate,
            max_consecutive_skips=self._stuck_runs.limit,
            compiler_options=self._compiler_options,
            policy_dtype=self._policy_dtype,
        )

    @checks_arguments
    def __call__(self, state: S, batch: Any) -> tuple[S, Metrics]:
        """Take one step; see :func:`make_train_step`."""
        self.require_state(state)
        if self._stuck_runs.is_stuck(state):
            self._raise_if_skipped(state, batch)
        try:
            flat, placed_batch = self._place(state, batch)
            placed: S = flat.state
            program = self.jitted = self._program_for(flat)
            with self.update.devices.set():
                if not self._has_warned:
                    self._warn(program.trace(placed, placed_batch), state)  # the call reuses this trace
                new_state, metrics = program(placed, placed_batch)
        except TypeError:
            require_no_raw_bytes((state, batch))
            raise
        except (RuntimeError, ValueError) as error:
            require_not_deleted(state, error)
            if "previously donated in the same call" in str(error):
                error.add_note(_SHARED_MEMORY)
            raise
        return new_state, metrics

    @classmethod
    def require_arguments(cls, *args: Any) -> None:
        """Raise a TypeError if ``args`` are not a :class:`TrainState` and a batch."""
        require_step_arguments(args, "(state, batch)", cls.require_state)

    @staticmethod
    def require_state(state: Any, remedy_for_nnx: str = "write jaxmp.nnx.make_train_step") -> None:
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
                f"jaxmp.TrainState.create(params=params, tx=tx), or for an NNX model {remedy_for_nnx}"
            )

    @checks_arguments
    def place(self, state: S, batch: Any) -> tuple[S, Any]:
        """Place the state and the batch on the devices of the step."""
        flat, placed_batch = self._place(state, batch)
        return flat.state, placed_batch

    def _place(self, state: Any, batch: Any) -> tuple[FlatState, Any]:
        flat = FlatState.of(state)
        of_batch = jax.tree.leaves(batch)
        if self._donate:  # a donated array must occur only once in the state and the batch
            ids = {*map(id, flat.leaves)}
            if len(ids) < len(flat.leaves) or not ids.isdisjoint(map(id, of_batch)):
                flat = flat.with_leaves(each_once(flat.leaves, of_batch))
        if not is_traced(flat.leaves):
            flat = self.update.devices.place_state(flat, of_batch)
        return flat, self.update.devices.place_batch(batch, self.update.accumulate_steps)

    def program_for(self, state: Any) -> Any:
        """Return the jitted function for a state of arrays or shapes.

        If the state is on a mesh, the function returns the new state in the same shardings.
        """
        return self._program_for(FlatState.of(state))

    def _program_for(self, flat: FlatState) -> Any:
        return self._program_with(flat.layout if flat.is_on_mesh else None)

    @checks_arguments
    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lower the program of a call for arrays or shapes.

        Use it to inspect the memory, the cost and the text of the program. If a call has compiled the program, it is
        not compiled again.
        """
        self.require_state(state)
        with self.update.devices.set():  # as in a call, so that both share a trace
            return self.program_for(state).lower(state, batch)

    def _jit(self, layout: Layout | None) -> Any:
        """Return the jitted step, with the shardings of ``layout`` for the new state.

        Without fixed shardings XLA would shard a new state like the batch.
        """
        shardings = None if layout is None else jax.tree.unflatten(layout.structure, layout.shardings)

        def step(state: S, batch: Any) -> tuple[S, Metrics]:
            self.require_state(state)
            return self.update(state, batch)

        return jax.jit(
            step,
            donate_argnums=0 if self._donate else (),
            out_shardings=(shardings, None),
            compiler_options=self._compiler_options,
        )

    # --- warnings and errors ---

    def _warn(self, traced: jax.stages.Traced, state: TrainState) -> None:
        """Warn of a step that runs, but is probably not what the user wants."""
        self._has_warned = True
        warn_if_updates_vanish(without_loss_scaling(state.tx), state.params, in_step=True)
        if ignores_params(traced):
            warn_user(
                "the loss does not depend on the params, so they are not trained; in the loss function, use its own "
                "argument, and no params or model from outside of it"
            )
        update = self.update
        if update.accumulate_steps > 1 and update.mean_over is None and divides_by_own_count(traced):
            warn_user(
                "each microbatch divides its loss by a number that it counts itself, such as mask.sum(), so the mean "
                "over microbatches is not that of the batch;\nreturn loss, {'count': mask.sum()}, and write "
                "make_train_step(..., mean_over='count')"
            )
        message = mismatch_of_products(traced, get_loss_scale(state.opt_state), self._policy_dtype)
        if message is not None:
            warn_user(message)

    def _raise_if_skipped(self, state: TrainState, batch: Any) -> None:
        """Raise the error of a stuck run if this batch would be skipped too.

        The state is not donated. The gradients are computed once more, to name the arrays that are not finite.
        """
        placed_batch = self.update.devices.place_batch(batch, self.update.accumulate_steps)
        is_skipped = jax.jit(lambda state, batch: self.update(state, batch)[1]["skipped"])
        if not is_skipped(state, placed_batch):
            return
        rng = None if state.rng is None else jax.random.split(state.rng)[1]
        gradients = jax.jit(self.update.gradients)
        products = product_dtypes(gradients.trace(state, placed_batch, rng).jaxpr)
        result = gradients(state, placed_batch, rng)
        parts = non_finite_parts(result.loss, result.grads, state.params, placed_batch)
        skips = int(get_loss_scaling_state(state.opt_state).consecutive_skipped)
        text = message(skips, float(state.loss_scale), parts)
        if "float16" in products and not np.isfinite(result.loss) and not non_finite((state.params, placed_batch)):
            text += FLOAT16_RANGE
        raise NonFiniteTrainingError(text, batch)
