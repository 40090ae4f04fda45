"""Which operation made the first infinity or NaN that reaches the loss or its gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxmp._internals.jax.walk import PRODUCTS
from jaxmp.base import tables
from jaxmp.base.trees import widen
from jaxmp.inspect.program import stepping
from jaxmp.inspect.program.calls import (
    StepCall,
    argument_paths,
    differentiated,
    is_inexact,
    is_step,
    loss_and_rest,
    named,
    require_arguments_not_deleted,
    require_own_settings,
    step_call,
)
from jaxmp.inspect.program.equations import Key, program_of
from jaxmp.inspect.program.evaluate import is_whole
from jaxmp.inspect.program.reading_values import values_of
from jaxmp.inspect.program.values import Turns, Value, leading_to
from jaxmp.optim.loss_scale import StaticLossScale
from jaxmp.optim.scaling_state import LossScalingState

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
    **dict.fromkeys(("atanh", "erf_inv"), lambda x: np.abs(x) == 1),
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
    """Find the operation that made the first infinity or NaN of a loss or of its gradients.

    The function and its derivative are traced and run one operation at a time, with a flag for each result. Loops run
    turn by turn. From the results that are not finite the search goes back through values that are not finite. So an
    infinity that a ``where`` or a softmax takes away is not blamed, and neither is a mask of ``-inf``. If no operation
    on finite numbers explains the result, an infinite argument is blamed, else the operation that makes NaN of an
    infinite constant, else the constant. The program runs again to look at the operands of the operation.

    Args:
      fun: returns the loss, a floating scalar, or a tuple that begins with it; under :func:`jaxmp.autocast` or with
        modules under policies if so trained. Or a train step, called with what it takes: then its gradients are looked
        at, with the loss scale of the state, for the state's rng.
      grad: whether to look at the gradients too, with respect to the floating arrays of the first argument that has
        any, as ``jax.grad`` takes them. Without them ``fun`` may return anything.
      loss_scale: what the loss is multiplied with before it is differentiated.

    Returns:
      A function of ``fun``'s arguments that returns a :class:`Blame`, or None if all is finite. Every rounding to
      half takes place as written.

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
            require_own_settings(loss_scale=None if scale == 1 else scale)
            return _of_step(step_call(fun, args))
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


def _of_step(call: StepCall) -> Blame | None:
    step, state, batch = call.step, call.state, call.batch
    rng = call.rng

    def program_for(state: Any) -> Callable[..., Any]:
        def program(params: Any, model_state: Any, batch: Any) -> Any:
            given = state.replace(params=params, model_state=model_state)
            loss, grads, *aux = step.placed_gradients(given, batch, rng)
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


class _Origin(NamedTuple):
    """Where the results of an operation that are not finite come from, element by element where it is elementwise."""

    through: list[bool]  # of each operand: whether it was not finite where the result is not
    born: bool  # whether finite operands gave a result that is not finite
    nan: bool  # whether finite operands gave NaN
    pole: bool  # whether finite operands hit a pole of the function
    made: bool  # whether operands without NaN, perhaps infinite, gave NaN
    ranges: tuple[Range, ...]  # of the operands


def _origin(name: str, operands: Sequence[Any], results: Sequence[Any]) -> _Origin:
    """Return the origin of results, computed by NumPy: XLA would compile for longer than it takes."""
    operands, results = list(map(_on_host, operands)), list(map(_on_host, results))
    bad_operands, nan_operands = list(map(_not_finite, operands)), list(map(_nan, operands))
    if name in _ELEMENTWISE:
        bad, nan = _not_finite(results[0]), _nan(results[0])
    else:
        bad = np.any([_not_finite(result).any() for result in results])
        nan = np.any([_nan(result).any() for result in results])
        bad_operands = [each.any() for each in bad_operands]
        nan_operands = [each.any() for each in nan_operands]
    if name == "select_n":
        for case in range(len(operands) - 1):
            is_chosen = operands[0] == case
            bad_operands[case + 1] &= is_chosen
            nan_operands[case + 1] &= is_chosen
    born = bad & ~_any_of(bad_operands)
    return _Origin(
        through=[bool(np.any(bad & operand)) for operand in bad_operands],
        born=bool(np.any(born)),
        nan=bool(np.any(born & nan)),
        pole=name in _POLES and bool(np.any(born & _POLES[name](*operands))),
        made=bool(np.any(nan & ~_any_of(nan_operands))),
        ranges=_ranges(operands),
    )


def _any_of(masks: Sequence[Any]) -> Any:
    return functools.reduce(np.logical_or, masks, np.False_)


def _on_host(value: Any) -> Any:
    """Return a value as a NumPy array; a random key stays as it is."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = process_allgather(value, tiled=True)
    return np.asarray(value)


def _not_finite(value: Any) -> Any:
    return ~np.isfinite(value) if is_inexact(value) else np.False_


def _nan(value: Any) -> Any:
    return np.isnan(value) if is_inexact(value) else np.False_


def _ranges(operands: Sequence[Any]) -> tuple[Range, ...]:
    """Return the ranges of arrays of numbers that are not empty."""
    ranges = []
    for operand in operands:
        if not jnp.issubdtype(operand.dtype, jnp.number) or not operand.size:
            continue
        numbers = np.abs(operand) if np.iscomplexobj(operand) else np.asarray(operand, np.float64)
        is_known = ~np.isnan(numbers)
        low = numbers.min(where=is_known, initial=np.inf) if is_known.any() else np.nan
        high = numbers.max(where=is_known, initial=-np.inf) if is_known.any() else np.nan
        ranges.append(Range(str(operand.dtype), operand.shape, float(low), float(high)))
    return tuple(ranges)


_At = tuple[Key, Turns]
"""An operation in one turn of each scan around it; in a while loop in the first turn in which it fails."""


class _Failure(NamedTuple):
    """An operation, some of whose results are not finite."""

    name: str
    bad: set[int]  # the numbers of these results
    while_turn: int  # -1 outside of while loops


_PENDING = 4096
"""The number of flags that are fetched at a time: waiting for each takes longer than computing it."""


class _Seen(Exception):
    """Ends a run in which there is nothing more to see."""


class _Program:
    """A program that was run once, with its operations that failed and the branches that its conditionals took."""

    def __init__(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> None:
        self.jaxpr, self.consts, self.inputs = jaxpr, consts, inputs
        self.failures: dict[_At, _Failure] = {}
        self.origins: dict[_At, _Origin] = {}
        pending: list[tuple[stepping.Moment, str, list[Any]]] = []

        def visit(moment: stepping.Moment, eqn: Any, operands: list[Any], results: list[Any], flags: list[Any]) -> None:
            pending.append((moment, eqn.primitive.name, flags))
            if len(pending) == _PENDING:
                self._add_failures(pending)
                pending.clear()

        self.results, self.branches = stepping.run(jaxpr, consts, inputs, visit)
        self._add_failures(pending)

    def _add_failures(self, pending: list[tuple[stepping.Moment, str, list[Any]]]) -> None:
        all_flags = jax.device_get([flags for _, _, flags in pending])
        for (moment, name, _), flags in zip(pending, all_flags, strict=True):
            bad = _numbers_of_bad(flags)
            if bad:
                self.failures.setdefault((moment.key, moment.turns), _Failure(name, bad, moment.while_turn))

    def look_at(self, wanted: set[_At]) -> None:
        """Run again, up to the last of some failures, for their origins."""

        def visit(moment: stepping.Moment, eqn: Any, operands: list[Any], results: list[Any], flags: list[Any]) -> None:
            at = moment.key, moment.turns
            if at in wanted and at not in self.origins and _numbers_of_bad(flags):
                self.origins[at] = _origin(eqn.primitive.name, operands, results)
                if wanted <= self.origins.keys():
                    raise _Seen

        with contextlib.suppress(_Seen):
            stepping.run(self.jaxpr, self.consts, self.inputs, visit, wanted)


def _numbers_of_bad(flags: Sequence[Any]) -> set[int]:
    """Return the numbers of the results whose flags say that they are not finite."""
    return {number for number, flag in enumerate(flags) if flag is not None and np.asarray(flag) != 0}


def _find(fun: Callable[..., Any], args: Sequence[Any], paths: Sequence[str]) -> Blame | None:
    """The blame in a function that returns losses, whatever else, and gradients."""
    jaxpr, consts, structure = program_of(fun, *args)
    inputs = jax.tree.leaves(tuple(args))
    program = _Program(jaxpr, consts, inputs)
    values = values_of(jaxpr, consts, is_whole)
    roots = values.results
    losses, aux, _ = map(jax.tree.leaves, jax.tree.unflatten(structure, range(len(roots))))
    bad = [n for n, result in enumerate(program.results) if not stepping.is_finite(result)]
    main = [roots[n] for n in bad if n not in aux]
    early = leading_to([roots[n] for n in (*losses, *aux)])
    found = _first(main or [roots[n] for n in bad], program, early)
    # A mask that is returned is meant to be infinite; a loss is not.
    if found is None or (found.rank is _Rank.CONSTANT and not main):
        return None
    value, turns = found.value, found.turns
    if value.name == "argument" or (value.name == "constant" and found.reader is None):
        given, path = value.constant, "a constant"
        if value.name == "argument":
            given, path = inputs[value.position], paths[value.position]
        return Blame("input", "", path, "", "input", _ranges([_on_host(jnp.asarray(given))]), None, False)
    kind, phase = "", "forward" if value in early else "backward"
    if found.reader is not None and not value.key:
        kind, phase, (value, turns) = "input", "input", found.reader
    at = value.key, turns
    if at not in program.origins:
        program.look_at({at})
    place, failure, origin = values.places[value.key], program.failures[at], program.origins[at]
    turn = None
    if place.turns:
        turn = failure.while_turn if place.turns[-1] is None else turns[-1]
        if place.turns[-1] is not None and value.scans[-1].reverse and phase == "forward":
            turn = place.turns[-1] - 1 - turn
    kind = kind or _kind(failure.name, origin)
    return Blame(phase, failure.name, place.path, place.source, kind, origin.ranges, turn, False)


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


def _first(starts: Sequence[Value], program: _Program, early: set[Value]) -> _Suspect | None:
    """Return the first suspect behind values that are not finite, if there is one.

    Origins are looked at in the order of the program until a suspect comes before all failures whose origin is unknown.
    Mostly one look is enough. A selection passes on only the elements it chooses, so each selection is looked at.
    """
    looks = 1
    while True:
        suspects, unknown = _suspects(starts, program)
        known_early = early | {suspect.value for suspect in suspects if not suspect.value.key}

        def order(suspect: _Suspect, known_early: set[Value] = known_early) -> Any:
            return suspect.rank, suspect.value not in known_early, suspect.value.order(suspect.turns)

        first = min(suspects, key=order, default=None)
        before = sorted((each for each in unknown if first is None or order(each) < order(first)), key=order)
        selections = [each for each in unknown if each.value.name == "select_n"]
        if not before and not selections:
            return first
        program.look_at({(each.value.key, each.turns) for each in (*before[:looks], *selections)})
        looks *= 4


def _suspects(starts: Sequence[Value], program: _Program) -> tuple[list[_Suspect], list[_Suspect]]:
    """Go back from values that are not finite: return the suspects, and the failures whose origin is not known yet."""
    suspects: list[_Suspect] = []
    unknown: list[_Suspect] = []
    left: list[tuple[Value, Turns, Any]] = [(value, (), None) for value in starts]
    seen = set()
    while left:
        value, turns, reader = left.pop()
        if (value, turns) in seen:
            continue
        seen.add((value, turns))
        followed = None  # the numbers of the operands or branches that lead on; None: all
        if not value.key:
            is_argument = value.name == "argument"
            given = program.inputs[value.position] if is_argument else value.constant
            if not stepping.is_finite(given):
                rank = _Rank.ARGUMENT if is_argument else _Rank.CONSTANT
                is_nan = _nan(_on_host(jnp.asarray(given))).any()
                suspects.append(_Suspect(_Rank.BORN if is_nan else rank, value, (), reader))
        elif value.place is not None:
            failure = program.failures.get((value.key, turns))
            if failure is None or value.position not in failure.bad:
                continue
            reader = value, turns
            suspect = _Suspect(_Rank.BORN, value, turns, None)
            origin = program.origins.get((value.key, turns))
            if origin is None:
                unknown.append(suspect)
            else:
                followed = {number for number, is_through in enumerate(origin.through) if is_through}
            if origin is not None and (origin.born or origin.made):
                suspects.append(suspect._replace(rank=_Rank.BORN if origin.born else _Rank.MADE))
        else:
            followed = program.branches.get((value.key, turns))
        left += [
            (source, other, reader)
            for number, source, other in value.sources(turns)
            if followed is None or number in followed
        ]
    return suspects, unknown


def _kind(name: str, origin: _Origin) -> str:
    if not origin.born or (origin.nan and name not in _NEVER_INVALID):
        return "invalid"
    return "division by zero" if origin.pole else "overflow"
