"""One step of training that counts what its values are: where gradients underflow, overflow, or change no weight."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp import dtypes, formats, tables
from jaxmp import tree as _tree
from jaxmp.engine.autocast import autocast
from jaxmp.inspect import statistics
from jaxmp.inspect.evaluate import evaluate
from jaxmp.inspect.program import Key, places, program_of
from jaxmp.inspect.statistics import Record, Statistics
from jaxmp.inspect.values import returned
from jaxmp.optimizer import get_loss_scale, has_loss_scale, require_loss

KINDS = ("weights", "activations", "activation_gradients", "gradients", "updates")


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
        largest = max((each.amax for each in gradients), default=0.0)
        limit = formats.format_of(dtypes.canonical_dtype(dtype)).largest
        scales = [2.0**n for n in range(25) if 4 * largest * 2.0**n <= limit] or [1.0]
        return min(scales, key=lambda scale: sum(each.under(dtype, scale).vanished for each in gradients))

    def rows(self) -> Iterator[tuple[str, str, Statistics]]:
        """Kind, path and statistics of each tensor."""
        for kind in KINDS:
            yield from ((kind.replace("_", " "), path, found) for path, found in getattr(self, kind).items())

    def _shown(self) -> tuple[str, tuple[str, ...], list[tuple[Any, ...]]]:
        title = f"loss {self.loss:.6g} under a scale of {self.loss_scale:g}; for float16 {self.recommended_scale():g}"
        columns = (
            "",
            "path",
            "values",
            "dtype",
            "zeros",
            "not finite",
            "amin",
            "mean",
            "amax",
            "ratio",
            "0 in float16",
        )
        rows = []
        for kind, path, found in self.rows():
            share = found.under("float16").vanished / max(found.count, 1)
            ratio = "" if found.ratio is None else f"{found.ratio:.1e}"
            sizes = (f"{size:.1e}" for size in (found.amin, found.mean_abs, found.amax))
            zeros = f"{found.zeros / max(found.count, 1):.1%}"
            count = tables.short(found.count)
            rows.append((kind, path, count, found.dtype, zeros, found.overflow, *sizes, ratio, f"{share:.1%}"))
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
    """Counts what the values of one training step are, layer by layer, on the device.

    The function that it returns, ``(params, *args, opt_state=None) -> Numerics``, computes the gradients of the loss
    once and changes nothing. It is compiled once for equal shapes, and brings some 20 kB back for each tensor.

    Args:
      loss_fn: ``loss_fn(params, *args)`` returning a floating scalar, or a tuple that begins with one. ``params`` is a
        pytree of arrays or an ``nnx.Module``, whose Params are meant; ``args`` are pytrees of arrays.
      policy: what :func:`jaxmp.autocast` takes, to run the loss function under it; None runs it as it is.
      loss_scale: a power of two that the loss is multiplied by before it is differentiated, so that half gradients
        underflow as they do in training. :class:`Numerics` has them without it.
      tx: an optimizer, alone or in :func:`jaxmp.loss_scaling`, for the ``updates`` that it makes of these gradients
        from ``opt_state``, or, where that is None, at its first step.

    Raises (here, or from the function):
      ValueError: ``loss_scale`` is no power of two.
      TypeError: the loss is no floating scalar.

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
    statistics.exponent_of(loss_scale)
    measured = _measured(loss_fn, policy, tx)

    def run(params: Any, *args: Any, opt_state: Any = None, loss_scale: float = loss_scale) -> Numerics:
        exponent = statistics.exponent_of(loss_scale)
        return _read(jax.device_get(measured(params, args, opt_state, np.float32(loss_scale))), exponent)

    return run


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Place:
    """What a record is of, apart from its numbers."""

    path: str
    dtype: Any
    size: int
    turns: tuple[int, ...] = ()


def _measured(loss_fn: Callable[..., Any], policy: Any, tx: Any) -> Callable[..., Any]:
    """The loss and the records of a step, in pairs of a place and what was found there, by kind."""

    def loss_of(fill: Callable[[Any], Any]) -> Callable[..., jax.Array]:
        def loss(params: Any, *args: Any) -> jax.Array:
            result = loss_fn(fill(params), *args)
            found = result[0] if isinstance(result, tuple) and result else result
            return jnp.asarray(require_loss(found, "return the loss, or a tuple that begins with it"))

        return loss if policy is None else autocast(loss, policy)

    @jax.jit
    def of_arrays(form: Any, params: Any, args: Any, opt_state: Any, scale: jax.Array) -> dict[str, Any]:
        arrays, fill = form.opened(params)
        jaxpr, consts, _ = program_of(loss_of(fill), arrays, *args)
        taps = _Taps(jaxpr)
        leaves, tree = jax.tree.flatten(arrays)
        is_float = [_tree.is_float_array(leaf) for leaf in leaves]
        others = jax.tree.leaves(args)

        def scaled(floats: list[Any], sinks: Any) -> Any:
            rest = iter(floats)
            whole = [next(rest) if floating else leaf for leaf, floating in zip(leaves, is_float, strict=True)]
            (loss,), records = evaluate(jaxpr, consts, [*whole, *others], taps, sinks, keeps_rules=True)
            loss = loss.astype(jnp.float32)
            return loss * scale, (loss, records)

        floats = [leaf for leaf, floating in zip(leaves, is_float, strict=True) if floating]
        gradient = jax.grad(scaled, argnums=(0, 1), has_aux=True)
        (grads, sinks), (loss, records) = gradient(floats, taps.sinks())
        names = [_tree.path_name(path) for path, _ in jax.tree.leaves_with_path(arrays)]
        names = [name for name, floating in zip(names, is_float, strict=True) if floating]

        def recorded(arrays: Sequence[Any]) -> list[Any]:
            return [
                (_Place(name, array.dtype, array.size), statistics.record(array))
                for name, array in zip(names, arrays, strict=True)
            ]

        found = {
            "loss": loss,
            "weights": recorded(floats),
            "activations": taps.found(records),
            "activation_gradients": taps.found(sinks),
            "gradients": recorded(grads),
            "updates": [],
        }
        if tx is not None:
            rest = iter(grads)
            whole = [
                next(rest).astype(jnp.float32) / scale if floating else jnp.zeros_like(leaf)
                for leaf, floating in zip(leaves, is_float, strict=True)
            ]
            updates = _updates(tx, jax.tree.unflatten(tree, whole), arrays, opt_state, loss)
            steps = [leaf for leaf, floating in zip(jax.tree.leaves(updates), is_float, strict=True) if floating]
            found["updates"] = [
                (place, found_there, statistics.lost(step, weight), _norm(step), _norm(weight))
                for (place, found_there), step, weight in zip(recorded(steps), steps, floats, strict=True)
            ]
        return found

    return lambda params, args, opt_state, scale: of_arrays(*_arrays_of(params), args, opt_state, scale)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(_tree.sum_of_squares(x))


def _updates(tx: Any, grads: Any, params: Any, opt_state: Any, loss: jax.Array) -> Any:
    """What an optimizer makes of true gradients."""
    opt_state = tx.init(params) if opt_state is None else opt_state
    if has_loss_scale(opt_state):
        grads = get_loss_scale(opt_state).scale(grads)
    update = optax.with_extra_args_support(tx).update
    try:
        return update(grads, opt_state, params, value=loss)[0]
    except TypeError as error:  # a chain hands the loss on to transforms that do not take it
        if "unexpected keyword argument 'value'" not in str(error):
            raise
        return update(grads, opt_state, params)[0]


class _Taps:
    """Records what scopes return, and what reaches it of the gradient: that comes out as the gradient of a sink."""

    def __init__(self, jaxpr: Any) -> None:
        avals = {place.key: [var.aval for var in place.eqn.outvars] for place in places(jaxpr)}
        self.returned = [(each, avals[each.key][each.position]) for each in returned(jaxpr)]
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
        """See :class:`jaxmp.inspect.evaluate.Recorder`."""
        if key not in self.positions:
            return results, None
        records = {n: statistics.record(results[n]) for n in self.positions[key]}
        return [_tap(x, given[n]) if given and n in given else x for n, x in enumerate(results)], records

    def merged(self, key: Key, old: Any, new: Any, turn: jax.Array) -> Any:
        """See :class:`jaxmp.inspect.evaluate.Recorder`."""
        return {n: old[n].added(new[n]) for n in new}

    def found(self, records: Mapping[Key, Any]) -> list[Any]:
        """The values by their places, with what was found there."""
        return [
            (_Place(each.path, aval.dtype, aval.size, tuple(turn for turn in each.turns if turn is not None)), there)
            for each, aval in self.returned
            if (there := records.get(each.key, {}).get(each.position)) is not None
        ]


@jax.custom_vjp
def _tap(x: jax.Array, sink: jax.Array) -> jax.Array:
    return x


def _backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cotangent, statistics.packed(statistics.record(cotangent))


_tap.defvjp(lambda x, sink: (x, None), _backward)


def _read(found: dict[str, Any], exponent: int) -> Numerics:
    def statistics_in(kind: str) -> dict[str, Statistics]:
        by_path: dict[str, list[Statistics]] = {}
        for place, record, *more in found[kind]:
            there = record if isinstance(record, Record) else statistics.unpacked(record)
            of_gradients = exponent if kind.endswith("gradients") else 0
            one = statistics.from_record(there, place.dtype, place.size, of_gradients, place.turns)
            if more:
                lost, step, weight = more
                with np.errstate(divide="ignore", invalid="ignore"):
                    ratio = float(step / weight)
                one = dataclasses.replace(one, ratio=ratio, _lost=dict(zip(dtypes.NAMES, lost.tolist(), strict=True)))
            by_path.setdefault(place.path, []).append(one)
        return {path: statistics.merged(parts) for path, parts in by_path.items()}

    return Numerics(float(found["loss"]), 2.0**exponent, **{kind: statistics_in(kind) for kind in KINDS})


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
        from jaxmp.inspect import nnx_models

        if nnx_models.is_module(params):
            return nnx_models.arrays_of(params)
    return _Tree(), params
