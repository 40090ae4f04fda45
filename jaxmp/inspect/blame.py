"""Which operation made the first infinity or NaN that reaches the loss or its gradients."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmp import tables
from jaxmp._jaxpr.walk import PRODUCTS
from jaxmp.inspect.calls import (
    AS_WRITTEN,
    argument_paths,
    differentiated,
    is_inexact,
    is_step,
    loss_and_rest,
    named,
    require_arguments_not_deleted,
    step_call,
)
from jaxmp.inspect.evaluate import Records, evaluate, is_whole
from jaxmp.inspect.program import Key, program_of
from jaxmp.inspect.values import Turns, Value, leading_to, values_of
from jaxmp.loss_scale import StaticLossScale
from jaxmp.optimizer import LossScalingState
from jaxmp.tree import widen

_ELEMENTWISE = """
abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt clamp convert_element_type copy copy_p
cos cosh digamma div erf erf_inv erfc exp exp2 expm1 integer_pow lgamma log log1p log2 logistic max min mul neg
nextafter one_minus_square pow reduce_precision rem rsqrt select_n sign sin sinh sqrt square sub tan tanh
""".split()  # noqa: SIM905
# NaN of finite operands is the difference of two overflows, or an overflow in a dtype without infinities.
_NEVER_INVALID = PRODUCTS.union(("add_any", "convert_element_type", "cumsum", "fft", "psum", "reduce_precision"))
_NEVER_INVALID |= {"reduce_sum", "reduce_window_sum", "scatter-add"}
# Where a function is infinite by itself, of its operands.
_POLES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("log", "log2", "rsqrt", "integer_pow"), lambda x: x == 0),
    **dict.fromkeys(("atanh", "erf_inv"), lambda x: jnp.abs(x) == 1),
    **dict.fromkeys(("lgamma", "digamma"), lambda x: x <= 0),
    "div": lambda x, y: y == 0,
    "pow": lambda x, y: x == 0,
    "log1p": lambda x: x == -1,
}


@dataclasses.dataclass(frozen=True)
class Range:
    """An operand: its dtype and shape, and its smallest and largest value but for NaN (NaN if it is all NaN)."""

    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float

    def __iter__(self) -> Iterator[float]:
        return iter((self.low, self.high))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}] in [{self.low:.4g}, {self.high:.4g}]"


@dataclasses.dataclass(frozen=True)
class Blame(tables.Shown):
    """The operation that made the first infinity or NaN.

    Attributes:
      phase: ``"input"``, ``"forward"`` or ``"backward"``; what only the derivative reads, such as the 0.5/sqrt(0) of a
        square root, is backward.
      primitive: JAX's name of the operation; of an input the operation that reads it, empty for an argument.
      path: the modules and scopes around it, ``/`` between; for an argument its name and its path in it.
      source: the user's file and line.
      kind: ``"overflow"``, ``"division by zero"`` (a pole: 1/0, log 0, rsqrt 0), ``"invalid"`` (0/0, inf - inf, the
        square root of a negative number) or ``"input"``.
      operands: their ranges, in the blamed turn.
      turn: the turn of the innermost loop, from 0; in the derivative of a scan that of the scan; None outside of loops.
      scaled_only: whether all is finite with a loss scale of 1.
    """

    phase: str
    primitive: str
    path: str
    source: str
    kind: str
    operands: tuple[Range, ...]
    turn: int | None
    scaled_only: bool

    def summary(self) -> str:
        """One line."""
        turn = "" if self.turn is None else f", turn {self.turn} of its loop"
        if self.phase == "input" and not self.primitive:
            what = f"{self.path!r} that came in is not finite"
        else:
            place = f"{self.path!r} " if self.path else ""
            source = f"({self.source}{turn})" if self.source or turn else ""
            kind = "a constant that is not finite" if self.phase == "input" else f"{self.phase} {self.kind}"
            what = f"{kind} in {self.primitive} {place}{source}".rstrip()
        return what + (", by the loss scale alone" if self.scaled_only else "")

    def _shown(self) -> Any:
        fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        rows = [(name.replace("_", " "), str(it)) for name, it in fields if name != "operands" and it not in ("", None)]
        rows += [(f"operand {n}", str(operand)) for n, operand in enumerate(self.operands)]
        return f"First that is not finite: {self.summary()}", ("field", "value"), rows, ()


def first_nonfinite(fun: Any, *, grad: bool = True, loss_scale: Any = 1.0) -> Callable[..., Blame | None]:
    """Finds the operation that made the first infinity or NaN of a loss or of its gradients.

    The function and its derivative are traced, run once with a few flags for each operation (those of each turn of a
    scan, and of the first bad turn of a while loop), and once more for the ranges of the blamed operands. From what is
    not finite in the end the search goes back through what is not finite. So an infinity that a ``where`` or a softmax
    takes away is none, and a mask of ``-inf`` is none. An infinite argument is blamed, or what makes NaN of an infinite
    constant, or the constant, if nothing that is computed from finite numbers explains the result.

    Args:
      fun: returns the loss, a floating scalar, or a tuple that begins with it; under :func:`jaxmp.autocast` or with
        modules under policies if so trained. Or a train step, called with what it takes: then its gradients are looked
        at, with the loss scale of the state, for the state's rng.
      grad: whether to look at the gradients too, with respect to the floating arrays of the first argument that has
        any, as ``jax.grad`` takes them. Without them ``fun`` may return anything.
      loss_scale: what the loss is multiplied with before it is differentiated.

    Returns:
      A function of ``fun``'s arguments that returns a :class:`Blame`, or None if all is finite. Compiled as written,
      every rounding to half included (``xla_allow_excess_precision=False``).

    Raises:
      ValueError: ``loss_scale`` is no positive finite number.
      TypeError: with ``grad``, ``fun`` returns no floating scalar first.
      RuntimeError: a donating step has had what the function is called with.

    >>> def loss_fn(params, x):
    ...     return jnp.sum(jnp.exp(params["w"] * x))
    >>> blame = first_nonfinite(loss_fn)({"w": jnp.array(50.0)}, jnp.array([1.0, 2.0]))
    >>> blame.primitive, blame.kind, blame.phase, blame.operands[0].high
    ('exp', 'overflow', 'forward', 100.0)
    """
    scale = float(loss_scale)
    if not 0 < scale < float("inf"):
        raise ValueError(f"loss_scale must be a positive finite number, got {loss_scale!r}; 1.0 is none")

    def find(*args: Any) -> Blame | None:
        if is_step(fun):
            return _of_step(*step_call(fun, args))
        require_arguments_not_deleted(fun, args)
        paths = argument_paths(fun, args)
        if not grad:
            return _find(lambda *args: ((), fun(*named(args)), ()), args, paths)
        program = _differentiated(fun, args)
        if scale == 1:
            return _find(lambda *args: program(None, *args), args, paths)
        scaled = _find(program, (jnp.float32(scale), *args), ["loss_scale", *paths])
        if scaled is None:
            return None
        return dataclasses.replace(scaled, scaled_only=_find(lambda *args: program(None, *args), args, paths) is None)

    return find


def _of_step(step: Any, state: Any, batch: Any) -> Blame | None:
    def program_for(state: Any) -> Callable[..., Any]:
        def program(params: Any, model_state: Any, batch: Any) -> Any:
            given = state.replace(params=params, model_state=model_state)
            loss, grads, *aux = step.placed_gradients(given, batch, state.rng)
            return loss, aux, grads

        return program

    def unscaled(node: Any) -> Any:
        return node._replace(loss_scale=StaticLossScale(1.0)) if isinstance(node, LossScalingState) else node

    args = state.params, state.model_state, batch

    def names_them(params: Any, model_state: Any, batch: Any) -> None: ...

    require_arguments_not_deleted(names_them, args)
    paths = argument_paths(names_them, args)
    found = _find(program_for(state), args, paths)
    if found is None:
        return None
    plain = jax.tree.map(unscaled, state.opt_state, is_leaf=lambda node: isinstance(node, LossScalingState))
    at_one = program_for(state.replace(opt_state=plain))
    return dataclasses.replace(found, scaled_only=_find(at_one, args, paths) is None)


def _differentiated(fun: Any, args: Sequence[Any]) -> Callable[..., Any]:
    """Of scale and arguments the losses, what else ``fun`` returns, and the gradients."""
    numbers = differentiated(args)

    def program(scale: Any, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)

        def losses(some: Sequence[Any]) -> Any:
            given = list(leaves)
            for number, leaf in zip(numbers, some, strict=True):
                given[number] = leaf
            loss, rest = loss_and_rest(fun(*named(jax.tree.unflatten(structure, given))))
            scaled = loss
            if scale is not None:
                with jax.named_scope("loss_scale"):
                    scaled = widen(loss) * scale.astype(widen(loss).dtype)
            return scaled, (loss, rest)

        (scaled, (loss, rest)), grads = jax.value_and_grad(losses, has_aux=True)([leaves[n] for n in numbers])
        return (loss, scaled), rest, grads

    return program


class _Flags(NamedTuple):
    """What is kept of an operation; with an axis before for each scan around it."""

    bad: jax.Array  # of each result, whether not all of it is finite
    through: jax.Array  # of each operand, whether that is where it comes from; of a conditional, which branch it was
    born: jax.Array  # whether finite operands gave what is not finite
    nan: jax.Array  # whether they gave NaN
    pole: jax.Array  # whether an infinity that they gave is the function's own
    made: jax.Array  # whether operands without NaN, perhaps infinite, gave NaN
    turn: jax.Array  # of the innermost while loop, the first bad one; -1 outside of one
    ranges: Any  # of each operand, lowest and highest, if asked for


class _Recorder:
    def __init__(self, only: Key | None = None) -> None:
        self.only = only

    def at(self, key: Key, eqn: Any, operands: Sequence[Any], results: list[Any], given: Any) -> tuple[list[Any], Any]:
        if (self.only is not None and key != self.only) or not any(map(is_inexact, results)):
            return results, None
        name, bad = eqn.primitive.name, [~_finite(result) for result in results]
        if name in ("scan", "while", "cond"):
            # Of a loop from what goes in and from its body, of a conditional from one branch, not from what chose it.
            branches = len(eqn.params.get("branches", ()))
            through = jnp.arange(branches + 1) == operands[0] if branches else jnp.ones(2, bool)
            born = nan = pole = made = jnp.array(False)
        else:
            through, born, nan, pole, made = _origin(eqn, operands, results, bad)
        ranges = [_range(operand) for operand in operands] if self.only is not None else None
        all_bad = jnp.stack([jnp.any(each) for each in bad])
        return results, _Flags(all_bad, through, born, nan, pole, made, jnp.int32(-1), ranges)

    def merged(self, key: Key, old: _Flags, new: _Flags, turn: jax.Array) -> _Flags:
        """The flags of the first bad turn."""
        was = jnp.any(old.bad, axis=-1)
        new = new._replace(turn=jnp.where(new.turn < 0, turn, new.turn))
        return jax.tree.map(lambda a, b: jnp.where(was.reshape(was.shape + (1,) * (a.ndim - was.ndim)), a, b), old, new)


def _origin(eqn: Any, operands: Sequence[Any], results: Sequence[Any], bad: Sequence[Any]) -> tuple[jax.Array, ...]:
    """``through``, ``born``, ``nan``, ``pole`` and ``made`` of an operation: element by element where it is so."""
    name = eqn.primitive.name
    is_bad, is_nan = [~_finite(operand) for operand in operands], [_nan(operand) for operand in operands]
    if name not in _ELEMENTWISE:
        is_bad, is_nan, bad = ([jnp.any(one) for one in each] for each in (is_bad, is_nan, bad))
        bad = [jnp.any(jnp.stack(bad))]
    elif name == "select_n":
        which = jnp.asarray(operands[0], jnp.int32)  # a bool for two cases
        chosen = [which == n for n in range(len(operands) - 1)]
        for each in is_bad, is_nan:
            each[1:] = [one & here for one, here in zip(each[1:], chosen, strict=True)]
    nan = _nan(results[0])
    if name not in _ELEMENTWISE:
        nan = jnp.any(jnp.stack([jnp.any(_nan(result)) for result in results]))
    none_bad, none_nan = (~_any(each) for each in (is_bad, is_nan))
    born = bad[0] & none_bad
    pole = born & _POLES[name](*operands) if name in _POLES else jnp.array(False)
    through = [jnp.any(bad[0] & each) for each in is_bad]
    found = (born, nan & none_bad, pole, nan & none_nan)
    return jnp.stack(through) if through else jnp.zeros(0, bool), *map(jnp.any, found)


def _any(flags: Sequence[jax.Array]) -> jax.Array:
    out = jnp.array(False)
    for each in flags:
        out = out | each
    return out


def _finite(value: Any) -> jax.Array:
    return jnp.isfinite(_wide(value)) if is_inexact(value) else jnp.array(True)


def _nan(value: Any) -> jax.Array:
    return jnp.isnan(_wide(value)) if is_inexact(value) else jnp.array(False)


def _wide(value: Any) -> jax.Array:
    value = jnp.asarray(value)
    return value.astype(jnp.float32) if value.dtype.itemsize == 1 else value


def _range(value: Any) -> tuple[jax.Array, jax.Array] | None:
    """Lowest and highest; None of what has none, a random key or an empty array."""
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.number) or not value.size:
        return None
    value = jnp.abs(value) if jnp.issubdtype(value.dtype, jnp.complexfloating) else _wide(value)
    return jnp.nanmin(value), jnp.nanmax(value)


def _find(program: Callable[..., Any], args: Sequence[Any], paths: Sequence[str]) -> Blame | None:
    """The blame in a function that returns losses, whatever else, and gradients."""
    jaxpr, consts, structure = program_of(program, *args)
    inputs = jax.tree.leaves(tuple(args))
    results, records = _run(jaxpr, consts, inputs)
    values = values_of(jaxpr, consts, is_whole)
    roots = values.results
    losses, aux, _ = map(jax.tree.leaves, jax.tree.unflatten(structure, range(len(roots))))
    bad = [n for n, result in enumerate(results) if _is_bad(result)]
    main = [roots[n] for n in bad if n not in aux]
    early = leading_to([roots[n] for n in (*losses, *aux)])
    # A mask that is returned is meant to be infinite; a loss is not.
    suspects = [
        suspect
        for suspect in _suspects(main or [roots[n] for n in bad], records, inputs)
        if main or suspect.rank is not _Rank.CONSTANT
    ]
    if not suspects:
        return None
    early |= {suspect.value for suspect in suspects if not suspect.value.key}
    found = min(suspects, key=lambda it: (it.rank, it.value not in early, it.value.order(it.turns)))
    value, turns = found.value, found.turns
    if value.name == "argument" or (value.name == "constant" and found.reader is None):
        given, path = value.constant, "a constant"
        if value.name == "argument":
            given, path = inputs[value.position], paths[value.position]
        return Blame("input", "", path, "", "input", _ranges([given], [_range(given)]), None, False)
    kind, phase = "", "forward" if value in early else "backward"
    if found.reader is not None and not value.key:
        kind, phase, (value, turns) = "input", "input", found.reader
    place = values.places[value.key]
    name, flags = place.eqn.primitive.name, _at(_run(jaxpr, consts, inputs, value.key)[1][value.key], turns)
    turn = None
    if place.turns:
        turn = int(flags.turn) if place.turns[-1] is None else turns[-1]
        if place.turns[-1] is not None and value.scans[-1].reverse and phase == "forward":
            turn = place.turns[-1] - 1 - turn
    operands = _ranges([atom.aval for atom in place.eqn.invars], flags.ranges)
    return Blame(phase, name, place.path, place.source, kind or _kind(name, flags), operands, turn, False)


def _run(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], only: Key | None = None
) -> tuple[list[Any], Records]:
    def run(consts: Any, inputs: Any) -> Any:
        return evaluate(jaxpr, consts, inputs, _Recorder(only))

    results, records = jax.jit(run, compiler_options=AS_WRITTEN)(list(consts), list(inputs))
    return results, jax.device_get(records)


class _Rank(enum.IntEnum):
    """How surely a suspect is to blame. Infinities that come in are often meant: what is born of numbers goes first."""

    BORN = 0  # of finite operands, or a NaN that came in
    ARGUMENT = 1  # infinite
    MADE = 2  # NaN, of infinities
    CONSTANT = 3  # infinite


class _Suspect(NamedTuple):
    rank: _Rank
    value: Value
    turns: Turns
    reader: tuple[Value, Turns] | None  # of an argument or a constant: which operation reads it, if one does


def _suspects(starts: Sequence[Value], records: Mapping[Key, _Flags], inputs: Sequence[Any]) -> Iterator[_Suspect]:
    """All that what is not finite comes from, as far as flags of whole arrays tell."""
    left: list[tuple[Value, Turns, Any]] = [(value, (), None) for value in starts]
    seen = set()
    while left:
        value, turns, reader = left.pop()
        if (value, turns) in seen:
            continue
        seen.add((value, turns))
        through = None
        if not value.key:
            is_argument = value.name == "argument"
            given = inputs[value.position] if is_argument else value.constant
            if _is_bad(given):
                rank = _Rank.ARGUMENT if is_argument else _Rank.CONSTANT
                yield _Suspect(_Rank.BORN if bool(jnp.any(_nan(given))) else rank, value, (), reader)
        elif value.is_computed:
            if value.key not in records or not (flags := _at(records[value.key], turns)).bad[value.position]:
                continue
            reader, through = (value, turns), flags.through
            if flags.born or flags.made:
                yield _Suspect(_Rank.BORN if flags.born else _Rank.MADE, value, turns, None)
        left += [
            (source, other, reader)
            for number, source, other in value.sources(turns)
            if through is None or through[number]
        ]


def _at(flags: _Flags, turns: Turns) -> _Flags:
    at: _Flags = jax.tree.map(lambda each: each[turns], flags)
    return at


def _is_bad(value: Any) -> bool:
    return not bool(jnp.all(_finite(value)))


def _kind(name: str, flags: _Flags) -> str:
    if not flags.born or (flags.nan and name not in _NEVER_INVALID):
        return "invalid"
    return "division by zero" if flags.pole else "overflow"


def _ranges(operands: Sequence[Any], ranges: Sequence[Any]) -> tuple[Range, ...]:
    return tuple(
        Range(str(jnp.result_type(operand)), jnp.shape(operand), float(bounds[0]), float(bounds[1]))
        for operand, bounds in zip(operands, ranges, strict=True)
        if bounds is not None
    )
