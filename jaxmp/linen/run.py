"""One run of a Linen module under policies, from the call of the root's method to its return.

While it lasts, a method interceptor stands between Linen and the modules that belong to the root. Before the first
method of one runs, its ``dtype`` and ``param_dtype`` fields are set as its policy says. While one runs, a mark on JAX's
name stack tells the engine how to compute what it does: as it is written, or as the engine decides. What belongs to a
root is told by a flag in its scope: Linen hands it on to every scope below, through lifted transforms too, and
``nn.jit`` keys its cache with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import flax.linen as nn
import jax
import numpy as np
from flax.core import Scope

from jaxmp import tree as _tree
from jaxmp._adapters import (
    Mode,
    NotHalf,
    Reason,
    Treatment,
    handed_out,
    is_default,
    is_floating,
    is_running_in,
    reason_not_half,
    widen,
)
from jaxmp._jaxpr.stand_ins import keeping_carries
from jaxmp._jaxpr.walk import equations
from jaxmp.dtypes import is_half
from jaxmp.engine.classes import Class, classify
from jaxmp.engine.rules import Rules
from jaxmp.linen.internals import children_of
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
from jaxmp.marks import computing
from jaxmp.overrides import level_of
from jaxmp.patterns import Path, is_class_pattern
from jaxmp.policy import Policy, PolicyMap

_ROOT_FLAG, _OUTER_FLAG, _POLICY_FLAG, _DECISION = "jaxmp_root", "jaxmp_outer", "jaxmp_policy", "_jaxmp_decision"


@dataclasses.dataclass(frozen=True)
class Root:
    """What a module under policies knows: the policies, and its own path if it was reached through a bound parent.

    Under autocast the policies say where it makes an exception, and no field and no param is touched.
    """

    policies: PolicyMap
    prefix: Path = ()
    autocast: bool = False
    operations: tuple[tuple[str, str], ...] = ()

    def rules(self, decided: Callable[[Any], object]) -> Rules:
        """What is asked of the engine; each module has its own half dtype but under autocast."""
        if not self.autocast:
            return Rules(None, decided=decided)
        matmul = self.policies.root.matmul
        return Rules(self.policies.compute_dtype, dict(self.operations), matmul=matmul, decided=decided)

    def mark(self, module: nn.Module) -> None:
        """Marks the scope of ``module``, and so every scope below that is still to come, as belonging to this root."""
        scope: Any = module.scope
        if scope.flags.get(_ROOT_FLAG, hash(self)) != hash(self):
            _set_flag(scope, _OUTER_FLAG, scope.flags[_ROOT_FLAG])
        _set_flag(scope, _ROOT_FLAG, hash(self))


def _set_flag(scope: Scope, name: str, value: int) -> None:
    if scope.flags.get(name) != value:
        scope.flags = scope.flags.copy({name: value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Decision(Treatment):
    """How one module computes."""

    key: int  # the same for modules of which nn.jit may reuse a trace
    param_dtype: np.dtype | None  # None if the params stay as they are made


@dataclasses.dataclass(frozen=True, eq=False)
class _Frame:
    """A method that is running."""

    run: Run
    module: nn.Module
    path: Path
    decision: Treatment

    def is_around(self, run: Run, module: nn.Module) -> bool:
        """Whether a method of ``module`` that is called now is a helper, or the body of a lifted transform."""
        related = isinstance(module, type(self.module)) or isinstance(self.module, type(module))
        return self.run is run and self.path == module.path and related


class _Running(threading.local):
    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.frames: list[_Frame] = []

    def run_of(self, module: nn.Module) -> Run | None:
        """The innermost run that ``module`` belongs to."""
        if module.scope is None or _ROOT_FLAG not in module.scope.flags:
            return None
        token, path = module.scope.flags[_ROOT_FLAG], module.path
        return next((run for run in reversed(self.runs) if run.token == token and run.covers(path)), None)


_running = _Running()


def is_running() -> bool:
    """Whether any run is under way."""
    return bool(_running.runs)


def run_with_root(module: nn.Module) -> Run | None:
    """The run of ``module`` as the root, if it is under way."""
    run = _running.run_of(module)
    return run if run is not None and run.path == module.path else None


@contextlib.contextmanager
def running(run: Run) -> Iterator[Run]:
    """While this lasts, ``run`` is under way, and checked at the end."""
    outer_token = run.module.scope.flags.get(_OUTER_FLAG)
    for outer in _running.runs:
        if outer.token == outer_token and outer.covers(run.path):
            below = run.path[len(outer.path) :]
            outer.nested.append(below)
            outer.classes.setdefault(outer.prefix + below, type(run.module))
    first = not _running.runs
    _running.runs.append(run)
    try:
        run.decide(run.module)
        with nn.intercept_methods(_intercept) if first else contextlib.nullcontext(), keeping_carries():
            yield run
        run.finish()
    finally:
        _running.runs.remove(run)
        run.shapes.clear()  # an initializer may hold its module, which holds these


def _intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    run = _running.run_of(context.module)
    if run is None:  # a model that is applied on its own inside another
        with computing(None):
            return next_fun(*args, **kwargs)
    return run.call(context.module, context.method_name, next_fun, args, kwargs)


class Run:
    """The modules met while a method of a root runs, and what was decided for each. Paths are relative to the root.

    Args:
      module: the root, bound to a scope.
      root: its policies.
      make_variables: when variables are about to be made, makes those of the module without policies.
      method: the name of the method that runs; None if it is a function that calls some.
    """

    def __init__(
        self, module: Any, root: Root, make_variables: Callable[[], Variables] | None, method: str | None
    ) -> None:
        root.mark(module)
        self.module, self.path, self.token, self.method = module, module.path, hash(root), method
        self.copy: Any = lambda: None  # a weak reference to the module's copy in the engine's trace, which ends first
        self.policies, self.prefix, self.make_variables = root.policies, root.prefix, make_variables
        self.autocast, self.operations = root.autocast, root.operations
        self.variables = self._foresee() if make_variables else module.variables
        self.classes: dict[Path, type] = {}
        self.decisions: dict[Path, _Decision] = {}
        self.shapes: dict[Any, Any] = {}  # of what initializers make
        self.defaults: dict[int, tuple[type, dict[str, Any]]] = {}  # of fields, by the ids of classes, with these
        self.called: dict[Path, Reason | None] = {}  # why they are not half, if they are not
        self.not_half: list[NotHalf] = []  # set at the end, if no run is around this one and every module was called
        self.nested: list[Path] = []
        config: Any = jax.config
        self.ambient_precision = config.jax_default_matmul_precision
        kinds = [is_class_pattern(pattern) for pattern in root.policies.patterns]
        self.by_class, self.by_path = any(kinds), not all(kinds)

    def covers(self, path: Path) -> bool:
        """Whether what is at ``path`` is the root or below it."""
        return path[: len(self.path)] == self.path

    def _foresee(self) -> Variables | None:
        """The shapes of the variables to come: who owns params or has submodules decides how it is treated."""
        assert self.make_variables is not None
        try:
            return jax.eval_shape(self.make_variables)
        except Exception:  # the user's own error, which the run will raise again, or variables that are no arrays
            return None

    def _at(self, path: Path) -> Variables | None:
        """The collections at ``path`` before the run, or as they will be; None where they could not be foreseen."""
        if self.variables is None:
            return None
        there = {name: descend(collection, path) for name, collection in self.variables.items()}
        return {name: collection for name, collection in there.items() if isinstance(collection, Mapping)}

    # --- what is decided for a module ---

    def decide(self, module: nn.Module, born_in: Scope | None = None) -> _Decision:
        """Sets ``module`` up for its policy, once, and remembers what was decided; ``born_in``: its scope to be."""
        scope: Any = born_in or module.scope
        path = scope.path[len(self.path) :]
        self.classes.setdefault(self.prefix + path, type(module))
        decision = vars(module).get(_DECISION)
        if decision is None:
            decision = self._decide(module, path)
            if self.variables is not None:
                object.__setattr__(module, _DECISION, decision)
        _set_flag(scope, _POLICY_FLAG, decision.key)
        scope.push = functools.partial(_push, weakref.ref(scope), weakref.ref(module))
        self.decisions[path] = decision
        return decision

    def _decide(self, module: Any, path: Path) -> _Decision:
        """Return the decision for ``module``, and fill its fields."""
        policy, pattern = self.policies.resolve(self.prefix + path, self._classes_around(module, path))
        dtypes: dict[str, np.dtype] = {}
        mode: Mode = "autocast"
        if not self.autocast:
            here = self._at(path)
            is_parent = here is not None and has_children(here)
            owns_params = here is None or bool(own_leaves(here.get(PARAMS, {})))
            # A container's None is left alone: what lies below follows its own path. A cell is one computation.
            container = is_parent and not owns_params and not isinstance(module, nn.RNNCellBase)
            defaults = self._defaults_of(module)
            dtypes = _fill_dtypes(module, defaults, policy, pattern is not None, container)
            is_float32 = owns_params or (pattern is not None and not is_parent)
            says_dtype = "dtype" in defaults and is_floating(module.dtype)
            is_bridge = _is_bridge(type(module))
            mode = "written" if says_dtype or is_bridge else "float32" if is_float32 else None
            if is_bridge:
                self.nested.append(path)
                _require_policy_in_bridge(module, self.prefix + path)
        _read_params(module, self.shapes, is_wide=mode == "float32")
        keeps_params = self.autocast or _is_bridge(type(module))
        return _Decision(
            policy=policy,
            mode=mode,
            override=level_of(policy, self.policies.root.matmul) if self.autocast and pattern is not None else None,
            not_half=reason_not_half(policy, dtypes.get("dtype", policy.compute_dtype), pattern, self.operations),
            key=hash((policy, pattern, self.prefix + path if self.by_path else None)),
            param_dtype=None if keeps_params else dtypes.get("param_dtype", policy.param_dtype),
        )

    def _classes_around(self, module: Any, path: Path) -> Mapping[Path, type | tuple[type, ...]]:
        """The classes of a module and of those above it; of all that share one's scope, as ``nn.share_scope`` says."""
        if not self.by_class:
            return self.classes
        around: dict[Path, tuple[type, ...]] = {}
        while True:
            at = self.prefix + path
            first = around.get(at) or ((self.classes[at],) if at in self.classes else ())
            around[at] = (*first, type(module))
            module = module.parent
            if not isinstance(module, nn.Module) or _running.run_of(module) is not self:
                break
            path = module.path[len(self.path) :]
        return {**self.classes, **around}

    def _defaults_of(self, module: Any) -> dict[str, Any]:
        """The fields of a module and their defaults."""
        cls: Any = type(module)
        if id(cls) not in self.defaults:
            self.defaults[id(cls)] = cls, {field.name: field.default for field in dataclasses.fields(cls)}
        return self.defaults[id(cls)][1]

    # --- what is done for a call ---

    def call(self, module: nn.Module, method: str, next_fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a method of ``module``, which belongs to this run, under its decision."""
        decision = self.decide(module)
        if method == "setup":
            next_fun(*args, **kwargs)
            return self._decide_children(module)
        self._decide_children(module)
        path = module.path[len(self.path) :]
        self.called.setdefault(path, decision.not_half)

        if self.autocast:
            with decision.mark():
                return next_fun(*args, **kwargs)
        caller = _running.frames[-1] if _running.frames else None
        inside = caller is not None and caller.is_around(self, module)
        treatment = decision.called_by(caller.decision if caller is not None and caller.run is self else None)
        if treatment.is_float32 and not inside:
            args, kwargs = jax.tree.map(widen, (args, kwargs))
        arguments = {id(leaf) for leaf in jax.tree.leaves((args, kwargs))} if treatment.is_float32 else set()
        _running.frames.append(_Frame(self, module, module.path, treatment))
        try:
            with decision.mark(), decision.products(caller.decision if caller else None, self.ambient_precision):
                result = next_fun(*args, **kwargs)
        finally:
            _running.frames.pop()
        if module.scope and module.scope.mutable is not False:
            keep_statistics(module, self._at(path) or {}, decision)
        if caller is not None and caller.run is self:
            if not inside:
                result = handed_out(result, treatment, caller.decision, arguments)
        elif self.method is not None and (module is self.module or module is self.copy()):
            result = handed_out(result, treatment, None, arguments) if self.prefix else result
            result = self.cast_output(result)  # before Linen captures it as an intermediate
        return result

    def cast_output(self, result: Any) -> Any:
        """What the root returns, in the policy's output dtype."""
        return result if self.prefix or self.autocast else self.decisions[()].policy.cast_to_output(result)

    def _decide_children(self, module: nn.Module) -> None:
        # Before they are called: a parent may read their dtypes, or call a method that Linen does not wrap. In the
        # engine's trace the parent is a copy, whose attributes are bound and not registered.
        attributes = [vars(module).get(name) for name in self._defaults_of(module) if name not in ("parent", "name")]
        attributes = [value for value in attributes if not isinstance(value, _NO_MODULES)]
        found = jax.tree.leaves(attributes, is_leaf=lambda leaf: isinstance(leaf, nn.Module)) if attributes else ()
        for child in (*children_of(module).values(), *found):
            if isinstance(child, nn.Module) and not hasattr(child, "jaxmp_root") and _running.run_of(child) is self:
                self.decide(child)

    # --- what is done at the end ---

    def finish(self) -> None:
        """Store params in their param dtypes, and check the patterns, after the run."""
        if self.make_variables is not None:
            store_params(self.module, self._param_dtype, self.variables or {}, self.make_variables)
            if self.method != "__call__":
                return  # a part of the variables was made, and what matches the others is not known
        if self.method != "setup" and not self.prefix:
            self._check()

    def _param_dtype(self, path: Path) -> np.dtype | None:
        owner = next((path[:end] for end in range(len(path), -1, -1) if path[:end] in self.decisions), None)
        return None if owner is None else self.decisions[owner].param_dtype

    def _check(self) -> None:
        """Raise if a pattern matched nothing; of a whole model, note what a half policy leaves in another dtype."""
        variables = {name: nn.unbox(collection) for name, collection in self.module.variables.items()}
        bridges = [path for path, cls in self.classes.items() if _is_bridge(cls)]
        paths = {}
        for name, collection in variables.items():
            paths[name] = [_outside(bridges, path) for path, _ in leaves(collection)]
        owners = {path[:-1] for path in paths.get(PARAMS, ())}
        owners = {path for path in owners if not any(path[: len(nested)] == nested for nested in self.nested)}
        self.policies.check(self.classes, [*itertools.chain(*paths.values())], owners <= self.classes.keys())
        half = self.policies.root.compute_dtype
        if not is_half(half) or self.nested or not owners <= self.called.keys():
            return
        params = leaves(variables.get(PARAMS, {}))
        matrices = {_outside(bridges, path)[:-1] for path, leaf in params if len(getattr(leaf, "shape", ())) >= 2}
        if len(_running.runs) > 1 or is_running_in("nnx"):
            return
        for path, reason in self.called.items():
            if reason is not None:
                has_matrix = path in matrices and not issubclass(self.classes[path], nn.Embed)
                self.not_half.append(NotHalf("/".join(path) or type(self.module).__name__, reason, has_matrix))


def _outside(bridges: Iterable[Path], path: Path) -> Path:
    """Return the path of a variable, without the modules inside the ``nnx.bridge.ToLinen`` that it belongs to."""
    for bridge in bridges:
        if path[: len(bridge)] == bridge:
            return (*bridge, path[-1])
    return path


def _push(scope: Any, module: Any, name: Any = None, *args: Any, **kwargs: Any) -> Scope:
    """``scope.push`` that decides for the submodule whose scope it makes, before anyone reads its fields or flags."""
    made = Scope.push(scope(), name, *args, **kwargs)
    parent = module()
    child = children_of(parent).get(made.name) if parent is not None else None
    run = _running.run_of(parent) if isinstance(child, nn.Module) and not hasattr(child, "jaxmp_root") else None
    if run is not None and isinstance(child, nn.Module):
        run.decide(child, made)
    return made


# --- the fields and params of one module ---

_REPLACED = "_jaxmp_replaced"  # where a module has the fields that its author wrote and a policy replaced
_NO_MODULES = (type(None), bool, int, float, str, type, types.FunctionType, np.dtype)  # fields of these hold none


def replaced_fields(module: nn.Module) -> dict[str, Any]:
    """Return the fields of ``module`` that a policy replaced, as its author wrote them."""
    return vars(module).get(_REPLACED, {})


def _fill_dtypes(
    module: Any, defaults: Mapping[str, Any], policy: Policy, overridden: bool, container: bool
) -> dict[str, np.dtype]:
    """Fill the ``dtype`` and ``param_dtype`` fields of ``module`` that have their defaults, and return both.

    In an ``overridden`` module they are filled in any case; in a ``container`` a ``dtype`` of None stays.
    """
    dtypes = {}
    for name, dtype in (("param_dtype", policy.param_dtype), ("dtype", policy.compute_dtype)):
        if name not in defaults or not is_floating(getattr(module, name)):
            continue
        value = getattr(module, name)
        if name == "dtype" and value is None and container:
            continue
        if overridden or is_default(value, defaults[name]):
            vars(module).setdefault(_REPLACED, {}).setdefault(name, value)
            object.__setattr__(module, name, dtype)
        dtypes[name] = np.dtype(getattr(module, name))
    return dtypes


def _is_bridge(cls: type) -> bool:
    return "flax.nnx" in sys.modules and issubclass(cls, sys.modules["flax.nnx"].bridge.ToLinen)


@dataclasses.dataclass(frozen=True)
class _WithPolicy:
    """Makes an NNX module for an ``nnx.bridge.ToLinen``, and raises if it has no policy of its own.

    Flax makes the module anew in each call, so that only then its policy is known.
    """

    make: Callable[..., Any]
    path: Path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.make(*args, **kwargs)
        if not hasattr(module, "jaxmp_decision"):
            self.fail(type(module).__name__)
        return module

    def fail(self, name: str) -> NoReturn:
        at = f"{'/'.join(self.path)!r}, " if self.path else ""
        raise ValueError(
            f"a policy does not reach into nnx.bridge.ToLinen, got {at}ToLinen of {name}.\n"
            "Apply the policy to the inner module, where it is made, then wrap that:\n"
            f"nnx.bridge.ToLinen(lambda *args, **kw: jaxmp.nnx.apply_policy({name}(*args, **kw), policy), ...)"
        )


def _require_policy_in_bridge(module: Any, path: Path) -> None:
    """Raise a ValueError, now or in the call, if the NNX module that a ``ToLinen`` wraps has no policy of its own."""
    make = module.nnx_class
    checked = _WithPolicy(make, path)
    if isinstance(make, type):
        checked.fail(make.__name__)
    if not isinstance(make, _WithPolicy):
        vars(module).setdefault(_REPLACED, {})["nnx_class"] = make
        object.__setattr__(module, "nnx_class", checked)


def _read_params(module: Any, shapes: dict[Any, Any], is_wide: bool) -> None:
    """Replace ``module.param`` by a function that traces equal initializers once.

    Flax traces the initializer of every param that exists, to compare shapes: a third of the time to trace a
    transformer.

    Args:
      module: a module that is bound to a scope.
      shapes: the shapes of the params so far, by initializer and arguments.
      is_wide: whether half params are widened, for a module that is traced in float32.
    """
    make = type(module).param
    reference = weakref.ref(module)  # a cycle would keep tracers alive

    def param(name: str, init_fn: Any, *args: Any, **kwargs: Any) -> Any:
        own: Any = reference()
        is_there = own.has_variable(PARAMS, name)
        init = functools.partial(_init_once, shapes, init_fn) if is_there else functools.partial(_init, init_fn)
        value = make(own, name, init, *args, **kwargs)
        return jax.tree.map(widen, value) if is_wide else value

    object.__setattr__(module, "param", param)


def _init_once(shapes: dict[Any, Any], init_fn: Callable[..., Any], key: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an initializer; if an equal one ran before, return uninitialised arrays of the same shapes."""
    call = init_fn, args, (*kwargs.items(),)
    try:
        avals = shapes.get(call)
    except TypeError:  # an argument has no hash
        return _init(init_fn, key, *args, **kwargs)
    if avals is not None:
        return jax.tree.map(lambda aval: jax.lax.empty(aval.shape, aval.dtype), avals)
    value = _init(init_fn, key, *args, **kwargs)
    shapes[call] = jax.tree.map(jax.typeof, value)
    return value


def _init(init_fn: Callable[..., Any], key: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an initializer; in float32, with a cast of the result, if it factorises, which JAX cannot do in half."""
    half = next((np.dtype(arg) for arg in jax.tree.leaves((args, kwargs)) if _is_half_dtype(arg)), None)
    if half is None:
        return init_fn(key, *args, **kwargs)
    wide_args, wide_kwargs = jax.tree.map(lambda arg: np.float32 if _is_half_dtype(arg) else arg, (args, kwargs))

    def make_wide(key: Any) -> Any:
        return init_fn(key, *wide_args, **wide_kwargs)

    return _tree.cast(make_wide(key), half) if _factorises(make_wide, key) else init_fn(key, *args, **kwargs)


def _is_half_dtype(arg: Any) -> bool:
    return isinstance(arg, (type, np.dtype)) and is_half(arg)


def _factorises(make: Callable[[Any], Any], key: Any) -> bool:
    """Whether the program of ``make`` has a factorisation, such as the QR of an orthogonal initializer."""
    try:
        program = jax.make_jaxpr(make)(key)
    except Exception:  # an initializer that cannot be traced, or fails: calling it raises its own error
        return False
    return any(classify(eqn.primitive.name) is Class.LINALG for eqn in equations(program))
