"""The class of an NNX module under a policy, and the calls of its methods.

A module under a policy is an instance of a subclass of its original class. The methods of the subclass run under the
policy. The root is the model to which the user applied the policy. If code outside of the root calls a method of the
root, the call runs as one program, which ``jaxmp.engine`` rewrites. In this program, each method call of a module adds
two scopes to JAX's name stack: the module's path, and a mark that tells the engine how to compute the method.
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

from jaxmp._internals.flax.nnx import is_pytree_class
from jaxmp._internals.flax.nnx_calls import of_arrays
from jaxmp._internals.flax.nnx_variables import is_module, is_object, modules_in, own_variables
from jaxmp._internals.jax.patches import keeping_carries
from jaxmp.base import trees as _tree
from jaxmp.base.cache_keys import float32_caller, policies_off
from jaxmp.engine.autocast import computed
from jaxmp.engine.half_check import NotHalf, ProductsCheck
from jaxmp.engine.module_border import (
    Treatment,
    handed_out,
    is_running_in,
    like,
    narrow,
    remembered,
    widen_for_float32_code,
)
from jaxmp.engine.overrides import Level
from jaxmp.engine.rules import Rules
from jaxmp.policy.patterns import Path
from jaxmp.policy.policies import Policy, check_backend

# Variables of these types have the dtype in which a module computes them. All other Variables keep their dtype.
_ACTIVATIONS = (nnx.Cache, nnx.Intermediate)
# The special methods that run under the policy. Python and Flax use the other special methods to handle an object.
_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "pow", "rshift", "or", "and")
_SPECIAL_METHODS = {"__call__", "__getitem__", "__neg__", *(f"__{r}{name}__" for name in _OPERATORS for r in ("", "r"))}


@dataclasses.dataclass(frozen=True)
class HalfPolicy:
    """A half-precision policy of a model, and the modules that compute otherwise.

    Attributes:
      policy: the policy.
      not_half: the modules that compute in another dtype.
    """

    policy: Policy
    not_half: tuple[NotHalf, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxDecision(Treatment):
    """The decision on how an NNX module computes.

    Equal modules of one class have equal decisions, as NNX's transforms require. Under autocast, ``policy`` is the
    policy of the whole model.

    Attributes:
      is_root: whether the policy was applied to this module itself. Its results are then cast to the output dtype.
      replaced: the original values of the attributes that the policy replaced.
      level: a number that makes the classes of two nested modules differ if all else is equal. Without this number, a
        call of the inner module would look like a call of the outer module's copy in a transform.
      operations: the overrides for operations under autocast.
      half: for a root under a half policy, the policy and the modules that do not compute in half precision; None if
        all modules compute in half precision.
    """

    is_root: bool
    replaced: tuple[tuple[str, Any], ...]
    level: int = 0
    operations: tuple[tuple[str, Level], ...] = ()
    half: HalfPolicy | None = None


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
        namespace |= {"jaxmp_decision": decision, "jaxmp_bare_class": bare, "jaxmp_programs": {}, "__reduce__": _reduce}
        namespace |= {"__module__": bare.__module__, "__qualname__": bare.__qualname__, "__doc__": bare.__doc__}
        namespace |= {name: _entrance(name, method) for name, method in _methods(bare)}

    return types.new_class(bare.__name__, (bare,), {"pytree": is_pytree_class(bare)}, fill)


def _reduce(self: Any) -> Any:  # called by pickle and copy.copy
    return _unpickle, (bare_class(self), decision_of(self)), dict(vars(self))


def _unpickle(bare: Any, decision: NnxDecision) -> Any:
    return object.__new__(policied_class(bare, decision))


def _methods(bare: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and functions of the methods that run under a policy.

    These are the methods that the author wrote. ``__init__`` and the methods of ``nnx.Module``, such as ``eval``, are
    excluded. Generators are excluded too, because their code runs after the call of the method has returned.
    """
    classes = [cls for cls in bare.__mro__ if cls not in nnx.Module.__mro__]
    for name in {name for cls in classes for name in vars(cls)}:
        is_excluded = name not in _SPECIAL_METHODS if name.startswith("__") else hasattr(nnx.Module, name)
        if is_excluded:
            continue
        method = inspect.getattr_static(bare, name)
        is_descriptor = isinstance(method, (functools.partialmethod, functools.singledispatchmethod))
        is_function = callable(method) and not isinstance(method, (type, staticmethod))
        if (is_descriptor or (is_function and hasattr(method, "__get__"))) and not _is_generator(method):
            yield name, method


def _is_generator(method: Any) -> bool:
    return inspect.isgeneratorfunction(inspect.unwrap(getattr(method, "func", method)))


def _entrance(name: str, method: Any) -> Callable[..., Any]:
    """Return a function that runs ``method`` under the decision for its module."""
    # By default Flax's init_cache creates a float32 cache, which is wrong for a layer that computes in another dtype.
    signature = (
        inspect.signature(method) if name == "init_cache" and inspect.isfunction(method) else inspect.Signature()
    )
    makes_cache = "dtype" in signature.parameters

    @functools.wraps(getattr(method, "func", method), updated=())
    def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = _dtype_of_cache(self) if makes_cache and not policies_off.value else None
        if dtype is not None and "dtype" not in signature.bind_partial(self, *args, **kwargs).arguments:
            kwargs["dtype"] = dtype
        return _call(self, method, args, kwargs)

    return enter


def _dtype_of_cache(module: Any) -> Any:
    """Return the dtype of a module's cache, or None for ``init_cache``'s default."""
    decision: NnxDecision = type(module).jaxmp_decision
    if decision.is_float32:
        return decision.policy.compute_dtype
    return vars(module).get("dtype") if decision.mode == "written" else None


numbers: ContextVar[Iterator[int] | None] = ContextVar("jaxmp_nnx_numbers", default=None)
"""A counter of runs, set while a tool inspects a program. Each run, and each call in a run, then has a numbered
scope."""


@dataclasses.dataclass(frozen=True, eq=False)
class _RootRun:
    """A call of a root, with the calls of modules inside of this call.

    If you call a module below a root directly, as in ``model.head(x)``, the module is the root of this run.

    Attributes:
      cls: the class of the root.
      ambient_precision: the precision of products outside of the run.
      paths: the modules and their paths, by the ids of the modules. The dict keeps the modules alive.
      calls: a counter of calls, which numbers their scopes.
      called: the ids of the modules that were called.
    """

    cls: type
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
class _NnxCall:
    """A running method of an NNX module, its run, and its caller."""

    run: _RootRun
    module: Any
    path: Path
    decision: NnxDecision
    caller: _NnxCall | None

    def is_in_run_of(self, cls: type) -> bool:
        """Return whether this call is part of a run whose root has the class ``cls``."""
        return self.run.cls is cls or (self.caller is not None and self.caller.is_in_run_of(cls))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Make this call the caller of all methods inside of the context."""
        token = _innermost.set(self)
        try:
            with float32_caller(type(self.module) if self.decision.is_float32 else None):
                yield
        finally:
            _innermost.reset(token)


_innermost: ContextVar[_NnxCall | None] = ContextVar("jaxmp_nnx_frame", default=None)


def is_running() -> bool:
    """Return whether a method of a module under a policy is running."""
    return _innermost.get() is not None


def _call(module: Any, method: Any, args: Any, kwargs: Any) -> Any:
    """Call ``method`` of ``module`` in the current run, or as a run of its own.

    A call starts a run if no method of a module under a policy is running. A call of a root that is nested in another
    model starts a run too.
    """
    caller, decision = _innermost.get(), _decision_now(module)
    if caller is not None and not (decision.is_root and not caller.is_in_run_of(type(module))):
        return _run_method(caller.run, module, method, args, kwargs)

    if (runs := numbers.get()) is None:
        return _outermost(module, method, args, kwargs, caller, decision)
    with jax.named_scope(f"jaxmp.run:{next(runs)}"):
        return _outermost(module, method, args, kwargs, caller, decision)


def _decision_now(module: Any) -> Any:
    """Return the decision for a call that begins now.

    While policies are off, the module computes as its author wrote it, but its path is still a scope on the name stack.
    """
    decision: NnxDecision = type(module).jaxmp_decision
    return dataclasses.replace(decision, mode="autocast", override=None) if policies_off.value else decision


def _outermost(module: Any, method: Any, args: Any, kwargs: Any, caller: _NnxCall | None, decision: NnxDecision) -> Any:
    """Call ``method`` of ``module`` as a new run, which the engine rewrites."""
    config: Any = jax.config
    ambient = caller.run.ambient_precision if caller else config.jax_default_matmul_precision
    if policies_off.value:
        run = _RootRun(type(module), ambient, {})
        run.find_paths(module, ())
        with _with_author_dtypes([node for node, _ in run.paths.values()]):
            return _run_method(run, module, method, args, kwargs)
    half = None if caller is not None or is_running_in("linen") else decision.half
    check = half and ProductsCheck(half.policy)
    decided = check.decided if check else id

    def fun(module: Any, args: Any, kwargs: Any) -> Any:  # the arguments are copies, which the trace may change
        run = _RootRun(type(module), ambient, {})
        run.find_paths(module, ())
        modules = dict(run.paths)  # without the copies that transforms make later
        with keeping_carries(), _half_variables_widened([node for node, _ in modules.values()]):
            result = _run_method(run, module, method, args, kwargs)
        if half and check:
            check.ran(half.not_half if run.called_all(modules) else ())
        return result

    if decision.mode == "autocast":
        check_backend(policy := decision.policy)
        rules = Rules(policy.compute_dtype, dict(decision.operations), float8=policy.float8, decided=decided)
        return computed(fun, rules, (module, args, kwargs), {}, policy)
    call, programs = of_arrays(fun, (module, args, kwargs), {}), type(module).jaxmp_programs
    key = method, call.key, numbers.get() is None, check is None
    result = call.write(*remembered(programs, key, call.pure, Rules(None, decided=decided), call.arguments))
    return _arrays(widen_for_float32_code, result) if caller is not None and caller.decision.is_float32 else result


def _run_method(run: _RootRun, module: Any, method: Any, args: Any, kwargs: Any) -> Any:
    """Call a method of ``module`` in a run.

    If the module calls its own method, no scope is opened and nothing is cast.
    """
    decision, caller = _decision_now(module), _innermost.get()
    bound = method.__get__(module, type(module))
    known, here = run.paths.get(id(module)), caller if caller is not None and caller.run is run else None
    if here is not None and (module is here.module or (known is None and type(module) is type(here.module))):
        with _dtypes_kept(module, decision):
            return bound(*args, **kwargs)
    around = here.path if here else ()
    if known is None:  # a copy that a transform has made
        run.find_paths(module, (*around, type(module).__name__))
        known = run.paths[id(module)]
    path = known[1]
    scope = "/".join(path[len(around) :] if path[: len(around)] == around else path)
    if scope and numbers.get() is not None:
        scope += f"/jaxmp.call:{next(run.calls)}"

    arguments = set[int]()
    if decision.is_float32:
        args, kwargs = _arrays(widen_for_float32_code, (args, kwargs))
        arguments = {id(leaf) for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_object)}
    treatment = decision.called_by(here.decision if here else None)
    run.called.add(id(module))
    frame = _NnxCall(run, module, path, treatment, caller)
    with (
        frame.running(),
        jax.named_scope(scope) if scope else contextlib.nullcontext(),
        decision.mark(),
        decision.products(caller.decision if caller else None, run.ambient_precision),
        _dtypes_kept(module, decision),
    ):
        result = bound(*args, **kwargs)

    if decision.mode == "autocast":
        return result
    if here is None and decision.is_root:
        return _arrays(decision.policy.cast_to_output, result)
    return handed_out(result, decision, here.decision if here else None, arguments, _arrays)


def _arrays(convert: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``convert`` to the arrays of ``tree``.

    Arrays in modules and in other objects of NNX are unchanged.
    """
    return jax.tree.map(lambda leaf: leaf if is_object(leaf) else convert(leaf), tree, is_leaf=is_object)


@contextlib.contextmanager
def _with_author_dtypes(modules: list[Any]) -> Iterator[None]:
    """Give modules the dtype attributes that the author set, inside of the context."""
    filled = [(vars(module), dict(decision.replaced)) for module in modules if (decision := decision_of(module))]
    before = [{name: attributes[name] for name in replaced} for attributes, replaced in filled]
    for attributes, replaced in filled:
        attributes.update(replaced)
    try:
        yield
    finally:
        for (attributes, _), old in zip(filled, before, strict=True):
            attributes.update(old)


@contextlib.contextmanager
def _half_variables_widened(modules: list[Any]) -> Iterator[None]:
    """Cast Params and caches to float32 in modules that are traced in float32.

    Only half-precision values are cast. At the end of the context, they have their stored dtypes again.
    """
    stored = []
    for module in modules:
        decision = decision_of(module)
        for var in own_variables(module) if decision is not None and decision.is_float32 else ():
            value = var.get_raw_value()
            is_read = isinstance(var, (nnx.Param, nnx.Cache))
            wide = jax.tree.map(widen_for_float32_code, value) if is_read else value
            if wide is not value:
                var.set_raw_value(wide)
                stored.append((var, value, wide))
    yield
    for var, value, wide in stored:
        now = var.get_raw_value()
        var.set_raw_value(value if now is wide else like(now, value))


@contextlib.contextmanager
def _dtypes_kept(module: Any, decision: NnxDecision) -> Iterator[None]:
    """Keep the dtypes of a module's Variables when a method writes to them.

    At the end of the context, a value that the method has written is cast to the dtype of the old value. There are
    three exceptions:

    - Params that existed before are not cast. New Params of a module without a ``dtype`` attribute are cast to the
      param dtype.
    - Intermediates are cast to the compute dtype if the module is traced in float32. Otherwise they are not cast.
    - Caches are not cast.
    """
    if decision.mode == "autocast":
        yield
        return
    before = {id(var): (var, var.get_raw_value()) for var in own_variables(module)}
    yield
    for var in own_variables(module):
        new, (_, old) = var.get_raw_value(), before.get(id(var), (var, None))
        if new is old:
            continue
        stored = new
        if isinstance(var, nnx.Param):
            if id(var) not in before and decision.mode != "written":
                stored = _tree.cast(new, vars(module).get("param_dtype", decision.policy.param_dtype))
        elif not isinstance(var, _ACTIVATIONS):
            stored = like(new, old)
        elif decision.is_float32 and not isinstance(var, nnx.Cache):
            stored = jax.tree.map(lambda leaf: narrow(leaf, decision.policy.compute_dtype), new)
        if stored is not new:
            var.set_raw_value(stored)
