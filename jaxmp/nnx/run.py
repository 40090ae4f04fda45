"""The class of an NNX module under a policy, and the calls of its methods.

A module under a policy is an instance of a subclass of its original class. If code outside of the model calls a method,
the call runs as one program, which ``jaxmp.engine`` rewrites. In this program, each method call of a module adds two
scopes to JAX's name stack: the module's path, and a mark that tells the engine how to compute the method.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx

from jaxmp._internals.flax.nnx import is_pytree_class, repr_with
from jaxmp._internals.flax.nnx_calls import of_arrays
from jaxmp._internals.flax.nnx_variables import is_module, is_object, modules_in, own_variables
from jaxmp.base.cache_keys import policies_off
from jaxmp.engine.autocast import computed
from jaxmp.engine.eager_calls import call_eagerly
from jaxmp.engine.half_check import NotHalf, ProductsCheck
from jaxmp.engine.model_policy import ModelPolicy, Treatment, VariableKind, widen
from jaxmp.policy.patterns import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxDecision:
    """How an NNX module is computed.

    Equal modules of one class have equal decisions, as NNX's transforms require.

    Attributes:
      model: the policy of the model.
      treatment: how the methods of the module are computed.
      is_root: whether the policy was applied to this module itself. Its results are then cast to the output dtype.
      replaced_dtype: the ``dtype`` of the author, in a tuple, if the policy replaced it.
      level: a number that makes the classes of two nested modules differ if all else is equal. Without this number, a
        call of the inner module would look like a call of the outer module's copy in a transform.
      not_half: for a root, the modules that do not compute in half precision.
    """

    model: ModelPolicy
    treatment: Treatment
    is_root: bool
    replaced_dtype: tuple[Any, ...]
    level: int = 0
    not_half: tuple[NotHalf, ...] = ()


def decision_of(module: Any) -> NnxDecision | None:
    """Return the decision for a module, or None if it has no policy."""
    return getattr(type(module), "jaxmp_decision", None)


def bare_class(module: Any) -> Any:
    """Return the class of a module without a policy, as the author wrote it."""
    return getattr(type(module), "jaxmp_bare_class", type(module))


@functools.cache
def policied_class(bare: Any, decision: NnxDecision) -> Any:
    """Return the subclass of ``bare`` whose instances run under ``decision``."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"jaxmp_decision": decision, "jaxmp_bare_class": bare, "__reduce__": _reduce}
        namespace |= {"__module__": bare.__module__, "__qualname__": bare.__qualname__, "__doc__": bare.__doc__}
        namespace |= {name: _entrance(method) for name, method in _methods(bare)}
        if decision.is_root:
            namespace["__nnx_repr__"] = repr_with(bare, "policy", str(decision.model))

    return types.new_class(bare.__name__, (bare,), {"pytree": is_pytree_class(bare)}, fill)


def _reduce(self: Any) -> Any:  # called by pickle and copy.copy
    return _unpickle, (bare_class(self), decision_of(self)), dict(vars(self))


def _unpickle(bare: Any, decision: NnxDecision) -> Any:
    return object.__new__(policied_class(bare, decision))


def _methods(bare: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and functions of the methods that run under a policy.

    These are ``__call__`` and the other methods that the author wrote. ``__init__``, operators such as ``__add__``, and
    the methods of ``nnx.Module``, such as ``eval``, are excluded. Generators are excluded too, because their code runs
    after the call of the method has returned.
    """
    classes = [cls for cls in bare.__mro__ if cls not in nnx.Module.__mro__]
    for name in {name for cls in classes for name in vars(cls)}:
        is_excluded = name != "__call__" if name.startswith("__") else hasattr(nnx.Module, name)
        if is_excluded:
            continue
        method = inspect.getattr_static(bare, name)
        is_descriptor = isinstance(method, (functools.partialmethod, functools.singledispatchmethod))
        is_function = callable(method) and not isinstance(method, (type, staticmethod))
        if (is_descriptor or (is_function and hasattr(method, "__get__"))) and not _is_generator(method):
            yield name, method


def _is_generator(method: Any) -> bool:
    return inspect.isgeneratorfunction(inspect.unwrap(getattr(method, "func", method)))


def _entrance(method: Any) -> Callable[..., Any]:
    """Return a function that runs ``method`` under the decision for its module."""

    @functools.wraps(getattr(method, "func", method), updated=())
    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _innermost.get() is not None:
            return _run_method(self, method, args, kwargs)
        if (runs := numbers.get()) is None:
            return _run_model(self, method, args, kwargs)
        with jax.named_scope(f"jaxmp.run:{next(runs)}"):
            return _run_model(self, method, args, kwargs)

    return enter


numbers: ContextVar[Iterator[int] | None] = ContextVar("jaxmp_nnx_numbers", default=None)
"""A counter of runs, set while a tool inspects a program. Each run, and each call in a run, then has a numbered
scope."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """A call of a model, with the calls of modules inside of this call.

    If you call a module below a root directly, as in ``model.head(x)``, the module is the root of this run.

    Attributes:
      ambient_precision: the precision of products outside of the run.
      paths: the modules and their paths, by the ids of the modules. The dict keeps the modules alive.
      calls: a counter of calls, which numbers their scopes.
      called: the ids of the modules that were called.
    """

    ambient_precision: str | None
    paths: dict[int, tuple[Any, Path]]
    calls: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    called: set[int] = dataclasses.field(default_factory=set)

    def called_all(self, modules: Mapping[int, tuple[Any, Path]]) -> bool:
        """Return whether every module with Params was called.

        A transform calls copies of modules. A call of a copy counts as a call of the module.
        """
        copies = {type(self.paths[key][0]) for key in self.called - modules.keys()}
        for key, (module, _) in modules.items():
            if key in self.called or type(module) in copies or not is_module(module):
                continue
            if any(isinstance(var, nnx.Param) for var in own_variables(module)):
                return False
        return True

    def find_paths(self, module: Any, path: Path) -> None:
        """Record the paths of a module and of the modules below it."""
        self.paths.update((id(node), (node, (*path, *below))) for below, node in modules_in(module))


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A running method of an NNX module, and its run."""

    run: _Run
    module: Any
    path: Path
    treatment: Treatment | None


_innermost: ContextVar[_Call | None] = ContextVar("jaxmp_nnx_call", default=None)


def _run_model(module: Any, method: Any, args: Any, kwargs: Any) -> Any:
    """Call ``method`` of ``module`` as a program that the engine rewrites."""
    config: Any = jax.config
    decision, ambient = type(module).jaxmp_decision, config.jax_default_matmul_precision
    if policies_off.value:
        run = _Run(ambient, {})
        run.find_paths(module, ())
        with _with_author_dtypes([node for node, _ in run.paths.values()]):
            return _run_method(module, method, args, kwargs, run)
    check = ProductsCheck(decision.model.policies.root)
    complete_calls: list[_Run] = []  # the run, if it called every module

    def fun(module: Any, args: Any, kwargs: Any) -> Any:  # the arguments are copies, which the trace may change
        run = _Run(ambient, {})
        run.find_paths(module, ())
        modules = dict(run.paths)  # without the copies that transforms make later
        with _variables_for_code([node for node, _ in modules.values()]):
            result = _run_method(module, method, args, kwargs, run)
        if run.called_all(modules):
            complete_calls.append(run)
        check.ran(decision.not_half if complete_calls else ())
        return result

    of_call, arguments, write, key = of_arrays(fun, (module, args, kwargs), {})

    def pure(*arguments: Any) -> Any:
        rules = decision.model.rules(check.decided)
        results = computed(of_call, rules, arguments, {})
        if complete_calls:
            rules.check()
        return results

    return write(*call_eagerly(pure, lambda: (method, key, numbers.get() is None), arguments))


def _run_method(module: Any, method: Any, args: Any, kwargs: Any, new_run: _Run | None = None) -> Any:
    """Call a method of ``module`` in ``new_run``, or in the run of the calling method.

    If the module calls its own method, no scope is opened and nothing is cast.
    """
    caller = _innermost.get() if new_run is None else None
    run = caller.run if caller else new_run
    assert run is not None
    decision: NnxDecision = type(module).jaxmp_decision
    bound = method.__get__(module, type(module))
    known = run.paths.get(id(module))
    if caller and (module is caller.module or (known is None and type(module) is type(caller.module))):
        return bound(*args, **kwargs)
    around = caller.path if caller else ()
    if known is None:  # a copy that a transform has made
        run.find_paths(module, (*around, type(module).__name__))
        known = run.paths[id(module)]
    path = known[1]
    scope = "/".join(path[len(around) :] if path[: len(around)] == around else path)
    if scope and numbers.get() is not None:
        scope += f"/jaxmp.call:{next(run.calls)}"
    run.called.add(id(module))
    with jax.named_scope(scope) if scope else contextlib.nullcontext():
        treatment = None if policies_off.value else decision.treatment
        call = _Call(run, module, path, treatment)
        if treatment is None:
            return _in_call(call, bound, args, kwargs)
        caller_treatment = caller.treatment if caller else None
        if treatment.written or caller_treatment is None or caller_treatment.written:
            args, kwargs = _arrays(treatment.for_code, (args, kwargs))
        with treatment.mark(), treatment.products(caller_treatment, run.ambient_precision):
            result = _in_call(call, bound, args, kwargs)
        if decision.is_root and decision.model.stores:
            result = _arrays(decision.model.policies.root.cast_to_output, result)
        if treatment.written and caller_treatment is not None and not caller_treatment.written:
            return _arrays(widen, result)
        return result


def _in_call(call: _Call, bound: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a method as the caller of all methods inside."""
    token = _innermost.set(call)
    try:
        return bound(*args, **kwargs)
    finally:
        _innermost.reset(token)


def _arrays(convert: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``convert`` to the arrays of ``tree``.

    Arrays in modules and in other objects of NNX are unchanged.
    """
    return jax.tree.map(lambda leaf: leaf if is_object(leaf) else convert(leaf), tree, is_leaf=is_object)


@contextlib.contextmanager
def _with_author_dtypes(modules: list[Any]) -> Iterator[None]:
    """Give modules the ``dtype`` that the author set, inside of the context."""
    replaced = []
    for module in modules:
        decision = decision_of(module)
        if decision is not None and decision.replaced_dtype:
            replaced.append((vars(module), vars(module)["dtype"]))
            vars(module)["dtype"] = decision.replaced_dtype[0]
    try:
        yield
    finally:
        for attributes, dtype in replaced:
            attributes["dtype"] = dtype


@contextlib.contextmanager
def _variables_for_code(modules: list[Any]) -> Iterator[None]:
    """Give Variables the dtypes in which the code of their modules is traced, inside of the context.

    At the end of the context, all Variables have the dtypes in which they are stored.
    """
    stored: dict[int, tuple[Any, Any, Any]] = {}  # by id: the Variable, its stored value, and its value for the code
    owners = [(module, decision) for module in modules if (decision := decision_of(module)) is not None]
    for module, decision in owners:
        for var in own_variables(module):
            value, is_param = var.get_raw_value(), isinstance(var, nnx.Param)
            if id(var) in stored:  # shared with an earlier module
                continue
            for_code = functools.partial(decision.treatment.for_code, is_operand=is_param)
            read = jax.tree.map(for_code, value)
            if any(new is not old for new, old in zip(jax.tree.leaves(read), jax.tree.leaves(value), strict=True)):
                var.set_raw_value(read)
            else:
                read = value
            stored[id(var)] = var, value, read
    yield
    for module, decision in owners:
        for var in own_variables(module):
            _, value, read = stored.get(id(var), (var, None, None))
            now = var.get_raw_value()
            if id(var) in stored and now is read:
                new = value
            else:
                new = decision.treatment.for_storage(now, value, _kind_of(var))
            if new is not now:
                var.set_raw_value(new)
            stored[id(var)] = var, new, new


_KINDS: dict[type, VariableKind] = {nnx.Param: "param", nnx.Cache: "cache", nnx.Intermediate: "activation"}
"""The kinds of Variables that have rules of their own."""


def _kind_of(var: nnx.Variable[Any]) -> VariableKind:
    return next((kind for cls, kind in _KINDS.items() if isinstance(var, cls)), "other")
