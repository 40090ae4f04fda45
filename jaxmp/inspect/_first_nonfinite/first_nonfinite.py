"""Find the operation that made the first infinity or NaN."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp.base import tables
from jaxmp.base.inspection import tool
from jaxmp.base.trees import map_nodes_of_type
from jaxmp.inspect._first_nonfinite import stepping
from jaxmp.inspect._first_nonfinite.known_lengths import with_known_lengths
from jaxmp.inspect._first_nonfinite.origins import Range, failure_kind, on_host, ranges_of
from jaxmp.inspect._first_nonfinite.suspects import ProgramRun, Rank, first_suspect
from jaxmp.inspect.program.calls import (
    StepCall,
    argument_paths,
    is_step,
    named,
    require_arguments_not_deleted,
    require_own_settings,
    step_call,
    under_policy,
)
from jaxmp.inspect.program.function_leaves import of_arrays
from jaxmp.inspect.program.iterations import Iteration
from jaxmp.inspect.program.loss_calls import with_gradients
from jaxmp.inspect.program.tracing import program_of
from jaxmp.optim.loss_scale import StaticLossScale
from jaxmp.optim.scaling_state import LossScalingState
from jaxmp.program.equations import evaluate
from jaxmp.program.reading import is_whole, read_program
from jaxmp.program.values import Program, Value, leading_to


@dataclasses.dataclass(frozen=True)
class Blame(tables.Shown):
    """The operation that made the first infinity or NaN.

    Attributes:
      phase: ``"input"`` (an argument or a constant), ``"forward"`` or ``"backward"``. A value that only the derivative
        uses is backward, such as 0.5/sqrt(0) in the derivative of a square root. It is ``"compiled"`` if a result of
        the compiled program is not finite, but all results are finite operation by operation; then most fields are
        empty.
      primitive: the name of the operation's JAX primitive. For a constant, this is the primitive that reads the
        constant. For an argument, it is empty.
      path: the modules and scopes around the operation, joined by ``/``; for an argument, the name of the argument and
        the path of the array in it.
      source: the file and line in the user's code.
      kind: ``"overflow"``, ``"division by zero"`` (a pole: 1/0, log 0, rsqrt 0), ``"invalid"`` (0/0, inf - inf, the
        square root of a negative number), ``"input"`` or ``"compiled"``.
      operands: the ranges of the operands in the blamed iteration; for an argument, the range of the argument; for the
        compiled program, the ranges of the results that are not finite.
      turn: the iteration of the innermost loop, counted from 0; None outside of loops. For a scan, and for the
        derivative of a scan, it is the index into the scanned arrays, also if the scan is reversed.
      scaled_only: whether everything is finite with a loss scale of 1, so that only the loss scale is to blame.
      not_counted: the operation, with the reason, if the search did not look into it.
    """

    phase: str
    primitive: str
    path: str
    source: str
    kind: str
    operands: tuple[Range, ...]
    turn: int | None
    scaled_only: bool
    not_counted: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return the blame in one line."""
        scale = ", by the loss scale alone" if self.scaled_only else ""
        if self.phase == "compiled":
            return f"a result of the compiled program; operation by operation, all results are finite{scale}"
        if self.phase == "input" and not self.primitive:
            return f"the input {self.path!r}{scale}"
        turn = "" if self.turn is None else f", iteration {self.turn} of the loop"
        path = f"{self.path!r} " if self.path else ""
        source = f"({self.source}{turn})" if self.source or turn else ""
        kind = "a constant" if self.phase == "input" else f"{self.phase} {self.kind}"
        return f"{kind} in {self.primitive} {path}{source}".rstrip() + scale

    def _shown(self) -> Any:
        rows = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("operands", "not_counted") and value not in ("", None):
                rows.append((field.name.replace("_", " "), str(value)))
        rows += [(f"operand {n}", str(operand)) for n, operand in enumerate(self.operands)]
        notes = [f"not counted: {'; '.join(self.not_counted)}"] if self.not_counted else []
        return f"First non-finite value: {self.summary()}", ("field", "value"), rows, notes


@tool
def first_nonfinite(
    fun: Any,
    policy: Any = None,
    *,
    overrides: Mapping[str, str] | None = None,
    grad: bool = True,
    loss_scale: float = 1.0,
) -> Callable[..., Blame | None]:
    """Find the operation that made the first infinity or NaN.

    ``fun`` and its derivative run one operation at a time, also inside loops. The search starts at the non-finite
    results and goes back through non-finite values. If all results are finite, the compiled program runs too, because
    XLA may compute other values. Some infinities do not reach a result, such as a mask of ``-inf``
    before a softmax. They are not blamed. If there are several suspects, the first in this order is blamed:

    1. an argument or constant that contains NaN, or an operation that computes an infinity or NaN from finite numbers;
    2. an infinite argument;
    3. an operation that computes NaN from an infinite constant;
    4. an infinite constant.

    Args:
      fun: a function that returns the loss (a floating scalar), or a tuple whose first element is the loss. ``fun`` may
        also be a train step. Then call the returned function with the step's arguments. The loss scale and the random
        key come from the step's state.
      policy: a policy with which :func:`jaxmp.autocast` runs ``fun``, in addition to the policies in ``fun``. Leave it
        out for a train step that was made with a policy.
      overrides: overrides of ``policy``, as for :func:`jaxmp.autocast`.
      grad: whether to check the gradients too, with respect to the first argument that has floating arrays. If False,
        ``fun`` may return anything.
      loss_scale: the factor by which the loss is multiplied before the differentiation.

    Returns:
      A function of ``fun``'s arguments that returns a :class:`Blame`, or None if the results of both runs are
      finite. In the run operation by operation, XLA keeps every rounding to half precision (float16 or bfloat16) of the
      traced program.

    Raises:
      ValueError: ``loss_scale`` is not a positive finite number, or is set for a train step.
      TypeError: ``grad`` is True, and the first result of ``fun`` is not a floating scalar.
      RuntimeError: an argument was donated to an earlier step.

    >>> def loss_fn(params, x):
    ...     return jnp.sum(jnp.exp(params["w"] * x))
    >>> blame = first_nonfinite(loss_fn)({"w": jnp.array(50.0)}, jnp.array([1.0, 2.0]))
    >>> blame.primitive, blame.kind, blame.phase, blame.operands[0].high
    ('exp', 'overflow', 'forward', 100.0)
    """
    scale = float(loss_scale)
    if not 0 < scale < float("inf"):
        raise ValueError(f"loss_scale must be a positive finite number, got {loss_scale!r}; 1.0 means no scaling")
    fun = under_policy(fun, policy, overrides)

    def find(*args: Any) -> Blame | None:
        if is_step(fun):
            require_own_settings(loss_scale=None if scale == 1 else scale)
            return _blame_in_step(step_call(fun, args))
        require_arguments_not_deleted(fun, args)
        function, args = of_arrays(fun, args)
        paths = argument_paths(fun, args)
        if not grad:
            return _blame_in(lambda *args: ((), function(*named(args)), ()), args, paths)
        program = with_gradients(function, args)

        def unscaled(*args: Any) -> Any:
            return program(None, *args)

        if scale == 1:
            return _blame_in(unscaled, args, paths)
        blame = _blame_in(program, (jnp.float32(scale), *args), ["loss_scale", *paths])
        if blame is None:
            return None
        return dataclasses.replace(blame, scaled_only=_blame_in(unscaled, args, paths) is None)

    return find


def _blame_in_step(call: StepCall) -> Blame | None:
    """Return the blame in a train step, under the loss scale of its state."""
    rng = call.rng

    def program_for(state: Any) -> Callable[..., Any]:
        def program(params: Any, model_state: Any, batch: Any) -> Any:
            step_state = state.replace(params=params, model_state=model_state)
            loss, grads, *aux = call.step.update.gradients(step_state, batch, rng)
            return loss, aux, grads

        return program

    args = call.state.params, call.state.model_state, call.batch
    program = program_for(call.state)
    require_arguments_not_deleted(program, args)
    paths = argument_paths(program, args)
    blame = _blame_in(program, args, paths)
    if blame is None:
        return None
    unscaled_state = call.state.replace(opt_state=_without_loss_scale(call.state.opt_state))
    return dataclasses.replace(blame, scaled_only=_blame_in(program_for(unscaled_state), args, paths) is None)


def _without_loss_scale(opt_state: Any) -> Any:
    """Return an optimizer state whose loss scale is 1."""
    unscaled = StaticLossScale(1.0)
    return map_nodes_of_type(lambda state: state._replace(loss_scale=unscaled), opt_state, LossScalingState)


def _blame_in(fun: Callable[..., Any], args: Sequence[Any], paths: Sequence[str]) -> Blame | None:
    """Return the blame in ``fun``, or None.

    ``fun`` returns a tuple of three items: losses, other results, and gradients.
    """
    jaxpr, consts, structure = program_of(fun, *args)
    inputs = jax.tree.leaves(tuple(args))
    run = ProgramRun(jaxpr, consts, inputs)
    bad = _numbers_of_bad(run.results)
    losses, aux, _ = map(jax.tree.leaves, jax.tree.unflatten(structure, range(len(run.results))))
    if not bad:
        return _blame_of_compiled(jaxpr, consts, inputs)
    if run.lengths:
        jaxpr, consts = with_known_lengths(jaxpr, consts, inputs, run.lengths)
        run = ProgramRun(jaxpr, consts, inputs)
    program = read_program(jaxpr, consts, counts_as_one=is_whole)
    results = program.results
    bad_losses_and_gradients = [results[n] for n in bad if n not in aux]
    early = leading_to([results[n] for n in (*losses, *aux)])
    suspect = first_suspect(bad_losses_and_gradients or [results[n] for n in bad], run, early)
    if suspect is None:
        return None
    if suspect.rank is Rank.CONSTANT and not bad_losses_and_gradients:
        return None  # infinite constants that `fun` returns beside the loss are intended, such as a mask
    value = suspect.value
    if value.name == "argument":
        return _blame_of_input(run.inputs[value.position], paths[value.position])
    if value.name == "constant":
        if suspect.reader is None:
            return _blame_of_input(value.constant, "a constant")
        return _blame_of_operation(run, program, *suspect.reader, "input")
    return _blame_of_operation(run, program, value, suspect.turns, "forward" if value in early else "backward")


def _numbers_of_bad(results: Sequence[Any]) -> list[int]:
    """Return the positions of the results that are not finite."""
    return [number for number, result in enumerate(results) if not stepping.is_finite(result)]


def _blame_of_compiled(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> Blame | None:
    """Return the blame if only the compiled program is not finite."""
    results = jax.jit(functools.partial(evaluate, jaxpr))(consts, inputs)
    bad = [on_host(jnp.asarray(results[number])) for number in _numbers_of_bad(results)]
    return Blame("compiled", "", "", "", "compiled", ranges_of(bad), None, False) if bad else None


def _blame_of_input(array: Any, path: str) -> Blame:
    return Blame("input", "", path, "", "input", ranges_of([on_host(jnp.asarray(array))]), None, False)


def _blame_of_operation(run: ProgramRun, program: Program, value: Value, turns: Iteration, phase: str) -> Blame:
    equation, failure = program.equations[value.key], run.failures[value.key, turns]
    origin = run.origin((value.key, turns))
    turn = turns[-1] if turns else None
    kind = "input" if phase == "input" else failure_kind(failure.name, origin)
    not_counted = (f"{equation.name}: it runs on each device",) if equation.bodies is not None else ()
    return Blame(phase, failure.name, equation.path, equation.source, kind, origin.ranges, turn, False, not_counted)
