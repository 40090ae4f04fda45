"""The class of an NNX module under a policy, and the calls of its methods.

A module under a policy is an instance of a subclass of its original class. If code outside of the model calls a method,
the call runs as one program, which ``jaxmp.engine`` rewrites. In this program, each method call of a module adds two
scopes to JAX's name stack: the module's path, and a mark that tells the engine how to compute the method. README.md
follows one call from start to end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxmp._internals.flax.nnx import is_pytree_class, repr_with
from jaxmp._internals.flax.nnx_calls import make_array_call
from jaxmp._internals.flax.nnx_variables import is_module, is_object, modules_in, own_variables
from jaxmp.base.context_variables import setting
from jaxmp.base.donation import require_not_deleted
from jaxmp.engine.model_call import ModelCall
from jaxmp.engine.model_policy import CallStack, MethodCall, ModelPolicy, Treatment, VariableKind
from jaxmp.policy.off_switch import unless_policies_off
from jaxmp.policy.patterns import Path
from jaxmp.program.scopes import CALL_SCOPE


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxDecision:
    """How an NNX module is computed.

    Equal modules of one class have equal decisions, as NNX's transforms require.

    Attributes:
      model_policy: the policy of the model.
      treatment: how the methods of the module are computed.
      is_root: whether the policy was applied to this module itself. Its results are then cast to the output dtype.
      replaced_dtype: the ``dtype`` of the author, in a tuple, if the policy replaced it.
      level: a number that makes the classes of two nested modules differ if all else is equal. Without this number, a
        call of the inner module would look like a call of the outer module's copy in a transform.
    """

    model_policy: ModelPolicy
    treatment: Treatment
    is_root: bool
    replaced_dtype: tuple[Any, ...]
    level: int = 0


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
        namespace |= {name: _wrap(method) for name, method in _methods(bare)}
        if decision.is_root:
            namespace["__nnx_repr__"] = repr_with(bare, "policy", str(decision.model_policy))

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
        if name != "__call__" and (name.startswith("__") or hasattr(nnx.Module, name)):
            continue
        method = inspect.getattr_static(bare, name)
        is_descriptor = isinstance(method, (functools.partialmethod, functools.singledispatchmethod))
        is_function = callable(method) and not isinstance(method, (type, staticmethod))
        if (is_descriptor or (is_function and hasattr(method, "__get__"))) and not _is_generator(method):
            yield name, method


def _is_generator(method: Any) -> bool:
    return inspect.isgeneratorfunction(inspect.unwrap(getattr(method, "func", method)))


TO_COPY = (
    "before the step, copy the arrays that two models share: nnx.update(target, jax.tree.map(jnp.copy, "
    "nnx.state(model)))"
)
"""The remedy for a model whose arrays were donated to a step of another model."""

call_numbers: ContextVar[Iterator[int] | None] = ContextVar("jaxmp_nnx_call_numbers", default=None)
"""A counter of calls, set while a tool inspects a program. Each run, and each call in a run, then has a scope with a
number of its own, so that the tool can tell the calls of one module apart."""


def _wrap(method: Any) -> Callable[..., Any]:
    """Return a function that runs ``method`` under the decision for its module."""

    @functools.wraps(getattr(method, "func", method), updated=())
    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (run := _run.get()) is not None:
            return run.call(self, method, args, kwargs)
        if (numbers := call_numbers.get()) is None:
            return _run_model(self, method, args, kwargs)
        with jax.named_scope(f"jaxmp.run:{next(numbers)}"):
            return _run_model(self, method, args, kwargs)

    return enter


def _run_as_written(module: Any, method: Any, args: Any, kwargs: Any) -> Any:
    """Call ``method`` of ``module`` in the scopes of a run, but without policies."""
    with _start_run(module, has_policies=False) as run, _with_author_dtypes(run.modules):
        return run.call(module, method, args, kwargs)


@unless_policies_off(_run_as_written)
def _run_model(module: Any, method: Any, args: Any, kwargs: Any) -> Any:
    """Call ``method`` of ``module`` as a program that the engine rewrites."""
    decision: NnxDecision = type(module).jaxmp_decision
    called_all = False

    def fun(module: Any, args: Any, kwargs: Any) -> Any:  # the arguments are copies, which the trace may change
        nonlocal called_all
        with _start_run(module) as run:
            before = _convert_for_code(run.modules)
            result = run.call(module, method, args, kwargs)
            _convert_for_storage(run.modules, before)
        called_all = run.called_all()
        return result

    pure, arguments, write = make_array_call(fun, (module, args, kwargs), {})
    call = ModelCall(decision.model_policy)
    try:
        results = call.computed(pure, *arguments)
    except (RuntimeError, ValueError) as error:
        require_not_deleted(nnx.as_pure(nnx.state(module, graph=True)), error, TO_COPY)
        raise
    call.check(called_all and decision.is_root)
    return write(*results)


class _Run:
    """A call of a model, with the calls of modules inside of this call.

    If you call a module below a root directly, as in ``model.head(x)``, the module is the root of this run.

    Attributes:
      modules: the modules of the model, without the copies that transforms make in the call.
    """

    def __init__(self, module: Any, has_policies: bool) -> None:
        self._stack = CallStack(_map_arrays, has_policies)
        self._paths: dict[int, tuple[Any, Path]] = {}  # modules and their paths, by id; keeps the modules alive
        self._called: set[int] = set()  # the ids of the modules that were called
        self._find_paths(module, ())
        self.modules = [module for module, _ in self._paths.values()]

    def call(self, module: Any, method: Any, args: Any, kwargs: Any) -> Any:
        """Call ``method`` of ``module``, as the decision for the module says.

        If the module calls its own method, no scope is opened and nothing is cast.
        """
        bound = method.__get__(module, type(module))
        caller = self._stack.innermost
        if caller is not None and self._calls_itself(caller, module):
            return bound(*args, **kwargs)
        around = caller.path if caller is not None else ()
        if id(module) not in self._paths:  # a copy that a transform has made
            self._find_paths(module, (*around, type(module).__name__))
        path = self._paths[id(module)][1]
        self._called.add(id(module))
        decision: NnxDecision = type(module).jaxmp_decision
        call = MethodCall(module, path, decision.treatment, decision.model_policy if decision.is_root else None)
        with self._scope(path, around):
            return self._stack.run(call, bound, args, kwargs)

    def _calls_itself(self, caller: MethodCall, module: Any) -> bool:
        """Return whether a module calls itself, as in a helper method or the body of a transform."""
        is_copy = id(module) not in self._paths and type(module) is type(caller.module)
        return module is caller.module or is_copy

    def _scope(self, path: Path, around: Path) -> contextlib.AbstractContextManager[Any]:
        """Return the scope of the module at ``path`` in the scope of the module at ``around``."""
        scope = "/".join(path[len(around) :] if path[: len(around)] == around else path)
        if not scope:
            return contextlib.nullcontext()
        numbers = call_numbers.get()
        return jax.named_scope(scope if numbers is None else f"{scope}/{CALL_SCOPE}{next(numbers)}")

    def called_all(self) -> bool:
        """Return whether every module with Params was called.

        A transform calls copies of modules. A call of a copy counts as a call of the module.
        """
        of_model = {id(module) for module in self.modules}
        classes_of_copies = {type(self._paths[key][0]) for key in self._called - of_model}
        for module in self.modules:
            if id(module) in self._called or type(module) in classes_of_copies or not is_module(module):
                continue
            if any(isinstance(var, nnx.Param) for var in own_variables(module)):
                return False
        return True

    def _find_paths(self, module: Any, path: Path) -> None:
        """Record the paths of a module and of the modules below it."""
        self._paths.update((id(node), (node, (*path, *below))) for below, node in modules_in(module))


_run: ContextVar[_Run | None] = ContextVar("jaxmp_nnx_run", default=None)


@contextlib.contextmanager
def _start_run(module: Any, has_policies: bool = True) -> Iterator[_Run]:
    """Start a run, which lasts until the end of the context."""
    run = _Run(module, has_policies)
    with setting(_run, run):
        yield run


def _map_arrays(convert: Callable[[Any], Any], tree: Any) -> Any:
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


class _Values(NamedTuple):
    """The values of a Variable, which is kept alive so that no other Variable gets its id."""

    var: Any
    stored: Any
    for_code: Any


def _convert_for_code(modules: list[Any]) -> dict[int, _Values]:
    """Give Variables the dtypes in which the code of their modules is traced.

    Return the values of the Variables by their ids. The first module of a shared Variable decides its dtype.
    """
    values: dict[int, _Values] = {}
    for module, treatment in _treatments(modules):
        for var in own_variables(module):
            if id(var) in values:
                continue
            stored = var.get_raw_value()
            convert = functools.partial(treatment.convert_for_code, is_operand=isinstance(var, nnx.Param))
            for_code = jax.tree.map(convert, stored)
            if any(map(operator.is_not, jax.tree.leaves(for_code), jax.tree.leaves(stored))):
                var.set_raw_value(for_code)
            else:  # keep the container, which the code may change in place
                for_code = stored
            values[id(var)] = _Values(var, stored, for_code)
    return values


def _convert_for_storage(modules: list[Any], before: dict[int, _Values]) -> None:
    """Give Variables the dtypes in which they are stored, after the code of their modules has run.

    ``before`` has the values of the Variables before the code ran. Values that it did not change are restored.
    """
    values = dict(before)
    for module, treatment in _treatments(modules):
        for var in own_variables(module):
            value, old = var.get_raw_value(), values.get(id(var))
            if old is not None and value is old.for_code:
                new = old.stored
            else:
                new = treatment.convert_for_storage(value, old.stored if old is not None else None, _kind_of(var))
            if new is not value:
                var.set_raw_value(new)
            values[id(var)] = _Values(var, new, new)


def _treatments(modules: list[Any]) -> Iterator[tuple[Any, Treatment]]:
    """Yield the modules that are under a policy, with their treatments."""
    for module in modules:
        decision = decision_of(module)
        if decision is not None:
            yield module, decision.treatment


_KINDS: dict[type, VariableKind] = {nnx.Param: "param", nnx.Cache: "cache", nnx.Intermediate: "activation"}
"""The kinds of Variables that have rules of their own."""


def _kind_of(var: nnx.Variable[Any]) -> VariableKind:
    return next((kind for cls, kind in _KINDS.items() if isinstance(var, cls)), "other")
