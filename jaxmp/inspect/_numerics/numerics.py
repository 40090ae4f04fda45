"""Count where the values of one training step underflow or overflow."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp._internals.flax.nnx import note_for_changes
from jaxmp.base import dtypes, formats, tables
from jaxmp.base.donation import require_not_deleted
from jaxmp.base.inspection import tool
from jaxmp.base.trees import widen
from jaxmp.inspect.counts import statistics
from jaxmp.inspect.counts.counting_step import CountingStep, updates_of
from jaxmp.inspect.counts.statistics import Statistics
from jaxmp.inspect.counts.step_records import TENSORS, StepRecords, gradients_and_records, records_of_step
from jaxmp.inspect.program import nnx_models
from jaxmp.inspect.program.calls import is_inexact, is_step, require_own_settings, step_call, under_policy
from jaxmp.inspect.program.function_leaves import PythonLeaves, with_functions, without_functions
from jaxmp.optim.checks import require_loss
from jaxmp.training.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Numerics(tables.Shown):
    """The result of :func:`numerics`.

    The mappings go from path to :class:`Statistics`, in program order. The magnitudes of gradients do not include the
    loss scale. But ``below_normal`` and ``overflow`` of gradients are the counts of the scaled gradients, as in
    training. Values that underflowed to 0 during the computation are counted in ``zeros``.

    In the printed table, tensors share a row if they have the same size and dtype and their paths differ only in
    numbers. The row shows the worst tensor in float16: the first one that overflows, or else the one with the most
    values that become 0. For gradients, the loss scale of the step counts. :meth:`rows` returns all tensors.

    Attributes:
      loss: the loss.
      loss_scale: the factor by which the loss was multiplied.
      weights: the params before the step.
      activations: the results of modules and named scopes on which the loss depends.
      activation_gradients: the gradients of the activations.
      gradients: the gradients of the params.
      updates: the updates that the optimizer adds to the params; empty without an optimizer.
      not_counted: the operations whose inner values are not counted, with the reasons.
    """

    loss: float
    loss_scale: float
    weights: Mapping[str, Statistics]
    activations: Mapping[str, Statistics]
    activation_gradients: Mapping[str, Statistics]
    gradients: Mapping[str, Statistics]
    updates: Mapping[str, Statistics]
    not_counted: tuple[str, ...] = ()

    def recommended_scale(self, dtype: Any = "float16") -> float:
        """Return the loss scale with which the fewest gradients become 0 in a dtype.

        The gradients are those of activations and of params. The scale is a power of two from 1 to 2^24. Under this
        scale, four times the largest gradient is still finite. A gradient that is infinite or NaN under the step's loss
        scale counts as the smallest one that overflows there. If several scales are equally good, the smallest is
        returned. If four times the largest gradient overflows even at scale 1, the result is 1.
        """
        return self._good_scales(dtype)[0]

    def _good_scales(self, dtype: Any) -> list[float]:
        """Return all loss scales that are as good as the recommended one, in ascending order."""
        gradients = [*self.activation_gradients.values(), *self.gradients.values()]
        if not gradients:
            return [1.0]
        together = statistics.merged_statistics(gradients)
        limit = formats.format_of(dtypes.canonical_dtype(dtype)).largest
        largest = max(together.amax, limit / self.loss_scale if together.overflow else 0.0)
        scales = [2.0**n for n in range(25) if 4 * largest * 2.0**n <= limit] or [1.0]
        vanished = [together.under(dtype, scale).vanished for scale in scales]
        return [scale for scale, count in zip(scales, vanished, strict=True) if count == min(vanished)]

    def rows(self) -> Iterator[tuple[str, str, Statistics]]:
        """Yield the kind, the path and the statistics of each tensor."""
        for kind in TENSORS:
            for path, tensor in getattr(self, kind).items():
                yield kind.replace("_", " "), path, tensor

    def _shown(self) -> Any:
        title = f"loss {self.loss:.6g} at loss scale {self.loss_scale:g}"
        if math.isfinite(self.loss):
            scales = self._good_scales("float16")
            title += f"; recommended for float16: {scales[0]:.0f}"
            if len(scales) > 1:
                title += f" (equally good up to {scales[-1]:.0f})"
        rows: list[tuple[Any, ...]] = []
        for kind in TENSORS:
            tensors: Mapping[str, Statistics] = getattr(self, kind)
            if tensors:
                rows.append((kind.replace("_", " "), *[""] * (len(_COLUMNS) - 1)))
            scale = self.loss_scale if kind.endswith("gradients") else 1.0
            for group in tables.grouped(tensors.items(), _key_of_tensor):
                path, tensor = max(group, key=lambda pair: _harm_in_float16(pair[1], scale))
                shown = path if len(group) == 1 else f"{path} (worst of {len(group)})"
                rows.append((f"  {shown}", *_cells(tensor, scale)))
        return title, _COLUMNS, rows, list(self._notes())

    def _notes(self) -> Iterator[str]:
        infinite = sum(tensor.overflow for tensor in [*self.activation_gradients.values(), *self.gradients.values()])
        if infinite and self.loss_scale <= 1:
            yield f"{infinite} gradients are not finite at loss scale 1, so no loss scale helps"
        if self.not_counted:
            yield f"not counted: {'; '.join(self.not_counted)}"


_COLUMNS = ("path", "values", "dtype", "zeros", "not\nfinite", "mean", "amax", "ratio", "0 in\nfloat16")


def _key_of_tensor(path_and_tensor: tuple[str, Statistics]) -> tuple[str, int, str]:
    """Return a key that is equal for tensors of equal layers."""
    path, tensor = path_and_tensor
    return tables.without_numbers(path), tensor.count, tensor.dtype


def _harm_in_float16(tensor: Statistics, scale: float) -> tuple[bool, int, float]:
    """Return a key that is larger the more float16 would harm a tensor.

    The keys of all tensors that overflow are equal. So ``max`` returns the first of them.
    """
    half = tensor.under("float16", scale)
    return (True, 0, 0.0) if half.overflow else (False, half.vanished, tensor.amax)


def _cells(tensor: Statistics, scale: float) -> tuple[Any, ...]:
    count = max(tensor.count, 1)
    has_finite = tensor.overflow < tensor.count
    return (
        tables.short(tensor.count),
        tensor.dtype,
        f"{tensor.zeros / count:.1%}",
        tensor.overflow,
        f"{tensor.mean_abs:.1e}" if has_finite else "nan",
        f"{tensor.amax:.1e}" if has_finite else "nan",
        "" if tensor.ratio is None else f"{tensor.ratio:.1e}",
        f"{tensor.under('float16', scale).vanished / count:.1%}",
    )


@tool
def numerics(
    loss_fn: Callable[..., Any],
    policy: Any = None,
    *,
    overrides: Mapping[str, str] | None = None,
    loss_scale: float = 1.0,
    tx: optax.GradientTransformation | None = None,
) -> Callable[..., Numerics]:
    """Count the values of one training step by magnitude, layer by layer.

    The returned function, ``(params, *args, opt_state=None, loss_scale=loss_scale) -> Numerics``, differentiates the
    loss once and does not change its arguments. The function is compiled once for each set of shapes, and copies
    about 20 kB per tensor to the host. Values inside of a ``jax.lax.while_loop``, of a ``jax.shard_map``, or of a
    function with a custom derivative rule, are not counted; ``not_counted`` lists these operations.

    Args:
      loss_fn: ``loss_fn(params, *args)``, which returns the loss (a floating scalar), or a tuple whose first element is
        the loss. ``params`` is a pytree of arrays, or an ``nnx.Module``, whose Params are differentiated. ``args`` are
        pytrees of arrays. ``loss_fn`` may also be a train step. Then call the returned function with the step's
        arguments. The returned function counts the values of the next step, but does not change the state.
      policy: a policy with which :func:`jaxmp.autocast` runs the loss function, or None. Leave it out for a train step
        that was made with a policy.
      overrides: overrides of ``policy``, as for :func:`jaxmp.autocast`.
      loss_scale: a power of two by which the loss is multiplied before the differentiation, so that gradients in half
        precision underflow as in training. The magnitudes in the result do not include this factor.
      tx: an optimizer that computes ``updates`` from the gradients, with or without :func:`jaxmp.loss_scaling`. If
        ``opt_state`` is None, the optimizer starts in its initial state.

    Raises:
      ValueError: ``loss_scale`` is not a power of two; ``tx`` or ``loss_scale`` is set for a train step; or ``policy``
        for a train step that has one.
      TypeError: the loss is not a floating scalar.
      RuntimeError: an argument was donated to an earlier step.

    >>> def loss_fn(params, x):
    ...     with jax.named_scope("dense"):
    ...         y = x @ params["kernel"]
    ...     return 1e-8 * jnp.sum(y)
    >>> report = numerics(loss_fn)({"kernel": jnp.ones((4, 2))}, jnp.ones((3, 4)))
    >>> report.activation_gradients["dense"].under("float16").vanished, report.activations["dense"].amax
    (6, 4.0)
    >>> report.recommended_scale("float16")
    4.0
    """
    if is_step(loss_fn):
        require_own_settings(tx=tx, loss_scale=None if loss_scale == 1 else loss_scale)
        return _count_train_step(under_policy(loss_fn, policy, overrides))
    statistics.exponent_of(loss_scale)
    count = _counting_program(loss_fn, policy, overrides, tx)

    def run(params: Any, *args: Any, opt_state: Any = None, loss_scale: float = loss_scale) -> Numerics:
        exponent = statistics.exponent_of(loss_scale)
        require_not_deleted({"params": params, "args": args, "opt_state": opt_state})
        return read_records(count(params, args, opt_state, np.float32(loss_scale)), exponent)

    return run


def read_records(records: StepRecords, exponent: int) -> Numerics:
    """Return the numerics of a step under the loss scale ``2**exponent``."""
    loss, by_kind = records.read(exponent)
    return Numerics(loss, 2.0**exponent, **by_kind, not_counted=records.not_counted.operations)


def _count_train_step(step: Any) -> Callable[..., Numerics]:
    @functools.cache
    def counting_program(step_of_trees: TrainStep) -> Callable[..., StepRecords]:
        return jax.jit(CountingStep(step_of_trees).count)

    def run(*args: Any) -> Numerics:
        call = step_call(step, args)
        records = counting_program(call.step)(call.state, call.batch, call.rng)
        return read_records(records, statistics.exponent_of(call.loss_scale))

    return run


_NOTE_FOR_LOSSES = (
    "A loss function may change only the model that it differentiates. If you passed a train step of your own,\n"
    "pass its loss function. If the loss function changes another model, call eval() on that model."
)


def _counting_program(loss_fn: Callable[..., Any], policy: Any, overrides: Any, tx: Any) -> Callable[..., StepRecords]:
    """Return a function that counts the values of a step.

    The returned function takes the params, the other arguments of ``loss_fn``, the optimizer state and the loss scale.
    """

    @jax.jit
    def count(
        model: Any,
        functions: tuple[PythonLeaves, ...],
        params: Any,
        args: Any,
        opt_state: Any,
        scale: jax.Array,
    ) -> StepRecords:
        arrays, rebuild = (params, None) if model is None else model.params_and_rebuild(params)

        def loss_of(params: Any, *args: Any) -> jax.Array:
            with note_for_changes(_NOTE_FOR_LOSSES):
                params, *other_args = with_functions(functions, (params, *args))
                result = loss_fn(params if rebuild is None else rebuild(params), *other_args)
            loss = result[0] if isinstance(result, tuple) and result else result
            return jnp.asarray(require_loss(loss, "return the loss, or a tuple that begins with it"))

        run = under_policy(loss_of, policy, overrides)

        def scaled(params: Any) -> tuple[jax.Array, jax.Array]:
            loss = run(params, *args).astype(jnp.float32)
            return loss * scale, loss

        def unscaled(leaf: jax.Array) -> jax.Array:
            wide = widen(leaf)
            return wide / scale.astype(wide.dtype) if is_inexact(wide) else wide

        loss, grads, activations = gradients_and_records(scaled, arrays)
        updates = None
        if tx is not None:
            state = tx.init(arrays) if opt_state is None else opt_state
            updates = updates_of(tx, jax.tree.map(unscaled, grads), state, arrays, loss)
        return records_of_step(loss, arrays, grads, updates, activations)

    def count_call(params: Any, args: Any, opt_state: Any, scale: Any) -> StepRecords:
        model = None
        if nnx_models.is_module(params):
            model, params = nnx_models.split_model(params)
        functions, (params, *args) = without_functions((params, *args))
        return count(model, functions, params, args, opt_state, scale)

    return count_call
