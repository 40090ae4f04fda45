"""Compare a function under its policies with itself without them, layer by layer."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.walk import PRODUCTS
from jaxmp.base import tables
from jaxmp.base.cache_keys import policies_off
from jaxmp.base.dtypes import is_half
from jaxmp.base.trees import widen
from jaxmp.engine.autocast import autocast
from jaxmp.inspect.program.borders import AtBorder, passed_in, returned
from jaxmp.inspect.program.calls import (
    AS_WRITTEN,
    StepCall,
    argument_paths,
    differentiated,
    is_step,
    loss_and_rest,
    named,
    require_arguments_not_deleted,
    require_own_settings,
    step_call,
)
from jaxmp.inspect.program.equations import Key, program_of
from jaxmp.inspect.program.evaluate import evaluate, is_whole
from jaxmp.inspect.program.products import multiplied
from jaxmp.inspect.program.reading_values import values_of
from jaxmp.inspect.program.values import Turns, Value, leading_to
from jaxmp.sharding.gathered_loss import Gathered
from jaxmp.training.state import TrainState
from jaxmp.training.step import TrainStep

_REFERENCES = ("float32", "float64")


@dataclasses.dataclass(frozen=True)
class Row:
    """A value under the policies beside the reference, all turns of loops together.

    Attributes:
      path: the module or scope that returns it; empty for the result; of a gradient of an argument that argument's.
      phase: ``"forward"``, or ``"backward"`` for the gradient with respect to it.
      dtype: the dtype that the module or scope computes in under the policies: that of its products' operands, several
        with commas between; without products that of the value before its last cast. Of a gradient of an argument the
        gradient's own.
      relative_error: the L2 norm of the difference, over that of the reference.
      mean_absolute_difference: of its elements.
      cosine: of the angle between the two, taken as vectors.
      ulps: the median of the differences in units of the spacing of the comparison's dtype at the reference.
    """

    path: str
    phase: str
    dtype: str
    relative_error: float
    mean_absolute_difference: float
    cosine: float
    ulps: float


_COLUMNS = ("path", "phase", "dtype", "relative\nerror", "mean\n|difference|", "cosine", "ulps")


@dataclasses.dataclass(frozen=True)
class Comparison(tables.Shown):
    """The changes that policies make in a function's numbers.

    Attributes:
      dtype: the half dtype that most of the function's products have; ``"float32"`` where nothing is half.
      is_changed: whether the policies change the dtype of a product.
      rows: what modules and named scopes return and the result, in program order, then the gradients with respect to
        them in the order of the backward pass, then those of the arguments.
      entered: where the relative error first exceeds 4 times the larger of its inputs' and one rounding to half: the
        path of the code that computes the value, also if it is its derivative that does it. Of code between modules
        that is the module around; empty for code in no scope, None if nowhere.
      worst: the row with the largest relative error.
      total: the row of the result and of all gradients of arguments together.
      unmatched: paths of scopes that return other values under the policies, so that they have no row.
    """

    dtype: str
    is_changed: bool
    rows: tuple[Row, ...]
    entered: str | None
    worst: Row
    total: Row
    unmatched: tuple[str, ...]

    def _shown(self) -> Any:
        where = "nowhere" if self.entered is None else f"in {self.entered or 'code in no scope'}"
        worst = f"{self.worst.relative_error:.2e} in {self.worst.path or 'the result'}"
        cells = [
            (row.path or "result", row.phase, row.dtype, *(f"{number:.2e}" for number in dataclasses.astuple(row)[3:]))
            for row in (*self.rows, dataclasses.replace(self.total, path="total"))
        ]
        notes = [f"no row, because they return other values: {', '.join(self.unmatched)}"] if self.unmatched else []
        if not self.is_changed:
            notes.append("No policy, region or autocast changes a product here; casts in the code itself are in both.")
        return f"The error enters {where}; worst: {worst}", _COLUMNS, cells, notes


def compare(
    fun: Callable[..., Any],
    policy: Any = None,
    *,
    reference: str = "float32",
    overrides: Mapping[str, str] | None = None,
    grad: bool = True,
    loss_scale: float = 1.0,
) -> Callable[..., Comparison]:
    """Compare a function with itself without policies, layer by layer, forward and backward.

    One side is ``fun`` as it is, with the policies of its modules and its autocasts. In the reference every policy,
    :func:`jaxmp.precision` region and autocast is off. Casts that the code of ``fun`` makes itself, and dtypes that its
    author gave to modules, are in both.

    Args:
      fun: returns the loss, a floating scalar, or a tuple that begins with it; without ``grad`` anything. Or a train
        step, called with what it takes: then its loss is compared, under the loss scale of the state.
      policy, overrides: puts ``fun`` as it is under :func:`jaxmp.autocast`, too.
      reference: ``"float32"``, with half arguments widened to float32 and products in true float32; or ``"float64"``,
        traced under ``jax.enable_x64`` with floating arguments in float64 (random numbers are others then: leave
        dropout out).
      grad: whether to compare gradients too, with respect to all that scopes return and to the floating arrays of the
        first argument that has any.
      loss_scale: what the loss is multiplied with before it is differentiated. The rows are those without it.

    Returns:
      A function of ``fun``'s arguments that returns a :class:`Comparison`. Both are compiled as written, every
      rounding to half included (``xla_allow_excess_precision=False``), and all values come to the host.

    Raises:
      ValueError: another reference; nothing floating to compare; ``overrides`` without a policy; a train step with
        a mesh, or with a ``loss_scale`` beside its own; or what :func:`jaxmp.autocast` raises.
      TypeError: with ``grad``, ``fun`` returns no floating scalar first.
      RuntimeError: a donating step has had what the function is called with.

    >>> def loss_fn(params, x):
    ...     with jax.named_scope("layer"):
    ...         y = x @ params["w"]
    ...     return jnp.mean(y**2)
    >>> x = jax.random.normal(jax.random.key(0), (8, 8))
    >>> comparison = compare(loss_fn, "mixed_bfloat16")({"w": x}, x)
    >>> comparison.entered is None, comparison.rows[0].path, comparison.rows[0].relative_error < 2**-8
    (True, 'layer', True)
    """
    if reference not in _REFERENCES:
        raise ValueError(
            f"a reference is 'float32' or 'float64', got {reference!r}; 'float32' is the function without policies"
        )
    if overrides and policy is None:
        raise ValueError(f"overrides are exceptions from a policy, got {overrides} and policy=None; name the policy")

    def run(*args: Any) -> Comparison:
        loss_fn, scale = fun, loss_scale
        if is_step(fun):
            require_own_settings(loss_scale=None if loss_scale == 1 else loss_scale)
            call = step_call(fun, args)
            loss_fn, args = _loss_of(call)
            scale = call.loss_scale
        require_arguments_not_deleted(loss_fn, args)
        paths = argument_paths(loss_fn, args)
        cast = loss_fn if policy is None else autocast(loss_fn, policy, overrides)
        half = _measured(cast, args, paths, grad, scale)
        with contextlib.ExitStack() as stack:
            stack.enter_context(policies_off(True))
            stack.enter_context(jax.default_matmul_precision("highest"))
            if reference == "float64":
                stack.enter_context(jax.enable_x64(True))
                args = jax.tree.map(_double, args)
            return _compared(half, _measured(loss_fn, widen(args), paths, grad, scale))

    return run


class _LossOnly(TrainStep):
    """A train step whose loss is looked at, and differentiated from outside."""

    def differentiated(self, loss_fn: Callable[[Any], Any], state: TrainState) -> tuple[Any, Any, dict[str, Any]]:
        loss, (model_state, metrics) = loss_fn(state.params)
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        return (loss, (jax.lax.stop_gradient(model_state), metrics)), zeros, {}


def _loss_of(call: StepCall) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the loss of a train step as a function, and its arguments."""
    step, state, batch = call
    if any(isinstance(part, Gathered) for part in step.arguments):
        raise ValueError(
            "compare takes a train step without a mesh, got one with sharding=; compare its loss function, "
            "compare(loss_fn)(params, model_state, batch, rng)"
        )
    looked_at = _LossOnly(*step.arguments)

    def loss_fn(params: Any, model_state: Any, batch: Any) -> Any:
        at = state.replace(params=params, model_state=model_state)
        return looked_at.gradients(at, batch, call.rng)[0]

    return loss_fn, (state.params, state.model_state, batch)


def _double(leaf: Any) -> Any:
    return jnp.asarray(leaf, jnp.float64) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf


@jax.custom_vjp
def _tap(x: jax.Array, sink: jax.Array) -> jax.Array:
    """``x``; the gradient with respect to ``sink`` is that with respect to ``x`` here."""
    return x


_tap.defvjp(lambda x, sink: (x, sink), lambda sink, ct: (ct, ct.astype(sink.dtype)))


class _Tapped:
    """Records some results by their positions, and taps those that a sink is given for."""

    def __init__(self, positions: Mapping[Key, Sequence[int]]) -> None:
        self.positions = positions

    def at(self, key: Key, eqn: Any, operands: Sequence[Any], results: list[Any], given: Any) -> tuple[list[Any], Any]:
        positions = self.positions.get(key)
        if positions is None:
            return results, None
        results = list(results)
        for position, sink in (given or {}).items():
            results[position] = _tap(results[position], sink)
        return results, {position: results[position] for position in positions}

    def merged(self, key: Key, old: Any, new: Any, turn: jax.Array) -> Any:
        return new


_Slot = tuple[Key, int]


class _Measured(NamedTuple):
    """A program, and what its scopes return: arrays of NumPy in float64 by equation and result.

    Slots are in program order, with their paths: those that scopes return, and those that are passed into scopes.
    """

    values: dict[_Slot, Value]
    returned: list[tuple[str, _Slot]]
    passed_in: list[tuple[str, _Slot]]
    forward: dict[_Slot, np.ndarray]
    backward: dict[_Slot, np.ndarray]
    results: list[tuple[Value, np.ndarray]]
    gradients: dict[int, tuple[str, np.ndarray, str]]  # by number of the argument's leaf
    products: list[tuple[str, str]]  # of each product in the forward pass its path and the dtype of its operands

    def computed_in(self, path: str, value: Value) -> str:
        """The dtype that the code of a scope computes a value in."""
        inside = [dtype for other, dtype in self.products if path and (other == path or other.startswith(f"{path}/"))]
        if inside:
            return ", ".join(sorted(set(inside)))
        while value.is_cast:
            (value,) = value.inputs
        return value.dtype.name


def _measured(
    fun: Callable[..., Any], args: Sequence[Any], paths: Sequence[str], grad: bool, loss_scale: float
) -> _Measured:
    def counted(*args: Any) -> Any:
        result = fun(*named(args))
        return loss_and_rest(result) if grad else ((), result)

    jaxpr, consts, structure = program_of(counted, *args)
    loss, rest = map(jax.tree.leaves, jax.tree.unflatten(structure, range(len(jaxpr.outvars))))
    ends = [n for n in loss or rest if jnp.issubdtype(jaxpr.outvars[n].aval.dtype, jnp.floating)]
    is_end = [n in ends for n in range(len(jaxpr.outvars))]
    leaving, entering = returned(jaxpr, is_end), passed_in(jaxpr, is_end)
    positions: dict[Key, list[int]] = {}
    for each in (*leaving, *entering):
        positions[each.key] = [*dict.fromkeys((*positions.get(each.key, ()), each.position))]
    inputs, wanted = jax.tree.leaves(tuple(args)), differentiated(args) if grad else []

    def run(some: Sequence[Any], given: Any, consts: Any, inputs: Any) -> Any:
        inputs = list(inputs)
        for n, leaf in zip(wanted, some, strict=True):
            inputs[n] = leaf
        results, records = evaluate(jaxpr, consts, inputs, _Tapped(positions), given, keeps_rules=True)
        if not grad:
            return 0.0, (results, records)
        return results[0] if loss_scale == 1 else widen(results[0]) * loss_scale, (results, records)

    some = [inputs[n] for n in wanted]
    if grad:
        shapes = jax.eval_shape(run, some, None, consts, inputs)[1][1]
        in_while = {each.key for each in (*leaving, *entering) if None in each.turns}
        wide = {key: jax.tree.map(_zeros, shape) for key, shape in shapes.items() if key not in in_while}
        call = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True), compiler_options=AS_WRITTEN)
        (_, (results, records)), (grads, cotangents) = call(some, wide, consts, inputs)
    else:
        _, (results, records) = jax.jit(run, compiler_options=AS_WRITTEN)(some, None, consts, inputs)
        grads, cotangents = [], {}
    forward, backward = (
        {(key, n): value for key, values in record.items() for n, value in values.items()}
        for record in (records, cotangents)
    )
    values = values_of(jaxpr, consts, functools.partial(is_whole, keeps_rules=True))
    leading = [value for value in leading_to(values.results) if value.is_computed]
    return _Measured(
        {(value.key, value.position): value for value in leading},
        _slots(leaving),
        _slots(entering),
        {slot: _array(value) for slot, value in forward.items()},
        {slot: _array(value) / loss_scale for slot, value in backward.items()},
        [(values.results[n], _array(results[n])) for n in ends],
        {n: (paths[n], _array(ct) / loss_scale, str(ct.dtype)) for n, ct in zip(wanted, grads, strict=True)},
        [(value.at.path, _multiplied_in(value)) for value in values.all if value.name in PRODUCTS],
    )


def _slots(found: Sequence[AtBorder]) -> list[tuple[str, _Slot]]:
    return [(each.path, (each.key, each.position)) for each in found]


def _multiplied_in(product: Value) -> str:
    """The dtype that a product is computed in: the wider one of its operands'."""
    return max(map(multiplied, product.inputs[:2]), key=lambda name: np.dtype(name).itemsize)


def _half_dtype(products: Sequence[tuple[str, str]]) -> str:
    """The half dtype that most products have; float32 without any."""
    halves = collections.Counter(dtype for _, dtype in products if is_half(dtype))
    return halves.most_common(1)[0][0] if halves else "float32"


def _zeros(shape: Any) -> jax.Array:
    return widen(jnp.zeros(shape.shape, shape.dtype))


def _array(value: Any) -> np.ndarray:
    return np.asarray(value).astype(np.float64)


def _compared(half: _Measured, full: _Measured) -> Comparison:
    dtype = _half_dtype(half.products)
    finfo = jnp.finfo(dtype)
    pairs, unmatched = _pairs(half, full, half.returned, full.returned)
    between, _ = _pairs(half, full, half.passed_in, full.passed_in)
    ends = [(value, a, b) for (value, a), (_, b) in zip(half.results, full.results, strict=True)]
    grads = [(path, a, full.gradients[n][1], dtype) for n, (path, a, dtype) in half.gradients.items()]
    computed = {path: half.computed_in(path, half.values[a]) for path, a, _ in pairs}
    rows = [_row(path, "forward", computed[path], half.forward[a], full.forward[b], finfo) for path, a, b in pairs]
    rows += [_row("", "forward", half.computed_in("", value), a, b, finfo) for value, a, b in ends]
    rows += [
        _row(path, "backward", computed[path], half.backward[a], full.backward[b], finfo)
        for path, a, b in reversed(pairs)
        if b in full.backward
    ]
    gradients = [_row(path, "backward", dtype, a, b, finfo) for path, a, b, dtype in grads]
    # What cancels out, such as the gradient of a bias before a batch norm, is rounding in any precision.
    sizes = [float(np.sqrt(np.mean(np.square(b)))) if b.size else 0.0 for _, _, b, _ in grads]
    tells = [size > float(finfo.eps) * max(sizes) for size in sizes]
    counting = [*rows, *(row for row, is_told in zip(gradients, tells, strict=True) if is_told)]
    if not counting:
        raise ValueError(
            "compare needs a function that returns floating arrays, or gradients of some, got none; return what is "
            "computed before it becomes integers"
        )
    told = {n for n, is_told in zip(half.gradients, tells, strict=True) if is_told}
    both = [(a, b) for _, a, b in ends] + [(a, b) for _, a, b, _ in grads]
    together = [np.concatenate([each.ravel() for each in side] or [np.zeros(0)]) for side in zip(*both, strict=True)]
    counts = (collections.Counter(dtype for _, dtype in measured.products) for measured in (half, full))
    return Comparison(
        dtype,
        operator.ne(*counts),
        (*rows, *gradients),
        _entered(half, full, [*pairs, *between], told, float(finfo.eps) / 2),
        max(counting, key=lambda row: np.nan_to_num(row.relative_error, nan=np.inf)),
        _row("", "backward" if grads else "forward", "", together[0], together[1], finfo),
        unmatched,
    )


_Pair = tuple[str, _Slot, _Slot]


def _pairs(
    half: _Measured, full: _Measured, halves: Sequence[tuple[str, _Slot]], fulls: Sequence[tuple[str, _Slot]]
) -> tuple[list[_Pair], tuple[str, ...]]:
    """Slots of the two at the same path, call by call, in program order; and the paths where that cannot be told."""
    groups: dict[tuple[str, Any], tuple[list[_Slot], list[_Slot]]] = {}
    for side, (measured, slots) in enumerate(((half, halves), (full, fulls))):
        for path, slot in slots:
            groups.setdefault((path, measured.forward[slot].shape), ([], []))[side].append(slot)
    pairs, unmatched = [], []
    for (path, _), (own, others) in groups.items():
        if len(own) > len(others):  # a scope returns a value in half and its cast to float32
            own = [slot for slot in own if not half.values[slot].is_cast]
        if len(own) != len(others):
            unmatched.append(path)
        else:
            pairs += [(path, a, b) for a, b in zip(own, others, strict=True)]
    return sorted(pairs, key=lambda pair: (full.values[pair[2]].order(), -len(pair[0]))), tuple(
        dict.fromkeys(unmatched)
    )


_Node = tuple[Value, Turns]


def _entered(
    half: _Measured, full: _Measured, pairs: Sequence[_Pair], told: Collection[int], rounding: float
) -> str | None:
    """The path where the error enters, turn by turn of scans: forward, else backward, arguments' gradients last."""
    paths: dict[Value, str] = {}
    forward: dict[_Node, float] = {}
    backward: dict[_Node, float] = {}
    for path, a, b in pairs:
        value = full.values[b]
        if value not in paths:
            paths[value] = path
            forward |= _by_turn(value, half.forward[a], full.forward[b])
            if b in full.backward:
                backward |= _by_turn(value, half.backward[a], full.backward[b])
    for (_, own), (value, other) in zip(half.results, full.results, strict=True):
        if value not in paths:
            paths[value] = ""
            forward |= _by_turn(value, own, other)
    reads = {node: list(_nearest(*node, forward)) for node in forward}
    readers: dict[_Node, list[_Node]] = {}
    for node, sources in reads.items():
        for source in sources:
            readers.setdefault(source, []).append(node)
            if source[0].name == "argument" and source[0].position in told:
                _, gradient, _ = half.gradients[source[0].position]
                backward |= _by_turn(source[0], gradient, full.gradients[source[0].position][1])

    def time(node: _Node) -> tuple[float, ...]:
        return node[0].order(node[1])

    for node in sorted(forward, key=time):
        if forward[node] > 4 * max([rounding, *(forward.get(source, 0.0) for source in reads[node])]):
            return paths[node[0]]
    for node in sorted(backward, key=time, reverse=True):
        after = sorted(readers.get(node, ()), key=time)
        around = [source for reader in after for source in (reader, *reads[reader])]
        given = [backward.get(reader, 0.0) for reader in after] + [forward.get(source, 0.0) for source in around]
        if after and backward[node] > 4 * max([rounding, *given]):
            return paths[after[0][0]]
    return None


def _by_turn(value: Value, half: np.ndarray, full: np.ndarray) -> dict[_Node, float]:
    return {(value, turns): _relative(half[turns], full[turns]) for turns in np.ndindex(full.shape[: len(value.scans)])}


def _nearest(value: Value, turns: Turns, known: Collection[_Node]) -> Iterator[_Node]:
    """The nearest of those known that a value is computed from, and the arguments."""
    left, seen = [(value, turns)], {(value, turns)}
    while left:
        value, turns = left.pop()
        for _, other, at in value.sources(turns):
            source = other, at
            if source in seen:
                continue
            seen.add(source)
            if source in known or source[0].name == "argument":
                yield source
            else:
                left.append(source)


def _difference(half: np.ndarray, full: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two and their difference; what is the same infinity or NaN in both, a mask say, counts as zeros."""
    same = ~np.isfinite(full) & ((half == full) | (np.isnan(half) & np.isnan(full)))
    half, full = np.where(same, 0, half), np.where(same, 0, full)
    return half, full, half - full


def _relative(half: np.ndarray, full: np.ndarray) -> float:
    """The L2 norm of the difference over that of the reference; infinite where that is zero or not finite."""
    _, full, difference = _difference(half, full)
    over, under = np.linalg.norm(difference.ravel()), np.linalg.norm(full.ravel())
    return 0.0 if over == 0 else float(over / under) if under and np.isfinite(over) else np.inf


def _row(path: str, phase: str, dtype: str, half: np.ndarray, full: np.ndarray, finfo: jnp.finfo) -> Row:
    half, full, difference = _difference(half, full)
    norms = np.linalg.norm(half.ravel()) * np.linalg.norm(full.ravel())
    with np.errstate(invalid="ignore"):  # of an infinity there is no angle
        cosine = float(np.vdot(half, full) / norms) if norms else float(not half.any() and not full.any())
    exponents = np.maximum(np.frexp(full)[1] - 1, int(finfo.minexp))
    away = np.abs(difference)
    ulps = away / 2.0 ** (exponents - int(finfo.nmant))
    mean, median = (float(np.mean(away)), float(np.median(ulps))) if away.size else (0.0, 0.0)
    return Row(path, phase, dtype, _relative(half, full), mean, cosine, median)
