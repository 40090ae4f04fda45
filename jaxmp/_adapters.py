"""What the adapters for Linen and NNX have in common.

A module with a ``dtype`` field computes as it is written. One that has params and no such field is traced in float32,
and the engine decides what in it is half: half values are widened on their way into it, which the engine sees through,
and what it computes leaves it in its compute dtype. Under autocast, in float16 O1 as Apex calls it, no field counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import tree as _tree
from jaxmp._jaxpr import reading
from jaxmp._jaxpr.program import Program, arrays_in, is_array
from jaxmp._jaxpr.walk import PRODUCTS, equations, jaxprs_in
from jaxmp.dtypes import CASTABLE, is_half
from jaxmp.engine.autocast import computed
from jaxmp.engine.classes import Class, classify
from jaxmp.engine.graph import Graph, Step
from jaxmp.engine.rules import Rules
from jaxmp.marks import computing, widened
from jaxmp.overrides import levels_of
from jaxmp.patterns import EVERY, OPERATIONS, Path, Pattern, pairs_of, pattern_text
from jaxmp.policy import Policy, PolicyMap, is_o1

Mode = Literal["written", "float32", "autocast"] | None

# --- policies ---


def autocast_map(policy: Any, overrides: Mapping[Any, Any] | None) -> tuple[PolicyMap, dict[str, Any]]:
    """The policies of a model under autocast and its exceptions of operations, of what ``autocast`` is given."""
    given = dict(pairs_of(overrides))
    operations = {key: given.pop(key) for key in [*given] if isinstance(key, str) and key.startswith(OPERATIONS)}
    policies = PolicyMap(PolicyMap("mixed_float16" if is_o1(policy) else policy), given)
    half = policies.compute_dtype
    if half not in CASTABLE or not is_half(half):
        raise ValueError(
            f"a model under autocast needs a policy with a half compute dtype, got {half.name}; use 'mixed_bfloat16' "
            "or 'mixed_float16'"
        )
    for pattern, exception in policies.rules:
        if exception.compute_dtype not in (np.float32, half):
            raise ValueError(
                f"under autocast a model computes in its policy's {half.name}, and in float32 where an override says "
                f"so, but the one for {pattern_text(pattern)!r} computes in {exception.compute_dtype.name}; write "
                "'float32' or 'half' there"
            )
    return policies, levels_of(operations, half, policies.root.matmul)


def described_model(value: Any) -> str:
    """What came in the place of a model, for an error: its class, for what it prints may be all of its arrays."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def is_running_in(library: str) -> bool:
    """Whether a run of ``jaxmp.linen`` or ``jaxmp.nnx`` is under way."""
    run = sys.modules.get(f"jaxmp.{library}.run")
    return run is not None and run.is_running()


# --- fields ---


def is_floating(dtype: Any) -> bool:
    """Whether ``dtype`` is what a policy may replace: a floating dtype, or None for "infer it"."""
    try:
        return dtype is None or bool(jnp.issubdtype(np.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def is_default(dtype: Any, default: Any) -> bool:
    """Whether a floating ``dtype`` (or None) is the ``default`` of its field; without a default, None is."""
    if dtype is None or default is None or default is dataclasses.MISSING:
        return dtype is None
    return np.dtype(dtype) == np.dtype(default)


def kept_from_half(
    policy: Policy, computes: np.dtype, pattern: Pattern | None, operations: Iterable[tuple[str, str]] = ()
) -> str | None:
    """Why a module that ``computes`` in some dtype is not in half; None if it is.

    Its ``policy`` is that of ``pattern``, and the dtype another one where that is its author's word. Without a pattern
    the overrides of ``operations`` count, where they name all products.
    """
    if is_half(computes):
        asked = {} if pattern is not None else dict(operations)
        keys = (key for key in (f"class:{Class.HALF}", EVERY) if asked.get(key, "half") in ("float32", "tensorfloat32"))
        return next((f"{_OVERRIDE}{key!r}" for key in keys), None)
    is_own = computes != policy.compute_dtype
    return f"its own dtype={computes.name}" if is_own else f"{_OVERRIDE}{pattern_text(pattern or '**')!r}"


class NothingInHalfError(ValueError):
    """A half policy that changes no product of a model."""


class Kept(NamedTuple):
    """A module that a half policy leaves in another dtype.

    Attributes:
      name: its path; of a root its class.
      reason: the override, or the dtype of its author's, that keeps it.
      has_matrix: whether it has Params such as products take.
    """

    name: str
    reason: str
    has_matrix: bool


class ProductsCheck:
    """Raises where a half policy changes no product of a call of a whole model.

    Two say what they know of the call, in either order: the engine, which products are half, and the run of the model,
    which modules are kept.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._graph: Graph | None = None
        self._modules: Sequence[Kept] | None = None

    def decided(self, graph: Graph) -> None:
        """Takes the program of the call, once the engine has decided it."""
        self._graph = graph
        self._check()

    def ran(self, modules: Sequence[Kept]) -> None:
        """Takes the modules that are kept; none if others of the model were not called."""
        self._modules = modules
        self._check()

    def _check(self) -> None:
        if self._graph is None or self._modules is None:
            return
        graph, self._graph = self._graph, None  # derivative rules, which keep the rules of the call, keep this too
        if self._modules and _are_kept(graph):
            kept = [module for module in self._modules if module.has_matrix] or self._modules
            raise NothingInHalfError(_unchanged(self._policy, kept))


def _are_kept(graph: Graph) -> bool:
    """Whether a decided program has products that a module or an override keeps, and none in half."""
    products = [(step, step.eqn) for step in graph.steps if step.eqn.primitive.name in PRODUCTS]
    if any(_is_half(*product) for product in products):
        return False
    closed = [step for step in graph.steps if step.bodies is None]  # what the engine does not look into
    inside = [(step, eqn) for step in closed for jaxpr in jaxprs_in(step.eqn) for eqn in equations(jaxpr)]
    products += [(step, eqn) for step, eqn in inside if eqn.primitive.name in PRODUCTS]
    are_asked = any(step.region.level or (step.node and step.node.asked) for step, _ in products)
    are_half = any(_is_half(*product) for product in products) or any(_may_multiply(step.eqn) for step in closed)
    return are_asked and not are_half


def _is_half(step: Step, eqn: Any) -> bool:
    """Whether a product, that of a step or one inside of it, has half operands or a half result; float8 ones too."""
    compute = step.node.compute if step.node is not None and eqn is step.eqn else None
    return _is_narrow(compute) if compute is not None else any(map(_is_narrow_array, (*eqn.invars, *eqn.outvars)))


def _may_multiply(eqn: Any) -> bool:
    """Whether an equation may be a product in half for all that is known: a kernel of several half arrays, cuDNN's."""
    is_unknown = classify(eqn.primitive.name) in (Class.OPAQUE, None)
    return is_unknown and sum(map(_is_narrow_array, eqn.invars)) > 1


def _is_narrow_array(atom: Any) -> bool:
    return _is_narrow(getattr(atom.aval, "dtype", None))


def _is_narrow(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2


def _unchanged(policy: Policy, kept: Sequence[Kept]) -> str:
    shown = ", ".join([f"{each.name} ({each.reason})" for each in kept][:8]) + (", …" if len(kept) > 8 else "")
    reasons = [*dict.fromkeys(each.reason for each in kept)]
    overrides = [reason for reason in reasons if reason.startswith(_OVERRIDE)]
    remedies = [f"drop or narrow the {' and the '.join(overrides)}"] if overrides else []
    if len(overrides) < len(reasons):
        remedies += [
            "to overrule a dtype that a module was given, name the module in overrides, e.g. "
            f"overrides={{'**': '{policy}'}}"
        ]
    return (
        f"the policy computes in {policy.compute_dtype.name}, but every product stays as it was: {shown}; "
        f"{'; or, '.join(remedies)}"
    )


_OVERRIDE = "override "


@contextlib.contextmanager
def noting_half(path: Path, cls: type, own: Treatment, adapter: str, remedy: Callable[[], str] = str) -> Iterator[None]:
    """Notes on an error that names a half dtype, once, which module and policy brought it there and what helps.

    Fourier transforms and factorisations take no half operands, and a module that has no ``dtype`` field gets them from
    those that have. Some are told so while the module is traced, others when the program of a whole call runs. If
    the module itself has a ``remedy``, that is what helps. An array that a step has deleted has its own note.
    """
    try:
        yield
    except NothingInHalfError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:  # NotImplementedErrors are the first
        if "has been deleted" in str(error):  # of either class: it depends on what JAX has cached
            _note_deleted(error, adapter)
        elif isinstance(error, (NotImplementedError, TypeError, ValueError)):
            _note_half(error, path, cls, own, adapter, remedy)
        raise


TO_COPY = {
    "linen": "copy before the step what is used after it, jax.tree.map(jnp.copy, state.params), say",
    "nnx": "copy before the step what two models share, nnx.update(target, jax.tree.map(jnp.copy, nnx.state(model)))",
}
"""What helps where a step deletes what is used after it."""


def _note_deleted(error: Exception, adapter: str) -> None:
    if not _is_noted(error):
        error.add_note(
            f"jaxmp: a donating train step deletes the arrays that it is given; {TO_COPY[adapter]}, or make the step "
            "with make_train_step(..., donate=False)"
        )


def _is_noted(error: Exception) -> bool:
    return any(note.startswith("jaxmp: ") for note in getattr(error, "__notes__", ()))


def _note_half(
    error: Exception, path: Path, cls: type, own: Treatment, adapter: str, remedy: Callable[[], str]
) -> None:
    half = own.policy.compute_dtype
    if _is_noted(error) or own.mode == "autocast" or not is_half(half) or half.name not in str(error):
        return
    name = "/".join(path)
    where = f"the module {name!r} ({cls.__name__})" if path else f"the root ({cls.__name__})"
    override = f"overrides={{{name!r}: 'float32'}} computes the module in float32; " if path else ""
    helps = remedy() or (
        f"An operation that takes no {half.name} needs float32: {override}jaxmp.{adapter}.autocast(model, "
        f"'mixed_{half.name}') in place of apply_policy computes such operations in float32 by itself; so does "
        ".astype(jnp.float32) before them"
    )
    error.add_note(
        f"jaxmp: {where} runs under the policy {own.policy}, where what modules return is {half.name}. {helps}"
    )


# --- borders ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Treatment:
    """How the code of a module is computed.

    Attributes:
      policy: what it computes in.
      mode: ``"written"`` if it computes as it is written, in the dtype of its field; ``"float32"`` if it is traced in
        float32, and hands out what the engine decides; ``"autocast"`` if autocast decides on the whole model; None if
        it is traced on the dtypes that come in, and decided on the graph.
      asked: what an override asks of autocast.
      kept: why it is not in half; None if it is.
    """

    policy: Policy
    mode: Mode
    asked: str | None = None
    kept: str | None = dataclasses.field(default=None, compare=False)

    @property
    def is_float32(self) -> bool:
        """Whether its code is traced in float32."""
        return self.mode == "float32"

    def called_by(self, caller: Treatment | None) -> Treatment:
        """How it is computed where it is called: traced on float32 if that is what its ``caller`` has to give.

        Half results of its submodules beside that would be widened for good.
        """
        is_given_float32 = self.mode is None and caller is not None and caller.is_float32
        return dataclasses.replace(self, mode="float32") if is_given_float32 else self

    def mark(self) -> contextlib.AbstractContextManager[None]:
        """What tells the engine how to compute the code of a method."""
        if self.mode == "autocast":
            return jax.named_scope(f"jaxmp.precision({self.asked})") if self.asked else contextlib.nullcontext()
        dtype = None if self.mode == "written" else self.policy.compute_dtype
        return computing(dtype, self.policy.matmul_precision, self.policy.matmul)

    def products(self, caller: Treatment | None, ambient: str | None) -> contextlib.AbstractContextManager[Any]:
        """The precision of products, where it is not that of the module that calls; ``ambient``: that around them all.

        Only where it changes: a module may have set a precision of its own around a submodule.
        """
        wanted = self.policy.matmul_precision
        if self.mode == "autocast" or wanted == (caller.policy.matmul_precision if caller else None):
            return contextlib.nullcontext()
        return jax.default_matmul_precision(wanted or ambient)


def handed_out(
    result: Any, own: Treatment, caller: Treatment | None, given: set[int], arrays: Callable[..., Any] = jax.tree.map
) -> Any:
    """What a method returns, as the code that called it wants it.

    What it only passes on, whose ids are ``given``, keeps its digits. ``arrays`` maps a function over its arrays.
    """
    if caller is not None and caller.is_float32:
        return arrays(widen, result)
    if own.is_float32:
        return arrays(lambda leaf: leaf if id(leaf) in given else narrow(leaf, own.policy.compute_dtype), result)
    return result


def widen(value: Any) -> Any:
    """A leaf for code that is traced in float32: half arrays are widened."""
    return widened(jnp.asarray(value)) if _tree.is_float_array(value) and is_half(value.dtype) else value


def narrow(value: Any, dtype: np.dtype) -> Any:
    """A leaf as code that is traced in float32 hands it out: in the compute dtype of its module, where that is half."""
    is_rounded = _tree.is_float_array(value) and value.dtype == np.float32 and is_half(dtype)
    return value.astype(dtype) if is_rounded else value


def same_structure(tree: Any, other: Any) -> bool:
    """Whether two pytrees have the same structure."""
    structure: Any = jax.tree.structure
    return bool(structure(tree) == structure(other))


def like(new: Any, old: Any) -> Any:
    """``new`` in the dtype of ``old``, if that is a floating array."""
    return _tree.cast(new, old.dtype) if _tree.is_float_array(old) else new


# --- eager calls ---


def remembered(programs: dict[Any, Any], key: Any, fun: Callable[..., Any], rules: Rules, args: tuple[Any, ...]) -> Any:
    """As :func:`computed`; without ``jit`` a program is written once for all calls of one key with arrays of one type.

    Its operations run one by one, as they would without the engine.

    Args:
      programs: those that were written before; the least recent ones are dropped.
      key: what ``fun`` depends on besides its arguments, compared by ``==``.
      fun: a function whose result depends on nothing else.
      rules: what is asked of its operations.
      args: its arguments.
    """
    leaves, tree = jax.tree.flatten(args)
    operands = arrays_in(leaves)
    if reading.is_tracing() or any(isinstance(leaf, jax.core.Tracer) for leaf in operands):
        return computed(fun, rules, args, {})
    statics = tuple(None if is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
    whole = (key, tree, statics, tuple(map(jax.typeof, operands)), reading.context())
    try:
        hash(whole)
    except TypeError:  # an argument or a field has none
        return computed(fun, rules, args, {})
    program = programs.get(whole) or Program(lambda *args: computed(fun, rules, args, {}), args)
    with _lock:
        programs.pop(whole, None)  # the latest stands last
        programs[whole] = program
        if len(programs) > _REMEMBERED:
            del programs[next(iter(programs))]
    jaxpr, consts = program.jaxpr
    return program.unflatten(reading.evaluate(jaxpr, consts, operands))


_REMEMBERED = 64
_lock = threading.RLock()  # threads may call one model; to compare keys may run the author's code
