"""Which operation made the first infinity or NaN that reaches the loss or its gradients."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmp import tables
from jaxmp._jaxpr.walk import PRODUCTS
from jaxmp._placement import require_not_deleted
from jaxmp.inspect import stepping
from jaxmp.inspect.calls import (
    Step,
    argument_paths,
    differentiated,
    is_inexact,
    loss_and_rest,
    named,
    require_arguments_not_deleted,
)
from jaxmp.inspect.evaluate import is_whole
from jaxmp.inspect.program import Key, program_of
from jaxmp.inspect.stepping import wide
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
        modules under policies if so trained. Or a :class:`jaxmp.training.TrainStep`, called with state and batch: then
        its gradients are looked at, with the loss scale of the state, for the state's rng.
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
        if isinstance(fun, Step):
            return _of_step(fun, *args)
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


def _of_step(step: Step, state: Any, batch: Any) -> Blame | None:
    step.require_state(state)
    require_not_deleted(state)

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


class _Origin(NamedTuple):
    """Where the results of an operation that are not finite come from, element by element where it is elementwise."""

    bad: Sequence[Any]  # of each result: whether an element is not finite
    through: Sequence[Any]  # of each operand: whether it was not finite where the result is not
    born: Any  # whether finite operands gave a result that is not finite
    nan: Any  # whether finite operands gave NaN
    pole: Any  # whether finite operands hit a pole of the function
    made: Any  # whether operands without NaN, perhaps infinite, gave NaN


@functools.partial(jax.jit, static_argnums=0)
def _origin(name: str, operands: Sequence[Any], results: Sequence[Any]) -> _Origin:
    bad = [_not_finite(result) for result in results]
    bad_operands, nan_operands = [_not_finite(operand) for operand in operands], [_nan(operand) for operand in operands]
    nan = functools.reduce(operator.or_, (jnp.any(_nan(result)) for result in results))
    any_bad = functools.reduce(operator.or_, map(jnp.any, bad))
    if name in _ELEMENTWISE:
        any_bad, nan = bad[0], _nan(results[0])
    else:
        bad_operands, nan_operands = list(map(jnp.any, bad_operands)), list(map(jnp.any, nan_operands))
    if name == "select_n":
        which = jnp.asarray(operands[0], jnp.int32)  # a bool for two cases
        for case in range(len(operands) - 1):
            bad_operands[case + 1] &= which == case
            nan_operands[case + 1] &= which == case
    none_bad = ~functools.reduce(operator.or_, bad_operands, jnp.array(False))
    none_nan = ~functools.reduce(operator.or_, nan_operands, jnp.array(False))
    born = any_bad & none_bad
    pole = born & _POLES[name](*operands) if name in _POLES else False
    return _Origin(
        bad=list(map(jnp.any, bad)),
        through=[jnp.any(any_bad & operand) for operand in bad_operands],
        born=jnp.any(born),
        nan=jnp.any(nan & none_bad),
        pole=jnp.any(pole),
        made=jnp.any(nan & none_nan),
    )


def _not_finite(value: Any) -> jax.Array:
    return ~jnp.isfinite(wide(value)) if is_inexact(value) else jnp.array(False)


def _nan(value: Any) -> jax.Array:
    return jnp.isnan(wide(value)) if is_inexact(value) else jnp.array(False)


def _is_bad(value: Any) -> bool:
    return bool(jnp.any(_not_finite(value)))


def _ranges(operands: Sequence[Any]) -> tuple[Range, ...]:
    """The ranges of arrays of numbers that are not empty; a random key has none."""
    ranges = []
    for operand in map(jnp.asarray, operands):
        if not jnp.issubdtype(operand.dtype, jnp.number) or not operand.size:
            continue
        is_complex = jnp.issubdtype(operand.dtype, jnp.complexfloating)
        numbers = jnp.abs(operand) if is_complex else wide(operand)
        low, high = float(jnp.nanmin(numbers)), float(jnp.nanmax(numbers))
        ranges.append(Range(str(operand.dtype), operand.shape, low, high))
    return tuple(ranges)


class _Failure(NamedTuple):
    """An operation at the first time that its results are not finite."""

    origin: _Origin
    while_turn: int  # -1 outside of while loops


_At = tuple[Key, Turns]


class _Run(NamedTuple):
    """The results of a program, its operations that failed, and the branches that its conditionals took."""

    results: list[Any]
    failures: Mapping[_At, _Failure]
    branches: Mapping[_At, set[int]]


def _run(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> _Run:
    failures: dict[_At, _Failure] = {}

    def visit(moment: stepping.Moment, eqn: Any, operands: list[Any], results: list[Any]) -> None:
        at = moment.key, moment.turns
        if at not in failures:
            origin = jax.device_get(_origin(eqn.primitive.name, operands, results))
            failures[at] = _Failure(origin, moment.while_turn)

    results, branches = stepping.run(jaxpr, consts, inputs, visit)
    return _Run(results, failures, branches)


def _ranges_at(at: _At, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> tuple[Range, ...]:
    """Run again for the ranges of the operands of one operation, the first time that it fails."""
    ranges: list[tuple[Range, ...]] = []

    def visit(moment: stepping.Moment, eqn: Any, operands: list[Any], results: list[Any]) -> None:
        if not ranges and (moment.key, moment.turns) == at:
            ranges.append(_ranges(operands))

    stepping.run(jaxpr, consts, inputs, visit)
    return ranges[0]


def _find(program: Callable[..., Any], args: Sequence[Any], paths: Sequence[str]) -> Blame | None:
    """The blame in a function that returns losses, whatever else, and gradients."""
    jaxpr, consts, structure = program_of(program, *args)
    inputs = jax.tree.leaves(tuple(args))
    run = _run(jaxpr, consts, inputs)
    values = values_of(jaxpr, consts, is_whole)
    roots = values.results
    losses, aux, _ = map(jax.tree.leaves, jax.tree.unflatten(structure, range(len(roots))))
    bad = [n for n, result in enumerate(run.results) if _is_bad(result)]
    main = [roots[n] for n in bad if n not in aux]
    early = leading_to([roots[n] for n in (*losses, *aux)])
    # A mask that is returned is meant to be infinite; a loss is not.
    suspects = [
        suspect
        for suspect in _suspects(main or [roots[n] for n in bad], run, inputs)
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
        return Blame("input", "", path, "", "input", _ranges([given]), None, False)
    kind, phase = "", "forward" if value in early else "backward"
    if found.reader is not None and not value.key:
        kind, phase, (value, turns) = "input", "input", found.reader
    place, failure = values.places[value.key], run.failures[value.key, turns]
    name = place.eqn.primitive.name
    turn = None
    if place.turns:
        turn = failure.while_turn if place.turns[-1] is None else turns[-1]
        if place.turns[-1] is not None and value.scans[-1].reverse and phase == "forward":
            turn = place.turns[-1] - 1 - turn
    ranges = _ranges_at((value.key, turns), jaxpr, consts, inputs)
    return Blame(phase, name, place.path, place.source, kind or _kind(name, failure.origin), ranges, turn, False)


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


def _suspects(starts: Sequence[Value], run: _Run, inputs: Sequence[Any]) -> Iterator[_Suspect]:
    """All that the values which are not finite come from, as far as :class:`_Origin` tells."""
    left: list[tuple[Value, Turns, Any]] = [(value, (), None) for value in starts]
    seen = set()
    while left:
        value, turns, reader = left.pop()
        if (value, turns) in seen:
            continue
        seen.add((value, turns))
        followed = None  # the operands or branches that lead on; None: all
        if not value.key:
            is_argument = value.name == "argument"
            given = inputs[value.position] if is_argument else value.constant
            if _is_bad(given):
                rank = _Rank.ARGUMENT if is_argument else _Rank.CONSTANT
                yield _Suspect(_Rank.BORN if bool(jnp.any(_nan(given))) else rank, value, (), reader)
        elif value.place is not None:
            failure = run.failures.get((value.key, turns))
            if failure is None or not failure.origin.bad[value.position]:
                continue
            origin, reader = failure.origin, (value, turns)
            followed = {number for number, is_through in enumerate(origin.through) if is_through}
            if origin.born or origin.made:
                yield _Suspect(_Rank.BORN if origin.born else _Rank.MADE, value, turns, None)
        else:
            followed = run.branches.get((value.key, turns))
        left += [
            (source, other, reader)
            for number, source, other in value.sources(turns)
            if followed is None or number in followed
        ]


def _kind(name: str, origin: _Origin) -> str:
    if not origin.born or (origin.nan and name not in _NEVER_INVALID):
        return "invalid"
    return "division by zero" if origin.pole else "overflow"
