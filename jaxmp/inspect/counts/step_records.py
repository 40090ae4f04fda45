"""Count a step's values on the device, and read the counts on the host.

A record is the counts of one tensor's values, see ``Counts`` in ``counting.py``. An activation is a value that
a module or a named scope returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base import dtypes
from jaxmp.base.trees import path_name
from jaxmp.inspect.counts import counting, statistics
from jaxmp.inspect.counts.counting import Counts
from jaxmp.inspect.counts.statistics import Statistics
from jaxmp.inspect.program.borders import not_recorded, read_for_recording, returned
from jaxmp.inspect.program.calls import is_inexact, with_leaves
from jaxmp.inspect.program.recorded_evaluation import evaluate_and_record
from jaxmp.inspect.program.taps import Taps
from jaxmp.inspect.program.tracing import program_of
from jaxmp.program.values import Key

TENSORS = ("weights", "activations", "activation_gradients", "gradients", "updates")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class RecordedTensor:
    """The description of a tensor whose values are counted.

    Attributes:
      kind: one of :data:`TENSORS`.
      path: the path of the param, or of the module or scope that returns the activation.
      dtype: the dtype of the tensor.
      size: the number of values in one iteration of the loops around the tensor. A complex element has two values.
      lengths: the number of iterations of each scan around the tensor, outermost first.
      number: the position of the param among all params; 0 for activations and their gradients.
    """

    kind: str
    path: str
    dtype: Any
    size: int
    lengths: tuple[int, ...] = ()
    number: int = 0


TensorRecords = list[tuple[RecordedTensor, jax.Array]]
"""Tensors with their records. A record has a leading axis for each scan around its tensor."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NotCounted:
    """The operations whose inner values are not counted, with the reasons."""

    operations: tuple[str, ...] = ()


class Activations(NamedTuple):
    """The records of activations and of their gradients."""

    records: TensorRecords
    not_counted: NotCounted


class StepRecords(NamedTuple):
    """All records of a step.

    Attributes:
      loss: the loss.
      groups: groups of tensors, each with its packed records. Axis 0 of the records has one entry for each tensor.
      not_counted: the operations whose inner values are not counted.
    """

    loss: jax.Array
    groups: list[tuple[tuple[RecordedTensor, ...], jax.Array]]
    not_counted: NotCounted

    def read(self, exponent: int) -> tuple[float, dict[str, dict[str, Statistics]]]:
        """Return the loss, and the statistics by kind and path.

        Args:
          exponent: the binary logarithm of the loss scale.
        """
        loss, groups, _ = jax.device_get(self)
        parts: dict[str, list[tuple[RecordedTensor, Statistics]]] = {kind: [] for kind in TENSORS}
        for tensors, records in groups:
            for tensor, record in zip(tensors, records, strict=True):
                parts[tensor.kind].append((tensor, _statistics(tensor, record, exponent)))
        return float(loss), {kind: _by_path(parts[kind]) for kind in TENSORS}


def _statistics(tensor: RecordedTensor, packed: np.ndarray, exponent: int) -> Statistics:
    record, lost, norms = counting.unpacked(packed)
    exponent = exponent if tensor.kind.endswith("gradients") else 0
    result = statistics.from_record(record, tensor.dtype, tensor.size, exponent, tensor.lengths)
    if lost.size:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = float(norms[0] / norms[1])
        lost_by_dtype = dict(zip(dtypes.NAMES, lost.tolist(), strict=True))
        result = dataclasses.replace(result, ratio=ratio, _lost=lost_by_dtype)
    return result


def _by_path(parts: list[tuple[RecordedTensor, Statistics]]) -> dict[str, Statistics]:
    by_path: dict[str, list[Statistics]] = {}
    for tensor, part in sorted(parts, key=lambda pair: pair[0].number):
        by_path.setdefault(tensor.path, []).append(part)
    return {path: statistics.merged_statistics(parts) for path, parts in by_path.items()}


def records_of_step(loss: Any, params: Any, grads: Any, updates: Any, activations: Activations) -> StepRecords:
    """Return all records of a step.

    Args:
      loss: a scalar.
      params: a tree of arrays.
      grads: the gradients of the params.
      updates: the updates of the params; None without an optimizer.
      activations: the records of activations and of their gradients. They may have a leading axis of microbatches.
    """
    groups = []
    for kind, tree in (("weights", params), ("gradients", grads), ("updates", updates)):
        groups += _records_of_tree(kind, tree, params)
    for tensor, packed in activations.records:
        has_microbatches = packed.ndim > len(tensor.lengths) + 1
        by_microbatch = packed if has_microbatches else packed[None]
        groups.append(((tensor,) * len(by_microbatch), by_microbatch))
    return StepRecords(loss, groups, activations.not_counted)


def _records_of_tree(kind: str, tree: Any, params: Any) -> list[tuple[tuple[RecordedTensor, ...], jax.Array]]:
    """Return the tensors of a tree in groups, each with its packed records.

    ``tree`` has the structure of ``params``. If ``tree`` is None, there are no records. Tensors of the same shape and
    dtypes form a group and are counted together. Otherwise XLA would compile the counting code once for each tensor.
    """
    groups: dict[Any, list[tuple[RecordedTensor, Any, Any]]] = {}
    weights = jax.tree.leaves_with_path(params)
    for number, (leaf, (path, weight)) in enumerate(zip(jax.tree.leaves(tree), weights, strict=False)):
        if is_inexact(weight):
            tensor = RecordedTensor(kind, path_name(path), leaf.dtype, counting.number_of_values(leaf), number=number)
            groups.setdefault((leaf.shape, leaf.dtype, weight.dtype), []).append((tensor, leaf, weight))
    records = []
    for group in groups.values():
        tensors, leaves, weights_of_group = zip(*group, strict=True)
        moved = ()
        if kind == "updates":
            moved = jax.vmap(counting.distance_moved)(jnp.stack(leaves), jnp.stack(weights_of_group))
        packed = counting.packed(jax.vmap(counting.counts_of)(jnp.stack(leaves)), *moved)
        records.append((tensors, packed))
    return records


def gradients_and_records(fun: Callable[[Any], tuple[jax.Array, Any]], params: Any) -> tuple[Any, Any, Activations]:
    """Differentiate a function, and record the activations and their gradients.

    Args:
      fun: a function that returns the scaled loss and auxiliary results.
      params: a tree of arrays.

    Returns:
      The auxiliary results, the gradients, and the records. The gradients of integers and other leaves are 0.
    """
    jaxpr, consts, structure = program_of(fun, params)
    leaves, tree = jax.tree.flatten(params)
    numbers = [n for n, leaf in enumerate(leaves) if is_inexact(leaf)]
    taps = _CountingTaps(jaxpr)

    def scaled(differentiated: Sequence[Any], sinks: Any) -> Any:
        arguments = with_leaves(leaves, numbers, differentiated)
        results, records = evaluate_and_record(jaxpr, consts, arguments, taps, sinks)
        return results[0], (results, records)

    differentiate = jax.grad(scaled, argnums=(0, 1), has_aux=True)
    (differentiated_grads, sinks), (results, records) = differentiate([leaves[n] for n in numbers], taps.sinks())
    packed = jax.tree.map(counting.packed, records, is_leaf=lambda node: isinstance(node, Counts))
    recorded = [*taps.named("activations", packed), *taps.named("activation_gradients", sinks)]
    grads = with_leaves([jnp.zeros_like(leaf) for leaf in leaves], numbers, differentiated_grads)
    _, aux = jax.tree.unflatten(structure, results)
    return aux, jax.tree.unflatten(tree, grads), Activations(recorded, NotCounted(taps.not_recorded))


class _CountingTaps(Taps):
    """Count the values that scopes return, and the gradients of these values.

    Only values on which the loss (the first result) depends are counted. ``program/taps.py`` explains taps and sinks.
    """

    def __init__(self, jaxpr: Any) -> None:
        is_loss = [True] + [False] * (len(jaxpr.outvars) - 1)
        program = read_for_recording(jaxpr)
        super().__init__(returned(program, is_loss))
        self.not_recorded = not_recorded(program)

    def record(self, value: jax.Array) -> Counts:
        return counting.counts_of(value)

    def record_cotangent(self, cotangent: jax.Array) -> jax.Array:
        return counting.packed(counting.counts_of(cotangent))

    def sink(self, aval: Any, lengths: tuple[int, ...]) -> jax.Array:
        return jnp.zeros((*lengths, counting.SIZE))

    def named(self, kind: str, records: Mapping[Key, Any]) -> TensorRecords:
        """Pair each record with a description of its tensor, of kind ``kind``."""
        tensors = []
        for border in self.borders:
            aval = border.aval
            record = records.get(border.key, {}).get(border.position)
            if record is not None:
                size = counting.number_of_values(aval)
                tensors.append((RecordedTensor(kind, border.path, aval.dtype, size, border.lengths), record))
        return tensors
