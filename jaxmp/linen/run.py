"""A run of a Linen module under policies.

The root is the module to which the user applied the policies. A run lasts from the call of one of the root's methods to
its return. During the run, a method interceptor handles every method call of the root and of the modules below it. A
flag in a module's scope shows to which root the module belongs (see ``jaxmp/linen/root.py``).

The decision for a module says how the module computes. Making the decision also sets the ``dtype`` and ``param_dtype``
fields, before the first method of the module runs. While a method runs, JAX's name stack has a scope that is called a
mark. The mark tells ``jaxmp.engine`` whether to keep the dtypes of the module's code or to choose the dtype of each
operation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.core import Scope

from jaxmp._internals.flax.linen import children_of
from jaxmp._internals.jax.patches import keeping_carries
from jaxmp.base.dtypes import is_half
from jaxmp.engine.half_check import NotHalf, Reason, reason_not_half
from jaxmp.engine.marks import computing
from jaxmp.engine.module_border import Mode, Treatment, handed_out, is_floating, is_running_in, widen_for_float32_code
from jaxmp.engine.overrides import level_of
from jaxmp.linen.bridge import is_bridge, require_policy_in_bridge
from jaxmp.linen.fields import fill_dtypes
from jaxmp.linen.initializers import run_initializers_in_float32
from jaxmp.linen.root import POLICY_FLAG, ROOTS_FLAG, Root, set_flag
from jaxmp.linen.variables import (
    PARAMS,
    Variables,
    descend,
    has_children,
    keep_statistics,
    leaves,
    own_leaves,
    store_params,
)
from jaxmp.policy.patterns import Path, is_class_pattern
from jaxmp.policy.policies import Policy

_DECISION = "_jaxmp_decision"  # the attribute of a module that stores its decision


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LinenDecision(Treatment):
    """How a Linen module computes.

    Attributes:
      key: an integer; ``nn.jit`` may share a trace between two modules if their keys are equal.
      param_dtype: the dtype in which params are stored; None if they keep the dtypes of their initializers.
    """

    key: int
    param_dtype: np.dtype | None


@dataclasses.dataclass(frozen=True, eq=False)
class _LinenCall:
    """A running method of a Linen module."""

    run: RootRun
    module: nn.Module
    path: Path
    decision: Treatment

    def is_around(self, run: RootRun, module: nn.Module) -> bool:
        """Return whether this call's module calls itself when it calls ``module``.

        For example, a module calls its own helper method, or the body of its lifted transform. The arguments and the
        result of such an inner call are not cast.
        """
        related = isinstance(module, type(self.module)) or isinstance(self.module, type(module))
        return self.run is run and self.path == module.path and related


class _Running(threading.local):
    """The active runs and methods of this thread, innermost last."""

    def __init__(self) -> None:
        self.runs: list[RootRun] = []
        self.frames: list[_LinenCall] = []

    def run_of(self, module: nn.Module) -> RootRun | None:
        """Return the innermost active run of the root that ``module`` belongs to."""
        if module.scope is None or ROOTS_FLAG not in module.scope.flags:
            return None
        roots, path = module.scope.flags[ROOTS_FLAG], module.path
        return next((run for run in reversed(self.runs) if run.roots == roots and run.covers(path)), None)

    @contextlib.contextmanager
    def method(self, call: _LinenCall) -> Iterator[None]:
        """Record that a method is running inside of the context."""
        self.frames.append(call)
        try:
            yield
        finally:
            self.frames.pop()


_running = _Running()


def is_running() -> bool:
    """Return whether any run is active."""
    return bool(_running.runs)


def run_with_root(module: nn.Module) -> RootRun | None:
    """Return the active run whose root is ``module``, or None."""
    run = _running.run_of(module)
    return run if run is not None and run.path == module.path else None


@contextlib.contextmanager
def running(run: RootRun) -> Iterator[RootRun]:
    """Make ``run`` active inside of the context, and finish it at the end."""
    for outer in _running.runs:
        if outer.roots == run.roots[:-1] and outer.covers(run.path):
            below = run.path[len(outer.path) :]
            outer.nested.append(below)
            outer.classes.setdefault(below, (type(run.module),))
    first = not _running.runs
    _running.runs.append(run)
    try:
        run.decide(run.module)
        with nn.intercept_methods(_intercept) if first else contextlib.nullcontext(), keeping_carries():
            yield run
        run.finish()
    finally:
        _running.runs.remove(run)


def _intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Call a method of a module under the decision of its run."""
    run = _running.run_of(context.module)
    if run is None:  # the module has no policy, because code in the run calls ``apply`` of another model
        with computing(None):
            return next_fun(*args, **kwargs)
    return run.call(context.module, context.method_name, next_fun, args, kwargs)


class RootRun:
    """A run of a root's method, with the decisions for all modules that it calls.

    Args:
      module: the root, bound to a scope.
      root: the policies of the root.
      make_variables: a function that initialises the variables without policies; None if the variables exist already.
      method: the name of the root's method that runs; None for a function that may call several methods.
    """

    def __init__(
        self, module: Any, root: Root, make_variables: Callable[[], Variables] | None, method: str | None
    ) -> None:
        root.mark(module)
        self.module, self.path, self.method = module, module.path, method
        self.roots: tuple[int, ...] = module.scope.flags[ROOTS_FLAG]  # the hashes of the outer roots and this root
        self.copy: Any = lambda: None  # a weak reference to the module's copy in the engine's trace
        self.policies, self.make_variables = root.policies, make_variables
        self.autocast, self.operations = root.autocast, root.operations
        # a copy, because the run may change the variables
        self.variables = self._foresee() if make_variables else jax.tree.map(lambda leaf: leaf, module.variables)
        self.classes: dict[Path, tuple[type, ...]] = {}  # modules that share a scope have one path
        self.decisions: dict[Path, _LinenDecision] = {}
        self.called: dict[Path, Reason | None] = {}  # why each called module is not half precision, or None
        self.not_half: list[NotHalf] = []  # filled at the end of an outermost run that called every module
        self.nested: list[Path] = []  # the paths of roots below this root
        self.bridges: list[Path] = []  # the paths of nnx.bridge.ToLinen modules
        config: Any = jax.config
        self.ambient_precision = config.jax_default_matmul_precision
        self.by_path = not all(map(is_class_pattern, root.policies.patterns))

    def covers(self, path: Path) -> bool:
        """Return whether ``path`` is the root's path or a path below it."""
        return path[: len(self.path)] == self.path

    def _foresee(self) -> Variables | None:
        """Return the shapes of the variables that the run will initialise.

        Return None if they cannot be computed.
        """
        assert self.make_variables is not None
        try:
            return jax.eval_shape(self.make_variables)
        except Exception:  # the user's error, which the run will raise again, or variables that are not arrays
            return None

    def _at(self, path: Path) -> Variables | None:
        """Return the collections of the module at ``path``, or None if they are unknown.

        If the run initialises the variables, the collections have shapes in place of arrays.
        """
        if self.variables is None:
            return None
        there = {name: descend(collection, path) for name, collection in self.variables.items()}
        return {name: collection for name, collection in there.items() if isinstance(collection, Mapping)}

    # --- decisions ---

    def decide(self, module: nn.Module, new_scope: Scope | None = None) -> _LinenDecision:
        """Return the decision for ``module``.

        The first call for a module makes the decision and sets the dtype fields of the module.

        Args:
          module: a module of this run.
          new_scope: the scope that Linen is about to give to the module; None if the module has its scope already.
        """
        scope: Any = new_scope or module.scope
        path = scope.path[len(self.path) :]
        if type(module) not in self.classes.get(path, ()):
            self.classes[path] = (*self.classes.get(path, ()), type(module))
        decision = vars(module).get(_DECISION)
        if decision is None:
            decision = self._decide(module, path)
            object.__setattr__(module, _DECISION, decision)
        set_flag(scope, POLICY_FLAG, decision.key)
        scope.push = functools.partial(_push, weakref.ref(scope), weakref.ref(module))
        self.decisions[path] = decision
        return decision

    def _decide(self, module: Any, path: Path) -> _LinenDecision:
        """Make the decision for ``module``, and set its dtype fields."""
        policy, pattern = self.policies.resolve(path, self.classes)
        is_overridden = pattern is not None
        mode: Mode = "autocast"
        dtypes: dict[str, np.dtype] = {}
        if not self.autocast:
            mode, dtypes = self._fill_fields(module, path, policy, is_overridden)
        if is_bridge(type(module)):
            self.bridges.append(path)
            if not self.autocast:
                require_policy_in_bridge(module, path)
        run_initializers_in_float32(module, is_wide=mode == "float32")
        keeps_params = self.autocast or is_bridge(type(module))
        return _LinenDecision(
            policy=policy,
            mode=mode,
            override=level_of(policy) if self.autocast and is_overridden else None,
            not_half=reason_not_half(policy, dtypes.get("dtype", policy.compute_dtype), pattern, self.operations),
            key=hash((policy, pattern, path if self.by_path else None)),
            param_dtype=None if keeps_params else dtypes.get("param_dtype", policy.param_dtype),
        )

    def _fill_fields(
        self, module: Any, path: Path, policy: Policy, is_overridden: bool
    ) -> tuple[Mode, dict[str, np.dtype]]:
        """Set the dtype fields of ``module``; return its mode and their dtypes."""
        collections = self._at(path)
        is_parent = collections is not None and has_children(collections)
        owns_params = collections is None or bool(own_leaves(collections.get(PARAMS, {})))
        # The dtype of a container stays None, so that each submodule gets its own dtype. A recurrent cell has
        # submodules too, but it computes in one dtype.
        is_container = is_parent and not owns_params and not isinstance(module, nn.RNNCellBase)
        defaults = {field.name: field.default for field in dataclasses.fields(module)}
        dtypes = fill_dtypes(module, defaults, policy, is_overridden, is_container)
        if isinstance(module, nn.MultiHeadDotProductAttention) and module.dtype is None and not module.decode:
            return "float32", dtypes  # else the softmax would be half precision, as with ``decode``
        if is_bridge(type(module)) or ("dtype" in defaults and is_floating(module.dtype)):
            return "written", dtypes
        if owns_params or (is_overridden and not is_parent):
            return "float32", dtypes
        return "inputs", dtypes

    # --- calls ---

    def call(self, module: nn.Module, method: str, next_fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a method of a module of this run, under the module's decision."""
        decision = self.decide(module)
        if method == "setup":
            return next_fun(*args, **kwargs)
        self._decide_fields(module)
        path = module.path[len(self.path) :]
        self.called.setdefault(path, decision.not_half)

        if self.autocast:
            with decision.mark():
                return next_fun(*args, **kwargs)
        return self._call_treated(module, decision, next_fun, args, kwargs)

    def _call_treated(
        self, module: nn.Module, decision: _LinenDecision, next_fun: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a method of ``module`` under ``decision``.

        Return the result in the dtypes that the calling module expects.
        """
        caller = _running.frames[-1] if _running.frames else None
        parent = caller.decision if caller is not None and caller.run is self else None
        is_inside = caller is not None and caller.is_around(self, module)
        treatment = decision.called_by(parent)
        arguments = set[int]()
        if treatment.is_float32:
            if not is_inside:
                args, kwargs = jax.tree.map(widen_for_float32_code, (args, kwargs))
            arguments = {id(leaf) for leaf in jax.tree.leaves((args, kwargs))}
        products = decision.products(caller.decision if caller else None, self.ambient_precision)
        with _running.method(_LinenCall(self, module, module.path, treatment)), decision.mark(), products:
            result = next_fun(*args, **kwargs)
        if module.scope and module.scope.mutable is not False:
            keep_statistics(module, self._at(module.path[len(self.path) :]) or {}, decision)
        if is_inside:
            return result
        if parent is not None:
            return handed_out(result, treatment, parent, arguments)
        if self.method is not None and (module is self.module or module is self.copy()):
            return self.cast_output(result)  # Linen captures the cast result as an intermediate
        return result

    def cast_output(self, result: Any) -> Any:
        """Cast the root's result to the policy's output dtype, except under autocast."""
        return result if self.autocast else self.decisions[()].policy.cast_to_output(result)

    def _decide_fields(self, module: nn.Module) -> None:
        """Decide for the submodules in fields of ``module``, before they are called.

        The module may read a submodule's dtype fields, or call a submodule's method that Linen does not intercept, such
        as ``initialize_carry`` of a recurrent cell.
        """
        names = [field.name for field in dataclasses.fields(module) if field.name not in ("parent", "name")]
        values = [vars(module).get(name) for name in names]
        for child in jax.tree.leaves(values, is_leaf=lambda leaf: isinstance(leaf, nn.Module)):
            if isinstance(child, nn.Module) and not hasattr(child, "jaxmp_root") and _running.run_of(child) is self:
                self.decide(child)

    # --- the end of the run ---

    def finish(self) -> None:
        """Cast initialised params to their param dtypes, and check the patterns."""
        if self.make_variables is not None:
            store_params(self.module, self._param_dtype, self.variables or {}, self.make_variables)
            if self.method != "__call__":
                return  # a pattern may match a module whose variables this method did not initialise
        self._check()

    def _param_dtype(self, path: Path) -> np.dtype | None:
        """Return the param dtype of the innermost module around the param at ``path``.

        Return None if the param is not cast.
        """
        for end in range(len(path), -1, -1):
            decision = self.decisions.get(path[:end])
            if decision is not None:
                return decision.param_dtype
        return None

    def _check(self) -> None:
        """Raise an error if a pattern matched nothing.

        If every module of the model ran, record the modules that do not compute in half precision.
        """
        variables = {name: nn.unbox(collection) for name, collection in self.module.variables.items()}
        paths = [path for collection in variables.values() for path, _ in leaves(collection)]
        paths = [path for path in paths if not _is_below(path, self.bridges)]
        owners = {path[:-1] for path, _ in leaves(variables.get(PARAMS, {}))}
        owners = {path for path in owners if not _is_below(path, [*self.nested, *self.bridges])}
        first_classes = {path: classes[0] for path, classes in self.classes.items()}
        self.policies.check(first_classes, paths, owners <= self.classes.keys())
        is_whole = not self.nested and not self.bridges and owners <= self.called.keys()
        is_outermost = len(_running.runs) == 1 and not is_running_in("nnx")
        if is_half(self.policies.root.compute_dtype) and is_whole and is_outermost:
            params = leaves(variables.get(PARAMS, {}))
            matrices = {path[:-1] for path, leaf in params if len(getattr(leaf, "shape", ())) >= 2}
            self._note_not_half(matrices)

    def _note_not_half(self, matrices: set[Path]) -> None:
        """Record the called modules that do not compute in half precision.

        ``matrices`` are the paths of the modules that have a param with two or more axes.
        """
        for path, reason in self.called.items():
            if reason is not None:
                has_matrix = path in matrices and not any(issubclass(cls, nn.Embed) for cls in self.classes[path])
                self.not_half.append(NotHalf("/".join(path) or type(self.module).__name__, reason, has_matrix))


def _is_below(path: Path, modules: list[Path]) -> bool:
    """Return whether ``path`` is the path of one of ``modules``, or lies below one."""
    return any(path[: len(module)] == module for module in modules)


def _push(scope: Any, module: Any, name: Any = None, *args: Any, **kwargs: Any) -> Scope:
    """Create the scope of a submodule as ``scope.push`` does, and make its decision."""
    child_scope = Scope.push(scope(), name, *args, **kwargs)
    parent = module()
    child = children_of(parent).get(child_scope.name) if parent is not None else None
    if isinstance(child, nn.Module) and not hasattr(child, "jaxmp_root"):
        run = _running.run_of(parent)
        if run is not None:
            run.decide(child, child_scope)
    return child_scope
