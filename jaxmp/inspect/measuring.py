"""One step of training that counts what its values are: where gradients underflow, overflow, or change no weight."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp.base import dtypes, formats, tables
from jaxmp.base import trees as _tree
from jaxmp.base.donation import require_not_deleted
from jaxmp.engine.autocast import autocast
from jaxmp.inspect.program import statistics
from jaxmp.inspect.program.calls import is_step, require_own_settings, step_call
from jaxmp.inspect.program.equations import Key, places, program_of
from jaxmp.inspect.program.evaluate import evaluate
from jaxmp.inspect.program.statistics import Record, Statistics
from jaxmp.inspect.program.values import returned
from jaxmp.optim.checks import require_loss
from jaxmp.optim.loss_scaling import with_loss
from jaxmp.optim.scaled_grad import scaled_loss
from jaxmp.optim.scaling_state import get_loss_scale
from jaxmp.training.state import TrainState
from jaxmp.training.step import Metrics, S, TrainStep

TENSORS = ("weights", "activations", "activation_gradients", "gradients", "updates")


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What :func:`numerics` found: mappings from path to :class:`Statistics`, in program order.

    Gradients are those of the loss itself, in whatever dtype and under whatever loss scale they were computed: they are
    divided by the scale, exactly. What vanished on the way is among their ``zeros``, and ``below_normal`` and
    ``overflow`` are counted as they were computed.

    Attributes:
      loss: the loss.
      loss_scale: what it was multiplied by.
      weights: the params, before the step.
      activations: what each module, or scope with a name, returns, on the way to the loss.
      activation_gradients: the gradients of these.
      gradients: those of the params.
      updates: what the optimizer adds to the params; empty without one.
    """

    loss: float
    loss_scale: float
    weights: Mapping[str, Statistics]
    activations: Mapping[str, Statistics]
    activation_gradients: Mapping[str, Statistics]
    gradients: Mapping[str, Statistics]
    updates: Mapping[str, Statistics]

    def recommended_scale(self, dtype: Any = "float16") -> float:
        """The power of two from 1 to 2^24 under which fewest gradients, of activations and params, become 0 in a dtype.

        Four times the largest gradient stays finite; of equals it is the smallest, and 1 if there is no such scale.
        """
        gradients = [*self.activation_gradients.values(), *self.gradients.values()]
        if not gradients:
            return 1.0
        together = statistics.merged(gradients)
        limit = formats.format_of(dtypes.canonical_dtype(dtype)).largest
        scales = [2.0**n for n in range(25) if 4 * together.amax * 2.0**n <= limit] or [1.0]
        return min(scales, key=lambda scale: together.under(dtype, scale).vanished)

    def rows(self) -> Iterator[tuple[str, str, Statistics]]:
        """Kind, path and statistics of each tensor."""
        for kind in TENSORS:
            yield from ((kind.replace("_", " "), path, found) for path, found in getattr(self, kind).items())

    def _shown(self) -> tuple[str, tuple[str, ...], list[tuple[Any, ...]]]:
        title = f"loss {self.loss:.6g} under a scale of {self.loss_scale:g}; for float16 {self.recommended_scale():g}"
        columns = (
            "path",
            "values",
            "dtype",
            "zeros",
            "not\nfinite",
            "mean",
            "amax",
            "ratio",
            "0 in\nfloat16",
        )
        rows: list[tuple[Any, ...]] = []
        of = ""
        for kind, path, found in self.rows():
            if kind != of:
                rows.append((kind, *[""] * (len(columns) - 1)))
                of = kind
            share = found.under("float16").vanished / max(found.count, 1)
            ratio = "" if found.ratio is None else f"{found.ratio:.1e}"
            sizes = (f"{size:.1e}" for size in (found.mean_abs, found.amax))
            zeros = f"{found.zeros / max(found.count, 1):.1%}"
            count = tables.short(found.count)
            rows.append((f"  {path}", count, found.dtype, zeros, found.overflow, *sizes, ratio, f"{share:.1%}"))
        return title, columns, rows

    def __str__(self) -> str:
        return tables.text(*self._shown())

    def table(self) -> Any:
        """A ``rich.table.Table``."""
        return tables.table(*self._shown())

    def to_json(self) -> str:
        """All statistics as JSON."""
        return tables.as_json(self)


def numerics(
    loss_fn: Callable[..., Any],
    *,
    policy: Any = None,
    loss_scale: float = 1.0,
    tx: optax.GradientTransformation | None = None,
) -> Callable[..., Numerics]:
    """Count what the values of one training step are, layer by layer, on the device.

    The function that it returns, ``(params, *args, opt_state=None) -> Numerics``, computes the gradients of the loss
    once and changes nothing. It is compiled once for equal shapes, and brings some 20 kB back for each tensor.

    Args:
      loss_fn: ``loss_fn(params, *args)`` returning a floating scalar, or a tuple that begins with one. ``params`` is a
        pytree of arrays or an ``nnx.Module``, whose Params are meant; ``args`` are pytrees of arrays. Or a train step,
        called with what it takes: then the step that would come next is counted, and not taken.
      policy: what :func:`jaxmp.autocast` takes, to run the loss function under it; None runs it as it is.
      loss_scale: a power of two that the loss is multiplied by before it is differentiated, so that half gradients
        underflow as they do in training. :class:`Numerics` has them without it.
      tx: an optimizer, alone or in :func:`jaxmp.loss_scaling`, for the ``updates`` that it makes of these gradients
        from ``opt_state``, or, where that is None, at its first step.

    Raises (here, or from the function):
      ValueError: ``loss_scale`` is no power of two; ``policy``, ``tx`` or ``loss_scale`` with a train step.
      TypeError: the loss is no floating scalar.
      RuntimeError: a donating step has had the params, or what else it is called with.

    A loop of ``jax.lax.while_loop`` has one record for all its turns, and functions with derivative rules of their own
    are one operation.

    >>> def loss_fn(params, x):
    ...     with jax.named_scope("dense"):
    ...         y = x @ params["kernel"]
    ...     return 1e-8 * jnp.sum(y)
    >>> found = numerics(loss_fn)({"kernel": jnp.ones((4, 2))}, jnp.ones((3, 4)))
    >>> found.activation_gradients["dense"].under("float16").vanished, found.activations["dense"].amax
    (6, 4.0)
    >>> found.recommended_scale("float16")
    4.0
    """
    if is_step(loss_fn):
        require_own_settings(policy=policy, tx=tx, loss_scale=None if loss_scale == 1 else loss_scale)
        return _of_step(loss_fn)
    statistics.exponent_of(loss_scale)
    measured = _measured(loss_fn, policy, tx)

    def run(params: Any, *args: Any, opt_state: Any = None, loss_scale: float = loss_scale) -> Numerics:
        exponent = statistics.exponent_of(loss_scale)
        require_not_deleted({"params": params, "args": args, "opt_state": opt_state})
        return measured(params, args, opt_state, np.float32(loss_scale)).read(exponent)

    return run


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Place:
    """What a record is of, apart from its numbers; ``number`` is its own among those of its kind."""

    kind: str
    path: str
    dtype: Any
    size: int
    turns: tuple[int, ...] = ()
    number: int = 0


Seen = list[tuple[Place, jax.Array]]
"""Places and records of activations and their gradients, packed, with the axes of the loops around."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Found:
    """What is read off a step, in one array: a transfer of each record would take longer than counting it.

    Attributes:
      numbers: float32, the loss and the packed records, one after another.
      places: of these groups of records those of their rows, and the last axis.
    """

    numbers: jax.Array
    places: tuple[tuple[tuple[Place, ...], int], ...]

    def tree_flatten(self) -> Any:
        """See JAX's pytrees."""
        return (self.numbers,), self.places

    @classmethod
    def tree_unflatten(cls, places: Any, numbers: Any) -> Found:
        """See JAX's pytrees."""
        return cls(numbers[0], places)

    def read(self, exponent: int) -> Numerics:
        """On the host; the binary logarithm of the loss scale, which gradients are freed from."""
        numbers = np.asarray(self.numbers)
        start = 1
        found: dict[str, list[tuple[Place, Statistics]]] = {kind: [] for kind in TENSORS}
        for rows, size in self.places:
            for place in rows:
                shape = (*place.turns, size)
                stop = start + math.prod(shape)
                it, lost, norms = statistics.unpacked(numbers[start:stop].reshape(shape))
                start = stop
                of_gradients = exponent if place.kind.endswith("gradients") else 0
                one = statistics.from_record(it, place.dtype, place.size, of_gradients, place.turns)
                if lost.size:
                    with np.errstate(divide="ignore", invalid="ignore"):
                        ratio = float(norms[0] / norms[1])
                    names = dict(zip(dtypes.NAMES, lost.tolist(), strict=True))
                    one = dataclasses.replace(one, ratio=ratio, _lost=names)
                found[place.kind].append((place, one))
        return Numerics(float(numbers[0]), 2.0**exponent, **{kind: _by_path(found[kind]) for kind in TENSORS})


def _by_path(found: list[tuple[Place, Statistics]]) -> dict[str, Statistics]:
    by_path: dict[str, list[Statistics]] = {}
    for place, one in sorted(found, key=lambda each: each[0].number):
        by_path.setdefault(place.path, []).append(one)
    return {path: statistics.merged(parts) for path, parts in by_path.items()}


def _measured(loss_fn: Callable[..., Any], policy: Any, tx: Any) -> Callable[..., Found]:
    """The records of a step that is computed for them."""

    @jax.jit
    def of_arrays(form: Any, params: Any, args: Any, opt_state: Any, scale: jax.Array) -> Found:
        arrays, fill = form.opened(params)

        def loss_of(params: Any, *args: Any) -> jax.Array:
            result = loss_fn(fill(params), *args)
            found = result[0] if isinstance(result, tuple) and result else result
            return jnp.asarray(require_loss(found, "return the loss, or a tuple that begins with it"))

        run = loss_of if policy is None else autocast(loss_of, policy)

        def scaled(params: Any) -> tuple[jax.Array, jax.Array]:
            loss = run(params, *args).astype(jnp.float32)
            return loss * scale, loss

        loss, grads, seen = differentiated(scaled, arrays)
        if tx is None:
            return found_in(loss, arrays, grads, None, seen)
        true = jax.tree.map(
            lambda leaf: leaf.astype(jnp.float32) / scale if _tree.is_float_array(leaf) else leaf, grads
        )
        state = tx.init(arrays) if opt_state is None else opt_state
        return found_in(loss, arrays, grads, updates_of(tx, true, state, arrays, loss), seen)

    return lambda params, args, opt_state, scale: of_arrays(*_arrays_of(params), args, opt_state, scale)


def differentiated(fun: Callable[[Any], tuple[jax.Array, Any]], params: Any) -> tuple[Any, Any, Seen]:
    """What ``jax.grad(fun, has_aux=True)`` gives, auxiliary results first, and the records of what is on the way.

    Of leaves that are not floating the gradients are 0.
    """
    jaxpr, consts, structure = program_of(fun, params)
    leaves, tree = jax.tree.flatten(params)
    taps = _Taps(jaxpr)
    is_float = [_tree.is_float_array(leaf) for leaf in leaves]

    def whole(floats: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        rest = iter(floats)
        return [next(rest) if floating else leaf for leaf, floating in zip(others, is_float, strict=True)]

    def scaled(floats: list[Any], sinks: Any) -> Any:
        results, records = evaluate(jaxpr, consts, whole(floats, leaves), taps, sinks, keeps_rules=True)
        return results[0], (results, records)

    floats = [leaf for leaf, floating in zip(leaves, is_float, strict=True) if floating]
    gradient = jax.grad(scaled, argnums=(0, 1), has_aux=True)
    (grads, sinks), (results, records) = gradient(floats, taps.sinks())
    packed = jax.tree.map(statistics.packed, records, is_leaf=lambda node: isinstance(node, Record))
    seen = [*taps.found("activations", packed), *taps.found("activation_gradients", sinks)]
    grads = jax.tree.unflatten(tree, whole(grads, list(map(jnp.zeros_like, leaves))))
    return jax.tree.unflatten(structure, results)[1], grads, seen


def found_in(loss: Any, params: Any, grads: Any, updates: Any, seen: Seen) -> Found:
    """All that is read off a step; ``seen`` may have an axis more in front, of microbatches."""
    weights = jax.tree.leaves_with_path(params)
    found, places = [jnp.reshape(loss, 1)], []
    for kind, tree in (("weights", params), ("gradients", grads), ("updates", updates)):
        groups: dict[Any, list[tuple[Place, Any, Any]]] = {}
        for number, (leaf, (path, weight)) in enumerate(zip(jax.tree.leaves(tree), weights, strict=False)):
            if _tree.is_float_array(weight):
                place = Place(kind, _tree.path_name(path), leaf.dtype, leaf.size, number=number)
                groups.setdefault((leaf.shape, leaf.dtype, weight.dtype), []).append((place, leaf, weight))
        for group in groups.values():  # those of one shape together: each alone takes as long to compile
            rows, leaves, theirs = zip(*group, strict=True)
            of_updates = jax.vmap(statistics.moved)(jnp.stack(leaves), jnp.stack(theirs)) if kind == "updates" else ()
            packed = statistics.packed(jax.vmap(statistics.record)(jnp.stack(leaves)), *of_updates)
            places.append((rows, packed.shape[-1]))
            found.append(packed.reshape(-1))
    for place, packed in seen:
        times = packed.shape[0] if packed.ndim > len(place.turns) + 1 else 1
        places.append(((place,) * times, statistics.SIZE))
        found.append(packed.reshape(-1))
    return Found(jnp.concatenate(found), tuple(places))


def updates_of(tx: Any, grads: Any, opt_state: Any, params: Any, loss: Any, **more: Any) -> Any:
    """What an optimizer makes of the gradients that it takes."""
    update = optax.with_extra_args_support(tx).update
    return with_loss(lambda **value: update(grads, opt_state, params, **value, **more)[0], loss)


_SEEN = "jaxmp.inspect"


class CountingStep(TrainStep):
    """A train step that counts what its values are. Microbatches are counted together."""

    def __init__(self, step: TrainStep) -> None:
        super().__init__(*step.arguments)
        self.found: Any = None

    def __call__(self, state: S, batch: Any) -> tuple[S, Metrics]:
        """Take a step, and keep what was counted in ``found``."""
        state, metrics = super().__call__(state, batch)
        self.found = metrics.pop(_SEEN), metrics["loss_scale"]
        return state, metrics

    def differentiated(self, loss_fn: Callable[[Any], Any], state: TrainState) -> tuple[Any, Any, dict[str, Any]]:
        """See :class:`jaxmp.training.TrainStep`."""
        fun = scaled_loss(loss_fn, get_loss_scale(state.opt_state), has_aux=True)
        result, grads, seen = differentiated(fun, state.params)
        return result, grads, {_SEEN: seen}

    def gradients(self, state: TrainState, batch: Any, rng: Any) -> tuple[jax.Array, Any, Any, dict[str, Any]]:
        """See :class:`jaxmp.training.TrainStep`."""
        loss, grads, model_state, metrics = super().gradients(state, batch, rng)
        true_grads = get_loss_scale(state.opt_state).unscale(_tree.widen(grads))
        # The compiler finds that the step computes the same updates.
        updates = updates_of(state.tx, true_grads, state.opt_state, state.params, loss)
        metrics[_SEEN] = found_in(loss, state.params, grads, updates, metrics[_SEEN])
        return loss, grads, model_state, metrics


def _of_step(step: Any) -> Callable[..., Numerics]:
    """Count what the values of a train step's next call are; see :func:`jaxmp.inspect.numerics`."""

    @functools.cache
    def program(of_trees: TrainStep) -> Callable[..., Found]:
        counting = CountingStep(of_trees)
        return jax.jit(lambda state, batch, rng: counting.placed_gradients(state, batch, rng)[-1][_SEEN])

    def run(*args: Any) -> Numerics:
        call = step_call(step, args)
        found = program(call.step)(call.state, call.batch, call.rng)
        return found.read(statistics.exponent_of(call.loss_scale))

    return run


class _Taps:
    """Records what scopes return, and what reaches it of the gradient: that comes out as the gradient of a sink."""

    def __init__(self, jaxpr: Any) -> None:
        avals = {place.key: [var.aval for var in place.eqn.outvars] for place in places(jaxpr)}
        on_the_way = [True, *(len(jaxpr.outvars) - 1) * [False]]  # to the loss, which is the first result
        self.returned = [(each, avals[each.key][each.position]) for each in returned(jaxpr, on_the_way)]
        self.positions: dict[Key, list[int]] = {}
        for each, _ in self.returned:
            positions = self.positions.setdefault(each.key, [])
            if each.position not in positions:
                positions.append(each.position)

    def sinks(self) -> dict[Key, dict[int, jax.Array]]:
        """One for each value, and each turn of the loops around; nothing is differentiated through a while loop."""
        sinks: dict[Key, dict[int, jax.Array]] = {}
        for each, _ in self.returned:
            if None not in each.turns:
                zeros = jnp.zeros((*(turn or 0 for turn in each.turns), statistics.SIZE))
                sinks.setdefault(each.key, {})[each.position] = zeros
        return sinks

    def at(self, key: Key, eqn: Any, operands: Sequence[Any], results: list[Any], given: Any) -> tuple[list[Any], Any]:
        """See :class:`jaxmp.inspect.program.evaluate.Recorder`."""
        if key not in self.positions:
            return results, None
        records = {n: statistics.record(results[n]) for n in self.positions[key]}
        return [_tap(x, given[n]) if given and n in given else x for n, x in enumerate(results)], records

    def merged(self, key: Key, old: Any, new: Any, turn: jax.Array) -> Any:
        """See :class:`jaxmp.inspect.program.evaluate.Recorder`."""
        return {n: old[n].added(new[n]) for n in new}

    def found(self, kind: str, records: Mapping[Key, Any]) -> Seen:
        """The values by their places, with what was found there."""
        return [
            (Place(kind, each.path, aval.dtype, aval.size, tuple(n for n in each.turns if n is not None)), there)
            for each, aval in self.returned
            if (there := records.get(each.key, {}).get(each.position)) is not None
        ]


@jax.custom_vjp
def _tap(x: jax.Array, sink: jax.Array) -> jax.Array:
    return x


def _backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cotangent, statistics.packed(statistics.record(cotangent))


_tap.defvjp(lambda x, sink: (x, None), _backward)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Tree:
    """Params that are a tree of arrays."""

    def opened(self, params: Any) -> tuple[Any, Callable[[Any], Any]]:
        """What is differentiated, and what makes the loss function's argument of it."""
        return params, lambda params: params


def _arrays_of(params: Any) -> tuple[Any, Any]:
    """How the loss function takes params, and these as arrays."""
    if "flax.nnx" in sys.modules:
        from jaxmp.inspect.program import nnx_models

        if nnx_models.is_module(params):
            return nnx_models.arrays_of(params)
    return _Tree(), params
